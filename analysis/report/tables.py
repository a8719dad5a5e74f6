"""The tables of the report as plain data; other modules write them to the terminal, Markdown, HTML, CSV and LaTeX."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import polars as pl

from analysis import recipe_labels
from analysis.columns import METRICS, shown_in
from analysis.metrics.run_row import is_unavailable
from analysis.stats import agreement, best_batch, bottleneck, study
from analysis.stats.cells import (
    CELL_KEYS,
    GPU_COMPARISON_KEYS,
    TIE_THRESHOLD,
    Ratio,
    build_cells,
    differences_note,
    disagreement_note,
    key_text,
    searched_batch_note,
    series_ratios,
    varying_keys,
    withhold_means,
)
from analysis.units import gpu_label, gpu_order, number, runtime_heading
from inpaint_bench.core.console import pluralize
from inpaint_bench.core.schema import COMMAND

from .estimate import Estimate

DASH = "\u2013"  # an empty cell
NUMBER = re.compile(r"([+-]?)([\d,]+(?:\.\d+)?)(?:e([+-]?)0*(\d+))?")  # as tables print it: sign, digits, power
PARENTHESES = (
    "In parentheses: the 95 % confidence interval of the mean, or with fewer than three runs or cards their range."
)
ONE_RUN = "n = 1: one run per cell, no interval."
INTERVALS = (
    "Mean (95 % confidence interval) over n runs: Student's t over the runs if one card was used, else over the "
    "cards; clipped to the values that the metric can have. With fewer than three runs, or two cards, the range of "
    "the runs instead. One card says nothing about others."
)
PROJECTED = "Runtime is projected from images/s to the requested epochs, not measured."
MAX_SKIPPED_IMAGES = 50
MAX_MESSAGE = 160  # characters; a CUDA out-of-memory message has 500


def cell(value: float | None) -> str:
    """Return a number as tables print it, a dash for none."""
    return DASH if value is None else number(value)


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table: its cells are text, of which an `Estimate` still knows its numbers."""

    id: str  # on the page, and the name of its files
    title: str
    columns: list[str]
    rows: list[list[str]]
    note: str = ""
    text_columns: frozenset[int] = frozenset()  # aligned left; the others hold numbers
    run_column: int | None = None  # holds run ids, which the page links
    muted_rows: frozenset[int] = frozenset()  # rows without values, shown in grey
    strong_rows: frozenset[int] = frozenset()  # printed in bold
    row_runs: list[list[str]] = field(default_factory=list)  # per row the runs behind its numbers, which the page links


