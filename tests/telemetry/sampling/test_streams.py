"""What a failing GPU does to its rows and to the others; when ticks are due."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from inpaint_bench.core.schema import Null
from inpaint_bench.telemetry.devices import open_devices
from inpaint_bench.telemetry.nvml.api import Nvml, NvmlError, gpu_uuid
from inpaint_bench.telemetry.nvml.real import RealNvml
from inpaint_bench.telemetry.sampling.sampler import Sampler
from inpaint_bench.telemetry.sampling.streams import FAST, LANES, SLOW, WINDOW, Reader, null_reason
from inpaint_bench.telemetry.sampling.ticker import Durations, Ticker
from inpaint_bench.telemetry.storage.parts import PartWriter
from tests.telemetry.support import FakeGpus, rows, uuid


def _sampler(gpus: FakeGpus) -> tuple[Sampler, dict[str, list[dict[str, Any]]]]:
    tables: dict[str, list[dict[str, Any]]] = defaultdict(list)
    nvml = cast(Nvml, gpus)
    devices = open_devices(nvml, gpus.known)
    return Sampler(nvml, devices, "nvml", lambda table, row: tables[table].append(row)), tables


def test_a_gpu_that_is_lost_is_an_event_and_the_others_go_on() -> None:
    gpus = FakeGpus(3)
    sampler, tables = _sampler(gpus)
    sampler.sample(FAST, 0)
    gpus.fail[uuid(1)]["*"] = 15
    for seq in (1, 2):
        sampler.sample(FAST, seq)
    by_gpu = {name: [row for row in tables["samples_fast"] if row["gpu_uuid"] == name] for name in gpus.known}
    assert [len(by_gpu[name]) for name in gpus.known] == [3, 2, 3]
    assert "power_instant_w" not in by_gpu[uuid(1)][1]
    assert "power_instant_w=gpu_lost" in by_gpu[uuid(1)][1]["nulls"]
    assert [(row["kind"], row["gpu_uuid"]) for row in tables["events"]] == [("gpu_lost", uuid(1))]
    assert by_gpu[uuid(2)][2]["nulls"] is None


def test_nvml_that_stops_answering_is_opened_anew() -> None:
    gpus = FakeGpus(2)
    sampler, tables = _sampler(gpus)
    sampler._backoff_s = 0.0
    for name in gpus.known:
        gpus.fail[name]["*"] = 999
    sampler.sample(FAST, 0)
    gpus.fail = {name: {} for name in gpus.known}
    sampler.sample(FAST, 1)
    assert [row["kind"] for row in tables["events"]] == ["nvml_broken", "nvml_reopened"]
    assert gpus.opened == 1
    assert tables["samples_fast"][-1]["nulls"] is None


def test_a_gpu_that_is_gone_when_nvml_is_opened_anew_is_lost_and_the_others_go_on() -> None:
    gpus = FakeGpus(2)
    sampler, tables = _sampler(gpus)
    sampler._backoff_s = 0.0
    for name in gpus.known:
        gpus.fail[name]["*"] = 999
    sampler.sample(FAST, 0)
    gpus.fail = {name: {} for name in gpus.known}
    gpus.known = gpus.known[:1]
    sampler.sample(FAST, 1)
    told = [(row["kind"], row["gpu_uuid"]) for row in tables["events"]]
    assert told == [("nvml_broken", uuid(0)), ("gpu_lost", uuid(1)), ("nvml_reopened", None)]
    assert [(row["gpu_uuid"], row["nulls"]) for row in tables["samples_fast"] if row["tick_seq"] == 1] == [
        (uuid(0), None)
    ]


def test_one_gpu_that_is_well_does_not_make_nvml_be_opened_anew_every_second() -> None:
    """Regression: every good read of another GPU forgot how long to wait before the next try."""
    gpus = FakeGpus(2)
    sampler, tables = _sampler(gpus)
    gpus.fail[uuid(1)] = dict.fromkeys(("fields", "utilization"), 999)
    waits = []
    for seq in range(8):
        sampler.sample(FAST, seq)
        waits.append(sampler._backoff_s)
        if sampler._reopen_at_s is not None:
            sampler._reopen_at_s = 0.0  # its time has come
    assert waits == sorted(waits)
    assert waits[-1] == 30
    gpus.fail[uuid(1)].clear()
    sampler.sample(FAST, 8)
    assert sampler._backoff_s == 1
    assert tables["samples_fast"][-1]["nulls"] is None


def test_a_number_that_a_counters_column_cannot_hold_is_null_and_costs_no_other_row(tmp_path: Path) -> None:
    """Regression: one negative counter made the rows of a whole journal step be lost."""
    columns = {item.column for lane in (FAST, SLOW) for item in lane.fields}
    numbers: dict[int, float] = {83: -1, 74: 0.5, 269: -5}
    gpus = FakeGpus(1)
    fields = gpus.fields
    gpus.fields = lambda handle, ids: [  # type: ignore[method-assign]
        answer._replace(value=numbers.get(one, 7)) for (one, _), answer in zip(ids, fields(handle, ids), strict=True)
    ]
    fast, slow = (Reader(lane).read(cast(Nvml, gpus), uuid(0)) for lane in (FAST, SLOW))
    assert fast.nulls == "energy_mj=error"
    assert slow.nulls == "throttle_power_cap_ns=error;throttle_sw_thermal_ns=error"
    assert columns - fast.values.keys() - slow.values.keys() == {*fast.codes, *slow.codes}
    for lane, reading in ((FAST, fast), (SLOW, slow)):
        writer = PartWriter(tmp_path / lane.table, lane.schema, {"run_id": "r"}, 60, 5)
        writer.append(**reading.row(uuid(0), "nvml", 0))
        writer.close()
    assert rows(tmp_path, "samples_slow")["throttle_hw_thermal_ns"].to_list() == [7]


def test_a_driver_replaced_under_the_run_ends_the_sampling() -> None:
    gpus = FakeGpus(1)
    sampler, tables = _sampler(gpus)
    gpus.fail[uuid(0)]["*"] = 18
    sampler.sample(FAST, 0)
    sampler.sample(FAST, 1)
    assert sampler.fatal
    assert len(tables["samples_fast"]) == 1
    assert tables["events"][0]["kind"] == "nvml_fatal"


def test_a_sensor_that_is_missing_three_times_from_the_start_is_not_asked_again() -> None:
    gpus = FakeGpus(1)
    gpus.fail[uuid(0)]["185:0"] = 3
    reader = Reader(FAST)
    readings = [reader.read(cast(Nvml, gpus), uuid(0)) for _ in range(5)]
    assert gpus.asked.count((uuid(0), (185, 0))) == 3
    assert {reading.nulls for reading in readings} == {"power_avg1s_w=not_supported"}
    assert reader.absent == {"power_avg1s_w": 3}


def test_one_refusal_later_is_one_null_and_the_sensor_is_asked_again() -> None:
    """Polling too fast gives spurious NOT_SUPPORTED; a tool that believes it loses the rest of the run."""
    gpus = FakeGpus(1)
    reader = Reader(FAST)
    nvml = cast(Nvml, gpus)
    reader.read(nvml, uuid(0))
    gpus.fail[uuid(0)]["186:0"] = 3
    assert all(reader.read(nvml, uuid(0)).nulls == "power_instant_w=not_supported" for _ in range(5))
    gpus.fail[uuid(0)].clear()
    assert reader.read(nvml, uuid(0)).nulls is None
    assert reader.errors["power_instant_w", 3] == 5
    assert reader.absent == {}


def test_a_query_that_fails_as_a_whole_nulls_its_columns_and_keeps_the_other_calls() -> None:
    gpus = FakeGpus(1)
    gpus.fail[uuid(0)]["fields"] = 4
    reading = Reader(FAST).read(cast(Nvml, gpus), uuid(0))
    assert reading.nulls == ("energy_mj=no_permission;power_avg1s_w=no_permission;power_instant_w=no_permission")
    assert reading.values == {"gpu_util_pct": 50, "mem_active_pct": 5}


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (3, Null.NOT_SUPPORTED),
        (4, Null.NO_PERMISSION),
        (13, Null.DRIVER_TOO_OLD),
        (15, Null.GPU_LOST),
        (16, Null.GPU_LOST),
        (26, Null.NOT_SUPPORTED),
        (999, Null.ERROR),
        (-1, Null.NOT_IN_CAPTURE),
    ],
)
def test_every_return_code_has_its_reason(code: int, reason: Null) -> None:
    assert null_reason(code) is reason


def test_the_lanes_fill_every_column_of_their_tables() -> None:
    head = {"run_id", "gpu_uuid", "source", "tick_seq", "t_mono_ns", "t_unix_ns", "read_us", "nulls"}
    for lane in LANES:
        filled = {item.column for item in lane.fields} | {name for call in lane.calls for name in call.columns}
        if lane.metrics:
            filled |= {WINDOW} | {item.column for item in lane.metrics}
        assert filled == set(lane.schema.names) - head


def test_a_row_is_stamped_in_the_middle_of_its_read_by_both_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an H200 a read takes 3 ms, now and then 17: energy over a window is cut at these times."""
    now_ms = 1000
    clock = SimpleNamespace(monotonic_ns=lambda: now_ms * 10**6, time_ns=lambda: (now_ms + 5000) * 10**6)
    monkeypatch.setattr("inpaint_bench.telemetry.sampling.streams.time", clock)
    gpus = FakeGpus(1)
    fields = gpus.fields

    def slow(handle: str, ids: Any) -> Any:
        nonlocal now_ms
        now_ms += 40
        return fields(handle, ids)

    gpus.fields = slow  # type: ignore[method-assign]
    reading = Reader(FAST).read(cast(Nvml, gpus), uuid(0))
    assert (reading.t_mono_ns, reading.t_unix_ns, reading.read_us) == (1020 * 10**6, 6020 * 10**6, 40_000)


