"""The report's tables as plain data: rendered to the terminal, Markdown and HTML elsewhere."""

from __future__ import annotations

import json
import textwrap
from dataclasses import dataclass, field
from typing import Any

import polars as pl

from analysis import published, recipe_labels
from analysis.metrics.run_row import is_unavailable
from analysis.stats import best_batch as best
from analysis.stats import bottleneck, study
from analysis.stats import cells as aggregate
from analysis.units import METRICS, gpu_label, gpu_order, number, runtime_heading

from .estimate import Estimate

BRACKETS = "In brackets behind a mean: its 95 % interval; the range of fewer than three runs, or cards."
ONE_RUN = "n = 1: one run per cell, no interval."
INTERVALS = (
    "Mean (95 % interval of the mean) over n runs: Student's t over the runs of one card, over the cards where several "
    "ran, cut to what the figure can be. Of fewer than three runs, or of two cards, the range: lowest to highest run. "
    "A single card says nothing about another."
)
PHOTOGRAPHS_SHOWN = 50
MESSAGE_SHOWN = 160  # characters of a run's last words; CUDA's on memory go on for 500
LONG_TABLE = 40  # rows from which on a table is folded on the page, and runs over pages on paper
PROJECTED = "Runtime is projected from images/s to the epochs asked, not waited for."


@dataclass(frozen=True, kw_only=True)
class Table:
    id: str
    title: str
    columns: list[str]
    rows: list[list[str]]
    note: str = ""
    text_columns: frozenset[int] = frozenset()  # aligned left; the rest are numbers
    run_column: int | None = None  # holds run ids: the page links them
    muted_rows: frozenset[int] = frozenset()  # rows of what has no figures: greyed
    key_columns: int = 0  # that say what a row is: repeated where a terminal is too narrow for the table


