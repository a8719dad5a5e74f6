"""Checks of what the stages computed: what the figures of a run lack, and what they contradict."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import polars as pl

from analysis.metrics import manifest_facts
from analysis.metrics.energy import MAX_COUNTER_DEVIATION, Deviation
from analysis.metrics.facts import Facts
from analysis.metrics.flags import THERMAL_COUNTERS, THERMAL_PCT
from analysis.metrics.telemetry import Telemetry
from inpaint_bench.core.schema import WindowKind

from .check import Finished, of_all, of_row, of_run, of_telemetry, warn


def several_sources(facts: Facts) -> Iterable[str]:
    kinds = {source.partition(":")[0] for source in facts.sources}
    return [", ".join(facts.sources)] if len(kinds) > 1 else []


def contradictions(_: Facts, telemetry: Telemetry) -> list[Deviation]:
    """Return the first integral of sampled power that is so far from the energy that one of the two is wrong."""
    return [each for each in telemetry.energy.deviations if abs(each.pct) > each.limit_pct][:1]


def _energy(facts: Facts, telemetry: Telemetry) -> Iterator[str]:
    energy = telemetry.energy
    yield from filter(None, [energy.problem])
    if not contradictions(facts, telemetry):
        yield from [each.text for each in energy.deviations if abs(each.pct) > 100 * MAX_COUNTER_DEVIATION][:1]


def _cut(facts: Facts) -> Iterable[int]:
    measured = sum(window.kind == WindowKind.MEASURE for window in facts.windows)
    return filter(None, [measured - len(facts.measured)])


def _not_steady(run: Finished) -> Iterable[str]:
    steady = run.rates.steadiness
    return [steady.explanation] if steady is not None and steady.verdict == "no" else []


def _lacks_steps(run: Finished) -> Iterable[str]:
    held, steps = run.rates.steps_in_table, run.row["n_steps"]
    return [f"{held} of {steps}"] if held not in (None, steps) else []


def _stalled(run: Finished) -> Iterable[str]:
    cost = "{stalls} step(s) stalled for {stall_s:.1f} s, {stall_pct:.1f} % of the measure window; without them "
    rates = "{images_per_s_steady:.4g} images/s in place of {images_per_s:.4g}"
    return [(cost + rates).format(**run.row)] if run.row["stalls"] else []


def _stated(run: Finished) -> Iterable[str]:
    return [STATED] if run.facts.is_command and not run.facts.uniform_steps and run.row["images"] else []


def _throttled(row: Mapping[str, Any]) -> Iterable[float]:
    return [pct for pct in [row["throttle_thermal_pct"]] if (pct or 0) > THERMAL_PCT]


def _uncertain(row: Mapping[str, Any]) -> Iterable[float]:
    return [pct for pct in [row["energy_error_pct"]] if (pct or 0) > ENERGY_ERROR_PCT]


def _reasons_without_counters(facts: Facts, telemetry: Telemetry) -> Iterable[str]:
    """Look at the bits of throttle_reasons where no counter says how long it was throttled."""
    inside = pl.any_horizontal(pl.col("t_mono_ns").is_between(*span) for span in facts.spans)
    rows = facts.samples["samples_slow"].filter(inside, pl.col("throttle_reasons").is_not_null())
    unknown = pl.all_horizontal(pl.col(name).is_null() for name in THERMAL_COUNTERS)
    hot = rows.filter(unknown, (pl.col("throttle_reasons").cast(pl.Int64) & THERMAL_BITS) != 0).height
    return [f"{hot} of {rows.height}"] if 100 * hot > THERMAL_PCT * rows.height else []


ENERGY_ERROR_PCT = 5.0
THERMAL_BITS = 0x8 | 0x20 | 0x40  # of NVML's clocks event reasons: hardware slowdown, software and hardware thermal
UNCERTAIN = "the energy may be wrong by up to {:.1f} %: its counter stood still, or the window is short"
THROTTLED_BY_BITS = "thermal throttling in {} samples, by throttle_reasons; no counter says for how long"
STATED = "the images are those of --images, over the whole command, its start included"
THROTTLED = "thermally throttled for {:.1f} % of the measure window"
UNREQUESTED = "no telemetry was requested: throughput only"
WARNINGS = (
    warn("windows cut short", of_run, _cut, "{} measure window(s) cut short and left out"),
    warn("manifest", of_run, lambda facts: manifest_facts.warnings(facts.manifest)),
    warn("steps in the table", of_all, _lacks_steps, "step table holds {} steps"),
    warn("steady state", of_all, _not_steady),
    warn("stalls", of_all, _stalled),
    warn("images of a command", of_all, _stated),
    warn("no telemetry", of_all, lambda run: [] if run.telemetry.requested else [UNREQUESTED]),
    warn("energy", of_telemetry, _energy),
    warn("thermal throttling", of_row, _throttled, THROTTLED),
    warn("uncertainty of the energy", of_row, _uncertain, UNCERTAIN),
    warn("reasons for throttling", of_telemetry, _reasons_without_counters, THROTTLED_BY_BITS),
    warn("columns left out", of_telemetry, lambda _, telemetry: telemetry.left_out, "left out: {}"),
)
