"""Profiles of single steps: where their time goes, by class of kernels, and what another recipe changes in it."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import polars as pl

from analysis import recipe_labels
from analysis.dataset import Dataset
from analysis.report.figures import base, svg
from analysis.report.tables import DASH, Section, Table, TableBuilder
from analysis.units import gpu_label, number
from inpaint_bench.core.console import pluralize
from inpaint_bench.core.kernels import CONVOLUTIONS, IDLE, KernelClass
from inpaint_bench.core.schema import KERNEL_TIMES

HEAVIEST = 10
MAX_TABLES = 8  # limit for tables of changes, of classes, and of heaviest kernels
MAX_NAME = 100  # characters of a kernel's name
MAX_BARS = 24
_C = KernelClass
# Classes of one family share a colour: their names in the legend, in the order of the stack.
_FAMILIES = (
    ("convolution", svg.SERIES[0], (_C.CONV_FORWARD, _C.CONV_DGRAD, _C.CONV_WGRAD, _C.CONVOLUTION)),
    ("GEMM", svg.SERIES[1], (_C.GEMM,)),
    ("attention", svg.SERIES[2], (_C.ATTENTION, _C.CROSS_ATTENTION)),
    ("norm", svg.SERIES[3], (_C.NORM,)),
    ("pointwise", svg.SERIES[4], (_C.POINTWISE,)),
    ("layout conversion, copy", svg.SERIES[7], (_C.LAYOUT, _C.COPY)),
    ("optimizer", svg.SERIES[5], (_C.OPTIMIZER,)),
    ("other, communication", svg.SERIES_GREY, (_C.OTHER, _C.COMMUNICATION)),
    (IDLE, svg.GRID, (IDLE,)),
)
CLASSES = {str(kind): family for family, _, kinds in _FAMILIES for kind in kinds}
ALL, BESIDE, TOGETHER = "all kernels", "communication beside other kernels", "together"
_COPIES = {"host to device": "To device", "device to host": "From device", "device to device": "On device"}
_SUMS = (ALL, IDLE, BESIDE, TOGETHER)  # the last lines of a table of changes
_T = TypeVar("_T")
# Profiles, and counters, are compared if all of these are equal.
COMPARED_WORK = (
    *("workload", "model", "variant", "site", "gpu", "gpus", "nodes", "batch"),
    *("resolution_px", "demonstration", "comparability_key"),
)


@dataclass(frozen=True, kw_only=True)
class Profile:
    """One call of a cell: means over its runs, the heaviest kernel first."""

    cell: dict[str, Any]
    call: str
    measured: bool
    run_ids: list[str]
    kernels: pl.DataFrame  # kind, detail, kernel, launches, ms
    overlap_ms: float  # communication beside other kernels, which counts in both

    @property
    def label(self) -> str:
        return f"{self.cell['series']}, batch {self.cell['batch']}, {self.call}"

    @property
    def name(self) -> str:
        return f"{self.cell[recipe_labels.COLUMN]} ({self.call})"

    @property
    def classes(self) -> dict[str, tuple[float, float]]:
        """Return milliseconds and launches by class, the heaviest first; idle time last."""
        return self._sums(pl.col("kind"))

    @property
    def algorithms(self) -> dict[str, tuple[float, float]]:
        """Return milliseconds and launches by class, of convolutions by algorithm too; idle time last."""
        algorithm = pl.col("kind").is_in(list(map(str, CONVOLUTIONS))) & (pl.col("detail") != "")
        name = pl.when(algorithm).then(pl.concat_str("kind", "detail", separator=", ")).otherwise("kind")
        return self._sums(name)

    def _sums(self, name: pl.Expr) -> dict[str, tuple[float, float]]:
        sums = self.kernels.group_by(name.alias("class")).agg(pl.col("ms", "launches").sum())
        rows = sums.sort(pl.col("class") == IDLE, -pl.col("ms"), "class").iter_rows(named=True)
        return {row["class"]: (row["ms"], row["launches"]) for row in rows}

    @property
    def ms(self) -> float:
        """Return the time of the call: of all kernels and the gaps between them, without what ran side by side."""
        return float(self.kernels["ms"].sum()) - self.overlap_ms


def sections(dataset: Dataset, build: TableBuilder) -> list[Section]:
    """Return the section of the profiles; empty if no valid run was to have one."""
    runs = dataset.runs.filter("valid")
    wanted = {row["run_id"]: json.loads(row["profile"]) for row in runs.drop_nulls("profile").iter_rows(named=True)}
    profiles = of_cells(dataset, build)
    known = {run_id for profile in profiles for run_id in profile.run_ids}
    problems = [
        f"Run {run_id}: {text}." for run_id in sorted(wanted) for text in _problems(wanted[run_id], run_id in known)
    ]
    timelines = _timelines(build, runs, wanted)
    if not profiles and not problems and not timelines:
        return []
    pairs = _pairs(profiles)
    compared = [profile for pair in pairs for profile in pair]
    alone = [profile for profile in profiles if not any(profile is other for other in compared)]
    measured = [profile for profile in profiles if profile.measured]
    tables = [_change(build, before, after) for before, after in pairs[:MAX_TABLES]]
    tables += [_by_class(build, index, profile) for index, profile in enumerate(alone[:MAX_TABLES])]
    tables += [_heaviest(build, index, profile) for index, profile in enumerate(measured[:MAX_TABLES])]
    for name, count in (("changes", len(pairs)), ("classes", len(alone)), ("heaviest kernels", len(measured))):
        if count > MAX_TABLES:
            problems.append(f"Tables of {name}: the first {MAX_TABLES} of {count}.")
    figures, title = [_figure(profiles)] if profiles else [], "Where a step's time goes"
    paragraphs = [_METHOD] if any(facts["profiler"] != "nsys" for facts in wanted.values()) else []
    paragraphs += [*([_TIMELINES] if timelines else []), *problems]
    return [Section(title=title, paragraphs=paragraphs, tables=timelines + tables, figures=figures)]


_METHOD = (
    "After the last measured window one step or call was profiled with torch.profiler. The profiler slows it down, and "
    "the clocks may differ: no time of a profiled step is counted in any other table or figure. Kernels are classified "
    "by their names; on a CPU, operators without the operators that they call. Traces for Perfetto lie in the run "
    "directories (traces/)."
)
_TIMELINES = (
    "Timelines are of Nsight Systems: after the measured windows, a process of its own ran the same steps under it, "
    "with the loader if there is one. It slows the steps down: none of these times is counted in any other table or "
    "figure. The files for its user interface lie in the run directories (traces/timeline.nsys-rep)."
)


def _problems(facts: dict[str, Any], known: bool) -> list[str]:
    """Return why a run's profile, or a part of it, is missing."""
    texts = ["; ".join(facts["problems"])] if facts["problems"] else []
    return [*texts, *(["its profile is missing or damaged, see skipped files"] if facts["calls"] and not known else [])]