@dataclass(kw_only=True)
class Builder:
    """Makes tables of one dataset; a demonstration is named in every title."""

    runs: pl.DataFrame
    cells: pl.DataFrame = field(init=False)  # of the overview: what only a study ran has tables of its own
    apart: list[str] = field(init=False)  # recipes that are not in the overview

    def __post_init__(self) -> None:
        self.runs = recipe_labels.add_short_names(self.runs)
        shown = study.overview_runs(self.runs)
        self.cells = aggregate.build_cells(shown)
        self.apart = sorted(set(self.runs["recipe"].drop_nulls()) - set(shown["recipe"]))

    @property
    def demonstration(self) -> bool:
        return bool(self.runs["demonstration"].any())

    def title(self, text: str) -> str:
        return f"Demonstration: {text}" if self.demonstration else text

    def table(self, id: str, title: str, columns: list[str], rows: list[list[str]], **more: Any) -> Table:
        texts = frozenset(i for i, name in enumerate(columns) if name in _TEXT_COLUMNS)
        return Table(id=id, title=self.title(title), columns=columns, rows=rows, text_columns=texts, **more)

    def heading(self, metric: str) -> str:
        return runtime_heading(self.runs) if metric == "runtime_h" else METRICS[metric].heading

    def _summary(self, id: str, title: str, metrics: tuple[str, ...], note: str) -> Table:
        keys = ["Site", "GPU", "Batch", "Recipe", "n", "Cards"]
        extra = [name for name in aggregate.LABEL_KEYS if name != "recipe" and self._varies(name)]
        rows = [
            [row["site"], gpu_label(row["gpu"]), str(row["batch"]), row[recipe_labels.COLUMN] or "\u2013"]
            + [str(row["n"]), cards(row)]
            + [str(row[name]) for name in extra]
            + [spread(row, name) for name in metrics]
            for row in self.cells.iter_rows(named=True)
        ]
        interval = ONE_RUN if self.one_run else INTERVALS
        parts = [
            note,
            interval,
            aggregate.differences_note(self.cells),
            aggregate.searched_batch_note(self.cells),
            self.apart_note(),
        ]
        columns = [*keys, *(_HEADINGS.get(name, name.capitalize()) for name in extra), *map(self.heading, metrics)]
        return self.table(id, title, columns, rows, note=" ".join(p for p in parts if p), key_columns=len(keys))

    def recipes(self) -> Table | None:
        """The levers behind every short name; None where no name is short."""
        rows = [[short, recipe.replace("+", ", ")] for short, recipe in recipe_labels.legend(self.runs).items()]
        note = "A recipe of many levers is named by its first ones and the number of the others."
        return self.table("recipes", "Recipes", ["Recipe", "Levers"], rows, note=note) if rows else None

    def apart_note(self) -> str:
        """Where the recipes are that only studies ran."""
        if not self.apart:
            return ""
        return f"{len(self.apart)} further recipe(s) ran only in studies: see the tables of levers."

    @property
    def one_run(self) -> bool:
        return bool((self.cells["n"] == 1).all())

    def _varies(self, name: str) -> bool:
        return self.cells[name].n_unique() > 1

    def throughput(self) -> Table:
        metrics = ("runtime_h", "steps_per_s", "images_per_s", "step_ms_p50", "step_ms_p95", "data_wait_pct")
        return self._summary("throughput", "Throughput", (*metrics, "gpu_util_pct", "mfu_pct"), PROJECTED)

    def energy(self) -> Table:
        metrics = "power_w joules_per_image images_per_s_per_w steps_per_s_per_w energy_ratio temp_gpu_c_mean"
        note = "Power is energy over time, of the whole GPU board. Steps/s/W falls with the batch by construction."
        return self._summary("energy", "Power, energy and temperature", tuple(metrics.split()), note)

    def memory(self) -> Table:
        metrics = "vram_pct vram_used_mib_peak torch_reserved_peak_mib torch_allocated_peak_mib mem_active_pct"
        note = (
            "VRAM as NVML sees it, share of what the driver does not reserve. Memory active is the share of "
            "time with any access: neither bandwidth nor VRAM."
        )
        return self._summary("memory", "Memory", tuple(metrics.split()), note)

    def run_list(self) -> Table:
        """Every run; what is the same in all of them is in the page's head and left out here."""
        metrics = ["runtime_h", "images_per_s", "gpu_util_pct", "power_w", "joules_per_image"]
        facts = {"Point": "point", "Try": "attempt", "Recipe": recipe_labels.COLUMN}
        facts = {name: column for name, column in facts.items() if self.runs[column].n_unique() > 1}
        rows = []
        for row in self.runs.iter_rows(named=True):
            status = (row["status"] or "unknown") + (f" ({row['reason']})" if row["reason"] else "")
            status = "unavailable" if is_unavailable(row) else status
            keys = [row["run_id"], *(row[column] or "\u2013" for column in facts.values()), row["site"]]
            batch = str(row["batch"] or "\u2013") + (" (found)" if row["batch_requested"] and row["batch"] else "")
            keys += [gpu_label(row["gpu"]), batch, status, "yes" if row["valid"] else "no"]
            rows.append([*keys, *(number(row[m]) for m in metrics), row["source"] or "\u2013"])
        head = ["Run", *facts, "Site", "GPU", "Batch", "Status", "Counts"]
        columns = [*head, *map(self.heading, metrics), "Telemetry"]
        note = f"Every attempt, whether it counts or not. {PROJECTED}"
        return self.table("runs", "Runs", columns, rows, note=note, run_column=0, key_columns=1)

    def not_counted(self) -> Table:
        """Failed, unfinished and invalid runs, each with why."""
        lost = self.runs.filter(~pl.col("valid"))
        rows = [
            [
                row["run_id"],
                row["point"] or "\u2013",
                row["site"],
                gpu_label(row["gpu"]),
                str(row["batch"] or "\u2013"),
                row["invalid_reason"] or "\u2013",
                textwrap.shorten(row["message"] or "", MESSAGE_SHOWN, placeholder=" \u2026"),
            ]
            for row in lost.iter_rows(named=True)
        ]
        columns = ["Run", "Point", "Site", "GPU", "Batch", "Why it does not count", "Message"]
        muted = frozenset(i for i, row in enumerate(lost.iter_rows(named=True)) if is_unavailable(row))
        cut = (lost["message"].str.len_chars() > MESSAGE_SHOWN).any()
        note = "Messages end with \u2026 where they are longer; runs.csv has them whole." if cut else ""
        title = "Runs that do not count"
        return self.table("not-counted", title, columns, rows, run_column=0, muted_rows=muted, note=note)

    def gpu_ratios(self) -> Table:
        rows = []
        groups = (
            self.cells.partition_by(aggregate.GPU_COMPARISON_KEYS, maintain_order=True) if self.cells.height else []
        )
        for ratio in (r for group in groups for r in aggregate.ratios(group, value="images_per_s")):
            rows.append([f"{ratio.fast} / {ratio.slow}", ratio.text, _each(ratio)])
        poster = (self.runs["workload"] == published.WORKLOAD).any()
        for ratio in published_ratios() if poster else []:
            rows.append([f"{ratio.fast} / {ratio.slow} (published)", ratio.text, _each(ratio)])
        note = "How many times faster at equal batch, by images/s; the range is over batches. " + (
            ONE_RUN
            if self.one_run
            else "By batch: the ratio of geometric means (95 % interval of the ratio, none with fewer than three runs, "
            "or cards where several ran, on a side); no difference seen: it holds 1. A single card says nothing about "
            "another."
        )
        drivers = sorted(self.runs.filter(pl.col("valid"))["driver"].drop_nulls().unique().to_list())
        if len(drivers) > 1:
            note += f" Drivers differ between runs ({', '.join(drivers)}): see the environment table."
        note = " ".join(
            p for p in (note, aggregate.differences_note(self.cells), aggregate.searched_batch_note(self.cells)) if p
        )
        return self.table("ratios", "GPU ratios", ["Pair", "Range", "By batch"], rows, note=note)

    def best_batch(self) -> Table:
        """A row per GPU: what to take, and which run could change that."""
        rows = []
        for one in best.decide_batches(self.cells, self.runs):
            cells = [text for choice in (one.fastest, one.cheapest) for text in _choice(choice)]
            take = str(one.fastest.smallest) if one.fastest else "\u2013"
            ends = [str(batch or "\u2013") for batch in (one.largest_completed, one.smallest_oom)]
            following = f"{one.next_run} ({one.next_run_reason})" if one.next_run else f"none: {one.next_run_reason}"
            rows.append([one.series, take, *cells, *ends, following])
        rows.sort(key=lambda row: gpu_order(row[0]))
        columns = ["GPU", "Take", "Fastest", "Images/s", "Ties by speed", "Least energy", "J/image", "Ties by energy"]
        columns += ["Largest that ran", "Smallest out of memory", "Next run"]
        note = (
            "Batches. A tie: the 95 % interval of the ratio holds 1, over pairs of one card and seed where "
            "there are such; with too few runs for an interval, runs that overlap or means within "
            f"{100 * aggregate.TIE_THRESHOLD:g} %. Take: the smallest that ties with the fastest."
        )
        parts = [
            note,
            aggregate.differences_note(self.cells),
            aggregate.searched_batch_note(self.cells),
            self.apart_note(),
        ]
        note = " ".join(p for p in parts if p)
        return self.table("best", "Best batch per GPU", columns, rows, note=note, key_columns=1)

    def bottlenecks(self) -> list[Table]:
        """The class of every run, and what to try for each class of a GPU's recipe."""
        around = bottleneck.sweep_evidence(aggregate.build_cells(self.runs), self.runs)
        rows = []
        alike: dict[tuple[str, ...], tuple[list[int], str]] = {}
        for row in self.runs.filter(pl.col("valid") | (pl.col("reason") == "oom_gpu")).iter_rows(named=True):
            found = bottleneck.classify(row, around.get(row["run_id"]))
            tier = bottleneck.NO_VALUE if found.tier is None else str(found.tier)
            head = [row["run_id"], gpu_label(row["gpu"]), str(row["batch"] or "\u2013"), found.name, tier]
            rows.append([*head, found.evidence, found.runner_up])
            advice = bottleneck.format_advice(found.advice, row)
            key = (found.name, gpu_label(row["gpu"]), row["site"], row[recipe_labels.COLUMN] or "\u2013", advice)
            if advice != bottleneck.NO_VALUE:
                alike.setdefault(key, ([], advice))[0].append(row["batch"] or 0)
        columns = ["Run", "GPU", "Batch", "Class", "Tier", "Evidence", "Runner-up"]
        tiers = "; ".join(f"{tier} {words}" for tier, words in bottleneck.TIERS.items())
        note = f"Tiers of evidence: {tiers}. The first rule that matches; docs/bottlenecks.md has them all."
        classes = self.table("bottleneck", "What held it back", columns, rows, note=note, run_column=0)
        advised = [
            [*key[:4], ", ".join(str(batch or "\u2013") for batch in sorted(set(batches))), str(len(batches)), advice]
            for key, (batches, advice) in sorted(alike.items(), key=lambda item: (item[0][0], gpu_order(item[0][1])))
        ]
        columns = ["Class", "GPU", "Site", "Recipe", "Batches", "Runs", "Try"]
        note = (
            "Overrides of a launch command, and Slurm's own words where they begin with two dashes; none is a promise."
        )
        return [classes, self.table("advice", "What to try", columns, advised, note=note)]

    def environment(self) -> Table:
        keys = ["site", "node", "gpu_name", "power_limit_w", "driver", "torch", "cuda", "precision", "source"]
        table = self.runs.group_by(keys).agg(pl.len().alias("n")).sort(keys, nulls_last=True)
        rows = [
            [number(v) if k == "power_limit_w" else str(v or "\u2013") for k, v in row.items()]
            for row in table.iter_rows(named=True)
        ]
        columns = ["Site", "Node", "Board", "Power limit [W]", "Driver", "torch", "CUDA", "Precision"]
        return self.table("environment", "Environment", [*columns, "Telemetry", "Runs"], rows)


