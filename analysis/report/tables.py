"""Tables and sections of the report as plain data; other modules write them to the terminal and to files."""

import json
import re
import textwrap
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import polars as pl

from analysis import recipe_labels
from analysis.columns import METRICS, shown_in
from analysis.metrics.run_row import is_unavailable
from analysis.stats import bottleneck
from analysis.stats import cells as stats
from analysis.units import gpu_label, gpu_order, made, number, runtime_heading
from inpaint_bench.core.console import pluralize
from inpaint_bench.core.schema import COMMAND

from . import names
from .estimate import Estimate
from .figures.base import Figure

DASH = "\u2013"  # an empty cell
NUMBER = re.compile(r"([+-]?)([\d,]+(?:\.\d+)?)(?:e([+-]?)0*(\d+))?")  # as tables print it: sign, digits, power
_NUMBER_OR_DASH = re.compile(f"{NUMBER.pattern}|{DASH}")
SUMMARIES = {"throughput": "Throughput", "energy": "Power, energy and temperature", "memory": "Memory"}
FIRST_ROWS = 8  # rows on the first screen
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
    lead_columns: tuple[str, ...] = ()  # columns on the first screen; empty: all
    lead_rows: tuple[int, ...] = ()  # rows on the first screen, in the order of the answer; empty: the first ones

    lead_count: int = FIRST_ROWS  # the most rows on the first screen

    def brief(self, rows: Sequence[int] = ()) -> Self:
        """Return what the first screen, the terminal and a column of a paper have of the table, or of these rows."""
        shown = rows or (self.lead_rows or range(len(self.rows)))[: self.lead_count]
        lead = [self.columns.index(name) for name in self.lead_columns if name in self.columns]
        columns = [i for i in lead or range(len(self.columns)) if any(self.rows[row][i] != DASH for row in shown)]
        return replace(
            self,
            columns=[self.columns[i] for i in columns],
            rows=[[self.rows[row][i] for i in columns] for row in shown],
            note="",
            text_columns=frozenset(at for at, i in enumerate(columns) if i in self.text_columns),
            muted_rows=frozenset(at for at, row in enumerate(shown) if row in self.muted_rows),
            strong_rows=frozenset(at for at, row in enumerate(shown) if row in self.strong_rows),
            row_runs=[self.row_runs[row] for row in shown] if self.row_runs else [],
        )

    def made_by(self, workloads: Collection[str | None]) -> Self:
        """Return the table with the units of what these workloads make."""
        columns, lead = ([made(name, workloads) for name in names] for names in (self.columns, self.lead_columns))
        return replace(self, columns=columns, lead_columns=(*lead,), note=made(self.note, workloads))


@dataclass(frozen=True, kw_only=True)
class Section:
    """What the report shows of one workload or subject.

    With an answer it is no fold: the answer, the first rows of its first table and its first figure are shown.
    """

    title: str
    workload: str = ""  # filled in by `sections`
    studied: str = ""  # workload of a study or of scaling, which may have a section of its own too
    kinds: tuple[str, ...] = ()  # what was compared, for the title: `ladder of levers`, or `recipes`, `batch sizes`
    answer: str = ""
    best: str = ""  # the figure of the answer, for an index: `173 images/s`
    facts: dict[str, str] = field(default_factory=dict)
    paragraphs: list[str] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)


