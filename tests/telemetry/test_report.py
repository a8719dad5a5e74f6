"""What telemetry.json says of a run that had much to report."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any, cast

import pytest

from inpaint_bench.telemetry import session
from inpaint_bench.telemetry.devices import open_devices
from inpaint_bench.telemetry.nvml.api import Nvml
from inpaint_bench.telemetry.report import Account, part_metadata
from inpaint_bench.telemetry.sampling.sampler import Sampler
from inpaint_bench.telemetry.spec import Spec
from inpaint_bench.telemetry.storage.writer import Storage

from .support import FakeGpus, uuid


class _NoStorage:
    errors, error = 0, None

    def counts(self) -> dict[str, dict[str, int]]:
        return {}


def test_a_week_of_problems_is_counted_and_the_first_two_hundred_are_told(tmp_path: Path) -> None:
    """A disk that refuses now and then would otherwise fill telemetry.json, and the manifest, with its own story."""
    nvml = cast(Nvml, FakeGpus(1))
    sampler = Sampler(nvml, open_devices(nvml, [uuid(0)]), "nvml", lambda table, row: None)
    spec = Spec(run_id="r", run_dir=str(tmp_path), uuids=[uuid(0)])
    account = Account({}, spec, None, sampler, cast(Storage, _NoStorage()), {})
    taken = [account.problem(f"storage_failed: {number}") for number in range(1000)]
    state = account.state("running")
    assert taken.count(True) == 200
    assert state["problems"] == [f"storage_failed: {number}" for number in range(200)]
    assert state["problems_more"] == 800


@pytest.mark.parametrize(("slow_hz", "period_ms"), [(1.0, "1000"), (5.0, "200"), (20.0, "200")])
def test_gpm_is_read_with_the_slow_lane_but_never_within_its_shortest_window(
    tmp_path: Path, slow_hz: float, period_ms: str
) -> None:
    spec = Spec(run_id="r", run_dir=str(tmp_path), uuids=[uuid(0)], slow_hz=slow_hz)
    assert part_metadata({}, spec)["samples_gpm"]["period_ms"] == period_ms


def test_lines_of_several_threads_are_whole_however_long_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last line holds all of telemetry.json: more than a pipe takes at once."""
    reading, writing = os.pipe()
    real = os.write
    monkeypatch.setattr(session.os, "write", lambda _, line: real(writing, line))
    messages: list[dict[str, Any]] = [{"final": str(number) * 100_000} for number in range(4)]
    threads = [threading.Thread(target=session.say, args=(message,)) for message in messages]
    for thread in threads:
        thread.start()
    with os.fdopen(reading) as lines:
        found = [json.loads(lines.readline()) for _ in messages]
    for thread in threads:
        thread.join()
    os.close(writing)
    assert sorted(one["final"] for one in found) == [one["final"] for one in messages]
