"""How a read becomes a row, and what a failing query does to it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from inpaint_bench.core.schema import Null
from inpaint_bench.core.tables import SCHEMAS
from inpaint_bench.telemetry.driver import Value
from inpaint_bench.telemetry.nvml.real import FIELDS, METRICS, QUERIES, RealNvml, gpu_uuid, null_reason
from inpaint_bench.telemetry.sampling.devices import open_devices
from inpaint_bench.telemetry.sampling.streams import FAST, SLOW, STREAMS, WINDOW, StreamReader, _validate
from inpaint_bench.telemetry.storage.parts import PartWriter
from tests.telemetry.support import FakeNvml, rows, uuid


def test_number_that_does_not_fit_its_column_is_null_and_costs_no_other_row(tmp_path: Path) -> None:
    """Regression: one negative counter lost the rows of a whole journal save."""
    columns = {item.columns[0] for stream in (FAST, SLOW) for item in stream.fields}
    numbers: dict[str, float] = {"energy_mj": -1, "throttle_power_cap_ns": 0.5, "throttle_sw_thermal_ns": -5}
    nvml = FakeNvml(1)
    fields = nvml.fields
    nvml.fields = lambda handle, names: [  # type: ignore[method-assign]
        result._replace(value=numbers.get(name, 7)) for name, result in zip(names, fields(handle, names), strict=True)
    ]
    fast, slow = (StreamReader(stream).read(nvml, uuid(0)) for stream in (FAST, SLOW))
    assert fast.nulls == "energy_mj=error"
    assert slow.nulls == "throttle_power_cap_ns=error;throttle_sw_thermal_ns=error"
    assert columns - fast.values.keys() - slow.values.keys() == {*fast.errors, *slow.errors}
    for stream, reading in ((FAST, fast), (SLOW, slow)):
        writer = PartWriter(tmp_path / stream.table, SCHEMAS[stream.table], {"run_id": "r"}, 60)
        writer.append(**reading.row(uuid(0), "nvml", 0))
        writer.close()
    assert rows(tmp_path, "samples_slow")["throttle_hw_thermal_ns"].to_list() == [7]


def test_sensor_missing_in_the_first_three_reads_is_not_queried_again() -> None:
    nvml = FakeNvml(1)
    nvml.fail[uuid(0)]["power_avg1s_mw"] = 3
    reader = StreamReader(FAST)
    readings = [reader.read(nvml, uuid(0)) for _ in range(5)]
    assert nvml.calls.count((uuid(0), "power_avg1s_mw")) == 3
    assert {reading.nulls for reading in readings} == {"power_avg1s_w=not_supported"}
    assert [*reader.absent] == ["power_avg1s_w"]


def test_later_not_supported_is_null_and_the_sensor_is_queried_again() -> None:
    """Polling too fast gives spurious NOT_SUPPORTED; to believe it would lose the rest of the run."""
    nvml = FakeNvml(1)
    reader = StreamReader(FAST)
    reader.read(nvml, uuid(0))
    nvml.fail[uuid(0)]["power_instant_mw"] = 3
    assert all(reader.read(nvml, uuid(0)).nulls == "power_instant_w=not_supported" for _ in range(5))
    nvml.fail[uuid(0)].clear()
    assert reader.read(nvml, uuid(0)).nulls is None
    assert reader.errors["power_instant_w", 3] == 5
    assert reader.absent == {}


def test_failed_field_query_nulls_its_columns_and_keeps_the_other_queries() -> None:
    nvml = FakeNvml(1)
    nvml.fail[uuid(0)]["fields"] = 4
    reading = StreamReader(FAST).read(nvml, uuid(0))
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
def test_every_return_code_has_a_null_reason(code: int, reason: Null) -> None:
    assert null_reason(code) is reason


def test_streams_fill_every_column_of_their_tables() -> None:
    head = {"run_id", "gpu_uuid", "source", "tick_seq", "t_mono_ns", "t_unix_ns", "read_us", "nulls"}
    for stream in STREAMS:
        filled = {item.columns[0] for item in stream.fields} | {
            name for query in stream.queries for name in query.columns
        }
        if stream.gpm:
            filled |= {WINDOW} | {item.columns[0] for item in stream.gpm}
        assert filled == set(SCHEMAS[stream.table].names) - head


def test_row_has_the_time_of_the_middle_of_its_read_on_both_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an H200 a read takes 3 ms, now and then 17: energy over a window is cut at these times."""
    now_ms = 1000
    clock = SimpleNamespace(monotonic_ns=lambda: now_ms * 10**6, time_ns=lambda: (now_ms + 5000) * 10**6)
    monkeypatch.setattr("inpaint_bench.telemetry.sampling.streams.time", clock)
    nvml = FakeNvml(1)
    fields = nvml.fields

    def slow(handle: str, names: Any) -> Any:
        nonlocal now_ms
        now_ms += 40
        return fields(handle, names)

    nvml.fields = slow  # type: ignore[method-assign]
    reading = StreamReader(FAST).read(nvml, uuid(0))
    assert (reading.t_mono_ns, reading.t_unix_ns, reading.read_us) == (1020 * 10**6, 6020 * 10**6, 40_000)