@dataclass(kw_only=True)
class TableBuilder:
    """Makes the tables of one dataset. If any run is a demonstration, every title says so."""

    runs: pl.DataFrame
    cells: pl.DataFrame = field(init=False)
    definitions_note: str = ""  # which columns the merge defined differently

    def __post_init__(self) -> None:
        self.runs = recipe_labels.add_short_names(self.runs)
        self.cells = stats.withhold_means(stats.build_cells(self.runs))

    @property
    def demonstration(self) -> bool:
        return bool(self.runs["demonstration"].any())

    def table(self, id: str, title: str, columns: list[str], rows: list[list[str]], **options: Any) -> Table:
        """Make a table. Columns whose cells are not all numbers are text."""
        title = f"Demonstration: {title}" if self.demonstration else title
        # A column with a mean is numeric, even if a cell has a text in place of its mean, such as `unavailable`.
        text_columns = frozenset(
            i
            for i, cells in enumerate(zip(*rows, strict=True))
            if not (any(isinstance(c, Estimate) for c in cells) or all(map(_NUMBER_OR_DASH.fullmatch, cells)))
        )
        return Table(id=id, title=title, columns=columns, rows=rows, text_columns=text_columns, **options)

    def heading(self, metric: str) -> str:
        """Return the heading of a metric's column."""
        return runtime_heading(self.runs) if metric == "runtime_h" else METRICS[metric].heading

    def summary(self, id: str) -> Table:
        """Return a row per cell: its keys, what else varies between cells, and the metrics that the table shows."""
        with_cpu = "joules_per_image_with_cpu"  # few sites let a job read it
        metrics = [name for name in shown_in(id) if name != with_cpu or self.cells[f"{name}_n"].sum()]
        # A key that is the same in all cells needs no column.
        varying = [name for name in stats.varying_keys(self.cells) if name != "recipe"]
        rows = [
            [row["site"], gpu_label(row["gpu"]), str(row["batch"] or DASH), row[recipe_labels.COLUMN] or DASH]
            + [*counts(row), *(stats.key_text(row, name) or DASH for name in varying)]
            + [mean_text(row, name) for name in metrics]
            for row in self.cells.iter_rows(named=True)
        ]
        columns = ["Site", "GPU", "Batch", "Recipe", *COUNTS]
        columns += [*map(key_heading, varying), *map(self.heading, metrics)]
        listed = len(self.cell_remarks().rows)
        note = f"{pluralize(listed, 'cell')}: see the table of cells whose runs differ." if listed else ""
        return self.table(id, SUMMARIES[id], columns, rows, note=note, row_runs=self.cells["run_ids"].to_list())

    def recipes(self) -> Table:
        """Return what chooses every recipe of several levers in a launch."""
        rows = [[short, pasted] for short, pasted in recipe_labels.launch_overrides(self.runs).items()]
        return self.table("recipes", "Recipes", ["Recipe", "Overrides"], rows)

    def run_list(self) -> Table:
        metrics = ["runtime_h", "images_per_s", "gpu_util_pct", "power_w", "joules_per_image", "energy_error_pct"]
        disagreeing = set(self.cells.drop_nulls("disagreement")["run_ids"].explode())
        rows = []
        for row in self.runs.iter_rows(named=True):
            status = (row["status"] or "unknown") + (f" ({row['reason']})" if row["reason"] else "")
            facts = [row[name] or DASH for name in ("point", "attempt", "model", recipe_labels.COLUMN)]
            batch = str(row["batch"] or DASH) + (" (searched)" if row["batch_requested"] and row["batch"] else "")
            remarks = [f"{row['inactive_levers']} not active"] if row["inactive_levers"] else []
            if row["steady"] == "no":
                text = "not steady: mean step {step_mean_pct:+.1f} %, drift {step_drift_pct:+.1f} %"
                remarks.append(text.format(**row))
            remarks += ["disagrees with runs of its cell"] if row["run_id"] in disagreeing else []
            keys = [row["run_id"], *facts, row["site"], gpu_label(row["gpu"]), batch]
            keys += ["unavailable" if is_unavailable(row) else status, "yes" if row["valid"] else "no"]
            figures = (number(row[metric]) for metric in metrics)
            rows.append([*keys, *figures, row["source"] or DASH, "; ".join(remarks) or DASH])
        columns = ["Run", "Point", "Attempt", "Model", "Recipe", "Site", "GPU", "Batch", "Status", "Valid"]
        columns += [*map(self.heading, metrics), "Telemetry", "Remark"]
        return self.table("runs", "Runs", columns, rows, run_column=0)

    def cell_remarks(self) -> Table:
        """Return the cells whose runs differ or disagree, or whose batch was searched for."""
        remarked = (pl.col("differences") != "") | (pl.col("batch_searched") > 0)
        rows = []
        for row in self.cells.filter(pl.col("disagreement").is_not_null() | remarked).iter_rows(named=True):
            disagreement = (row["disagreement"] or DASH) + ("; no mean" if row["withheld"] else "")
            keys = [row["series"], str(row["batch"] or DASH), *counts(row)]
            rows.append([*keys, row["differences"] or DASH, disagreement, str(row["batch_searched"])])
        columns = ["Cell", "Batch", *COUNTS, "Its runs differ in", "Its runs disagree in", "Runs with a searched batch"]
        return self.table("cell-remarks", "Cells whose runs differ", columns, rows)

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
        note = "Messages that end with \u2026 are complete in runs.csv."
        return self.table("excluded", "Excluded runs", columns, rows, run_column=0, muted_rows=muted, note=note)

    def gpu_ratios(self, published: Sequence[stats.Ratio] = ()) -> Table:
        """Return how much faster each GPU is than the slower ones, and after these the published ratios."""
        # Within one group only the GPU, its site, the batch and what the comparability key names may differ.
        groups = self.cells.partition_by(stats.GPU_COMPARISON_KEYS, maintain_order=True)
        measured = [ratio for group in groups for ratio in stats.series_ratios(group, "images_per_s")]
        rows = [
            [f"{ratio.fast} / {ratio.slow}{source}", ratio.text, _by_batch(ratio)]
            for source, ratios in (("", measured), (" (published)", published))
            for ratio in ratios
        ]
        note = "Ratio of images/s at equal batch size; the range is over batch sizes."
        note += " By batch: ratio of geometric means."
        note = " ".join([note, *names.of_many(sum(len(ratio.by_batch) for ratio in measured))])
        return self.table("ratios", "Speedup between GPUs", ["Pair", "Range", "By batch"], rows, note=note)

    def bottlenecks(self, kernel_times: pl.DataFrame | None = None) -> list[Table]:
        """Return what to try for each class, GPU and recipe, the class of every run, and the rules."""
        shared = bottleneck.shared_evidence(self.cells, self.runs, kernel_times)
        rows = []
        suggestions: dict[tuple[str, ...], list[int]] = {}
        # A run that ran out of memory is never valid, but that is its class.
        for row in self.runs.filter(pl.col("valid") | (pl.col("reason") == "oom_gpu")).iter_rows(named=True):
            result = bottleneck.classify(row, shared.get(row["run_id"]))
            gpu, model = gpu_label(row["gpu"]), row["model"] or DASH
            tier = str(result.tier or bottleneck.NO_VALUE)
            run = [row["run_id"], gpu, model, str(row["batch"] or DASH)]
            rows.append([*run, result.name, result.shares, tier, result.evidence, result.runner_up])
            advice = made(bottleneck.format_advice(result.advice, row), [row["workload"]])
            # Runs with equal advice share a row, which lists their batches.
            if advice != bottleneck.NO_VALUE and row["workload"] != COMMAND:  # it has no keys of ours
                key = (result.name, gpu, row["site"], model, row[recipe_labels.COLUMN] or DASH, advice)
                suggestions.setdefault(key, []).append(row["batch"] or 0)
        tiers = "; ".join(f"{tier} {text}" for tier, text in bottleneck.TIERS.items())
        note = f"Tiers of evidence: {tiers}. The first rule that matches decides. {self.definitions_note}".strip()
        columns = ["Run", "GPU", "Model", "Batch", "Class", "Shares", "Tier", "Evidence", "Runner-up"]
        classes = self.table("bottleneck", "Bottleneck of each run", columns, rows, note=note, run_column=0)
        advised = [
            [*key[:-1], ", ".join(str(batch or DASH) for batch in sorted(set(batches))), str(len(batches)), key[-1]]
            for key, batches in sorted(suggestions.items(), key=lambda item: (item[0][0], gpu_order(item[0][1])))
        ]
        columns = ["Class", "GPU", "Site", "Model", "Recipe", "Batches", "Runs", "Suggestion"]
        note = "Overrides for a launch command, or Slurm options if they begin with two dashes; no gain is guaranteed."
        advice_table = self.table("advice", "Suggested changes", columns, advised, note=note)
        rules = [[name, when] for name, when, _, _ in bottleneck.describe_rules()]
        title = "Rules of the bottleneck classes"
        return [advice_table, classes, self.table("bottleneck-rules", title, ["Class", "When"], rules)]

    def training_quality(self) -> Table:
        """Return validation losses and quality metrics of valid runs per cell."""
        known = self.runs.filter("valid", pl.coalesce("validation", "quality_metrics").is_not_null())
        # Losses on other images, or after another number of steps, are not comparable.
        cells = known.partition_by([*stats.CELL_KEYS, "data_identity", "validation_last_step"], maintain_order=True)
        cells.sort(key=lambda cell: (str(cell["gpu"][0]), cell["batch"][0], str(cell["site"][0])))
        names = list(dict.fromkeys(name for text in known["quality_metrics"] for name in json.loads(text or "{}")))
        rows = []
        for cell in cells:
            first = cell.row(0, named=True)
            metrics = [json.loads(text or "{}") for text in cell["quality_metrics"]]
            keys = [gpu_label(first["gpu"]), str(first["batch"]), first["recipe"], first["site"]]
            keys += [(first["data_identity"] or "unknown")[:8], *counts(count_runs(cell))]
            losses = [_loss(cell, when) for when in ("first", "last")]
            rows.append([*keys, *losses, *(_metric([metric.get(name) for metric in metrics]) for name in names)])
        columns = ["GPU", "Batch", "Recipe", "Site", "Data set", *COUNTS, "Validation loss, first", "last", *names]
        note = "[images per run] after a metric. Validation uses fixed images, noise and timesteps, so its losses are "
        note += "comparable between recipes on one data set."
        return self.table("training-quality", "Training quality", columns, rows, note=note)

    def skipped_files(self, skipped: pl.DataFrame) -> Table:
        """Return everything that the merge skipped, and images that the data source skipped, each with the reason."""
        rows = [list(row) for row in skipped.select("code", "path", "reason").iter_rows()]
        known = self.runs.filter(pl.col("images_skipped") > 0)
        images = [
            ("image", f"{row['site'] or DASH}: {image['file']}", image["reason"])
            for row in known.iter_rows(named=True)
            for image in json.loads(row["skipped_images"] or "[]")
        ]
        listed = [list(image) for image in dict.fromkeys(images)][:MAX_SKIPPED_IMAGES]
        most = max(known["images_skipped"], default=0)
        note = f"{len(listed)} images listed; the run that skipped most skipped {most:,}." if listed else ""
        return self.table("skipped-files", "Skipped files", ["Kind", "Path", "Reason"], [*rows, *listed], note=note)

    def cards(self) -> Table:
        """Return how far the runs of each card are from the means of their cells, the furthest from 1 first."""
        cells = self.cells.with_row_index("cell").select("cell", "run_ids", pl.col(_OF_CARDS).name.suffix("_mean"))
        each = cells.explode("run_ids").join(self.runs, left_on="run_ids", right_on="run_id")
        # By node as well: if no UUID was recorded, another node is another card.
        several = each.filter(pl.struct("node", "gpu_uuid").n_unique().over("cell") > 1)
        ratios = {name: (pl.col(name) / pl.col(f"{name}_mean")).mean() for name in _OF_CARDS}
        cards = several.group_by("node", "gpu", "gpu_uuid").agg(pl.len(), **ratios)
        far = pl.max_horizontal((pl.col(name) - 1).abs() for name in _OF_CARDS)
        rows = []
        for node, gpu, uuid, count, *means in cards.sort(-far, "node", "gpu_uuid", nulls_last=True).iter_rows():
            ratio = (DASH if mean is None else f"{mean:.4f}" for mean in means)
            rows.append([node or DASH, gpu_label(gpu), uuid or DASH, str(count), *ratio])
        columns = ["Node", "GPU", "Card", "Runs", *(f"{METRICS[name].label}, ratio" for name in _OF_CARDS)]
        note = "Mean ratio of the runs of a card to the mean of their cell; cells with runs on several cards or nodes."
        return self.table("cards", "Variation between cards", columns, rows, note=note)

    def environment(self) -> Table:
        """Return the number of runs per node, card, driver and versions, also of the code."""
        keys = {"site": "Site", "node": "Node", "gpu_name": "GPU name", "power_limit_w": "Power limit [W]"}
        keys |= {"driver": "Driver", "torch": "torch", "cuda": "CUDA", "precision": "Precision"}
        keys |= {"source": "Telemetry", "code_version": "Code"}
        counts = self.runs.group_by(*keys).agg(n=pl.len()).sort(*keys, nulls_last=True)
        rows = [
            [number(value) if key == "power_limit_w" else str(value or DASH) for key, value in row.items()]
            for row in counts.iter_rows(named=True)
        ]
        return self.table("environment", "Environment", [*keys.values(), "Runs"], rows)


