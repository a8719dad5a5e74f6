"""The files of a report: one page that works offline, Markdown, CSV, LaTeX, figures. Its answer in the terminal."""

import sys
from collections.abc import Collection, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import vl_convert

from analysis import recipe_labels
from analysis.dataset import definitions_note, open_dataset
from analysis.ingest import planned
from analysis.stats import agreement
from inpaint_bench.core import files
from inpaint_bench.core.console import echo, list_some, sanitize
from inpaint_bench.core.errors import UserError

from . import page, render
from .contents import Report, make_report
from .figures import svg
from .figures.base import Figure
from .sections import dataset_comparison, decision
from .tables import Table, TableBuilder

PAGE, TEXT, CSV, INDEX = "report.html", "report.md", "runs.csv", "index.html"
MARKER = ".inpaint-report"  # JSON: the files of the last report, the only ones that the next one removes
TERMINAL_WIDTH = 80  # characters, if the output is a file or a pipe
FORMATS = ("csv", "latex", "pdf", "png")
# PNG takes eleven times as long as PDF, and 900 runs have 70 figures: only on request.
DEFAULT_FORMATS = ("csv", "latex", "pdf")
PNG_SCALE = 2
BATCH_CURVE = "fig-images_per_s"


def write_report(dataset_dir: Path, out: Path, **options: Any) -> Path:
    """Write the report as `write` does, and return the path of the page."""
    write(dataset_dir, out, **options)
    return out / PAGE


def write(
    dataset_dir: Path,
    out: Path,
    *,
    formats: Collection[str] = DEFAULT_FORMATS,
    accept_disagreement: bool = False,
    compared_with: Path | None = None,
) -> Report:
    """Write the page and its files, and return what they say. Raises UserError if `out` cannot hold the report.

    `accept_disagreement` shows means of cells whose runs disagree (stats.agreement).
    """
    dataset = open_dataset(dataset_dir)
    if accept_disagreement:
        dataset = replace(dataset, runs=agreement.accept(dataset.runs))
    _check_target(dataset_dir, out)
    notes = [*dataset.notes, *planned.describe(dataset.metadata.get("points_without_run", []))]
    build = TableBuilder(runs=dataset.runs, definitions_note=definitions_note(dataset.metadata))
    compared = []
    if compared_with is not None:
        old = open_dataset(compared_with)
        notes += [f"{compared_with}: {note}" for note in old.notes]
        compared = [dataset_comparison.section(build, dataset_comparison.compare(old.runs, dataset.runs), old, dataset)]
    report = make_report(dataset, build, notes, compared)
    runs = dataset.runs.drop(recipe_labels.COLUMN, agreement.ACCEPTED, strict=False)
    contents = export(report.tables, report.figures, formats, demonstration=bool(report.demonstration))
    contents |= {CSV: render.runs_csv(runs).encode(), TEXT: markdown(report).encode()}
    _replace(out, contents | {PAGE: page.html(report, build, formats).encode()})
    return report


def write_index(folder: Path, out: Path, **options: Any) -> tuple[list[Report], list[str]]:
    """Write the report of every dataset in the folder, and a page that links to them, the newest first.

    `options` are those of `write`. Return the reports, and a sentence about each folder that is passed over.
    """
    _check_target(folder, out)
    _replace(out, {INDEX: b""})  # until it is known, but the folder is marked as ours
    reports, passed_over = [], []
    folders = sorted(path for path in folder.iterdir() if path.is_dir())
    for number, each in enumerate(folders, 1):
        echo(f"report {number} of {len(folders)}: {each.name}", error=True)
        try:
            reports.append(write(each, out / each.name, **options))
        except UserError as error:
            passed_over.append(f"Passed over: {error}")
    reports.sort(key=lambda report: str(report.dataset.runs["ended"].max() or ""), reverse=True)
    text = page.render("index.html.j2", reports=reports, passed_over=passed_over, page=PAGE)
    _replace(out, {INDEX: text.encode()})
    return reports, passed_over


