"""The files of a report: one page that works offline, Markdown, CSV, LaTeX, figures. Its answer in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import polars as pl

from analysis import recipe_labels, seal
from analysis.dataset import open_dataset
from analysis.ingest import planned
from analysis.stats import agreement
from analysis.stats.dataset_comparison import compare
from analysis.units import list_some
from inpaint_bench.core import files
from inpaint_bench.core.console import sanitize
from inpaint_bench.core.errors import UserError

from . import export, page, render
from .contents import Report, make_report
from .figures import overview
from .sections import dataset_comparison, decision
from .tables import TableBuilder

PAGE, TEXT, CSV = "report.html", "report.md", "runs.csv"
MARKER = ".inpaint-report"  # JSON: the files of the last report, the only ones that the next one removes
TERMINAL_WIDTH = 80  # characters, where the output is a file or a pipe


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
        raise UserError(f"{out} holds {list_some(foreign)}, which no report wrote; move it away first.")
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