def test_memory_is_reported_in_mib_and_power_in_watts() -> None:
    gpus = FakeGpus(1)
    slow = Reader(SLOW).read(cast(Nvml, gpus), uuid(0)).values
    assert [slow[f"vram_{part}_mib"] for part in ("total", "reserved", "used", "free")] == [8192, 1024, 2048, 5120]
    fast = Reader(FAST).read(cast(Nvml, gpus), uuid(0)).values
    assert fast["power_instant_w"] == pytest.approx(fast["energy_mj"] / 1000)


def test_a_gpu_that_is_not_here_is_refused_with_those_that_are() -> None:
    with pytest.raises(ValueError, match=f"{uuid(7)} is not here; NVML lists {uuid(0)}"):
        open_devices(cast(Nvml, FakeGpus(1)), [uuid(7)])


def test_a_handle_that_answers_by_another_uuid_is_refused() -> None:
    gpus = FakeGpus(2)
    gpus.uuid = lambda handle: uuid(1)  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=f"{uuid(0)} was asked for and {uuid(1)} answered"):
        open_devices(cast(Nvml, gpus), [uuid(0)])


def test_a_gpu_in_mig_mode_is_refused() -> None:
    gpus = FakeGpus(1)
    gpus.mig_mode = lambda handle: 1  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="MIG mode"):
        open_devices(cast(Nvml, gpus), [uuid(0)])


