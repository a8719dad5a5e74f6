"""The report of a merged dataset: terminal tables, Markdown, CSV, LaTeX, figures, and one page that works offline."""

from __future__ import annotations

import sys
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import polars as pl

from analysis import recipe_labels, seal
from analysis.dataset import Dataset, open_dataset
from analysis.ingest import planned
from analysis.metrics.run_row import is_unavailable
from analysis.stats import agreement, study
from analysis.stats.cells import disagreement_note, is_distinguishable, is_same_work
from analysis.stats.dataset_comparison import compare
from analysis.units import gpu_label, gpu_order, number
from inpaint_bench.core import files
from inpaint_bench.core.console import sanitize
from inpaint_bench.core.errors import UserError

from . import commands, export, page, render, workloads
from .figures import overview
from .sections import counters, dataset_comparison, decision, poster, profiles, scaling, study_tables
from .tables import Table, TableBuilder

_INVENTED = "synthetic"  # in the name of a recording that benchmarks/make_synthetic_captures.py made
PAGE, TEXT, CSV = "report.html", "report.md", "runs.csv"
MARKER = ".inpaint-report"  # JSON: the files of the last report, the only ones that the next one removes
TERMINAL_WIDTH = 80  # characters, where the output is a file or a pipe


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
        workloads=[
            *scaling.sections(build),
            *profiles.sections(dataset, build),
            *counters.sections(dataset, build),
            *workloads.sections(dataset, build),
            *commands.sections(build),
        ],
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
        # A program of somebody else has no batch: `commands` tells of it.
        known = cells.drop_nulls([metric, "batch"]).sort(metric, descending=not lower_is_better).to_dicts()
        if known and comparable:
            best, others = known[0], known[1:]
            is_better = partial(is_distinguishable, best, metric=metric, lower_is_better=lower_is_better)
            tied = [_cell_name(cell) for cell in others if not is_better(cell)]
            text = f"{label}: {_cell_name(best)}, {number(best[metric])} {unit}"
            sentences.append(f"{text}; tied with {_some(tied)}." if tied else f"{text}.")
    if not comparable:
        differ = "The runs differ in workload, model or resolution, or some are demonstrations"
        sentences.append(f"{differ}: there is no overall fastest.")
    if cells.height and (cells["n"] == 1).all():
        sentences.append("One run per cell, so there are no confidence intervals.")
    return ("Demonstration only: " if build.demonstration else "") + " ".join(sentences)


def _cell_name(cell: dict[str, Any]) -> str:
    return f"{cell['series']} at batch {cell['batch']}"


def _some(names: list[str], most: int = 3) -> str:
    """Return the first names, and the number of the others."""
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")


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


def write_report(
    dataset_dir: Path,
    out: Path,
    *,
    terminal: bool = False,
    formats: Collection[str] = export.DEFAULT_FORMATS,
    accept_disagreement: bool = False,
    compared_with: Path | None = None,
) -> Path:
    """Write the page and its files, print the tables if `terminal`, and return the path of the page.

    `accept_disagreement` shows means of cells whose runs disagree (stats.agreement). `compared_with` is an older
    dataset, which the first section behind the figures compares this one with.

    Raises UserError if `out` cannot hold the report, or holds files that no report wrote.
    """
    dataset = open_dataset(dataset_dir)
    if accept_disagreement:
        dataset = replace(dataset, runs=agreement.accept(dataset.runs))
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is not a folder; give a folder for the report.")
    if out.resolve() == dataset_dir.resolve() or dataset_dir.resolve() in out.resolve().parents:
        raise UserError(f"{out} lies inside the dataset, which the next merge replaces; choose another folder.")
    previous = _previous_files(out)
    notes = seal.check(dataset.folder, dataset.metadata)
    notes += planned.describe(dataset.metadata.get("points_without_run", []))
    build = TableBuilder(runs=dataset.runs, definitions_note=seal.definitions_note(dataset.metadata))
    compared = []
    if compared_with is not None:
        old = open_dataset(compared_with)
        notes += [f"{compared_with}: {note}" for note in seal.check(old.folder, old.metadata)]
        compared = [dataset_comparison.section(build, compare(old.runs, dataset.runs), old, dataset)]
    report = make_report(dataset, build, notes)
    report = replace(report, workloads=[*compared, *report.workloads])
    # Drawn and exported before the first file is removed: an error here leaves the older report.
    figures, missing = overview.draw(dataset, build.cells.filter(~pl.col("withheld")))
    missing += (
        [f"Cells whose runs disagree: see {build.cell_remarks().title}."] if build.cells["withheld"].any() else []
    )
    all_figures = [figure for section in figures.values() for figure in section]
    all_figures += [figure for section in report.workloads for figure in section.figures]
    exports = export.export(report.all_tables(), all_figures, formats, demonstration=bool(report.demonstration))
    names = [PAGE, TEXT, CSV, *exports]
    if foreign := [name for name in names if name not in previous and (out / name).exists()]:
        raise UserError(f"{out} holds {_some(foreign)}, which no report wrote; move it away first.")
    # Also those that are not written again, e.g. PDFs that were not asked for this time.
    for name in previous:
        (out / name).unlink(missing_ok=True)
    # Before the files that it lists: a report that is interrupted from here on can still be replaced by the next one.
    files.replace_json(out / MARKER, {"files": names})
    for name, content in exports.items():
        files.replace_bytes(out / name, content)
    render.runs_csv(dataset.runs.drop(recipe_labels.COLUMN, agreement.ACCEPTED, strict=False), out / CSV)
    files.replace_bytes(out / TEXT, markdown(report).encode())
    # Last, because it links to the others.
    files.replace_bytes(out / PAGE, page.html(report, build, figures, missing, out, formats).encode())
    # After every file: a pipe that its reader has closed ends the process here.
    if terminal:
        print_answer(report)
    return out / PAGE