_HEADINGS = {"resolution_px": "Resolution [px]", "gpus": "GPUs", "comparability_key": "Board, driver, power"}
_TEXT_COLUMNS = frozenset(
    name
    for group in (
        ("Run", "Point", "Site", "GPU", "Recipe", "Status", "Counts", "Telemetry", "Why it does not count", "Message"),
        ("Ties by speed", "Ties by energy", "Next run", "Class", "Evidence", "Runner-up", "Batches", "Try", "Levers"),
        ("Pair", "By batch", "Against", "Change of images/s", "Model", "Workload", "Demonstration"),
        ("Node", "Board", "Driver", "torch", "CUDA", "Precision"),
        ("Step", "Lever", "Levers as found", "Figure"),
        ("The poster says", "Its figures", "What they show"),
    )
    for name in group
)


def spread(row: dict[str, Any], metric: str) -> str:
    """Mean, its interval (of too few runs the range) where the ends differ as printed, and the metric's own n."""
    n, value = row[f"{metric}_n"], row[metric]
    if value is None:
        return number(None)
    remarks = [f"n = {n}"] if 0 < n < row["n"] else []
    low, high = row[f"{metric}_low"], row[f"{metric}_high"]
    least, most = row[f"{metric}_min"], row[f"{metric}_max"]
    return Estimate(value, low, high, least=least, most=most, form=number, remarks=remarks, narrow=False)


