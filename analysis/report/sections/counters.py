"""Hardware counters of the heaviest kernels, by Nsight Compute, and what another recipe changes in them.

A run with counters has no cell. Its profile by torch.profiler tells the share of a kernel in the time of all kernels,
and how often the call launches it.
"""

import json
from dataclasses import dataclass
from typing import Any, NamedTuple

import polars as pl

from analysis import recipe_labels
from analysis.dataset import Dataset
from analysis.report.figures import base
from analysis.report.tables import DASH, Section, Table, TableBuilder
from analysis.units import number
from inpaint_bench.core.kernels import IDLE, RATES, STALLS, TOTALS
from inpaint_bench.core.schema import KERNEL_COUNTERS, KERNEL_RULES, KERNEL_TIMES, Status

from .profiles import describe_work, same_calls

MAX_RUNS, MAX_CHANGES = 6, 8
MOST_KERNELS = 16
UNUSED_PCT = 2  # percent of the peak of the tensor cores; below it a class of kernels does not work on them
MOST_RULES = 20
MAX_NAME, MAX_TEXT = 80, 240  # characters of a kernel's name, and of what a rule says
_PIPES = {"inst_fma": "FMA", "inst_alu": "ALU", "inst_tensor": "Tensor", "inst_lsu": "Load, store", "inst_xu": "XU"}
_PIPES |= {"inst_uniform": "Uniform", "inst_cbu": "Branch", "inst_adu": "ADU"}
_SAME_AS_TENSOR = "inst_wgmma"  # counts in inst_tensor too
_COMPARED = {"sm_cycles": ("Mcycles", 1e6), "instructions": ("Minstr.", 1e6)}  # by class: heading and unit
_COMPARED |= {"ipc": ("IPC", 1), "tensor_pct": ("Tensor [%]", 1)}
_METHOD = (
    "Counted by Nsight Compute, in processes that measure nothing else: it runs every kernel several times with empty "
    "caches, at the clocks that the card happens to have. So no time of such a run is shown, and hit rates are of a "
    "cold cache. The kernels are those that take longest in a profile of the same call, which gives their share of "
    "the time. All launches of one call are counted, unless the time limit ended that: then the last ones are missing."
)


class Coverage(NamedTuple):
    """The share [%] of the counted kernels in a time. The time of missing launches is not known: it is in the share."""

    pct: float
    missing: bool  # launches of these kernels

    def __str__(self) -> str:
        return f"{'at most ' if self.missing else ''}{self.pct:.0f} %"


@dataclass(frozen=True, kw_only=True)
class Counted:
    """The counters of one call of a run: a row per kernel, that with the largest share first."""

    run: dict[str, Any]
    call: str
    kernels: pl.DataFrame  # kind, detail, kernel, counted, launches, share and the columns of core/kernels.py
    class_shares: dict[str, float]  # shares of the time of the call, counted or not
    rules: pl.DataFrame  # see `_ranked`

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
    """Return the section of the counters; empty if no run was to have any."""
    counted = counted_runs(dataset, build)
    tables = [_change(build, index, *pair) for index, pair in enumerate(_pairs(counted)[:MAX_CHANGES])]
    tables += [table for index, counts in enumerate(counted[:MAX_RUNS]) for table in _tables(build, index, counts)]
    run_ids = {counts.run["run_id"] for counts in counted}
    problems = [sentence for run in _wanted(build) for sentence in _problems(run, run_ids)]
    if len(counted) > MAX_RUNS:
        problems.append(f"Tables of counters: of the first {MAX_RUNS} of {len(counted)} calls.")
    title = "Counters of the heaviest kernels"
    return [Section(title=title, paragraphs=[_METHOD, *problems], tables=tables)] if tables or problems else []


def counted_runs(dataset: Dataset, build: TableBuilder) -> list[Counted]:
    """Return the counters of every call that was to have any and has them."""
    tables = [dataset.rows(name) for name in (KERNEL_COUNTERS, KERNEL_TIMES, KERNEL_RULES)]
    return [counts for run in _wanted(build) for counts in _counted(run, *tables)]


def _wanted(build: TableBuilder) -> list[dict[str, Any]]:
    return [run for run in build.runs.to_dicts() if json.loads(run["profile"] or "{}").get("profiler") == "ncu"]


def _problems(run: dict[str, Any], counted: set[str]) -> list[str]:
    problems, name = json.loads(run["profile"]).get("problems"), f"Run {run['run_id']}"
    texts = [f"{name}: {'; '.join(problems)}."] if problems else []
    if run["run_id"] not in counted:
        contradictions = (run["invalid_reason"] or "").partition("; ")[2] if run["status"] == Status.COMPLETED else ""
        reason = run["message"] or "its table of counters is missing or damaged, see skipped files"
        texts.append(f"{name} has no counters: {contradictions or reason}.")
    return texts