@dataclass(kw_only=True)
class TableBuilder:
    """Makes the tables of one dataset. If any run is a demonstration, every title says so."""

    runs: pl.DataFrame
    cells: pl.DataFrame = field(init=False)  # without the recipes that ran in studies only
    all_cells: pl.DataFrame = field(init=False)
    definitions_note: str = ""  # which columns the merge defined differently
    study_recipes: list[str] = field(init=False)  # those recipes
    disagreeing_runs: set[str] = field(init=False)

    def __post_init__(self) -> None:
        self.runs = recipe_labels.add_short_names(self.runs)
        shown = study.overview_runs(self.runs)
        self.cells = withhold_means(build_cells(shown))
        self.all_cells = withhold_means(build_cells(self.runs))
        self.disagreeing_runs = set(self.all_cells.drop_nulls("disagreement")["run_ids"].explode())
        self.study_recipes = sorted(set(self.runs["recipe"].drop_nulls()) - set(shown["recipe"]))

    @property
    def demonstration(self) -> bool:
        return bool(self.runs["demonstration"].any())

    @property
    def one_run_per_cell(self) -> bool:
        return bool((self.cells["n"] == 1).all())

    def table(self, id: str, title: str, columns: list[str], rows: list[list[str]], **options: Any) -> Table:
        """Make a table. Columns whose cells are not all numbers are text."""
        title = f"Demonstration: {title}" if self.demonstration else title
        text_columns = frozenset(i for i, cells in enumerate(zip(*rows, strict=True)) if not _is_numeric(cells))
        return Table(id=id, title=title, columns=columns, rows=rows, text_columns=text_columns, **options)

    def heading(self, metric: str) -> str:
        """Return the heading of a metric's column."""
        return runtime_heading(self.runs) if metric == "runtime_h" else METRICS[metric].heading

    def note(self, *sentences: str) -> str:
        """Return these sentences, and those about what the cells mix and which recipes are in other tables."""
        of_cells = (disagreement_note(self.cells), differences_note(self.cells), searched_batch_note(self.cells))
        return " ".join(filter(None, [*sentences, *of_cells, self.study_note()]))

    def study_note(self) -> str:
        """Return the sentence about recipes that ran in studies only."""
        if not self.study_recipes:
            return ""
        return f"{pluralize(len(self.study_recipes), 'more recipe')} ran in studies only: see the tables of levers."

    def _summary(self, id: str, title: str, note: str) -> Table:
        """Return a table with a row per cell: its keys, what else varies between cells, and the columns shown in it."""
        metrics = shown_in(id)
        keys = ["Site", "GPU", "Batch", "Recipe", "n", "Cards"]
        # A key that is the same in all cells needs no column.
        varying = [name for name in varying_keys(self.cells) if name != "recipe"]
        rows = [
            [row["site"], gpu_label(row["gpu"]), str(row["batch"] or DASH), row[recipe_labels.COLUMN] or DASH]
            + [str(row["n"]), card_count(row)]
            + [key_text(row, name) or DASH for name in varying]
            + [mean_text(row, name) for name in metrics]
            for row in self.cells.iter_rows(named=True)
        ]
        columns = [*keys, *(_HEADINGS.get(name, name.capitalize()) for name in varying), *map(self.heading, metrics)]
        note = self.note(note, ONE_RUN if self.one_run_per_cell else INTERVALS)
        row_runs = self.cells["run_ids"].to_list()
        return self.table(id, title, columns, rows, note=note, row_runs=row_runs)

    def recipes(self) -> list[Table]:
        """Return what chooses every recipe of several levers in a launch, if there is one."""
        rows = [[short, pasted] for short, pasted in recipe_labels.launch_overrides(self.runs).items()]
        note = (
            "Named by bundle, caches (cached), compile (compiled), CUDA graph (graph), and what else tells them apart."
        )
        return [self.table("recipes", "Recipes", ["Recipe", "Overrides"], rows, note=note)] if rows else []

    def throughput(self) -> Table:
        """Return runtime, rates and utilization of every cell."""
        return self._summary("throughput", "Throughput", PROJECTED)

    def energy(self) -> Table:
        """Return power, energy, efficiency and temperature of every cell."""
        note = "Power is energy divided by time, for the GPU board. Steps/s/W falls with batch size by definition."
        return self._summary("energy", "Power, energy and temperature", note)

    def memory(self) -> Table:
        """Return GPU memory as NVML and as PyTorch report it, of every cell."""
        note = (
            "VRAM as NVML reports it, as a share of what the driver does not reserve. Memory active is the share of "
            "time with any access to memory, not a bandwidth."
        )
        return self._summary("memory", "Memory", note)

    def run_list(self) -> Table:
        """Return every run; keys that are the same for all of them are left out."""
        metrics = ["runtime_h", "images_per_s", "gpu_util_pct", "power_w", "joules_per_image"]
        facts = {"Point": "point", "Attempt": "attempt", "Model": "model", "Recipe": recipe_labels.COLUMN}
        facts = {name: column for name, column in facts.items() if self.runs[column].n_unique() > 1}
        rows = []
        for row in self.runs.iter_rows(named=True):
            status = (row["status"] or "unknown") + (f" ({row['reason']})" if row["reason"] else "")
            status = "unavailable" if is_unavailable(row) else status
            keys = [row["run_id"], *(str(row[column] or DASH) for column in facts.values()), row["site"]]
            batch = str(row["batch"] or DASH) + (" (searched)" if row["batch_requested"] and row["batch"] else "")
            keys += [gpu_label(row["gpu"]), batch, status, "yes" if row["valid"] else "no"]
            rows.append([*keys, *(number(row[metric]) for metric in metrics), row["source"] or DASH])
        columns = ["Run", *facts, "Site", "GPU", "Batch", "Status", "Valid", *map(self.heading, metrics), "Telemetry"]
        if any(remarks := [self._run_remark(row) for row in self.runs.iter_rows(named=True)]):
            columns.append("Remark")
            rows = [[*row, remark or DASH] for row, remark in zip(rows, remarks, strict=True)]
        note = f"Every attempt, valid or not. {PROJECTED}"
        return self.table("runs", "Runs", columns, rows, note=note, run_column=0)

    def _run_remark(self, row: dict[str, Any]) -> str:
        remarks = [f"{row['inactive_levers']} not active"] if row["inactive_levers"] else []
        remarks += ["disagrees with runs of its cell"] if row["run_id"] in self.disagreeing_runs else []
        return "; ".join(remarks)

    def cell_remarks(self) -> Table:
        """Return the cells, also of studies, whose runs differ or disagree."""
        remarked = self.all_cells.filter(pl.col("disagreement").is_not_null() | (pl.col("differences") != ""))
        cells = remarked.select("series", "batch", "n", "differences", "disagreement").iter_rows()
        rows = [[str(value or DASH) for value in row] for row in cells]
        columns = ["Cell", "Batch", "n", "Its runs differ in", "Its runs disagree in"]
        limits = (f"{100 * limit:g} %" for limit in (agreement.MAX_RANGE, agreement.OUTLIER))
        note = (
            "Runs disagree where images/s or J/image of one exceeds that of another by more than {}, or where one of "
            f"at least three is off the mean of the others by more than {{}} and {agreement.OUTLIER_RANGES:g} times "
            "their range. Such a cell has no mean, unless on a CPU, of demonstrations, or with --accept-disagreement."
        ).format(*limits)
        return self.table("cell-remarks", "Cells whose runs differ", columns, rows, note=note if rows else "")

    def excluded(self) -> Table:
        """Return failed, unfinished and invalid runs, each with the reason."""
        excluded = self.runs.filter(~pl.col("valid")).to_dicts()
        rows = []
        for row in excluded:
            keys = [row["run_id"], row["point"] or DASH, row["site"], gpu_label(row["gpu"]), str(row["batch"] or DASH)]
            message = textwrap.shorten(row["message"] or "", MAX_MESSAGE, placeholder=" \u2026")
            rows.append([*keys, row["invalid_reason"] or DASH, message])
        columns = ["Run", "Point", "Site", "GPU", "Batch", "Reason", "Message"]
        # A recipe that this machine cannot run is no failure: shown in grey.
        muted = frozenset(i for i, row in enumerate(excluded) if is_unavailable(row))
        shortened = any(len(row["message"] or "") > MAX_MESSAGE for row in excluded)
        note = "Messages that end with \u2026 are complete in runs.csv." if shortened else ""
        return self.table("excluded", "Excluded runs", columns, rows, run_column=0, muted_rows=muted, note=note)

    def gpu_ratios(self, published: Sequence[Ratio] = ()) -> Table:
        """Return how much faster each GPU is than the slower ones, and after these the published ratios."""
        # Within one group only the GPU, its site, the batch and what the comparability key names may differ.
        groups = self.cells.partition_by(GPU_COMPARISON_KEYS, maintain_order=True)
        measured = [ratio for group in groups for ratio in series_ratios(group, "images_per_s")]
        rows = [
            [f"{ratio.fast} / {ratio.slow}{source}", ratio.text, _by_batch(ratio)]
            for source, ratios in (("", measured), (" (published)", published))
            for ratio in ratios
        ]
        method = (
            "By batch: ratio of geometric means (95 % confidence interval; none with fewer than three runs, or cards "
            "if several were used, on either side). Tie: the interval contains 1. One card says nothing about others."
        )
        valid = self.runs.filter("valid")
        drivers, versions = (sorted(valid[name].drop_nulls().unique()) for name in ("driver", "code_version"))
        note = self.note(
            "Ratio of images/s at equal batch size; the range is over batch sizes.",
            ONE_RUN if self.one_run_per_cell else method,
            f"Driver versions differ between runs: {', '.join(drivers)}." if len(drivers) > 1 else "",
            f"Code versions differ between runs: {', '.join(versions)}." if len(versions) > 1 else "",
        )
        return self.table("ratios", "Speedup between GPUs", ["Pair", "Range", "By batch"], rows, note=note)

    def compared_batches(self) -> Table:
        """Return a row per GPU and recipe: the best batches by speed and by energy with their ties, and the memory."""
        rows = []
        for decision in best_batch.decide_batches(self.cells, self.runs):
            choices = [text for choice in (decision.fastest, decision.cheapest) for text in _choice(choice)]
            memory = [str(batch or DASH) for batch in (decision.largest_completed, decision.smallest_oom)]
            rows.append([decision.series, *choices, *memory])
        rows.sort(key=lambda row: gpu_order(row[0]))
        columns = ["GPU and recipe", "Fastest", "Images/s", "Ties (speed)", "Least energy", "J/image"]
        columns += ["Ties (energy)", "Largest completed", "Smallest out of memory"]
        note = self.note(
            "Batch sizes. Tie: the 95 % confidence interval of the ratio contains 1, over runs paired by card and "
            "seed where there are such pairs; with too few runs for an interval, runs that overlap or means within "
            f"{100 * TIE_THRESHOLD:g} %."
        )
        return self.table("batches", "Batches compared", columns, rows, note=note)

    def bottlenecks(self) -> list[Table]:
        """Return the bottleneck class of every run, and what to try for each class, GPU and recipe."""
        # Cells of all runs, also of studies: every run is to have a class.
        sweeps = bottleneck.sweep_evidence(self.all_cells, self.runs)
        rows = []
        suggestions: dict[tuple[str, ...], list[int]] = {}
        several = self.runs["model"].n_unique() > 1
        # A run that ran out of memory is never valid, but that is its class.
        for row in self.runs.filter(pl.col("valid") | (pl.col("reason") == "oom_gpu")).iter_rows(named=True):
            result = bottleneck.classify(row, sweeps.get(row["run_id"]))
            tier = bottleneck.NO_VALUE if result.tier is None else str(result.tier)
            model = [row["model"] or DASH] if several else []
            head = [row["run_id"], gpu_label(row["gpu"]), *model, str(row["batch"] or DASH)]
            rows.append([*head, result.name, tier, result.evidence, result.runner_up])
            advice = bottleneck.format_advice(result.advice, row)
            # Runs with equal advice share a row, which lists their batches.
            key = (result.name, gpu_label(row["gpu"]), row["site"], *model, row[recipe_labels.COLUMN] or DASH, advice)
            if advice != bottleneck.NO_VALUE and row["workload"] != COMMAND:  # it has no keys of ours
                suggestions.setdefault(key, []).append(row["batch"] or 0)
        models = ["Model"] if several else []
        columns = ["Run", "GPU", *models, "Batch", "Class", "Tier", "Evidence", "Runner-up"]
        tiers = "; ".join(f"{tier} {text}" for tier, text in bottleneck.TIERS.items())
        note = f"Tiers of evidence: {tiers}. The first rule that matches decides; docs/bottlenecks.md lists all rules."
        note = " ".join(filter(None, [note, self.definitions_note]))
        classes = self.table("bottleneck", "Bottleneck of each run", columns, rows, note=note, run_column=0)
        advised = [
            [*key[:-1], ", ".join(str(batch or DASH) for batch in sorted(set(batches))), str(len(batches)), key[-1]]
            for key, batches in sorted(suggestions.items(), key=lambda item: (item[0][0], gpu_order(item[0][1])))
        ]
        columns = ["Class", "GPU", "Site", *models, "Recipe", "Batches", "Runs", "Suggestion"]
        note = "Overrides for a launch command, or Slurm options if they begin with two dashes; no gain is guaranteed."
        return [classes, self.table("advice", "Suggested changes", columns, advised, note=note)]

    def training_quality(self) -> list[Table]:
        """Return validation losses and quality metrics of valid runs per cell, if any run has them."""
        known = self.runs.filter("valid", pl.coalesce("validation", "quality_metrics").is_not_null())
        if known.is_empty():
            return []
        # Losses on other images, or after another number of steps, are not comparable.
        cells = known.partition_by([*CELL_KEYS, "data_identity", "validation_last_step"], maintain_order=True)
        cells.sort(key=lambda cell: (str(cell["gpu"][0]), cell["batch"][0], str(cell["site"][0])))
        several = known["data_identity"].n_unique() > 1
        names = list(dict.fromkeys(name for text in known["quality_metrics"] for name in json.loads(text or "{}")))
        rows = []
        for cell in cells:
            first = cell.row(0, named=True)
            metrics = [json.loads(text or "{}") for text in cell["quality_metrics"]]
            keys = [gpu_label(first["gpu"]), str(first["batch"]), first["recipe"], first["site"]]
            keys += [(first["data_identity"] or "unknown")[:8]] if several else []
            losses = [_loss(cell, when) for when in ("first", "last")]
            means = [_metric([metric.get(name) for metric in metrics]) for name in names]
            rows.append([*keys, str(cell.height), *losses, *means])
        columns = ["GPU", "Batch", "Recipe", "Site", *(["Data set"] if several else []), "n"]
        columns += ["Validation loss, first", "last", *names]
        note = "Mean (min\u2013max) over n runs; [images per run] after a metric. Validation uses fixed images, noise "
        note += f"and timesteps, so its losses are comparable between recipes{' on one data set' if several else ''}."
        return [self.table("training-quality", "Training quality", columns, rows, note=note)]

    def skipped_images(self) -> Table:
        """Return the images that the data source skipped, each once, with the reason."""
        known = self.runs.filter(pl.col("images_skipped") > 0)
        images = [
            (row["site"] or DASH, image["file"], image["reason"])
            for row in known.iter_rows(named=True)
            for image in json.loads(row["skipped_images"] or "[]")
        ]
        rows = [list(image) for image in dict.fromkeys(images)][:MAX_SKIPPED_IMAGES]
        most = max(known["images_skipped"], default=0)
        note = f"{len(rows)} listed; the run that skipped most skipped {most:,}." if rows else ""
        return self.table("skipped-images", "Skipped images", ["Site", "File", "Reason"], rows, note=note)

    def skipped_files(self, skipped: pl.DataFrame) -> Table:
        """Return everything that the merge skipped, with the reason."""
        rows = [list(row) for row in skipped.select("code", "path", "reason").iter_rows()]
        return self.table("skipped-files", "Skipped files", ["Kind", "Path", "Reason"], rows)

    def environment(self) -> Table:
        """Return the number of runs per node, card, driver and versions, also of the code."""
        keys = ["site", "node", "gpu_name", "power_limit_w", "driver", "torch", "cuda", "precision", "source"]
        keys += ["code_version"]
        counts = self.runs.group_by(keys).agg(n=pl.len()).sort(keys, nulls_last=True)
        rows = [
            [number(value) if key == "power_limit_w" else str(value or DASH) for key, value in row.items()]
            for row in counts.iter_rows(named=True)
        ]
        columns = ["Site", "Node", "GPU name", "Power limit [W]", "Driver", "torch", "CUDA", "Precision"]
        return self.table("environment", "Environment", [*columns, "Telemetry", "Code", "Runs"], rows)


