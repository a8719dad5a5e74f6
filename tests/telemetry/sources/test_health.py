"""Health at both ends of a run: what it says, what it does not know, and what makes a run doubtful."""

from __future__ import annotations

import time
from pathlib import Path
from typing import cast

import pynvml
import pytest

from inpaint_bench.core.files import read_json
from inpaint_bench.telemetry.nvml.api import Nvml
from inpaint_bench.telemetry.nvml.capture_file import SUFFIX
from inpaint_bench.telemetry.sources.health import _RECOVERY, PCIE_REPLAY_FIELD, RECOVERY_FIELD, read_health, worsened
from tests.telemetry.nvml.fake_pynvml import driver
from tests.telemetry.support import FakeGpus, rows, small_capture, start, uuid

WELL = {
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
        assert read_health(nvml, handle) == {**WELL, "nulls": {}}


def test_a_counter_that_is_not_given_is_null_with_its_reason_and_costs_no_other() -> None:
    with driver() as (fake, nvml, handle):
        fake.fail = {"nvmlDeviceGetTotalEccErrors": 3, "nvmlDeviceGetRemappedRows": 4}
        fake.fields[230] = (3, 0)
        found = read_health(nvml, handle)
    assert found["pcie_replays"] == 5
    assert found["ecc_uncorrected_volatile"] is None
    assert found["nulls"]["ecc_uncorrected_volatile"] == "not_supported"
    assert found["nulls"]["remapped_rows_failed"] == "no_permission"
    assert found["nulls"]["recovery_action"] == "not_supported"
    assert {name for name in WELL if found[name] is None} == found["nulls"].keys()


def test_a_gpu_that_answers_nothing_has_a_reason_for_everything() -> None:
    gpus = FakeGpus(1)
    gpus.fail[uuid(0)]["*"] = 15
    found = read_health(cast(Nvml, gpus), uuid(0))
    assert found["nulls"] == dict.fromkeys(WELL, "gpu_lost")
    assert worsened({**WELL}, found) == []


@pytest.mark.parametrize(
    ("start", "end", "told"),
    [
        ({}, {}, None),
        ({}, {"ecc_corrected_volatile": 99, "pcie_replays": 50}, None),
        ({}, {"ecc_uncorrected_volatile": 2}, "2 new uncorrectable memory errors since the driver was loaded (0 to 2)"),
        ({}, {"ecc_uncorrected_aggregate": 1}, None),  # a counter that went back: not new errors
        ({"ecc_uncorrected_volatile": None}, {"ecc_uncorrected_volatile": 2}, None),
        ({}, {"remapped_rows_uncorrected": 3}, "1 new rows remapped after uncorrectable errors (2 to 3)"),
        ({}, {"remapped_rows_failed": 1}, "a row could not be remapped, during the run"),
        ({"remapped_rows_failed": 1}, {"remapped_rows_failed": 1}, "a row could not be remapped, before the run"),
    ],
)
def test_only_new_uncorrectable_errors_and_failed_remaps_are_told(
    start: dict[str, int], end: dict[str, int], told: str | None
) -> None:
    assert worsened({**WELL, **start}, {**WELL, **end}) == ([told] if told else [])


def test_errors_that_come_during_a_run_are_an_event_and_in_the_account(tmp_path: Path) -> None:
    counts = {0: [0, 0], 200: [5, 2]}
    path = small_capture(tmp_path / f"sick{SUFFIX}", [0] * 50, ecc_volatile=counts)
    sidecar = start(tmp_path / "run", capture=str(path))
    time.sleep(0.5)
    account = sidecar.stop()
    told = "2 new uncorrectable memory errors since the driver was loaded (0 to 2)"
    events = rows(tmp_path / "run", "events")
    assert events.select("kind", "detail").rows() == [("ecc", told)]
    assert events["gpu_uuid"][0] == sidecar.devices[0]["uuid"]
    assert account["problems"] == [f"ecc: {told}"] == sidecar.problems()
    health = account["devices"][0]["health"]
    assert (health["start"]["ecc_uncorrected_volatile"], health["end"]["ecc_uncorrected_volatile"]) == (0, 2)
    assert health["end"]["pcie_replays"] is None
    assert health["end"]["nulls"]["pcie_replays"] == "not_in_capture"
    assert account["status"] == "complete"


def test_health_at_the_start_is_on_disk_while_the_run_lasts(tmp_path: Path) -> None:
    sidecar = start(tmp_path)
    (device,) = read_json(tmp_path / "telemetry.json")["devices"]
    assert device["health"]["start"]["remapped_rows_failed"] == 0
    assert device["health"]["start"]["recovery_action"] == "none"
    assert device["health"]["end"] is None
    assert sidecar.stop()["devices"][0]["health"]["end"] == device["health"]["start"]
    assert "health" not in sidecar.devices[0]  # the manifest keeps what does not change


def test_the_binding_knows_the_fields_and_the_hints() -> None:
    assert pynvml.NVML_FI_DEV_PCIE_REPLAY_COUNTER == PCIE_REPLAY_FIELD
    assert pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION == RECOVERY_FIELD
    numbers = [getattr(pynvml, f"NVML_GPU_RECOVERY_ACTION_{name.upper()}") for name in _RECOVERY]
    assert numbers == list(range(len(_RECOVERY)))
    assert (pynvml.NVML_VOLATILE_ECC, pynvml.NVML_AGGREGATE_ECC) == (0, 1)
    assert (pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED) == (0, 1)
