"""telemetry.json and the lines to the client, of a run that had much to report."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import msgspec
import pynvml
import pytest

from inpaint_bench.telemetry import process
from inpaint_bench.telemetry.process import SidecarProcess, stream_rates
from inpaint_bench.telemetry.report import Message, NotReady, SidecarSpec

from .nvml.fake_pynvml import driver
from .support import settings


def test_all_problems_are_counted_and_the_first_two_hundred_listed(tmp_path: Path) -> None:
    """A disk that fails now and then would otherwise fill telemetry.json, and the manifest, with its problems."""
    sidecar = SidecarProcess(SidecarSpec(run_id="r", run_dir=str(tmp_path), settings=settings(), parent=os.getppid()))
    for number in range(1000):
        sidecar.report_problem("storage_failed", str(number))
    report = sidecar.report("running")
    assert report.problems == [f"storage_failed: {number}" for number in range(200)]
    assert report.problems_omitted == 800
    assert report.tables["events"].rows == 1000


@pytest.mark.parametrize(("slow_hz", "gpm_hz"), [(1.0, 1.0), (5.0, 5.0), (20.0, 5.0)])
def test_gpm_is_read_at_the_slow_rate_but_never_faster_than_its_window_allows(slow_hz: float, gpm_hz: float) -> None:
    assert stream_rates(settings(slow_hz=slow_hz))["gpm"] == gpm_hz


def test_line_longer_than_a_pipes_buffer_is_written_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last line holds all of telemetry.json."""
    reading, writing = os.pipe()
    real = os.write
    monkeypatch.setattr(process.os, "write", lambda _, line: real(writing, line[:1000]))
    message = NotReady("x" * 100_000)
    thread = threading.Thread(target=process.send, args=(message,))
    thread.start()
    with os.fdopen(reading) as lines:
        received = msgspec.json.decode(lines.readline(), type=Message)
    thread.join()
    os.close(writing)
    assert received == message


class TestPowerLimit:
    def sidecar(self, folder: Path, uuid: str, watts: float = 500) -> SidecarProcess:
        wanted = settings(source="nvml", power_limit_w=watts)
        return SidecarProcess(
            SidecarSpec(run_id="r", run_dir=str(folder), settings=wanted, parent=os.getppid(), uuids=[uuid])
        )

    def test_is_set_recorded_and_set_back(self, tmp_path: Path) -> None:
        with driver() as (fake, _, uuid):
            sidecar = self.sidecar(tmp_path, uuid)
            assert fake.power_limit_mw == 500_000
            assert [device.power_limit_w for device in sidecar.report("running").devices] == [500]
            sidecar._close(None)
            assert fake.power_limit_mw == 700_000

    @pytest.mark.parametrize(
        ("watts", "code", "sentence"),
        [
            (900, 0, "takes 200 to 700 W"),
            (500, pynvml.NVML_ERROR_NO_PERMISSION, "only root may set the power limit of GPU-"),
            (500, pynvml.NVML_ERROR_NOT_SUPPORTED, "cannot be set"),
        ],
    )
    def test_that_cannot_be_set_ends_the_start(self, tmp_path: Path, watts: float, code: int, sentence: str) -> None:
        with driver() as (fake, _, uuid):
            if code:
                fake.fail["nvmlDeviceSetPowerManagementLimit"] = code
            with pytest.raises(ValueError, match=sentence):
                self.sidecar(tmp_path, uuid, watts)
            assert fake.power_limit_mw == 700_000