def test_a_uuid_is_the_same_with_and_without_its_prefix() -> None:
    bare = "0123abcd-0000-1111-2222-0123456789AB"
    assert gpu_uuid(bare) == gpu_uuid(f"GPU-{bare}") == f"GPU-{bare.lower()}"


def test_the_binding_knows_every_field_and_call_that_is_used() -> None:
    import pynvml

    named = {
        186: "NVML_FI_DEV_POWER_INSTANT",
        185: "NVML_FI_DEV_POWER_AVERAGE",
        83: "NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION",
        82: "NVML_FI_DEV_MEMORY_TEMP",
        74: "NVML_FI_DEV_CLOCKS_EVENT_REASON_SW_POWER_CAP",
        269: "NVML_FI_DEV_CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN",
        270: "NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN",
        271: "NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN",
    }
    used = {item.field_id for lane in LANES for item in lane.fields}
    assert used == named.keys()
    assert all(getattr(pynvml, name) == number for number, name in named.items())
    assert RealNvml()


def test_a_binding_that_is_not_the_vendors_is_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    import pynvml

    monkeypatch.delattr(pynvml, "_nvmlGetFunctionPointer")
    with pytest.raises(NvmlError, match="not nvidia-ml-py"):
        RealNvml()


class TestTicker:
    def test_ticks_keep_to_their_deadlines_however_late_each_one_was(self) -> None:
        ticker = Ticker(100_000_000, 0)
        taken = [ticker.take(now * 1_000_000) for now in (0, 99, 130, 199, 201, 300)]
        assert taken == [0, None, 1, None, 2, 3]
        assert (ticker.due, ticker.done, ticker.late) == (4, 4, 0)

    def test_a_tick_more_than_a_period_late_is_skipped_and_counted(self) -> None:
        ticker = Ticker(100_000_000, 0)
        taken = [ticker.take(now * 1_000_000) for now in (0, 450, 500, 550)]
        assert taken == [0, 4, 5, None]
        assert (ticker.due, ticker.done, ticker.late) == (6, 3, 3)

    def test_two_reads_are_never_less_than_50_ms_apart(self) -> None:
        ticker = Ticker(100_000_000, 0)
        ticker.take(0)
        assert ticker.take(190_000_000) == 1
        assert ticker.take(200_000_000) is None
        assert ticker.next_ns == 240_000_000
        assert ticker.take(240_000_000) == 2
        assert ticker.earliest_ns == 290_000_000


def test_quantiles_of_read_times_are_within_five_percent() -> None:
    durations = Durations()
    assert durations.quantile_us(0.5) is None
    for us in range(1, 1001):
        durations.add(us)
    assert durations.quantile_us(0.5) == pytest.approx(500, rel=0.05)
    assert durations.quantile_us(0.99) == pytest.approx(990, rel=0.05)
    assert durations.max_us == 1000
    slow = Durations()
    slow.add(1000.0)  # nearest to a bucket that begins above it
    assert slow.quantile_us(0.99) == slow.max_us == 1000