def _counted(run: dict[str, Any], rows: pl.DataFrame, times: pl.DataFrame, rules: pl.DataFrame) -> list[Counted]:
    """Return the counters of each call of a run by kernel: totals added up, everything else as weighted means."""
    rows = rows.filter(pl.col("run_id") == run["run_id"])
    # Behind the reason that nothing was timed come contradictions of the counters.
    if rows.is_empty() or run["status"] != Status.COMPLETED or "; " in (run["invalid_reason"] or ""):
        return []
    times = times.filter(pl.col("run_id") == run["run_id"], pl.col("kind") != IDLE)
    rules = rules.filter(pl.col("run_id") == run["run_id"])
    return [_of_call(run, own, times, rules) for own in rows.partition_by("call", maintain_order=True)]


def _of_call(run: dict[str, Any], rows: pl.DataFrame, times: pl.DataFrame, rules: pl.DataFrame) -> Counted:
    of_call, rules = (table.filter(pl.col("call") == rows["call"][0]) for table in (times, rules))
    kernels = rows.group_by("kind", "detail", "kernel").agg(
        pl.len().alias("counted"),
        *(total(name) for name in TOTALS),
        *(weighted_mean(name, "sm_cycles") for name in RATES),
        *(weighted_mean(name, "instructions") for name in STALLS),
    )
    shares = of_call.group_by("kernel").agg(
        pl.col("launches").sum(), (100 * pl.col("ms").sum() / of_call["ms"].sum()).alias("share")
    )
    kernels = kernels.join(shares, on="kernel", how="left").sort(-pl.col("share").fill_null(0), "kernel")
    class_shares = of_call.group_by("kind").agg(100 * pl.col("ms").sum() / of_call["ms"].sum())
    return Counted(
        run=run,
        call=str(rows["call"][0]),
        kernels=kernels,
        class_shares=dict(class_shares.iter_rows()),
        rules=_ranked(rules, rows, kernels),
    )


def _ranked(rules: pl.DataFrame, rows: pl.DataFrame, kernels: pl.DataFrame) -> pl.DataFrame:
    """Return what rules estimate of each kernel, that of most kernel time first, then what is no estimate of time.

    Over the launches of a kernel a mean weighted by cycles, in which a launch that the rule says nothing of counts as
    zero. What a rule says twice of a launch is not added: its largest estimate counts.
    """
    weight = pl.when(pl.col("sm_cycles").null_count() == 0).then(pl.col("sm_cycles")).otherwise(1.0)
    launches = rows.select("launch", "kernel", weight.over("kernel").alias("weight"))
    launches = launches.with_columns(pl.col("weight").sum().over("kernel").alias("whole"))
    estimates = rules.filter(pl.col("speedup_pct") > 0).join(launches, on="launch")
    estimates = estimates.sort("speedup_pct", descending=True)
    estimates = estimates.unique(["launch", "rule", "scope"], keep="first", maintain_order=True)
    estimates = estimates.group_by("kernel", "rule", "scope", maintain_order=True).agg(
        pl.len().alias("estimated"),
        ((pl.col("speedup_pct") * pl.col("weight")).sum() / pl.col("whole").first()).alias("estimate"),
        pl.col("text").first(),
    )
    estimates = estimates.join(kernels.select("kernel", "kind", "detail", "counted", "share"), on="kernel")
    saved = pl.col("share") * pl.col("estimate") / 100
    estimates = estimates.with_columns(pl.when(pl.col("scope") == "global").then(saved).alias("priority"))
    return estimates.sort(-pl.col("priority").fill_null(-1), -saved.fill_null(0), "kernel", "rule")


def total(name: str) -> pl.Expr:
    """Return the sum, null if any launch has none."""
    return pl.when(pl.col(name).null_count() == 0).then(pl.col(name).sum()).alias(name)


def weighted_mean(name: str, weight: str) -> pl.Expr:
    """Return the mean of one column by the weights in another, over the rows that have it; null without any."""
    weights = pl.when(pl.col(name).is_not_null()).then(pl.col(weight))
    return pl.when(weights.sum() > 0).then((pl.col(name) * weights).sum() / weights.sum()).alias(name)


