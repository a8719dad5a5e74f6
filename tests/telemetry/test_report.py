"""telemetry.json and the lines to the client, of a run that had much to report."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import cast

import msgspec
import pytest

from inpaint_bench.core.records import TableCounts
from inpaint_bench.telemetry import process
from inpaint_bench.telemetry.devices import open_devices
from inpaint_bench.telemetry.report import ReportBuilder, part_metadata, stream_rates
from inpaint_bench.telemetry.sampling.sampler import Sampler
from inpaint_bench.telemetry.spec import Message, NotReady, SidecarSpec
from inpaint_bench.telemetry.storage.sidecar_tables import SidecarTables

from .support import FakeNvml, uuid


class _NoTables:
    errors, error = 0, None

    def counts(self) -> dict[str, TableCounts]:
        return {}


def test_all_problems_are_counted_and_the_first_two_hundred_listed(tmp_path: Path) -> None:
    """A disk that fails now and then would otherwise fill telemetry.json, and the manifest, with its problems."""
    nvml = FakeNvml(1)
    spec = SidecarSpec(run_id="r", run_dir=str(tmp_path), uuids=[uuid(0)])
    sampler = Sampler(nvml, open_devices(nvml, [uuid(0)]), "nvml", lambda table, row: None, stream_rates(spec))
    builder = ReportBuilder(spec, "999", "13", None, "nvml", sampler, cast(SidecarTables, _NoTables()))
    listed = [builder.add_problem(f"storage_failed: {number}") for number in range(1000)]
    report = builder.build("running")
    assert listed.count(True) == 200
    assert report.problems == [f"storage_failed: {number}" for number in range(200)]
    assert report.problems_omitted == 800


@pytest.mark.parametrize(("slow_hz", "period_ms"), [(1.0, "1000"), (5.0, "200"), (20.0, "200")])
def test_gpm_is_read_at_the_slow_rate_but_never_faster_than_its_window_allows(
    tmp_path: Path, slow_hz: float, period_ms: str
) -> None:
    spec = SidecarSpec(run_id="r", run_dir=str(tmp_path), uuids=[uuid(0)], slow_hz=slow_hz)
    assert part_metadata(spec, "nvml", "999", "13")["samples_gpm"]["period_ms"] == period_ms


def test_long_lines_of_several_threads_do_not_mix(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last line holds all of telemetry.json: more than a pipe's buffer."""
    reading, writing = os.pipe()
    real = os.write
    monkeypatch.setattr(process.os, "write", lambda _, line: real(writing, line))
    messages = [NotReady(str(number) * 100_000) for number in range(4)]
    threads = [threading.Thread(target=process.send, args=(message,)) for message in messages]
    for thread in threads:
        thread.start()
    with os.fdopen(reading) as lines:
        received = [msgspec.json.decode(lines.readline(), type=Message) for _ in messages]
    for thread in threads:
        thread.join()
    os.close(writing)
    assert sorted(received, key=lambda message: message.error) == messages
