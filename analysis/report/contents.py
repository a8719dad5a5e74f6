"""What a report of a merged dataset says, whatever it is written as: headline, facts, tables and sections."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import polars as pl

from analysis import recipe_labels
from analysis.dataset import Dataset
from analysis.metrics.run_row import is_unavailable
from analysis.stats import study
from analysis.stats.cells import disagreement_note, is_distinguishable, is_same_work
from analysis.units import gpu_label, gpu_order, list_some, number

from . import commands, workloads
from .figures.base import mark_demonstration
from .sections import counters, decision, poster, profiles, scaling, study_tables
from .tables import Table, TableBuilder

_INVENTED = "synthetic"  # in the name of a recording that benchmarks/make_synthetic_captures.py made


@dataclass(frozen=True, kw_only=True)
class Report:
    """Everything that a report shows, except the figures, whatever it is written as."""

    dataset: Dataset
    demonstration: str  # why the report is a demonstration; empty if it is none
    notes: list[str]  # what to know of how the dataset was merged, and which planned points it lacks
    headline: str
    disagreement: str  # cells whose runs disagree, so that they have no mean; empty if there are none
    facts: dict[str, str]
    quality: dict[str, str]
    conflicts: list[str]  # run directories that have the id of another run
    tables: dict[str, list[Table]]  # by section of the page
    workloads: list[workloads.Section]  # the profiles, and of those workloads that have results of their own

    def all_tables(self) -> list[Table]:
        """Return every table in the order of Markdown."""
        own = [table for section in self.workloads for table in section.tables]
        rest = [table for name, tables in self.tables.items() for table in tables if name != "decision"]
        return [*self.tables["decision"], *own, *rest]


def make_report(dataset: Dataset, build: TableBuilder, notes: list[str]) -> Report:
    """Compute the report of a dataset. Reads the table of runs and the workloads' results, not the samples."""
    runs = dataset.runs
    decisions = decision.tables(build)
    ratios = [table for table in [build.gpu_ratios(poster.ratios(runs))] if table.rows]  # none with one GPU
    sections = [
        *scaling.sections(build),
        *profiles.sections(dataset, build),
        *counters.sections(dataset, build),
        *workloads.sections(dataset, build),
        *commands.sections(build),
    ]
    if build.demonstration:
        sections = [replace(section, figures=mark_demonstration(section.figures)) for section in sections]
    skipped_images = [table for table in [build.skipped_images()] if table.rows]
    return Report(
        dataset=dataset,
        demonstration=_demonstration(runs),
        notes=notes,
        headline=headline(build),
        disagreement=disagreement_note(build.all_cells),
        facts=_facts(dataset),
        quality=_quality(dataset, build.cells),
        conflicts=dataset.skipped.filter(pl.col("code") == "conflict")["path"].to_list(),
        tables={  # the recommendation first, then the results behind it, the records last
            "decision": decisions[:1],
            "recipes": build.recipes(),
            "results": [
                *decisions[1:],
                build.compared_batches(),
                build.throughput(),
                build.energy(),
                build.memory(),
            ],
            "levers": [study_tables.table(build, comparison) for comparison in study.comparisons(runs)],
            "findings": [
                *ratios,
                *study_tables.recipe_comparison(build),
                *reversed(build.bottlenecks()),  # what to do before the reason of each run
            ],
            **poster.sections(build),
            "training": build.training_quality(),
            "runs": [build.run_list(), build.cell_remarks()],
            "excluded": [build.excluded(), build.skipped_files(dataset.skipped), *skipped_images],
            "environment": [build.environment()],
        },
        workloads=sections,
    )


def _demonstration(runs: pl.DataFrame) -> str:
    marked = runs.filter("demonstration")
    if marked.is_empty():
        return ""
    sources = marked["source"].fill_null("").str.to_lowercase()
    replayed = int(sources.str.contains("replay", literal=True).sum())
    text = f"{marked.height} of {runs.height} runs are demonstrations"
    text += f", {replayed} of them with telemetry replayed from a recording. " if replayed else ". "
    invented = marked.filter(sources.str.contains(_INVENTED, literal=True))["gpu"].unique().to_list()
    if invented:
        names = " and ".join(map(gpu_label, sorted(invented, key=gpu_order)))
        text += f"The telemetry of {names} is invented: a program made the recording, no card was measured. "
    return f"{text}The numbers show how the pipeline works; they say nothing about the GPUs they name."