_HEADINGS = {
    "resolution_px": "Resolution [px]",
    "gpus": "GPUs",
    "nodes": "Nodes",
    "comparability_key": "GPU name, driver, power",
}
_HEADINGS |= {"encodes_online": "Latents", "text_online": "Texts", "inactive_levers": "Levers"}


def _is_numeric(cells: Sequence[str]) -> bool:
    # One mean makes a column numeric: a text in it, e.g. `unavailable`, stands for a mean.
    return any(isinstance(c, Estimate) for c in cells) or all(c == DASH or NUMBER.fullmatch(c) for c in cells)


def mean_text(row: dict[str, Any], metric: str) -> str:
    """Return the mean with its interval, or the range of too few runs, and the metric's n if it is not the row's."""
    n, value = row[f"{metric}_n"], row[metric]
    if row.get("withheld") and n:
        least, most = (number(row[f"{metric}_{end}"]) for end in ("min", "max"))
        return f"runs disagree ({least}\u2013{most})"
    if value is None:
        return DASH
    low, high, least, most = (row[f"{metric}_{end}"] for end in ("low", "high", "min", "max"))
    remarks = [f"n = {n}"] if 0 < n < row["n"] else []
    return Estimate(value, low, high, least=least, most=most, form=number, remarks=remarks, narrow=False)


