"""The report's tables as plain data: rendered to the terminal, Markdown and HTML elsewhere."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import polars as pl

from . import aggregate, bottleneck, published, study
from .metrics import METRICS, gpu_label, gpu_order, number, runtime_heading
from .runs import is_unavailable

ONE_RUN = "n = 1: one run per cell, no interval."
RANGES = "Mean (min\u2013max) over n runs; no range where n = 1."
PHOTOGRAPHS_SHOWN = 50
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


@dataclass(kw_only=True)
class Builder:
    """Makes tables of one dataset; a demonstration is named in every title."""

    runs: pl.DataFrame
    cells: pl.DataFrame = field(init=False)  # of the overview: what only a study ran has tables of its own
    apart: list[str] = field(init=False)  # recipes that are not in the overview

    def __post_init__(self) -> None:
        shown = study.overview(self.runs)
        self.cells = aggregate.cells(shown)
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
        extra = [name for name in aggregate.TELLING if name != "recipe" and self._varies(name)]
        rows = [
            [row["site"], gpu_label(row["gpu"]), str(row["batch"]), row["recipe"] or "\u2013"]
            + [str(row["n"]), cards(row)]
            + [str(row[name]) for name in extra]
            + [spread(row, name) for name in metrics]
            for row in self.cells.iter_rows(named=True)
        ]
        interval = ONE_RUN if self.one_run else RANGES
        parts = [note, interval, aggregate.mixed_note(self.cells), aggregate.found_note(self.cells), self.apart_note()]
        columns = [*keys, *(_HEADINGS.get(name, name.capitalize()) for name in extra), *map(self.heading, metrics)]
        return self.table(id, title, columns, rows, note=" ".join(p for p in parts if p))

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
        facts = {"Point": "point", "Try": "attempt", "Recipe": "recipe"}
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
        return self.table("runs", "Runs", columns, rows, note=note, run_column=0)

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
                row["message"] or "",
            ]
            for row in lost.iter_rows(named=True)
        ]
        columns = ["Run", "Point", "Site", "GPU", "Batch", "Why it does not count", "Message"]
        muted = frozenset(i for i, row in enumerate(lost.iter_rows(named=True)) if is_unavailable(row))
        return self.table("not-counted", "Runs that do not count", columns, rows, run_column=0, muted_rows=muted)

    def gpu_ratios(self) -> Table:
        rows = []
        groups = self.cells.partition_by(aggregate.COMPARABLE, maintain_order=True) if self.cells.height else []
        for ratio in (r for group in groups for r in aggregate.ratios(group, value="images_per_s")):
            each = ", ".join(f"{batch}: {value:.2f}" for batch, value in ratio.by_batch.items())
            rows.append([f"{ratio.fast} / {ratio.slow}", ratio.text, each])
        poster = (self.runs["workload"] == published.WORKLOAD).any()
        for ratio in published_ratios() if poster else []:
            each = ", ".join(f"{batch}: {value:.2f}" for batch, value in ratio.by_batch.items())
            rows.append([f"{ratio.fast} / {ratio.slow} (published)", ratio.text, each])
        note = "How many times faster at equal batch, by images/s; the range is over batches. " + (
            ONE_RUN if self.one_run else "Ratios of means."
        )
        drivers = sorted(self.runs.filter(pl.col("valid"))["driver"].drop_nulls().unique().to_list())
        if len(drivers) > 1:
            note += f" Drivers differ between runs ({', '.join(drivers)}): see the environment table."
        note = " ".join(p for p in (note, aggregate.mixed_note(self.cells), aggregate.found_note(self.cells)) if p)
        return self.table("ratios", "GPU ratios", ["Pair", "Range", "By batch"], rows, note=note)

    def best_batch(self) -> Table:
        rows = []
        for metric, lowest, words in (
            ("images_per_s", False, "fastest (images/s)"),
            ("joules_per_image", True, "least energy (J/image)"),
        ):
            for best in aggregate.best_batches(self.cells, metric=metric, lowest=lowest):
                rows.append([best.series, words, str(best.batch), number(best.value), _verdict(best)])
        rows.sort(key=lambda row: gpu_order(row[0]))
        columns = ["GPU", "By", "Best batch", "Value", "Reading"]
        note = "A tie is within 2 %, or, with more than one run each, ranges that overlap; take the smallest."
        note = " ".join(p for p in (note, aggregate.mixed_note(self.cells), aggregate.found_note(self.cells)) if p)
        return self.table("best", "Best batch per GPU", columns, rows, note=note)

    def bottlenecks(self) -> Table:
        rows = []
        for row in self.runs.filter(pl.col("valid") | (pl.col("reason") == "oom_gpu")).iter_rows(named=True):
            name, evidence = bottleneck.classify(row)
            rows.append([row["run_id"], gpu_label(row["gpu"]), str(row["batch"]), name, evidence])
        columns = ["Run", "GPU", "Batch", "Class", "Evidence"]
        note = f"Tier {bottleneck.TIER}: evidence of a single run; first rule that matches, thresholds not fitted."
        return self.table("bottleneck", "What held it back", columns, rows, note=note, run_column=0)

    def environment(self) -> Table:
        keys = ["site", "node", "gpu_name", "power_limit_w", "driver", "torch", "cuda", "precision", "source"]
        table = self.runs.group_by(keys).agg(pl.len().alias("n")).sort(keys, nulls_last=True)
        rows = [
            [number(v) if k == "power_limit_w" else str(v or "\u2013") for k, v in row.items()]
            for row in table.iter_rows(named=True)
        ]
        columns = ["Site", "Node", "Board", "Power limit [W]", "Driver", "torch", "CUDA", "Precision"]
        return self.table("environment", "Environment", [*columns, "Telemetry", "Runs"], rows)


_HEADINGS = {"resolution_px": "Resolution [px]", "gpus": "GPUs"}
_TEXT_COLUMNS = frozenset(
    name
    for group in (
        ("Run", "Point", "Site", "GPU", "Recipe", "Status", "Counts", "Telemetry", "Why it does not count", "Message"),
        ("By", "Reading", "Class", "Evidence", "Pair", "By batch", "Model", "Workload", "Demonstration"),
        ("Node", "Board", "Driver", "torch", "CUDA", "Precision"),
        ("Step", "Lever", "Levers as found", "Figure"),
    )
    for name in group
)


def spread(row: dict[str, Any], metric: str) -> str:
    """Mean, with min and max where runs differ as printed, and the metric's n where not every run has it."""
    n, inside = row[f"{metric}_n"], []
    if n > 1:
        ends = dict.fromkeys(number(row[f"{metric}_{end}"]) for end in ("min", "max"))
        inside += ["\u2013".join(ends)] if len(ends) > 1 else []
    if 0 < n < row["n"]:
        inside.append(f"n = {n}")
    return number(row[metric]) + (f" ({', '.join(inside)})" if inside else "")


def cards(row: dict[str, Any]) -> str:
    """How many different cards a cell's runs used; an en dash where no run names its card."""
    return str(row["cards"] or "\u2013")


def published_ratios() -> list[aggregate.Ratio]:
    """The poster's speed-ups, from its hours, by the same code as ours."""
    hours = published.shown().filter(pl.col("metric") == "runtime_h")
    hours = hours.with_columns(pl.col("gpu").map_elements(gpu_label, pl.String).alias("series"))
    return aggregate.ratios(hours, value="value", lower_is_faster=True)


def _verdict(best: aggregate.Best) -> str:
    if best.candidates == 1:
        return "only batch measured"
    words = f"no tie among {best.candidates} batches"
    if best.ties:
        words = f"tie with {', '.join(map(str, best.ties))}: take {best.smallest}"
    return words + ("; n = 1, no interval" if best.n == 1 else "")


def photographs_skipped(runs: pl.DataFrame, title: str) -> Table:
    """Photographs that the data set's reader left out, each once, with why."""
    known = runs.filter(pl.col("images_skipped") > 0)
    named = {
        (row["site"], one["file"], one["reason"]): None
        for row in known.iter_rows(named=True)
        for one in json.loads(row["skipped_photographs"] or "[]")
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