def headline(build: TableBuilder) -> str:
    """Return how many runs are valid, and the fastest and the most efficient cell with their ties."""
    runs = build.runs
    sentences = [f"{runs.filter('valid').height} of {runs.height} runs are valid."]
    cells = build.all_cells  # those of studies too: the fastest is the fastest
    # Among different kinds of work, a smaller model or image would always be the fastest.
    comparable = is_same_work(cells)
    for metric, lower_is_better, label, unit in (
        ("images_per_s", False, "Fastest", "images/s"),
        ("joules_per_image", True, "Least energy", "J per image"),
    ):
        # A run of `watch` has no batch; `commands` reports it.
        known = cells.drop_nulls([metric, "batch"]).sort(metric, descending=not lower_is_better).to_dicts()
        if known and comparable:
            best, others = known[0], known[1:]
            is_better = partial(is_distinguishable, best, metric=metric, lower_is_better=lower_is_better)
            tied = [_cell_name(cell) for cell in others if not is_better(cell)]
            text = f"{label}: {_cell_name(best)}, {number(best[metric])} {unit}"
            sentences.append(f"{text}; tied with {list_some(tied)}." if tied else f"{text}.")
    if not comparable:
        differ = "The runs differ in workload, model or resolution, or some are demonstrations"
        sentences.append(f"{differ}: there is no overall fastest.")
    if cells.height and (cells["n"] == 1).all():
        sentences.append("One run per cell, so there are no confidence intervals.")
    return ("Demonstration only: " if build.demonstration else "") + " ".join(sentences)


def _cell_name(cell: dict[str, Any]) -> str:
    return f"{cell['series']} at batch {cell['batch']}"


def _values(column: pl.Series) -> str:
    return ", ".join(map(str, column.drop_nulls().unique().sort())) or "unknown"


def _facts(dataset: Dataset) -> dict[str, str]:
    runs, metadata = dataset.runs, dataset.metadata
    gpus = sorted(runs["gpu"].drop_nulls().unique(), key=gpu_order)
    recipes = study.overview_runs(runs)[recipe_labels.COLUMN]
    in_studies = runs[recipe_labels.COLUMN].drop_nulls().n_unique() - recipes.drop_nulls().n_unique()
    times = runs.select(pl.col("started").min(), pl.col("ended").max()).row(0)
    merged_at = str(metadata.get("merged_at"))[:16].replace("T", " ")
    return {
        "Workload": f"{_values(runs['workload'])}, model {_values(runs['model'])}",
        "GPUs": ", ".join(map(gpu_label, gpus)) or "none",
        "Batch sizes": _values(runs["batch"]),
        "Recipes": _values(recipes) + (f", and {in_studies} more in studies" if in_studies else ""),
        "Sites": _values(runs["site"]),
        "Time": " to ".join(f"{time:%Y-%m-%d %H:%M}" for time in times if time) + " UTC" if any(times) else "unknown",
        "Merged": f"{merged_at} UTC from {', '.join(metadata.get('roots', []))}",
        "Software": str(metadata.get("producer")),
    }


def _quality(dataset: Dataset, cells: pl.DataFrame) -> dict[str, str]:
    runs = dataset.runs
    valid = runs.filter("valid")
    invalid = runs.filter((pl.col("status") == "completed") & ~pl.col("valid")).height
    unavailable = sum(map(is_unavailable, runs.select("status", "reason").to_dicts()))
    coverage = valid["coverage_pct"].drop_nulls().to_list()
    versions = valid["code_version"].drop_nulls().n_unique()
    without_run = sum(entry["points"] for entry in dataset.metadata.get("points_without_run", []))
    return {
        "Run directories": str(dataset.metadata.get("run_directories")),
        "Runs merged": str(runs.height),
        "Valid": str(valid.height),
        "Completed but invalid": str(invalid),
        "Failed or unfinished": str(runs.height - valid.height - invalid - unavailable),
        **({"Unavailable": str(unavailable)} if unavailable else {}),
        **({"Planned points without a run": str(without_run)} if without_run else {}),
        "Skipped files": str(dataset.skipped.height),
        "Lowest sample coverage": f"{min(coverage):.1f} %" if coverage else "no samples",
        "Energy counter / integral": _range(valid["energy_ratio"].drop_nulls().to_list(), ".3f"),
        **({"Code versions": str(versions)} if versions > 1 else {}),
        "Runs per cell": _range(cells["n"].to_list(), "d"),
    }


def _range(values: list[Any], form: str) -> str:
    if not values:
        return "unknown"
    return "\u2013".join(dict.fromkeys(f"{end:{form}}" for end in (min(values), max(values))))