def _pairs(counted: list[Counted]) -> list[tuple[Counted, Counted]]:
    """Return which runs to compare: of the same work that of the plainest recipe with each of another recipe."""
    pairs = []
    for group in same_calls(counted, lambda counts: counts.run, lambda counts: counts.call):
        group.sort(key=lambda counts: -(counts.kernels["sm_cycles"].sum() or 0))
        plainest = min(group, key=lambda counts: recipe_labels.count_parts(counts.run["recipe"]))
        pairs += [(plainest, other) for other in group if other.recipe != plainest.recipe]
    return pairs


def _change(build: TableBuilder, index: int, before: Counted, after: Counted) -> Table:
    old, new = by_class(before), by_class(after)
    cycles = {kind: max(side.get(kind, {}).get("sm_cycles") or 0 for side in (old, new)) for kind in {*old, *new}}
    rows = []
    for kind in sorted(cycles, key=lambda kind: -cycles[kind]):
        cells = [kind, str(before.coverage(kind)), str(after.coverage(kind))]
        for name, (_, scale) in _COMPARED.items():
            first, second = (classes.get(kind, {}).get(name) for classes in (old, new))
            # A ratio to stray instructions of tensor cores that are not used says nothing.
            unused = name == "tensor_pct" and (first or 0) < UNUSED_PCT
            ratio = None if unused or not first or second is None else second / first
            cells += [_text(first, scale), _text(second, scale), _text(ratio)]
        rows.append(cells)
    columns = ["Class", "Counted before", "Counted after"]
    columns += [text for name, _ in _COMPARED.values() for text in (f"{name} before", f"{name} after", "Ratio")]
    title = f"From {before.recipe} to {after.recipe}, {describe_work(before.run)}: counters by class of kernels"
    note = (
        f"Before: run {before.run['run_id']} ({before.call}); after: run {after.run['run_id']} ({after.call}). Of the "
        f"counted kernels only, {before.coverage()} and {after.coverage()} of the kernel time of the call. SM cycles "
        "(of the SM that takes longest) and instructions of warps are sums over the launches of a call; IPC and use of "
        "the tensor cores are means weighted by cycles. Counted: as a share of the time of their class; at most, where "
        "launches are missing, and sums are too small."
    )
    return build.table(f"counter-changes-{index}", title, columns, rows, note=note)


def by_class(counted: Counted) -> dict[str, dict[str, float | None]]:
    """Return cycles, instructions, IPC and use of the tensor cores of each class of kernels."""
    means = (weighted_mean(name, "sm_cycles") for name in ("ipc", "tensor_pct"))
    rows = counted.kernels.group_by("kind").agg(total("sm_cycles"), total("instructions"), *means)
    return {row.pop("kind"): row for row in rows.to_dicts()}


def _tables(build: TableBuilder, index: int, counted: Counted) -> list[Table]:
    """Return four tables of the heaviest kernels of one run, and what rules say of them."""
    kernels = counted.kernels.head(MOST_KERNELS)
    heads = list(map(_names, kernels.to_dicts()))
    return [
        build.table(
            f"{id}-{index}",
            f"{title}: {counted.label}",
            ["Kernel", "Class", *columns],
            [[*head, *map(_text, row)] for head, row in zip(heads, kernels.select(**columns).rows(), strict=True)],
            note=f"{counted.note} {note}",
        )
        for id, title, columns, note in _TABLES
    ] + ([_rules(build, index, counted)] if counted.rules.height else [])


def _rules(build: TableBuilder, index: int, counted: Counted) -> Table:
    columns = ["Kernel", "Class", "Rule", "Launches", "Time share [%]", "Estimate [%]", "Scope", "Priority [%]", "Text"]
    rows = [
        [
            *_names(row), row["rule"], f"{row['estimated']:,} of {row['counted']:,}", _text(row["share"]),
            _text(row["estimate"]), row["scope"], _text(row["priority"]), base.shorten(row["text"], MAX_TEXT),
        ]
        for row in counted.rules.head(MOST_RULES).to_dicts()
    ]  # fmt: skip
    note = (
        f"{counted.note} Estimates of Nsight Compute's rules, as means over all counted launches of a kernel. Global: "
        "the share of the kernel's time that would go; times the kernel's share this is the priority, a share of the "
        "kernel time of the call. Local: how much better the hardware that the rule looks at would be used, which says "
        "nothing of time. Estimates of one kernel overlap and do not add up."
    )
    title = f"Rules by priority: {counted.label}"
    return build.table(f"rules-{index}", title, columns, rows, note=note)