def cards(row: dict[str, Any]) -> str:
    """How many different cards a cell's runs used; an en dash where no run names its card."""
    return str(row["cards"] or "\u2013")


def published_ratios() -> list[aggregate.Ratio]:
    """The poster's speed-ups, from its hours, by the same code as ours."""
    hours = published.shown().filter(pl.col("metric") == "runtime_h")
    hours = hours.with_columns(pl.col("gpu").map_elements(gpu_label, pl.String).alias("series"))
    return aggregate.ratios(hours, value="value", lower_is_faster=True)


def _each(ratio: aggregate.Ratio) -> str:
    """The ratio at every batch, with its interval where there is one."""
    words = []
    for batch, value in ratio.by_batch.items():
        found = ratio.gains.get(batch)
        text = f"{batch}: {value:.2f}"
        if found and found.low is not None and found.high is not None:
            inside = f"{1 + found.low:.2f} to {1 + found.high:.2f}"
            text += f" ({'no difference seen, ' if found.tie else ''}{inside})"
        words.append(text)
    return ", ".join(words)


def _choice(one: best.Choice | None) -> list[str]:
    """The batch, its figure, and its ties."""
    if one is None:
        return ["\u2013"] * 3
    ties = ", ".join(map(str, one.ties)) or ("only batch measured" if one.candidates == 1 else "none")
    return [str(one.batch), spread(one.cell, one.metric), ties + ("; n = 1" if one.n == 1 else "")]


def photographs_skipped(runs: pl.DataFrame, title: str) -> Table:
    """Photographs that the data set's reader left out, each once, with why."""
    known = runs.filter(pl.col("images_skipped") > 0)
    named = {
        (row["site"], one["file"], one["reason"]): None
        for row in known.iter_rows(named=True)
        for one in json.loads(row["skipped_images"] or "[]")
    }
    rows = [[site or "\u2013", file, why] for site, file, why in list(named)[:PHOTOGRAPHS_SHOWN]]
    most = max(known["images_skipped"].to_list(), default=0)
    note = f"{len(rows)} shown; one run skipped {most:,} at most." if rows else ""
    columns = ["Site", "File", "Reason"]
    return Table(id="photographs", title=title, columns=columns, rows=rows, text_columns=frozenset(range(3)), note=note)


def skipped(frame: pl.DataFrame, title: str) -> Table:
    """Everything the merge left out."""
    rows = [[r["code"], r["path"], r["reason"]] for r in frame.iter_rows(named=True)]
    columns = ["Kind", "Path", "Reason"]
    return Table(id="skipped", title=title, columns=columns, rows=rows, text_columns=frozenset(range(3)))
