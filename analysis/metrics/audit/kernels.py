"""Checks of the tables of a profile: the times of kernels, and what Nsight Compute counted."""

import math
import re
from collections.abc import Iterator
from statistics import median

import msgspec
import polars as pl

from analysis.metrics.facts import Facts
from analysis.units import number
from inpaint_bench.core.config.levers import profiled_kernels
from inpaint_bench.core.console import list_some, pluralize
from inpaint_bench.core.kernels import IDLE, METRICS, TOTALS
from inpaint_bench.core.schema import KERNEL_COUNTERS, KERNEL_TIMES

from .bounds import MAX_PCIE_MIB_S

# Time of a profiled call over that of a measured step. The profiler slows a call down, and kernels of several streams
# overlap.
CALL_OVER_STEP = 0.3, 3.0
TOLERANCE = 1.01
# Instructions of these pipes are parts of all instructions. On Hopper a WGMMA counts as both of the tensor cores.
PIPES = [name for name in TOTALS if name.startswith("inst_")]
SHARES = [name for name in METRICS if name.endswith("_pct")]
HITS_MOST_PCT = 110.0  # ncu counts hits and accesses in different passes
MAX_DRAM_MIB_S = 10_000_000  # HBM3e: 8 TB/s
LEAST_STEP_MS = 1.0  # gaps between launches take most of a shorter step


def check_times(facts: Facts) -> Iterator[str]:
    rows, profile = facts.tables[KERNEL_TIMES], facts.manifest.profile
    if profile is None or KERNEL_TIMES in facts.files.incomplete:
        return
    calls = rows["call"].unique(maintain_order=True).to_list()
    if missing := [call for call in profile.calls if call not in calls]:
        yield f"{KERNEL_TIMES} has no kernel of {', '.join(missing)}, which was profiled"
    if foreign := [call for call in calls if call not in profile.calls]:
        yield f"{KERNEL_TIMES} has kernels of {', '.join(foreign)}, which was not profiled"
    impossible = ~pl.col("ms").is_finite() | (pl.col("ms") < 0) | (pl.col("launches") < (pl.col("kind") != IDLE))
    if (wrong := rows.filter(impossible)).height:
        first = wrong.row(0, named=True)
        text = f"{pluralize(first['launches'], 'launch')} of {first['kind']} in {first['ms']} ms"
        name = first["kernel"] or first["kind"]
        yield f"{KERNEL_TIMES} has {pluralize(wrong.height, 'row')} that no profile gives, e.g. {name}: {text}"
    if repeated := rows.height - rows.select("call", "kind", "kernel", "launches", "ms").n_unique():
        yield f"{KERNEL_TIMES} repeats {pluralize(repeated, 'row')}"
    # On a CPU operators contain others.
    for (call,), of_call in rows.filter("measured").group_by("call", maintain_order=True):
        if IDLE in of_call["kind"]:
            what = f"{KERNEL_TIMES}: kernels and gaps of {call} take"
            yield from _beside_a_step(facts, float(of_call["ms"].sum()), what)
    for call, exchanged in profile.communication.items():
        if not (exchanged.exposed_ms or 0) <= exchanged.ms * TOLERANCE <= exchanged.call_ms * TOLERANCE**2:
            parts = f"{number(exchanged.exposed_ms)} of {number(exchanged.ms)} ms in {number(exchanged.call_ms)} ms"
            yield f"communication of {call}: exposed, total and length of the call do not ascend: {parts}"


def _beside_a_step(facts: Facts, profiled_ms: float, what: str) -> Iterator[str]:
    steps = [facts.steps_of(window)["device_ms"].drop_nulls().to_list() for window, _ in facts.measured]
    known = [ms for each in steps for ms in each if math.isfinite(ms)]
    if not known or not facts.uniform_steps or (step_ms := median(known)) < LEAST_STEP_MS:
        return
    if not CALL_OVER_STEP[0] <= profiled_ms / step_ms <= CALL_OVER_STEP[1]:
        yield f"{what} {profiled_ms:.1f} ms, a step {step_ms:.1f} ms"