def _stalls(states: dict[str, float | None]) -> str:
    known = {name.removeprefix("stall_").replace("_", " "): value for name, value in states.items() if value}
    waiting = sorted((name for name in known if name != "selected"), key=lambda name: -known[name])[:3]
    return ", ".join(f"{name} {100 * known[name] / sum(known.values()):.0f} %" for name in waiting) or DASH


def _share(part: pl.Expr) -> pl.Expr:
    return pl.when(pl.col("instructions") > 0).then(100 * part / pl.col("instructions"))


_COMPLETE = pl.col("launches").is_null() | (pl.col("launches") == pl.col("counted"))
_COUNTED = pl.col("counted").map_elements("{:,}".format, pl.String)
_LAUNCHED = pl.format("{} of {}", _COUNTED, pl.col("launches").map_elements("{:,}".format, pl.String))
_BUSIEST = pl.max_horizontal("sm_pct", "memory_pct")
_KNOWN_PIPES = [name for name in TOTALS if name.startswith("inst_") and name != _SAME_AS_TENSOR]
_IN_STATES = pl.sum_horizontal(*STALLS)
_TABLES: list[tuple[str, str, dict[str, pl.Expr], str]] = [  # id, title, columns, note
    (
        "counters",
        "Counters",
        {
            "Launches": pl.when(_COMPLETE).then(_COUNTED).otherwise(_LAUNCHED),
            "Time share [%]": pl.col("share"),
            "Mcycles": pl.col("sm_cycles") / 1e6,
            "Minstr.": pl.col("instructions") / 1e6,
            "IPC": pl.col("ipc"),
            "Tensor [%]": pl.col("tensor_pct"),
            "SM [%]": pl.col("sm_pct"),
            "Memory [%]": pl.col("memory_pct"),
            "Headroom [%]": pl.when(_COMPLETE).then(pl.col("share") * (1 - _BUSIEST / 100)),
        },
        "Tensor, SM, Memory: share of the peak of the tensor cores, of the busiest unit of the SMs and of the busiest "
        "part of the memory system. Headroom: an upper bound for the kernel time that would go if the busiest of both "
        "were at its peak; not known where launches are missing.",
    ),
    (
        "instruction-mix",
        "Instruction mix",
        {heading: _share(pl.col(name)) for name, heading in _PIPES.items()}
        | {"WGMMA": _share(pl.col(_SAME_AS_TENSOR))}
        | {"Rest": _share(pl.col("instructions") - pl.sum_horizontal(_KNOWN_PIPES))},
        "Per cent of the instructions of warps, by the pipe that executes them. FMA: FP32 arithmetic and integer "
        "multiplication; ALU: integers and logic; XU: exp, conversions. WGMMA is part of Tensor.",
    ),
    (
        "memory-system",
        "Memory system",
        {"DRAM [%]": pl.col("dram_pct"), "L2 [%]": pl.col("l2_pct"), "L1 [%]": pl.col("l1_pct")}
        | {"L2 hits [%]": pl.col("l2_hit_pct"), "L1 hits [%]": pl.col("l1_hit_pct")}
        | {"Read [MiB]": pl.col("dram_read_bytes") / 2**20, "Written [MiB]": pl.col("dram_write_bytes") / 2**20}
        | {"Sectors per load": pl.col("sectors_per_load"), "Sectors per store": pl.col("sectors_per_store")}
        | {"M conflicts, load": pl.col("load_conflicts") / 1e6, "M conflicts, store": pl.col("store_conflicts") / 1e6},
        "Throughput as a share of its peak; bytes between DRAM and L2 of all launches of a call. Caches are empty when "
        "a launch begins. Sectors: of 32 bytes, per request of a warp to global memory by the load-store unit. "
        "Conflicts: of banks of shared memory, of all launches.",
    ),
    (
        "warp-states",
        "Warp states",
        {"Occupancy [%]": pl.col("occupancy_pct"), "Eligible warps": pl.col("warps_eligible")}
        | {"Issued": pl.col("warps_issued"), "Warps per issue": pl.when(_IN_STATES > 0).then(_IN_STATES)}
        | {"Stalls": pl.struct(*STALLS).map_elements(_stalls, pl.String)},
        "Occupancy: active warps of those that fit. Eligible, issued: warps per cycle and scheduler. Warps per issue: "
        "in any state when an instruction is issued; the three most frequent stalls as per cent of these.",
    ),
]


def _names(row: dict[str, Any]) -> list[str]:
    detail = f", {row['detail']}" if row["detail"] else ""
    return [base.shorten(row["kernel"], MAX_NAME), f"{row['kind']}{detail}"]


def _text(value: float | str | None, scale: float = 1) -> str:
    return value if isinstance(value, str) else DASH if value is None else number(value / scale)