def test_handle_of_another_uuid_is_refused() -> None:
    nvml = FakeNvml(2)
    nvml.uuid = lambda handle: uuid(1)  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=f"opened GPU {uuid(1)} in place of {uuid(0)}"):
        open_devices(nvml, [uuid(0)])


def test_uuid_is_the_same_with_and_without_its_prefix() -> None:
    bare = "0123abcd-0000-1111-2222-0123456789AB"
    assert gpu_uuid(bare) == gpu_uuid(f"GPU-{bare}") == f"GPU-{bare.lower()}"


def test_every_query_of_a_stream_exists_and_field_ids_are_those_of_recorded_captures() -> None:
    """Capture files hold the numbers, so a binding that renumbered a field would misread them."""
    assert {query.name for stream in STREAMS for query in stream.queries} <= QUERIES.keys()
    assert {item.name for stream in STREAMS for item in stream.fields} <= FIELDS.keys()
    assert {item.name for stream in STREAMS for item in stream.gpm} == METRICS.keys()
    assert FIELDS == {
        "power_instant_mw": (186, 0),
        "power_avg1s_mw": (185, 0),
        "energy_mj": (83, 0),
        "power_mem_avg_mw": (185, 2),
        "temp_mem_c": (82, 0),
        "throttle_power_cap_ns": (74, 0),
        "throttle_sw_thermal_ns": (269, 0),
        "throttle_hw_thermal_ns": (270, 0),
        "throttle_power_brake_ns": (271, 0),
        "pcie_replays": (94, 0),
        "recovery_action": (230, 0),
    }
    assert RealNvml()


def test_binding_that_is_not_nvidias_is_recognised() -> None:
    code = (
        "import pynvml\n"
        "del pynvml.NVML_FI_DEV_CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN\n"
        "import inpaint_bench.telemetry.nvml.real"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert "pynvml.py is not nvidia-ml-py 12.575 or newer; pip uninstall pynvml" in run.stderr


@pytest.mark.parametrize(
    ("column", "value"),
    [
        *(("gpu_util_pct", 2619), ("mem_active_pct", -1), ("temp_gpu_c", 255), ("temp_mem_c", 65535)),
        *(("sm_clock_mhz", 0), ("mem_clock_mhz", 65535), ("power_instant_w", 4_294_967.0), ("vram_used_mib", 2**44)),
    ],
)
def test_value_that_no_card_gives_is_null_with_a_reason(column: str, value: float) -> None:
    error = _validate(column, Value(value))
    assert error is not None
    assert error.reason == Null.OUT_OF_RANGE
