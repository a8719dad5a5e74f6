"""Hardware counters of the heaviest kernels, by Nsight Compute, and what another recipe changes in them.

A run with counters is timed by nobody (metrics/run_row.py): it has no cell, and no time of it is shown. Its profile by
torch.profiler tells the share of a kernel in the time of all kernels, and how often the call launches it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import polars as pl

from analysis import recipe_labels
from analysis.dataset import Dataset
from analysis.report.figures import base
from analysis.report.section import Section
from analysis.report.tables import DASH, Table, TableBuilder
from analysis.units import number
from inpaint_bench.core.kernels import IDLE, RATES, STALLS, TOTALS
from inpaint_bench.core.schema import KERNEL_COUNTERS, KERNEL_TIMES, Status

from .profiles import COMPARED_WORK, describe_work

MAX_RUNS, MAX_CHANGES = 6, 8
MOST_KERNELS = 16
MAX_NAME = 80  # characters of a kernel's name
_PIPES = {
    "inst_fma": "FMA",
    "inst_alu": "ALU",
    "inst_tensor": "Tensor",
    "inst_lsu": "Load, store",
    "inst_xu": "XU",
    "inst_uniform": "Uniform",
    "inst_cbu": "Branch",
    "inst_adu": "ADU",
}
_SAME_AS_TENSOR = "inst_wgmma"  # counts in inst_tensor too
_COMPARED = (("sm_cycles", 1e6), ("instructions", 1e6), ("ipc", 1), ("tensor_pct", 1))  # by class, and their unit
_METHOD = (
    "Counted by Nsight Compute, in processes that measure nothing else: it runs every kernel several times, one after "
    "the other, each time with empty caches and at the clocks that the card happens to have. So no time of such a run "
    "appears in any table or figure, and hit rates are those of a cold cache. The kernels are those that take longest "
    "in a profile of the same call, which gives their share of the time of all kernels; all launches of one call are "
    "counted, unless the time limit ended that: then the last ones are missing, and sums are too small. What Nsight "
    "Compute printed lies in the run directories (ncu.csv)."
)


class Coverage(NamedTuple):
    """The share [%] of the counted kernels in a time. The time of missing launches is not known: it is in the share."""

    pct: float
    missing: bool  # launches of these kernels

    def __str__(self) -> str:
        return f"{'at most ' if self.missing else ''}{self.pct:.0f} %"


@dataclass(frozen=True, kw_only=True)
class Counted:
    """The counters of one run: a row per kernel, that with the largest share first."""

    run: dict[str, Any]
    call: str
    kernels: pl.DataFrame  # kind, detail, kernel, counted, launches, share and the columns of core/kernels.py
    class_shares: dict[str, float]  # of the time of the call, counted or not

    @property
    def recipe(self) -> str:
        return str(self.run[recipe_labels.COLUMN] or DASH)

    @property
    def label(self) -> str:
        return f"{self.recipe}, {describe_work(self.run)}, {self.call}"

    @property
    def note(self) -> str:
        return f"Run {self.run['run_id']}: {self.coverage()} of the kernel time of the call."

    def coverage(self, kind: str | None = None) -> Coverage:
        """Return how much of the time of a class, or else of the call, was counted."""
        kernels = self.kernels.filter(pl.col("kind") == kind) if kind else self.kernels
        whole = self.class_shares.get(kind, 0.0) if kind else 100.0
        missing = bool((kernels["counted"] < kernels["launches"]).any())
        return Coverage(100 * float(kernels["share"].sum()) / whole if whole else 0.0, missing)


def sections(dataset: Dataset, build: TableBuilder) -> list[Section]:
    """Return the section of the counters; empty where no run was to have any."""
    runs = _wanted(build)
    if not runs:
        return []
    counted = counted_runs(dataset, build)
    tables = [_change(build, index, *pair) for index, pair in enumerate(list(_pairs(counted))[:MAX_CHANGES])]
    for index, counts in enumerate(counted[:MAX_RUNS]):
        tables += [table(build, index, counts) for table in (_overview, _mix, _memory, _warps)]
    run_ids = {counts.run["run_id"] for counts in counted}
    problems = [sentence for run in runs for sentence in _problems(run, run_ids)]
    return [
        Section(
            title="Counters of the heaviest kernels",
            workload="counters",
            paragraphs=[_METHOD, *problems],
            tables=tables,
        )
    ]


def counted_runs(dataset: Dataset, build: TableBuilder) -> list[Counted]:
    """Return the counters of every run that was to have any and has them."""
    rows, times = dataset.rows(KERNEL_COUNTERS), dataset.rows(KERNEL_TIMES)
    return [counts for run in _wanted(build) if (counts := _counted(run, rows, times))]


def _wanted(build: TableBuilder) -> list[dict[str, Any]]:
    return [run for run in build.runs.to_dicts() if (_profile(run) or {}).get("profiler") == "ncu"]


def _profile(run: dict[str, Any]) -> dict[str, Any] | None:
    profile = json.loads(run["profile"]) if run["profile"] else None
    return profile if isinstance(profile, dict) else None


def _problems(run: dict[str, Any], counted: set[str]) -> list[str]:
    problems = (_profile(run) or {}).get("problems") or []
    texts = [f"Run {run['run_id']}: {'; '.join(problems)}."] if problems else []
    if run["run_id"] not in counted:
        if (contradictions := (run["invalid_reason"] or "").partition("; ")[2]) and run["status"] == Status.COMPLETED:
            return [*texts, f"Counters of run {run['run_id']} are not shown: {contradictions}."]
        reason = run["message"] or "its table of counters is missing or damaged, see skipped files"
        texts.append(f"Run {run['run_id']} has no counters: {reason}.")
    return texts


def _counted(run: dict[str, Any], rows: pl.DataFrame, times: pl.DataFrame) -> Counted | None:
    """Return the counters of a run by kernel: totals added up, everything else as weighted means."""
    rows = rows.filter(pl.col("run_id") == run["run_id"])
    # Behind the reason that nothing was timed come contradictions of the counters.
    if rows.is_empty() or run["status"] != Status.COMPLETED or "; " in (run["invalid_reason"] or ""):
        return None
    call = str(rows["call"][0])
    kernels = rows.group_by("kind", "detail", "kernel").agg(
        pl.len().alias("counted"),
        *(_total(name) for name in TOTALS),
        *(weighted_mean(name, "sm_cycles") for name in RATES),
        *(weighted_mean(name, "instructions") for name in STALLS),
    )
    of_call = times.filter(pl.col("run_id") == run["run_id"], pl.col("call") == call, pl.col("kind") != IDLE)
    shares = of_call.group_by("kernel").agg(
        pl.col("launches").sum(), (100 * pl.col("ms").sum() / of_call["ms"].sum()).alias("share")
    )
    kernels = kernels.join(shares, on="kernel", how="left").sort(-pl.col("share").fill_null(0), "kernel")
    class_shares = of_call.group_by("kind").agg(100 * pl.col("ms").sum() / of_call["ms"].sum())
    return Counted(run=run, call=call, kernels=kernels, class_shares=dict(class_shares.iter_rows()))


def _total(name: str) -> pl.Expr:
    """Return the sum, null where any launch has none."""
    return pl.when(pl.col(name).null_count() == 0).then(pl.col(name).sum()).alias(name)


def weighted_mean(name: str, weight: str) -> pl.Expr:
    """Return the mean of one column by the weights in another, over the rows that have it; null without any."""
    weights = pl.when(pl.col(name).is_not_null()).then(pl.col(weight))
    return pl.when(weights.sum() > 0).then((pl.col(name) * weights).sum() / weights.sum()).alias(name)


def _pairs(counted: list[Counted]) -> Iterable[tuple[Counted, Counted]]:
    """Yield which runs to compare: of the same work that of the plainest recipe with each of another recipe."""

    def work(counts: Counted) -> str:
        return repr([counts.run[name] for name in COMPARED_WORK])

    for _, same_work in groupby(sorted(counted, key=work), key=work):
        group = sorted(same_work, key=lambda counts: -(counts.kernels["sm_cycles"].sum() or 0))
        plainest = min(group, key=lambda counts: recipe_labels.count_parts(counts.run["recipe"]))
        yield from ((plainest, other) for other in group if other.recipe != plainest.recipe)


def _change(build: TableBuilder, index: int, before: Counted, after: Counted) -> Table:
    old, new = by_class(before), by_class(after)
    kinds = sorted({*old, *new}, key=lambda kind: -max(_value(old, kind, "sm_cycles"), _value(new, kind, "sm_cycles")))
    rows = []
    for kind in kinds:
        cells = [kind, str(before.coverage(kind)), str(after.coverage(kind))]
        for name, scale in _COMPARED:
            first, second = (classes.get(kind, {}).get(name) for classes in (old, new))
            cells += [_text(first, scale), _text(second, scale), _ratio(first, second)]
        rows.append(cells)
    headings = ("Mcycles", "Minstr.", "IPC", "Tensor [%]")
    columns = ["Class", "Counted before", "Counted after"]
    columns += [text for name in headings for text in (f"{name} before", f"{name} after", "Ratio")]
    work = describe_work(before.run)
    title = f"From {before.recipe} to {after.recipe}, {work}: counters by class of kernels"
    note = (
        f"Before: run {before.run['run_id']} ({before.call}); after: run {after.run['run_id']} ({after.call}). Of the "
        f"counted kernels only, {before.coverage()} and {after.coverage()} of the kernel time of the call. SM cycles "
        "(of the SM that takes longest) and instructions of warps are sums over the launches of a call; IPC and use of "
        "the tensor cores are means weighted by cycles. Ratio: after over before. Counted: kernels with counters, "
        "as a share of the time of their class; at most, where launches of them are missing, and sums are too small."
    )
    return build.table(f"counter-changes-{index}", title, columns, rows, note=note)


def by_class(counted: Counted) -> dict[str, dict[str, float | None]]:
    """Return cycles, instructions, IPC and use of the tensor cores of each class of kernels."""
    rows = counted.kernels.group_by("kind").agg(
        _total("sm_cycles"),
        _total("instructions"),
        weighted_mean("ipc", "sm_cycles"),
        weighted_mean("tensor_pct", "sm_cycles"),
    )
    return {row.pop("kind"): row for row in rows.to_dicts()}


def _value(classes: dict[str, dict[str, float | None]], kind: str, name: str) -> float:
    return classes.get(kind, {}).get(name) or 0.0


def _overview(build: TableBuilder, index: int, counted: Counted) -> Table:
    rows = []
    for row in counted.kernels.head(MOST_KERNELS).to_dicts():
        busiest = max((row[name] for name in ("sm_pct", "memory_pct") if row[name] is not None), default=None)
        complete = row["launches"] in (None, row["counted"])
        lost = None if busiest is None or row["share"] is None else row["share"] * (1 - busiest / 100)
        launches = f"{row['counted']:,}" + ("" if complete else f" of {row['launches']:,}")
        rows.append(
            [
                *(*_names(row), launches, _text(row["share"])),
                *(_text(row[name], 1e6) for name in ("sm_cycles", "instructions")),
                *(_text(row[name]) for name in ("ipc", "tensor_pct", "sm_pct", "memory_pct")),
                _text(lost) if complete else DASH,
            ]
        )
    columns = ["Kernel", "Class", "Launches", "Time share [%]", "Mcycles", "Minstr.", "IPC", "Tensor [%]", "SM [%]"]
    columns += ["Memory [%]", "Headroom [%]"]
    note = (
        f"{counted.note} Tensor, SM, Memory: share of the peak of the tensor cores, of the busiest unit of the SMs and "
        "of the busiest part of the memory system. Headroom: share of the kernel time that would go if the busiest of "
        "both were at its peak; inferred, an upper bound, and the order in which to look at the kernels; not known "
        "where launches are missing."
    )
    return build.table(f"counters-{index}", f"Counters: {counted.label}", columns, rows, note=note)


def _mix(build: TableBuilder, index: int, counted: Counted) -> Table:
    rows = []
    for row in counted.kernels.head(MOST_KERNELS).to_dicts():
        shares = [_part(row[name], row["instructions"]) for name in _PIPES]
        known = [row[name] for name in TOTALS if name.startswith("inst_") and name != _SAME_AS_TENSOR]
        rest = None if row["instructions"] is None else row["instructions"] - sum(value or 0 for value in known)
        wgmma = _part(row[_SAME_AS_TENSOR], row["instructions"])
        rows.append([*_names(row), *map(_text, shares), _text(wgmma), _text(_part(rest, row["instructions"]))])
    columns = ["Kernel", "Class", *_PIPES.values(), "WGMMA", "Rest"]
    note = (
        f"{counted.note} Per cent of the instructions of warps, by the pipe that executes them. FMA: FP32 arithmetic "
        "and integer multiplication; ALU: integers and logic; XU: exp, conversions. WGMMA is part of Tensor. An "
        "instruction of the tensor cores does far more work than one FMA: see their use."
    )
    return build.table(f"instruction-mix-{index}", f"Instruction mix: {counted.label}", columns, rows, note=note)


def _memory(build: TableBuilder, index: int, counted: Counted) -> Table:
    rates = {
        "dram_pct": "DRAM [%]",
        "l2_pct": "L2 [%]",
        "l1_pct": "L1 [%]",
        "l2_hit_pct": "L2 hits [%]",
        "l1_hit_pct": "L1 hits [%]",
    }
    rows = [
        [*_names(row), *(_text(row[name]) for name in rates)]
        + [_text(row[name], 2**20) for name in ("dram_read_bytes", "dram_write_bytes")]
        for row in counted.kernels.head(MOST_KERNELS).to_dicts()
    ]
    columns = ["Kernel", "Class", *rates.values(), "Read [MiB]", "Written [MiB]"]
    note = (
        f"{counted.note} Throughput as a share of its peak; bytes between DRAM and L2 of all launches of a call. "
        "Caches are empty when a launch begins."
    )
    return build.table(f"memory-system-{index}", f"Memory system: {counted.label}", columns, rows, note=note)


def _warps(build: TableBuilder, index: int, counted: Counted) -> Table:
    rows = []
    for row in counted.kernels.head(MOST_KERNELS).to_dicts():
        states = {name.removeprefix("stall_").replace("_", " "): row[name] for name in STALLS if row[name]}
        total = sum(states.values())
        waiting = sorted((name for name in states if name != "selected"), key=lambda name: -states[name])[:3]
        stalls = [f"{name} {100 * states[name] / total:.0f} %" for name in waiting]
        rates = [_text(row[name]) for name in ("occupancy_pct", "warps_eligible", "warps_issued")]
        rows.append([*_names(row), *rates, _text(total or None), ", ".join(stalls) or DASH])
    columns = ["Kernel", "Class", "Occupancy [%]", "Eligible warps", "Issued", "Warps per issue", "Stalls"]
    note = (
        f"{counted.note} Occupancy: active warps of those that fit. Eligible and issued: warps per cycle and "
        "scheduler, which issues at most one. Warps per issue: in any state when an instruction is issued; the three "
        "most frequent stalls as per cent of these."
    )
    return build.table(f"warp-states-{index}", f"Warp states: {counted.label}", columns, rows, note=note)


def _names(row: dict[str, Any]) -> list[str]:
    detail = f", {row['detail']}" if row["detail"] else ""
    return [base.shorten(row["kernel"], MAX_NAME), f"{row['kind']}{detail}"]


def _part(value: float | None, total: float | None) -> float | None:
    return None if value is None or not total else 100 * value / total


def _text(value: float | None, scale: float = 1) -> str:
    return DASH if value is None else number(value / scale)


def _ratio(before: float | None, after: float | None) -> str:
    return DASH if not before or after is None else f"{after / before:.3g}"
