"""When ticks are due, and what a failing GPU does to the others."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

from inpaint_bench.telemetry.nvml.probe import HZ
from inpaint_bench.telemetry.sampling.devices import open_devices
from inpaint_bench.telemetry.sampling.sampler import Sampler, Ticker
from inpaint_bench.telemetry.sampling.streams import FAST
from tests.telemetry.support import FakeNvml, uuid


def _sampler(
    nvml: FakeNvml, fast_hz: float = HZ["fast"], energy_hz: float | None = None
) -> tuple[Sampler, dict[str, list[dict[str, Any]]]]:
    tables: dict[str, list[dict[str, Any]]] = defaultdict(list)
    devices = open_devices(nvml, nvml.gpus)
    hz = {**HZ, "fast": fast_hz}
    return Sampler(nvml, devices, "nvml", lambda table, row: tables[table].append(row), hz, energy_hz), tables


def test_lost_gpu_is_an_event_and_the_others_continue() -> None:
    nvml = FakeNvml(3)
    sampler, tables = _sampler(nvml)
    sampler.sample(FAST, 0)
    nvml.fail[uuid(1)]["*"] = 15
    for seq in (1, 2):
        sampler.sample(FAST, seq)
    by_gpu = {name: [row for row in tables["samples_fast"] if row["gpu_uuid"] == name] for name in nvml.gpus}
    assert [len(by_gpu[name]) for name in nvml.gpus] == [3, 2, 3]
    assert "power_instant_w" not in by_gpu[uuid(1)][1]
    assert "power_instant_w=gpu_lost" in by_gpu[uuid(1)][1]["nulls"]
    assert [(row["kind"], row["gpu_uuid"]) for row in tables["events"]] == [("gpu_lost", uuid(1))]
    assert by_gpu[uuid(2)][2]["nulls"] is None


def test_broken_nvml_is_reported_once_per_gpu_and_queried_again() -> None:
    nvml = FakeNvml(2)
    sampler, tables = _sampler(nvml)
    for name in nvml.gpus:
        nvml.fail[name]["*"] = 999
    for seq in (0, 1):
        sampler.sample(FAST, seq)
    nvml.fail = {name: {} for name in nvml.gpus}
    sampler.sample(FAST, 2)
    events = [(row["kind"], row["gpu_uuid"]) for row in tables["events"]]
    assert events == [("nvml_broken", uuid(0)), ("nvml_broken", uuid(1))]
    assert "unknown (NVML code 999)" in tables["events"][0]["detail"]
    assert [row["nulls"] is None for row in tables["samples_fast"]] == [False] * 4 + [True] * 2


def test_replaced_driver_ends_the_sampling() -> None:
    nvml = FakeNvml(1)
    sampler, tables = _sampler(nvml)
    nvml.fail[uuid(0)]["*"] = 18
    sampler.sample(FAST, 0)
    sampler.sample(FAST, 1)
    assert sampler.fatal
    assert len(tables["samples_fast"]) == 1
    assert tables["events"][0]["kind"] == "nvml_fatal"


def test_deadlines_do_not_shift_after_late_ticks() -> None:
    ticker = Ticker(100_000_000, 0)
    taken = [ticker.take(now * 1_000_000) for now in (0, 99, 130, 199, 201, 300)]
    assert taken == [0, None, 1, None, 2, 3]
    report = ticker.report()
    assert (report.ticks_due, report.ticks_done, report.ticks_skipped) == (4, 4, 0)


def test_two_ticks_are_at_least_40_ms_apart() -> None:
    ticker = Ticker(100_000_000, 0)
    ticker.take(0)
    assert ticker.take(190_000_000) == 1
    assert ticker.take(200_000_000) is None
    assert ticker.next_ns == 230_000_000
    assert ticker.take(230_000_000) == 2
    assert ticker.earliest_ns == 270_000_000


def test_delays_of_ticks_at_20_hz_do_not_add_up() -> None:
    """Regression: two ticks had to be a whole period apart, and one tick in 220 was lost."""
    ticker = Ticker(50_000_000, 0)
    now_ns = 0
    while now_ns < 600 * 10**9:
        now_ns = ticker.next_ns + 200_000  # every tick wakes up 0.2 ms late
        assert ticker.take(now_ns) is not None
    report = ticker.report()
    assert report.ticks_skipped == 0
    assert report.ticks_done / (now_ns / 1e9) == pytest.approx(20, rel=1e-4)


def _energy_reads(nvml: FakeNvml, name: str) -> int:
    return nvml.calls.count((name, "energy_mj"))


def test_energy_counter_is_read_once_a_second_after_the_first_reads_and_at_the_end() -> None:
    """A reading takes 3 ms on an H200: at 20 Hz, 6 % of a core for a counter that grows every 100 ms."""
    nvml = FakeNvml(1)
    sampler, tables = _sampler(nvml, fast_hz=20, energy_hz=1)
    for seq in range(20 * 61):
        sampler.sample(FAST, seq)
    rows = tables["samples_fast"]
    assert _energy_reads(nvml, uuid(0)) == 20 + 60
    assert all("energy_mj" in row for row in rows[:20])
    later = [row for row in rows[20:] if "energy_mj" in row]
    assert [row["tick_seq"] for row in later] == list(range(20, 20 * 61, 20))
    assert {row["nulls"] for row in rows if "energy_mj" not in row} == {"energy_mj=not_due"}
    sampler.sample_last()
    assert "energy_mj" in tables["samples_fast"][-1]  # a window that ends now must not be extrapolated


def test_energy_counters_of_several_gpus_are_read_in_turn() -> None:
    nvml = FakeNvml(2)
    sampler, tables = _sampler(nvml, fast_hz=10, energy_hz=1)
    for seq in range(60):
        sampler.sample(FAST, seq)
    rows = [row for row in tables["samples_fast"] if row["tick_seq"] >= 20 and "energy_mj" in row]
    assert [(row["tick_seq"], row["gpu_uuid"]) for row in rows] == [
        *((20, uuid(0)), (29, uuid(1)), (30, uuid(0)), (39, uuid(1))),
        *((40, uuid(0)), (49, uuid(1)), (50, uuid(0)), (59, uuid(1))),
    ]


def test_failed_reading_of_the_energy_counter_is_repeated_at_the_next_tick() -> None:
    nvml = FakeNvml(1)
    sampler, tables = _sampler(nvml, fast_hz=10, energy_hz=1)
    for seq in range(20):
        sampler.sample(FAST, seq)
    nvml.fail[uuid(0)]["energy_mj"] = 999
    sampler.sample(FAST, 20)
    nvml.fail[uuid(0)].clear()
    for seq in (21, 22):
        sampler.sample(FAST, seq)
    assert [row["nulls"] for row in tables["samples_fast"][20:]] == ["energy_mj=error", None, "energy_mj=not_due"]


def test_card_without_an_energy_counter_says_so_in_every_row() -> None:
    nvml = FakeNvml(1)
    nvml.fail[uuid(0)]["energy_mj"] = 3
    sampler, tables = _sampler(nvml, fast_hz=10, energy_hz=1)
    for seq in range(40):
        sampler.sample(FAST, seq)
    assert {row["nulls"] for row in tables["samples_fast"]} == {"energy_mj=not_supported"}
    assert _energy_reads(nvml, uuid(0)) == 3