COUNTS = ("n", "Cards", "Not steady")
_OF_CARDS = ("images_per_s", "power_w")
_HEADINGS = {"resolution_px": "Resolution [px]", "gpus": "GPUs", "comparability_key": "GPU name, driver, power"}
_HEADINGS |= {"encodes_online": "Latents", "text_online": "Texts", "inactive_levers": "Levers"}


def key_heading(name: str) -> str:
    """Return the heading of a key of cells."""
    return _HEADINGS.get(name, name.capitalize())


def mean_text(row: dict[str, Any], metric: str) -> str:
    """Return the mean with its interval, or the range of too few runs, and the metric's n if it is not the row's."""
    n, value = row[f"{metric}_n"], row[metric]
    if row.get("withheld") and n:
        least, most = (number(row[f"{metric}_{end}"]) for end in ("min", "max"))
        return least if least == most else f"runs disagree ({least}\u2013{most})"
    if value is None:
        return DASH
    low, high, least, most = (row[f"{metric}_{end}"] for end in ("low", "high", "min", "max"))
    remarks = [f"n = {n}"] if 0 < n < row["n"] else []
    return Estimate(value, low, high, least=least, most=most, form=number, remarks=remarks, narrow=False)


def counts(cell: dict[str, Any]) -> list[str]:
    """Return the columns COUNTS: how many runs, different cards, and runs that were not steady; a dash for none."""
    return [str(cell["n"] or 0), *(str(cell[name] or DASH) for name in ("cards", "unsteady"))]