def card_count(cell: dict[str, Any]) -> str:
    """Return how many different cards a cell's runs used; a dash if no run recorded its card."""
    return str(cell["cards"] or DASH)


def _by_batch(ratio: Ratio) -> str:
    parts = []
    for batch, value in ratio.by_batch.items():
        gain = ratio.gains.get(batch)
        text = f"{batch}: {value:.2f}"
        if gain and gain.low is not None and gain.high is not None:
            text += f" ({'tie, ' if gain.tie else ''}{1 + gain.low:.2f} to {1 + gain.high:.2f})"
        parts.append(text)
    return ", ".join(parts)


def _choice(choice: best_batch.Choice | None) -> list[str]:
    if choice is None:
        return [DASH] * 3
    ties = ", ".join(map(str, choice.ties)) or ("only one batch measured" if len(choice.ranking) == 1 else "none")
    return [str(choice.batch), mean_text(choice.cell, choice.metric), ties + ("; n = 1" if choice.n == 1 else "")]


def _loss(cell: pl.DataFrame, when: str) -> str:
    steps = cell[f"validation_{when}_step"].drop_nulls().unique().sort().to_list()
    text = _mean_and_range(cell[f"validation_{when}_loss"].drop_nulls().to_list())
    return text + (f" at step {', '.join(map(str, steps))}" if steps else "")


def _metric(results: list[dict[str, Any] | None]) -> str:
    """Return the mean of a quality metric, or the reason why it is unavailable: never an empty cell."""
    known = [result for result in results if result and result.get("value") is not None]
    reasons = dict.fromkeys(str(result["unavailable"]) for result in results if result and result.get("unavailable"))
    counts = sorted({result["n"] for result in known if result.get("n")})
    text = _mean_and_range([result["value"] for result in known])
    parts = [text + (f" [{', '.join(map(str, counts))}]" if counts else "")] if known else []
    return "; ".join([*parts, *(f"unavailable: {reason}" for reason in reasons)]) or DASH


def _mean_and_range(values: list[float]) -> str:
    if not values:
        return DASH
    mean = number(sum(values) / len(values))
    return mean if len(values) == 1 else f"{mean} ({number(min(values))}\u2013{number(max(values))})"