def _timelines(build: TableBuilder, runs: pl.DataFrame, wanted: dict[str, dict[str, Any]]) -> list[Table]:
    """Return a table with a row per run that has a timeline; its values are means over the steps."""
    rows = []
    for run in build.runs.filter(pl.col("run_id").is_in(runs["run_id"])).sort("run_id").to_dicts():
        line = wanted.get(run["run_id"], {}).get("timeline")
        if not line or not line["steps"] or not line["length_ms"]:
            continue
        sums = [line[name] for name in ("length_ms", "kernels", "gaps", "idle_ms", "wait_ms", "idle_in_waits_ms")]
        sums += [line[name].get(direction, 0) for direction in _COPIES for name in ("copied_mib", "copied_ms")]
        values = [100 * line["idle_ms"] / line["length_ms"], line["longest_gap_ms"]]
        values += [None if value is None else value / line["steps"] for value in sums]
        work = f"{run[recipe_labels.COLUMN] or DASH}, {describe_work(run)}"
        rows.append([run["run_id"], work, str(line["steps"]), *map(number, values)])
    columns = ["Run", "Work", "Steps", "Idle [%]", "Longest gap [ms]", "Length [ms]", "Kernels", "Gaps", "Idle [ms]"]
    columns += ["Wait for data [ms]", "Idle in waits [ms]"]
    columns += [f"{heading} [{unit}]" for heading in _COPIES.values() for unit in ("MiB", "ms")]
    note = (
        "Per step, but for the longest gap. Idle: neither kernel nor copy nor memset ran. Wait for data: the host "
        "waited for the loader; idle in waits: the GPU had no work meanwhile, a stall of the loader."
    )
    return [build.table("timelines", "Timelines", columns, rows, note=note, run_column=0)] if rows else []