def count_runs(runs: pl.DataFrame) -> dict[str, Any]:
    """Return of some runs what `counts` shows."""
    return runs.select(pl.len().alias("n"), **stats.RUN_COUNTS).row(0, named=True)


def _by_batch(ratio: stats.Ratio) -> str:
    parts = []
    for batch, value in ratio.by_batch.items():
        gain = ratio.gains.get(batch)
        remarks = ["tie"] if gain and gain.tie else []
        if gain and gain.low is not None and gain.high is not None:
            remarks.append(f"{1 + gain.low:.2f} to {1 + gain.high:.2f}")
        remarks += [gain.remark] if gain and gain.remark and (gain.paired or gain.one_card_each) else []
        parts.append(f"{batch}: {value:.2f}" + (f" ({', '.join(remarks)})" if remarks else ""))
    return ", ".join(parts)


def _loss(cell: pl.DataFrame, when: str) -> str:
    steps = cell[f"validation_{when}_step"].drop_nulls().unique().sort().to_list()
    text = _mean(cell[f"validation_{when}_loss"].drop_nulls().to_list())
    return text + (f" at step {', '.join(map(str, steps))}" if steps else "")


def _metric(results: list[dict[str, Any] | None]) -> str:
    """Return the mean of a quality metric, or the reason why it is unavailable: never an empty cell."""
    known = [result for result in results if result and result.get("value") is not None]
    reasons = dict.fromkeys(str(result["unavailable"]) for result in results if result and result.get("unavailable"))
    counts = sorted({result["n"] for result in known if result.get("n")})
    text = _mean([result["value"] for result in known])
    parts = [text + (f" [{', '.join(map(str, counts))}]" if counts else "")] if known else []
    return "; ".join([*parts, *(f"unavailable: {reason}" for reason in reasons)]) or DASH


def _mean(values: list[float]) -> str:
    return Estimate(sum(values) / len(values), least=min(values), most=max(values), form=number) if values else DASH