def check_timeline(facts: Facts) -> Iterator[str]:
    timeline = facts.manifest.profile and facts.manifest.profile.timeline
    if not timeline:
        return
    sizes, steps = msgspec.structs.asdict(timeline), max(1, timeline.steps)
    limits = [
        *((f"{part} beside {whole}", sizes[part] or 0, sizes[whole] or 0) for part, whole in timeline.parts),
        ("idle_in_waits_ms beside wait_ms", timeline.idle_in_waits_ms or 0, timeline.wait_ms or 0),
        ("one beside steps and kernels", 1, min(timeline.steps, timeline.kernels)),
        ("idle_ms beside its gaps", timeline.idle_ms, timeline.gaps * timeline.longest_gap_ms),
        # The first wait may be before the first kernel.
        ("wait_ms beside length_ms", (timeline.wait_ms or 0) * (1 - 1 / steps), timeline.length_ms),
    ]
    for direction, mib in timeline.copied_mib.items():
        ms, mib_s = timeline.copied_ms.get(direction, 0.0), MAX_PCIE_MIB_S if "host" in direction else MAX_DRAM_MIB_S
        limits += [(f"copied_ms {direction} beside length_ms", ms, timeline.length_ms)]
        limits += [(f"copied_mib {direction} beside copied_ms and the bus", mib, mib_s * ms / 1000)]
    for names, size, most in limits:
        if not 0 <= size <= TOLERANCE * most:
            yield f"the timeline has {names}: {number(size)}, and at most {number(most)} is possible"
    busy_ms = (timeline.length_ms - (timeline.idle_in_waits_ms or 0)) / steps
    yield from _beside_a_step(facts, busy_ms, "a step of the timeline takes")


def check_levers(facts: Facts) -> Iterator[str]:
    """Compare the kernels of the measured calls, on a GPU, with the levers that are called active."""
    rows, profile = facts.tables[KERNEL_TIMES].filter("measured"), facts.manifest.profile
    if profile is None or profile.problems or IDLE not in rows["kind"] or KERNEL_TIMES in facts.files.incomplete:
        return
    names = [" ".join(map(str, row)) for row in rows.select("kind", "detail", "kernel").unique().iter_rows()]
    for lever in facts.manifest.levers or []:
        pattern = re.compile(profiled_kernels(lever.field, lever.requested), re.IGNORECASE)
        if lever.active and not any(map(pattern.search, names)):
            similar = list_some(sorted(name for name in names if name.startswith(lever.field)), most=2)
            yield f"lever {lever.name} is called active, and the profile has no kernel of it, but {similar or 'others'}"


def check_counters(facts: Facts) -> Iterator[str]:
    rows = facts.tables[KERNEL_COUNTERS]
    if repeated := rows.height - rows.select("call", "launch").n_unique():
        yield f"{KERNEL_COUNTERS} repeats {pluralize(repeated, 'launch')}"
    if foreign := sorted(set(rows["kernel"].unique()) - set(facts.tables[KERNEL_TIMES]["kernel"].unique())):
        yield f"{KERNEL_COUNTERS} has kernels that {KERNEL_TIMES} does not have, e.g. {foreign[0]}"
    limits = {name: HITS_MOST_PCT if name.endswith("_hit_pct") else 100 * TOLERANCE for name in SHARES}
    outside = [name for name in SHARES if _any(rows, ~pl.col(name).is_between(0, limits[name]))]
    outside += [name for name in METRICS if name not in SHARES and _any(rows, pl.col(name) < 0)]
    outside += [name for name in METRICS if _any(rows, ~pl.col(name).is_finite())]
    outside += ["warps_issued"] if _any(rows, pl.col("warps_issued") > TOLERANCE) else []
    if outside:
        yield f"{KERNEL_COUNTERS}: no GPU counts such values of {list_some(sorted(set(outside)))}"
    parts = [name for name in PIPES if _any(rows, pl.col(name) > TOLERANCE * pl.col("instructions"))]
    if parts:
        yield f"{KERNEL_COUNTERS}: {list_some(parts)} counts more instructions than there are"
    if _any(rows, pl.col("warps_issued") > TOLERANCE * pl.col("warps_eligible")):
        yield f"{KERNEL_COUNTERS}: more warps were issued than were eligible"
    # A scheduler issues one instruction per cycle at most. `warps_issued` is a mean of those of an SM's four that have
    # a warp (two, if blocks have 64 threads), and replays of a short kernel differ by up to a quarter.
    least, most = 0.75 * pl.col("warps_issued") - 0.05, 1.25 * 4 * pl.col("warps_issued") + 0.05
    if _any(rows, ~pl.col("ipc").is_between(least, most)):
        yield f"{KERNEL_COUNTERS}: ipc is not that of one to four schedulers with warps_issued"


def _any(rows: pl.DataFrame, condition: pl.Expr) -> bool:
    return bool(rows.select(condition.fill_null(False).any()).item())
