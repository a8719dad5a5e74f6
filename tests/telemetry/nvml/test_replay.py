"""Captures and their replay: recorded results come back, and what was not recorded is missing with a reason."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from benchmarks import make_synthetic_captures
from inpaint_bench.core.schema import Null
from inpaint_bench.telemetry.nvml.probe import NvmlRecorder
from inpaint_bench.telemetry.nvml.replay import (
    FORMAT,
    PACKAGED,
    SUFFIX,
    Capture,
    ReplayNvml,
    available,
    load,
    save,
)
from inpaint_bench.telemetry.report import CaptureMeta
from inpaint_bench.telemetry.sampling.checks import read_health
from inpaint_bench.telemetry.sampling.devices import describe
from inpaint_bench.telemetry.sampling.streams import GPM, STREAMS, StreamReader
from tests.telemetry.support import FakeNvml, rows, small_capture, start, uuid

COUNTERS = ("sm_active_pct", "dram_active_pct")


@pytest.mark.subprocess
def test_energy_counter_never_decreases_when_the_capture_loops(tmp_path: Path) -> None:
    """0.5 s of capture, 1.4 s of run: the counter continues at the loop's rate, 10 J per 100 ms."""
    path = small_capture(tmp_path / f"tiny{SUFFIX}", [0, 500_000, 510_000, 520_000, 530_000], loop_from_ms=100)
    sidecar = start(tmp_path / "run", capture=str(path))
    time.sleep(1.4)
    sidecar.stop()
    fast = rows(tmp_path / "run", "samples_fast")
    assert fast["energy_mj"].diff().drop_nulls().min() >= 0
    looped = fast.filter(fast["energy_mj"] >= 500_000)
    seconds = (looped["t_mono_ns"][-1] - looped["t_mono_ns"][0]) / 1e9
    assert seconds > 1
    assert (looped["energy_mj"][-1] - looped["energy_mj"][0]) / seconds == pytest.approx(100_000, rel=0.1)
    assert "power_instant_w=not_in_capture" in fast["nulls"][0]


def test_gpm_and_health_are_recorded_and_replayed(tmp_path: Path) -> None:
    nvml = FakeNvml(1)
    nvml.fail[uuid(0)] = {"dram_active_pct": 3, "remapped_rows": 4, "recovery_action": 3}
    recorder = NvmlRecorder(nvml)
    assert recorder.counters(uuid(0), COUNTERS) is None
    recorder.counters(uuid(0), COUNTERS)
    health = read_health(recorder, uuid(0))
    path = tmp_path / f"fake{SUFFIX}"
    save(path, Capture(format=FORMAT, meta=CaptureMeta(duration_ms=1000), calls=recorder.calls))
    replay = ReplayNvml(load(str(path)))
    (name,) = replay.uuids()
    assert replay.counters(name, COUNTERS) is None
    window = replay.counters(name, COUNTERS)
    assert window is not None
    assert [value.value for value in window.values] == [10.0, None]
    assert str(window.values[1].error) == "replay of gpm:10: not supported (NVML code 3)"
    assert read_health(replay, name) == health
    assert health.nulls["remapped_rows_failed"] == "no_permission"


@pytest.mark.parametrize("card", make_synthetic_captures.CARDS, ids=lambda card: card.name)
def test_synthetic_capture_supports_what_its_chip_does_and_omits_what_is_unknown(
    card: make_synthetic_captures.Card,
) -> None:
    """GPM from Hopper on; no 1-s average on GA100; memory power from Hopper on; no memory temperature on GA102."""
    replay = ReplayNvml(load(card.name))
    (name,) = replay.uuids()
    device = describe(replay, name)
    nulls = {**device.nulls, **read_health(replay, name).nulls}
    for stream in STREAMS:
        reader = StreamReader(stream)
        readings = [reader.read(replay, name) for _ in range(2)]  # GPM: the first read has no window
        nulls |= {column: error.reason.value for column, error in readings[1].errors.items()}
    metrics = {"window_ms", *(item.columns[0] for item in GPM.gpm)}
    refused = {
        "a40-synthetic": {"power_mem_avg_w", "temp_mem_c", "mig_mode"} | metrics,
        "a100-synthetic": {"power_avg1s_w", "power_mem_avg_w"} | metrics,
        "h200-synthetic": set(),
    }
    assert {column for column, reason in nulls.items() if reason == Null.NOT_SUPPORTED} == refused[card.name]
    unknown = {
        "a40-synthetic": {"vbios", "recovery_action"},
        "a100-synthetic": {"vbios", "recovery_action", "temp_mem_c"},
        "h200-synthetic": {"vbios"},
    }
    assert {column for column, reason in nulls.items() if reason == Null.NOT_IN_CAPTURE} == unknown[card.name]
    assert set(nulls.values()) <= {Null.NOT_SUPPORTED, Null.NOT_IN_CAPTURE}


@pytest.mark.parametrize("name", [card.name for card in make_synthetic_captures.CARDS])
def test_packaged_synthetic_capture_is_what_the_script_makes_and_says_so(name: str, tmp_path: Path) -> None:
    capture = load(name)
    assert capture.meta.synthetic is True
    assert "Not a measurement" in str(capture.meta.note)
    (card,) = [card for card in make_synthetic_captures.CARDS if card.name == name]
    made = tmp_path / f"{name}{SUFFIX}"
    save(made, make_synthetic_captures.make(card))
    assert load(str(made)) == capture


def test_packaged_captures_are_small_and_readable() -> None:
    assert {"a40-synthetic", "a100-synthetic", "h200-synthetic"} <= set(available())
    for name in available():
        assert load(name).calls
        assert (PACKAGED / f"{name}{SUFFIX}").stat().st_size < 200_000


def test_damaged_capture_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / f"broken{SUFFIX}"
    path.write_bytes(b"not gzip")
    with pytest.raises(ValueError, match="broken"):
        load(str(path))
