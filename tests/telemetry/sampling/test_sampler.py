"""When ticks are due, and what a failing GPU does to the others."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from inpaint_bench.telemetry.devices import open_devices
from inpaint_bench.telemetry.nvml.recorder import HZ
from inpaint_bench.telemetry.sampling.sampler import Sampler, Ticker
from inpaint_bench.telemetry.sampling.streams import FAST
from tests.telemetry.support import FakeNvml, uuid


def _sampler(nvml: FakeNvml) -> tuple[Sampler, dict[str, list[dict[str, Any]]]]:
    tables: dict[str, list[dict[str, Any]]] = defaultdict(list)
    devices = open_devices(nvml, nvml.gpus)
    return Sampler(nvml, devices, "nvml", lambda table, row: tables[table].append(row), HZ), tables


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


def test_tick_more_than_a_period_late_is_skipped_and_counted() -> None:
    ticker = Ticker(100_000_000, 0)
    taken = [ticker.take(now * 1_000_000) for now in (0, 450, 500, 550)]
    assert taken == [0, 4, 5, None]
    report = ticker.report()
    assert (report.ticks_due, report.ticks_done, report.ticks_skipped) == (6, 3, 3)


def test_two_ticks_are_at_least_50_ms_apart() -> None:
    ticker = Ticker(100_000_000, 0)
    ticker.take(0)
    assert ticker.take(190_000_000) == 1
    assert ticker.take(200_000_000) is None
    assert ticker.next_ns == 240_000_000
    assert ticker.take(240_000_000) == 2
    assert ticker.earliest_ns == 290_000_000