def of_cells(dataset: Dataset, build: TableBuilder) -> list[Profile]:
    """Return the profiles of every cell, in the order of the tables."""
    rows = dataset.rows(KERNEL_TIMES)
    # A dataset may come from elsewhere: a class that this version does not know counts as other.
    known = pl.col("kind").is_in(list(map(str, CLASSES)))
    rows = rows.with_columns(kind=pl.when(known).then("kind").otherwise(pl.lit("other")))
    profiles = []
    facts = {run["run_id"]: json.loads(run["profile"]) for run in build.runs.drop_nulls("profile").to_dicts()}
    for cell in build.cells.iter_rows(named=True):
        of_cell = rows.filter(pl.col("run_id").is_in(cell["run_ids"]))
        for (call, measured), group in of_cell.group_by("call", "measured", maintain_order=True):
            run_ids = group["run_id"].unique().sort().to_list()
            sums = pl.col("launches", "ms").sum() / len(run_ids)
            kernels = group.group_by("kind", "detail", "kernel", maintain_order=True).agg(sums).sort(-pl.col("ms"))
            recorded = [(facts.get(run_id, {}).get("communication") or {}).get(call) or {} for run_id in run_ids]
            complete = [times for times in recorded if None not in map(times.get, ("ms", "exposed_ms"))]
            beside = sum(times["ms"] - times["exposed_ms"] for times in complete) / len(run_ids)
            identity: dict[str, Any] = {"cell": cell, "call": str(call), "measured": bool(measured), "run_ids": run_ids}
            profiles.append(Profile(**identity, kernels=kernels, overlap_ms=beside))
    return profiles


def _figure(profiles: list[Profile]) -> base.Figure:
    shown = [
        (profile.label, {kind: ms for kind, (ms, _) in profile.classes.items()}) for profile in profiles[:MAX_BARS]
    ]
    order = {family: place for place, (family, _, _) in enumerate(_FAMILIES)}
    rows: list[base.Row] = [
        {"label": label, "part": CLASSES[kind], "value": ms, "order": order[CLASSES[kind]]}
        for label, times in shown
        for kind, ms in times.items()
    ]
    totals = [{"label": label, "value": sum(times.values()), "text": _total(times)} for label, times in shown]
    used = {family: colour for family, colour, _ in _FAMILIES if any(row["part"] == family for row in rows)}
    run_ids = [run_id for profile in profiles for run_id in profile.run_ids]
    caption = ["Of a profiled step, which is no measurement of speed. Idle: no kernel ran."]
    caption.append(base.n_note(run_ids, len({profile.cell["series"] for profile in profiles})))
    caption += [f"The first {MAX_BARS} of {len(profiles)} calls."] if len(profiles) > MAX_BARS else []
    subtitle = "Milliseconds of one profiled step or call by class of kernels"
    chart = base.stacks(rows, totals, used, "ms")
    return base.figure("fig-kernel-classes", "Where a step's time goes", subtitle, caption, chart, run_ids)


def _total(times: dict[str, float]) -> str:
    total = sum(times.values())
    return f"{total:,.1f} ms" + (f", idle {100 * times[IDLE] / total:.1f} %" if IDLE in times else "")


def same_calls(
    items: list[_T], row: Callable[[_T], Mapping[str, Any]], call: Callable[[_T], str]
) -> Iterator[list[_T]]:
    """Yield the items in groups of the same work and call; `row` gives the cell or run of an item."""
    works: dict[str, list[_T]] = {}
    for item in items:
        works.setdefault(repr([row(item)[name] for name in COMPARED_WORK]), []).append(item)
    for alike in works.values():
        # With one call per recipe its name may differ: a step, and the replay of a CUDA graph.
        several = len(alike) > len({id(row(item)) for item in alike})
        names = dict.fromkeys(map(call, alike))
        yield from [[item for item in alike if call(item) == name] for name in names] if several else [alike]


