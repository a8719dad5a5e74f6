"""GPM: windows without gaps, and no metric lost for one failure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from inpaint_bench.telemetry.nvml.probe import HZ
from inpaint_bench.telemetry.nvml.real import METRICS, NvmlError, RealNvml
from inpaint_bench.telemetry.sampling.devices import open_devices
from inpaint_bench.telemetry.sampling.sampler import Sampler
from inpaint_bench.telemetry.sampling.streams import GPM, StreamReader
from tests.telemetry.support import FakeNvml, uuid

from .fake_pynvml import FakeDriver, driver


class Rig:
    """The real implementation on the fake driver, and a clock that the test moves."""

    def __init__(self, fake: FakeDriver, nvml: RealNvml, handle: str) -> None:
        self.driver, self.nvml, self.handle = fake, nvml, handle
        self.now_ms = 1000

    def after(self, ms: int, *names: str) -> Any:
        self.now_ms += ms
        return self.nvml.counters(self.handle, names or ("sm_active_pct", "dram_active_pct"))


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    with driver() as (fake, nvml, handle):
        rig = Rig(fake, nvml, handle)
        clock = SimpleNamespace(monotonic_ns=lambda: rig.now_ms * 1_000_000)
        monkeypatch.setattr("inpaint_bench.telemetry.nvml.real.time", clock)
        yield rig


def test_windows_follow_each_other_without_a_gap_on_two_buffers(rig: Rig) -> None:
    assert rig.after(0) is None
    windows = [rig.after(1000), rig.after(1000), rig.after(500)]
    assert [window.window_ms for window in windows] == [1000, 1000, 500]
    assert rig.driver.windows == [(1, 2), (2, 3), (3, 4)]
    assert rig.driver.allocated == 2
    assert [metric.value for metric in windows[0].values] == [2.0, 10.0]


def test_early_read_has_no_window_and_does_not_shorten_the_next(rig: Rig) -> None:
    rig.after(0)
    assert rig.after(100) is None
    assert rig.after(900).window_ms == 1000
    assert rig.driver.windows == [(1, 2)]


def test_window_longer_than_half_a_minute_is_discarded(rig: Rig) -> None:
    rig.after(0)
    assert rig.after(30_001) is None
    assert rig.after(1000).window_ms == 1000


def test_card_before_hopper_is_not_supported_and_old_driver_is_too_old(rig: Rig) -> None:
    rig.driver.gpm_supported = False
    with pytest.raises(NvmlError) as refused:
        rig.after(0)
    assert refused.value.code == 3
    rig.driver.fail["nvmlGpmQueryDeviceSupport"] = 13
    with pytest.raises(NvmlError) as unknown:
        rig.after(0)
    assert unknown.value.code == 13
    assert rig.driver.allocated == 0


def test_failed_sample_costs_one_row_and_the_next_window_spans_it(rig: Rig) -> None:
    rig.after(0)
    rig.driver.fail["nvmlGpmSampleGet"] = 999
    with pytest.raises(NvmlError):
        rig.after(1000)
    rig.driver.fail.clear()
    assert rig.after(1000).window_ms == 2000
    assert rig.driver.windows == [(1, 2)]


def test_each_metric_has_its_own_return_code_and_nan_is_an_error(rig: Rig) -> None:
    rig.driver.metric_codes[10] = 3
    rig.driver.metric_values[5] = float("nan")
    rig.after(0)
    metrics = rig.after(1000, "sm_active_pct", "dram_active_pct", "tensor_active_pct").values
    assert [metric.value for metric in metrics] == [2.0, None, None]
    assert [metric.error.code for metric in metrics[1:]] == [3, 999]


def test_buffers_are_freed_before_nvml_is_closed_and_allocated_anew_after(rig: Rig) -> None:
    rig.after(0)
    rig.nvml.close()
    assert rig.driver.freed == 2
    assert rig.driver.called.index("nvmlGpmSampleFree") < rig.driver.called.index("nvmlShutdown")
    assert rig.after(1000) is None
    assert rig.driver.allocated == 4


def test_metric_ids_are_those_of_recorded_captures() -> None:
    assert METRICS == {
        "sm_active_pct": 2,
        "sm_occupancy_pct": 3,
        "tensor_active_pct": 5,
        "dram_active_pct": 10,
        "pcie_tx_mib_s": 20,
        "pcie_rx_mib_s": 21,
        "nvlink_tx_mib_s": 61,
        "nvlink_rx_mib_s": 60,
    }


def test_metric_that_fails_later_is_null_and_queried_again() -> None:
    nvml = FakeNvml(1)
    reader = StreamReader(GPM)
    assert reader.read(nvml, uuid(0)) is None
    assert reader.read(nvml, uuid(0)).nulls is None
    nvml.fail[uuid(0)] = {"dram_active_pct": 3}
    failing = [reader.read(nvml, uuid(0)) for _ in range(5)]
    assert {reading.nulls for reading in failing} == {"dram_active_pct=not_supported"}
    assert failing[0].values["sm_active_pct"] == 10.0
    nvml.fail[uuid(0)] = {"counters": 999}
    assert "window_ms=error" in str(reader.read(nvml, uuid(0)).nulls)
    nvml.fail[uuid(0)] = {}
    recovered = reader.read(nvml, uuid(0))
    assert (recovered.nulls, recovered.values["dram_active_pct"]) == (None, 10.0)
    assert reader.absent == {}


def test_broken_gpm_alone_is_no_event() -> None:
    nvml = FakeNvml(1)
    tables: dict[str, list[dict[str, Any]]] = defaultdict(list)
    sampler = Sampler(nvml, open_devices(nvml, nvml.gpus), "nvml", lambda table, row: tables[table].append(row), HZ)
    nvml.fail[uuid(0)]["counters"] = 999
    for seq in range(3):
        sampler.sample(GPM, seq)
    assert tables["events"] == []
    assert len(tables["samples_gpm"]) == 3