def _previous_files(out: Path) -> list[str]:
    """Return the files of the report in this folder. Raises UserError if the folder holds something else."""
    if not out.exists() or not any(out.iterdir()):
        return []
    try:
        marker = files.read_json(out / MARKER)
    except ValueError:
        marker = None
    names = marker.get("files") if isinstance(marker, dict) else None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f"{out} is not empty and not the folder of a report ({MARKER}); give a new or empty folder.")
    home = out.resolve()  # a marker may come from elsewhere: it must not name a file outside the folder
    # The folder is resolved, the name is not: a link in the report's folder may be removed, its target may not.
    return [name for name in names if home in (home / name).parent.resolve().joinpath(Path(name).name).parents]


def print_answer(report: Report) -> None:
    """Print what to know before the figures, the headline, and the decision table with what to run next."""
    from rich.text import Text

    from inpaint_bench.core.console import Terminal

    console = Terminal(highlight=False, width=None if sys.stdout.isatty() else TERMINAL_WIDTH)

    def show(text: str, style: str = "") -> None:
        console.print(Text(sanitize(text), style=style), soft_wrap=text.startswith("Fastest: "))

    if report.demonstration:
        show(f"DEMONSTRATION: {report.demonstration}", "bold reverse")
    for path in report.conflicts:
        show(f"CONFLICT: {path}: see skipped files", "bold red")
    for note in report.notes:
        show(f"NOTE: {note}", "bold")
    show(report.headline, "bold")
    for table in report.tables["decision"]:
        render.to_terminal(decision.brief(table), console)
        for line in decision.suggestions(table):
            show(line)
    if report.disagreement:
        show(f"NOTE: {report.disagreement}", "bold")


def markdown(report: Report) -> str:
    """Return the report without figures as Markdown."""
    prefix = "Demonstration: " if report.demonstration else ""
    title = f"# {prefix}Benchmark report"
    banner = [f"> **Demonstration.** {render.inline(report.demonstration)}"] if report.demonstration else []
    banner += [f"> **Note.** {render.inline(note)}" for note in report.notes]
    facts = [f"- {name}: {render.inline(value)}" for name, value in (*report.facts.items(), *report.quality.items())]
    blocks = [title, render.inline(report.headline), *banner, "\n".join(facts)]
    blocks += map(render.to_markdown, report.tables["decision"])
    for section in report.workloads:
        blocks += [f"## {prefix}{render.inline(section.title)}", *map(render.inline, section.paragraphs)]
        blocks += map(render.to_markdown, section.tables)
    rest = [table for name, tables in report.tables.items() if name != "decision" for table in tables]
    return "\n\n".join([*blocks, f"## {prefix}Results", *map(render.to_markdown, rest)])
