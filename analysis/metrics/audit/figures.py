"""Checks of what the stages computed: what the figures of a run lack, and what they contradict."""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl

from analysis.metrics.energy import MAX_COUNTER_DEVIATION
from analysis.metrics.facts import Facts
from analysis.metrics.flags import THERMAL_COUNTERS, THERMAL_PCT
from analysis.metrics.telemetry import Telemetry
from inpaint_bench.core.schema import WindowKind

from .check import Finished

ENERGY_ERROR_PCT = 5.0
THERMAL_BITS = 0x8 | 0x20 | 0x40  # NVML's clocks event reasons: hardware slowdown, software and hardware thermal


def several_sources(facts: Facts) -> Iterator[str]:
    if len({source.partition(":")[0] for source in facts.sources}) > 1:
        yield f"telemetry of several kinds: {', '.join(facts.sources)}"


def contradiction(_: Facts, telemetry: Telemetry) -> Iterator[str]:
    """Name the first integral of sampled power that is so far from the energy that one of the two is wrong."""
    wrong = [each for each in telemetry.energy.deviations if abs(each.pct) > each.limit_pct]
    yield from (f"{each.text} of {each.column}" for each in wrong[:1])


def cut_short(facts: Facts) -> Iterator[str]:
    measured = sum(window.kind == WindowKind.MEASURE for window in facts.windows)
    if cut := measured - len(facts.measured):
        yield f"{cut} measure window(s) cut short and left out"


def warnings_of_steps(run: Finished) -> Iterator[str]:
    row, steady, held = run.row, run.rates.steadiness, run.rates.steps_in_table
    if held not in (None, row["n_steps"]):
        yield f"step table holds {held} of {row['n_steps']} steps"
    if steady is not None and steady.verdict == "no":
        yield steady.explanation
    if row["stalls"]:
        cost = "{stalls} step(s) stalled for {stall_s:.1f} s, {stall_pct:.1f} % of the measure window; without them "
        rates = "{images_per_s_steady:.4g} images/s in place of {images_per_s:.4g}"
        yield (cost + rates).format(**row)
    if run.facts.is_command and not run.facts.uniform_steps and row["images"]:
        yield "the images are those of --images, over the whole command, its start included"


def warnings_of_telemetry(run: Finished) -> Iterator[str]:
    facts, telemetry, energy = run.facts, run.telemetry, run.telemetry.energy
    if not telemetry.requested:
        yield "no telemetry was requested: throughput only"
        return
    yield from filter(None, [energy.problem])
    if not any(contradiction(facts, telemetry)):
        far = [each.text for each in energy.deviations if abs(each.pct) > 100 * MAX_COUNTER_DEVIATION]
        yield from far[:1]
    if (pct := run.row["throttle_thermal_pct"] or 0) > THERMAL_PCT:
        yield f"thermally throttled for {pct:.1f} % of the measure window"
    if (pct := run.row["energy_error_pct"] or 0) > ENERGY_ERROR_PCT:
        yield f"the energy may be wrong by up to {pct:.1f} %: its counter stood still, or the window is short"
    # The bits of throttle_reasons count if no counter says how long it was throttled.
    rows = facts.measured_samples["samples_slow"].filter(pl.col("throttle_reasons").is_not_null())
    unknown = pl.all_horizontal(pl.col(name).is_null() for name in THERMAL_COUNTERS)
    hot = rows.filter(unknown, (pl.col("throttle_reasons").cast(pl.Int64) & THERMAL_BITS) != 0).height
    if 100 * hot > THERMAL_PCT * rows.height:
        samples = f"{hot} of {rows.height} samples"
        yield f"thermal throttling in {samples}, by throttle_reasons; no counter says for how long"
    yield from (f"left out: {gap}" for gap in telemetry.left_out)
