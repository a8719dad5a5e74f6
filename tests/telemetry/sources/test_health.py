"""Error counters at both ends of a run: their values, their reasons, and what makes a run doubtful."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from inpaint_bench.core.records import GpuHealth, TelemetryReport, read_record
from inpaint_bench.telemetry.nvml.capture_file import SUFFIX
from inpaint_bench.telemetry.sources.checks import RECOVERY_ACTIONS, read_health, worsened
from tests.telemetry.nvml.fake_pynvml import driver
from tests.telemetry.support import FakeNvml, rows, small_capture, start, uuid

COUNTERS: dict[str, Any] = {
    "ecc_corrected_volatile": 3,
    "ecc_uncorrected_volatile": 0,
    "ecc_corrected_aggregate": 7,
    "ecc_uncorrected_aggregate": 2,
    "remapped_rows_corrected": 1,
    "remapped_rows_uncorrected": 2,
    "remapped_rows_pending": 0,
    "remapped_rows_failed": 0,
    "pcie_replays": 5,
    "recovery_action": "gpu_reset",
}


def test_every_counter_comes_from_its_own_call() -> None:
    with driver() as (_, nvml, handle):
        assert read_health(nvml, handle) == GpuHealth(**COUNTERS, nulls={})


def test_missing_counter_is_null_with_its_reason_and_affects_no_other() -> None:
    with driver() as (fake, nvml, handle):
        fake.fail = {"nvmlDeviceGetTotalEccErrors": 3, "nvmlDeviceGetRemappedRows": 4}
        fake.fields[230] = (3, 0)
        health = read_health(nvml, handle)
    assert health.pcie_replays == 5
    assert health.ecc_uncorrected_volatile is None
    assert health.nulls["ecc_uncorrected_volatile"] == "not_supported"
    assert health.nulls["remapped_rows_failed"] == "no_permission"
    assert health.nulls["recovery_action"] == "not_supported"
    assert {name for name in COUNTERS if getattr(health, name) is None} == health.nulls.keys()


def test_lost_gpu_has_a_reason_for_every_counter() -> None:
    nvml = FakeNvml(1)
    nvml.fail[uuid(0)]["*"] = 15
    health = read_health(nvml, uuid(0))
    assert health.nulls == dict.fromkeys(COUNTERS, "gpu_lost")
    assert worsened(GpuHealth(**COUNTERS), health) == []


@pytest.mark.parametrize(
    ("start", "end", "phrase"),
    [
        ({}, {}, None),
        ({}, {"ecc_corrected_volatile": 99, "pcie_replays": 50}, None),
        ({}, {"ecc_uncorrected_volatile": 2}, "2 new uncorrectable memory errors since the driver was loaded (0 to 2)"),
        ({}, {"ecc_uncorrected_aggregate": 1}, None),  # a counter that decreased is no new error
        ({"ecc_uncorrected_volatile": None}, {"ecc_uncorrected_volatile": 2}, None),
        ({}, {"remapped_rows_uncorrected": 3}, "1 new rows remapped after uncorrectable errors (2 to 3)"),
        ({}, {"remapped_rows_failed": 1}, "a row could not be remapped, during the run"),
        ({"remapped_rows_failed": 1}, {"remapped_rows_failed": 1}, "a row could not be remapped, before the run"),
    ],
)
def test_only_new_uncorrectable_errors_and_failed_remaps_are_reported(
    start: dict[str, int], end: dict[str, int], phrase: str | None
) -> None:
    before, after = (GpuHealth(**{**COUNTERS, **changes}) for changes in (start, end))
    assert worsened(before, after) == ([phrase] if phrase else [])


def test_errors_during_a_run_are_an_event_and_in_the_report(tmp_path: Path) -> None:
    counts = {0: [0, 0], 200: [5, 2]}
    path = small_capture(tmp_path / f"sick{SUFFIX}", [0] * 50, ecc_volatile=counts)
    sidecar = start(tmp_path / "run", capture=str(path))
    time.sleep(0.5)
    report = sidecar.stop()
    phrase = "2 new uncorrectable memory errors since the driver was loaded (0 to 2)"
    events = rows(tmp_path / "run", "events")
    assert events.select("kind", "detail").rows() == [("ecc", phrase)]
    assert events["gpu_uuid"][0] == sidecar.devices[0].uuid
    assert report.problems == [f"ecc: {phrase}"]
    before, after = report.devices[0].health_start, report.devices[0].health_end
    assert before is not None
    assert after is not None
    assert (before.ecc_uncorrected_volatile, after.ecc_uncorrected_volatile) == (0, 2)
    assert after.pcie_replays is None
    assert after.nulls["pcie_replays"] == "not_in_capture"
    assert report.status == "complete"


def test_health_at_the_start_is_on_disk_during_the_run(tmp_path: Path) -> None:
    sidecar = start(tmp_path)
    running = read_record(tmp_path / "telemetry.json", TelemetryReport)
    assert running is not None
    (device,) = running.devices
    assert device.health_start is not None
    assert device.health_start.remapped_rows_failed == 0
    assert device.health_start.recovery_action == "none"
    assert device.health_end is None
    assert sidecar.stop().devices[0].health_end == device.health_start
    assert not hasattr(sidecar.devices[0], "health_start")  # the manifest gets what does not change


def test_recovery_actions_are_named_by_the_binding() -> None:
    assert [RECOVERY_ACTIONS[number] for number in range(3)] == ["none", "gpu_reset", "node_reboot"]
