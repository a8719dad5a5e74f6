"""Profiles of single steps: where their time goes, by class of kernels, and what another recipe changes in it.

No time of a profiled step is a measurement of speed; nothing here enters another table or figure.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import polars as pl

from analysis import recipe_labels
from analysis.dataset import Dataset
from analysis.report.figures import base, kernel_classes
from analysis.report.section import Section
from analysis.report.tables import DASH, Table, TableBuilder
from analysis.units import gpu_label, number
from inpaint_bench.core.console import pluralize
from inpaint_bench.core.kernels import CONVOLUTIONS, IDLE
from inpaint_bench.core.schema import KERNEL_TIMES

HEAVIEST = 10
MAX_TABLES = 8  # of changes, of classes, and of heaviest kernels
MAX_NAME = 100  # characters of a kernel's name
# Profiles, and counters, are compared where all of these are equal.
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
        """Return the time of all kernels and of the gaps between them."""
        return float(self.kernels["ms"].sum())


def sections(dataset: Dataset, build: TableBuilder) -> list[Section]:
    """Return the section of the profiles; empty where no valid run was to have one."""
    runs = dataset.runs.filter("valid")
    wanted = {row["run_id"]: json.loads(row["profile"]) for row in runs.drop_nulls("profile").iter_rows(named=True)}
    profiles = of_cells(dataset, build)
    problems = _problems(wanted, {run_id for profile in profiles for run_id in profile.run_ids})
    if not profiles and not problems:
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
    return [
        Section(
            title="Where a step's time goes",
            workload="profiles",
            paragraphs=[_METHOD, *problems],
            tables=tables,
            figures=[_figure(profiles, build)] if profiles else [],
        )
    ]


_METHOD = (
    "After the last measured window one step or call was profiled with torch.profiler. The profiler slows it down, and "
    "the clocks may differ: no time of a profiled step is counted in any other table or figure. Kernels are classified "
    "by their names; on a CPU, operators without the operators that they call. Traces for Perfetto lie in the run "
    "directories (traces/)."
)


def _problems(wanted: dict[str, dict[str, Any]], run_ids: set[str]) -> list[str]:
    """Return a sentence per run whose profile, or a part of it, is missing."""
    texts = []
    for run_id, facts in sorted(wanted.items()):
        if facts["problems"]:
            texts.append(f"Run {run_id}: {'; '.join(facts['problems'])}.")
        if facts["calls"] and run_id not in run_ids:
            texts.append(f"Run {run_id}: its profile is missing or damaged, see skipped files.")
    return texts


def of_cells(dataset: Dataset, build: TableBuilder) -> list[Profile]:
    """Return the profiles of every cell, in the order of the tables."""
    rows = dataset.rows(KERNEL_TIMES)
    # A dataset may come from elsewhere: a class that this version does not know counts as other.
    known = pl.col("kind").is_in(list(map(str, kernel_classes.STYLES)))
    rows = rows.with_columns(kind=pl.when(known).then("kind").otherwise(pl.lit("other")))
    profiles = []
    for cell in build.all_cells.iter_rows(named=True):
        of_cell = rows.filter(pl.col("run_id").is_in(cell["run_ids"]))
        for (call, measured), group in of_cell.group_by("call", "measured", maintain_order=True):
            run_ids = group["run_id"].unique().sort().to_list()
            sums = pl.col("launches", "ms").sum() / len(run_ids)
            kernels = group.group_by("kind", "detail", "kernel", maintain_order=True).agg(sums).sort(-pl.col("ms"))
            profiles.append(
                Profile(cell=cell, call=str(call), measured=bool(measured), run_ids=run_ids, kernels=kernels)
            )
    return profiles


def _figure(profiles: list[Profile], build: TableBuilder) -> base.Figure:
    bars = [(profile.label, {kind: ms for kind, (ms, _) in profile.classes.items()}) for profile in profiles]
    run_ids = [run_id for profile in profiles for run_id in profile.run_ids]
    caption = [
        "Of a profiled step, which is no measurement of speed. Shades of a colour: in the order of its legend.",
        "Idle: from the first to the last kernel, no kernel ran." if any(IDLE in times for _, times in bars) else "",
        base.n_note(run_ids, len({profile.cell["series"] for profile in profiles})),
        recipe_labels.legend_text(build.all_cells),
    ]
    return kernel_classes.draw(bars, caption, run_ids)


def _pairs(profiles: list[Profile]) -> list[tuple[Profile, Profile]]:
    """Return which profiles to compare: of the same work the plainest with each other one, and the two fastest.

    The plainest is the recipe of the fewest parts, of several the slowest.
    """

    def work(profile: Profile) -> str:
        return repr([profile.cell[name] for name in COMPARED_WORK])

    pairs = []
    measured = [profile for profile in profiles if profile.measured]
    for _, same_work in groupby(sorted(measured, key=work), key=work):
        group = list(same_work)
        calls = [sum(other.cell is profile.cell for other in group) for profile in group]
        # With one call per recipe its name may differ: a step, and the replay of a CUDA graph.
        names = dict.fromkeys(profile.call for profile in group)
        sets = [group] if max(calls) == 1 else [[p for p in group if p.call == name] for name in names]
        for members in sets:
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
    old, new = before.algorithms, after.algorithms
    kinds = [kind for kind in {**old, **new} if kind != IDLE]
    kinds.sort(key=lambda kind: -max(old.get(kind, (0, 0))[0], new.get(kind, (0, 0))[0]))
    lines = [(kind, old.get(kind, (0.0, 0.0)), new.get(kind, (0.0, 0.0))) for kind in kinds]
    lines.append(("all kernels", _sum(old), _sum(new)))
    if IDLE in old or IDLE in new:
        lines.append((IDLE, old.get(IDLE, (0.0, 0.0)), new.get(IDLE, (0.0, 0.0))))
        lines.append(("together", (before.ms, 0.0), (after.ms, 0.0)))
    rows = [
        [name, *_side(a, before.ms), *_side(b, after.ms), f"{b[0] - a[0]:+.2f}", _percent(a[0], b[0])]
        for name, a, b in lines
    ]
    work = describe_work(before.cell)
    title = f"From {before.name} to {after.name}, {work}: what each class of kernels lost or gained"
    note = f"Before: {before.name}; after: {after.name}. {_runs_note(before, after)} Launches of idle: gaps."
    id = f"kernels-{_slug(before)}-{_slug(after)}"
    return build.table(base.shorten(id, 100), title, columns, rows, note=note)


def _by_class(build: TableBuilder, index: int, profile: Profile) -> Table:
    """Return the classes of a profile that nothing is compared with."""
    rows = [[name, *_side(value, profile.ms)] for name, value in profile.algorithms.items()]
    title = f"Kernel time by class: {profile.label}"
    note = f"{_runs_note(profile)} Launches of idle: gaps."
    return build.table(f"kernel-classes-{index}", title, ["Class", "Time [ms]", "Share", "Launches"], rows, note=note)


def _runs_note(*profiles: Profile) -> str:
    counts = " and ".join(pluralize(len(profile.run_ids), "run") for profile in profiles)
    return f"Profiled steps of {counts}, no measurement of speed."


def _slug(profile: Profile) -> str:
    text = f"{profile.cell['series']}-{profile.cell['batch']}-{profile.call}".lower()
    return "".join(c if c.isascii() and c.isalnum() else "-" for c in text)


def _sum(classes: dict[str, tuple[float, float]]) -> tuple[float, float]:
    kernels = [value for kind, value in classes.items() if kind != IDLE]
    return sum(ms for ms, _ in kernels), sum(launches for _, launches in kernels)


def _side(value: tuple[float, float], total: float) -> list[str]:
    ms, launches = value
    return [f"{ms:.2f}", f"{100 * ms / total:.1f} %", f"{launches:,.0f}" if launches else DASH]


def _percent(before: float, after: float) -> str:
    return f"{100 * (after / before - 1):+.0f} %" if before else DASH


def _heaviest(build: TableBuilder, index: int, profile: Profile) -> Table:
    kernels = profile.kernels.filter(pl.col("kind") != IDLE).head(HEAVIEST)
    rows = [
        [
            base.shorten(row["kernel"], MAX_NAME),
            row["kind"],
            row["detail"] or DASH,
            f"{row['launches']:,.0f}",
            number(row["ms"]),
            f"{100 * row['ms'] / profile.ms:.1f} %",
        ]
        for row in kernels.iter_rows(named=True)
    ]
    title = f"The ten heaviest kernels: {profile.label}"
    columns = ["Kernel", "Class", "Detail", "Launches", "Time [ms]", "Share"]
    note = f"{_runs_note(profile)} Shares of kernels and idle time together."
    return build.table(f"heaviest-kernels-{index}", title, columns, rows, note=note)