def _check_target(source: Path, out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is not a folder; give a folder for the report.")
    if out.resolve() == source.resolve() or source.resolve() in out.resolve().parents:
        raise UserError(f"{out} lies inside the dataset, which the next merge replaces; choose another folder.")
    files.check_can_be_made(out)
    _previous_files(out)


def _replace(out: Path, contents: dict[str, bytes]) -> None:
    """Write these files in place of those of the previous report."""
    previous = _previous_files(out)
    if foreign := [name for name in contents if name not in previous and (out / name).exists()]:
        raise UserError(f"{out} holds {list_some(foreign)}, which no report wrote; move it away first.")
    # Also those that are not written again, e.g. PDFs that were not asked for this time.
    for name in previous:
        (out / name).unlink(missing_ok=True)
    # Before the files that it lists: a report that is interrupted from here on can still be replaced by the next one.
    files.replace_json(out / MARKER, {"files": list(contents)})
    for name, content in contents.items():
        files.replace_bytes(out / name, content)


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
    """Print what to know before the figures, and each answer with its first rows."""
    from rich.text import Text

    from inpaint_bench.core.console import Terminal

    console = Terminal(highlight=False, width=None if sys.stdout.isatty() else TERMINAL_WIDTH)

    def show(text: str, style: str = "", *, whole: bool = False) -> None:
        console.print(Text(sanitize(text, "\n"), style=style), soft_wrap=whole)

    show(report.title, "bold")
    if report.demonstration:
        show(f"DEMONSTRATION: {report.demonstration}", "bold reverse")
    for path in report.conflicts:
        show(f"CONFLICT: {path}: see skipped files", "bold red")
    for note in report.notes:
        show(f"NOTE: {note}", "bold")
    for section in report.answered:
        title = "" if section is report.answered[0] else f"{section.title}\n"  # as the page has them
        show(f"\n{title}{section.answer}", "bold")
        for table in section.tables[:1]:
            render.to_terminal(render.first_rows(table), console)
            # What is to be pasted is not broken.
            for line in decision.suggestions(table):
                show(line, whole=True)
    show(report.quality)


def markdown(report: Report) -> str:
    """Return the report without figures as Markdown, in the order of the page."""
    prefix = "Demonstration: " if report.demonstration else ""
    blocks = [f"# {render.inline(report.title)}"]
    blocks += [f"> **Demonstration.** {render.inline(report.demonstration)}"] if report.demonstration else []
    blocks += [f"> **Note.** {render.inline(note)}" for note in report.notes]
    for section in report.answered:
        blocks += [] if section is report.answered[0] else [f"## {render.inline(section.title)}"]
        blocks += [render.inline(section.answer), *(render.to_markdown(table.brief()) for table in section.tables[:1])]
    blocks.append(render.inline(report.quality))
    for section in report.sections:
        facts = "\n".join(f"- {name}: {render.inline(value)}" for name, value in section.facts.items())
        body = [facts, *map(render.inline, section.paragraphs), *map(render.to_markdown, section.tables)]
        if any(body):
            details = f"{section.title}: all rows" if section.answer else section.title
            blocks += [f"## {render.inline(details)}", *filter(None, body)]
    return "\n\n".join([*blocks, f"## {prefix}Method", *map(render.inline, page.method())])


def parse_formats(text: str) -> tuple[str, ...]:
    """Return the formats of `all`, `none`, or names separated by commas. Raises UserError for an unknown name."""
    if text in ("all", "none"):
        return FORMATS if text == "all" else ()
    names = text.split(",")
    if unknown := [name for name in names if name not in FORMATS]:
        known = ",".join(FORMATS)
        raise UserError(f"--export {text}: unknown format {unknown[0]!r}; give all, none, or any of {known}.")
    return tuple(name for name in FORMATS if name in names)


def export(
    tables: Iterable[Table], figures: Iterable[Figure], formats: Collection[str], *, demonstration: bool
) -> dict[str, bytes]:
    """Return the content of every file by its path below the report. Figures are always written as SVG."""
    contents: dict[str, bytes] = {}
    for table in tables:
        if "csv" in formats:
            contents[f"tables/{table.id}.csv"] = render.to_csv(table, demonstration=demonstration).encode()
        if "latex" in formats:
            contents[f"tables/{table.id}.tex"] = render.to_latex(table).encode()
    for figure in figures:
        contents[f"figures/{figure.id}.svg"] = svg.standalone(figure.svg).encode()
        if "pdf" in formats:
            contents[f"figures/{figure.id}.pdf"] = bytes(vl_convert.svg_to_pdf(svg.on_paper(figure.svg)))
        if "png" in formats:
            png = vl_convert.svg_to_png(svg.on_paper(figure.svg), scale=PNG_SCALE)
            contents[f"figures/{figure.id}.png"] = bytes(png)
    return contents


def write_for_paper(report: Report, folder: Path) -> list[str]:
    """Write the leading figure and the batch curve as SVG and PDF of one column's width, and return their files."""
    chosen = {figure.id: figure for figure in report.figures if figure.id == BATCH_CURVE}
    chosen |= {figure.id: figure for figure in report.answered[0].figures[:1]}
    contents = {
        f"{figure.id}.{suffix}": content
        for figure in chosen.values()
        for suffix, content in svg.column(figure.spec, figure.id, figure.title).items()
    }
    for name, content in contents.items():
        files.replace_bytes(folder / name, content)
    return list(contents)