def _pairs(profiles: list[Profile]) -> list[tuple[Profile, Profile]]:
    """Return which profiles to compare: of the same work the plainest with each other one, and the two fastest.

    The plainest is the recipe of the fewest parts, of several the slowest.
    """
    pairs = []
    measured = [profile for profile in profiles if profile.measured]
    for members in same_calls(measured, lambda profile: profile.cell, lambda profile: profile.call):
        members.sort(key=lambda profile: -profile.ms)
        plainest = min(members, key=lambda profile: recipe_labels.count_parts(profile.cell["recipe"]))
        pairs += [(plainest, other) for other in members if other is not plainest]
        if all(profile is not plainest for profile in members[-2:]):
            pairs.append((members[-2], members[-1]))
    return pairs


def describe_work(row: dict[str, Any]) -> str:
    """Return GPU, model and batch of a cell or run, for a title."""
    work = [gpu_label(row["gpu"]), row["model"], row["variant"], f"batch {row['batch']}"]
    return ", ".join(filter(None, work))


def _change(build: TableBuilder, before: Profile, after: Profile) -> Table:
    columns = ["Class", "Before [ms]", "Share", "Launches", "After [ms]", "Share", "Launches", "Change [ms]", "Change"]
    sides = [(profile, _with_sums(profile)) for profile in (before, after)]
    old, new = (lines for _, lines in sides)
    kinds = [kind for kind in {**old, **new} if kind not in _SUMS]
    kinds.sort(key=lambda kind: -max(lines.get(kind, (0, 0))[0] for _, lines in sides))
    rows = []
    for name in [*kinds, *(name for name in _SUMS if old.get(name) or new.get(name))]:
        (a, _), (b, _) = pair = [lines.get(name, (0.0, 0.0)) for _, lines in sides]
        cells = [cell for (profile, _), value in zip(sides, pair, strict=True) for cell in _side(value, profile.ms)]
        rows.append([name, *cells, f"{b - a:+.2f}", f"{100 * (b / a - 1):+.0f} %" if a else DASH])
    title = f"From {before.name} to {after.name}, {describe_work(before.cell)}: each class of kernels"
    note = f"{_runs_note(before, after)} Launches of idle: gaps."
    id = f"kernels-{_slug(before)}-{_slug(after)}"
    return build.table(base.shorten(id, 100), title, columns, rows, note=note)


def _with_sums(profile: Profile) -> dict[str, tuple[float, float]]:
    """Return the classes, and lines that add up to the time of the call."""
    lines = profile.algorithms
    kernels = [value for kind, value in lines.items() if kind != IDLE]
    lines[ALL] = sum(ms for ms, _ in kernels), sum(launches for _, launches in kernels)
    if profile.overlap_ms:
        lines[BESIDE] = -profile.overlap_ms, 0.0
    return lines | ({TOGETHER: (profile.ms, 0.0)} if IDLE in lines else {})


def _by_class(build: TableBuilder, index: int, profile: Profile) -> Table:
    rows = [[name, *_side(value, profile.ms)] for name, value in profile.algorithms.items()]
    title, columns = f"Kernel time by class: {profile.label}", ["Class", "Time [ms]", "Share", "Launches"]
    return build.table(f"kernel-classes-{index}", title, columns, rows, note=_runs_note(profile))


def _runs_note(*profiles: Profile) -> str:
    counts = " and ".join(pluralize(len(profile.run_ids), "run") for profile in profiles)
    return f"Profiled steps of {counts}, no measurement of speed."


def _slug(profile: Profile) -> str:
    text = f"{profile.cell['series']}-{profile.cell['batch']}-{profile.call}".lower()
    return "".join(c if c.isascii() and c.isalnum() else "-" for c in text)


def _side(value: tuple[float, float], total: float) -> list[str]:
    ms, launches = value
    return [f"{ms:.2f}", f"{100 * ms / total:.1f} %", f"{launches:,.0f}" if launches else DASH]


def _heaviest(build: TableBuilder, index: int, profile: Profile) -> Table:
    rows = []
    for row in profile.kernels.filter(pl.col("kind") != IDLE).head(HEAVIEST).to_dicts():
        time = [f"{row['launches']:,.0f}", number(row["ms"]), f"{100 * row['ms'] / profile.ms:.1f} %"]
        rows.append([base.shorten(row["kernel"], MAX_NAME), row["kind"], row["detail"] or DASH, *time])
    title = f"The ten heaviest kernels: {profile.label}"
    columns = ["Kernel", "Class", "Detail", "Launches", "Time [ms]", "Share"]
    return build.table(f"heaviest-kernels-{index}", title, columns, rows, note=_runs_note(profile))
