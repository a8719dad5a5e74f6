"""The page of a report: one HTML file without external resources, whose only script sorts and filters tables."""

import base64
import hashlib
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import polars as pl
from markupsafe import Markup, escape

from analysis import recipe_labels
from analysis.columns import METRICS
from analysis.stats.cells import CELL_KEYS
from analysis.units import gpu_label, made, number
from inpaint_bench.core.schema import SAMPLE_GRIDS

from .contents import RUNS, TIMELINES, Report
from .figures import base, svg
from .sections import decision, study_tables
from .tables import DASH, Table, TableBuilder

_UNITS = re.compile(
    r"(?<=\d) (?=%|W\b|s\b|MiB\b|h\b|\S+/s\b)|(?<=\bSD) (?=\d)|(?<=\bbatch) (?=\d)|(?<=\bn) (?==)|(?<=\bn =) "
)
_RANGE = re.compile(r"(?<=\d)\u2013(?=\d)")
_TEMPLATES = Path(__file__).parent / "templates"
PAGE_BYTES = 24 * 2**20  # limit for all sample images on one page
SHOWN_SECTIONS = 3  # answers that are not folded
_RUN_FIGURES = ("images_per_s", "joules_per_image", "power_w", "gpu_util_pct", "vram_pct", "temp_gpu_c_mean")


def method() -> list[str]:
    """Return the paragraphs on windows, validity, intervals and ties, which hold for every report."""
    return (_TEMPLATES / "method.txt").read_text(encoding="utf-8").strip().split("\n\n")


def render(template: str, **values: Any) -> str:
    """Return the HTML of a template. Everything is escaped except our own SVG, whose text is escaped already, style and
    script.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    # StrictUndefined makes a misspelt name in the template an error, not an empty place on the page.
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    script = (_TEMPLATES / "tables.js").read_text()
    environment.globals.update(
        figure_css=Markup(svg.css()),
        figure_font=Markup(svg.FONT),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        style=Markup((_TEMPLATES / "report.css").read_text()),
        **values,
    )
    environment.filters |= {"unbroken": _unbroken, "breakable": _breakable}
    return environment.get_template(template).render()


def html(report: Report, build: TableBuilder, formats: Collection[str]) -> str:
    """Return the page of a report."""
    samples, samples_note = embed_samples(report.dataset.folder, report.dataset.runs, CELL_KEYS)
    return render(
        "report.html.j2",
        anchor=anchor,
        constants=constants,
        formats=formats,
        mark=study_tables.NOT_ACTIVE,
        method=method(),
        report=report,
        runs=_run_entries(build),
        samples=samples,
        samples_note=samples_note,
        shown=SHOWN_SECTIONS,
        suggestions=decision.suggestions,
        special={"runs": RUNS, "timelines": TIMELINES},
        svg=lambda figure: Markup(figure.svg),
    )


def embed_samples(folder: Path, runs: pl.DataFrame, cell_keys: Sequence[str]) -> tuple[list[dict[str, str]], str]:
    """Return a grid per cell, of its first valid run: workload, run_id, title and URI; and a note on those left out."""
    known = runs.filter(pl.col("sample_grid").is_not_null())
    valid = known.filter("valid").sort("seed", "run_id", nulls_last=True)
    shown: list[dict[str, str]] = []
    remaining, left_out = PAGE_BYTES, 0
    for row in valid.unique(cell_keys, keep="first", maintain_order=True).iter_rows(named=True):
        path = folder / row["sample_grid"]
        if not path.is_file() or path.stat().st_size > remaining:
            # Goes on: a smaller image may still fit.
            left_out += 1
            continue
        content = path.read_bytes()
        remaining -= len(content)
        uri = f"data:image/png;base64,{base64.b64encode(content).decode()}"
        names = [gpu_label(row["gpu"]), *([row["model"]] if known["model"].n_unique() > 1 else [])]
        title = ", ".join([*names, f"batch {row['batch']}", row["recipe"], f"seed {row['seed'] or 0}"])
        shown.append({"workload": row["workload"], "run_id": row["run_id"], "title": title, "uri": uri})
    note = f"One valid run per recipe, GPU and batch; all {known.height} are in the dataset's {SAMPLE_GRIDS} folder."
    if left_out:
        note += f" {left_out} more are not on this page, which holds {PAGE_BYTES // 2**20} MiB of images."
    return shown, note if known.height else ""


def _unbroken(text: str) -> str:
    """Keep a number and its unit, `n = 3` and `1.6\u20131.7` on one line."""
    # A word joiner (U+2060) on either side of the dash, a no-break space (U+00A0) before the unit.
    return _RANGE.sub("\u2060\u2013\u2060", _UNITS.sub("\u00a0", text))


def _breakable(text: str) -> Markup:
    """Let a line end behind a comma, plus or underscore, by no character that would be pasted with the text."""
    return Markup(re.sub(r"(_|\+(?!\d)|,(?!\d))(?=\S)", r"\1<wbr>", str(escape(text))))


def constants(table: Table) -> tuple[dict[int, str], str]:
    """Return the columns with one value in all of several rows, and the sentences that state them above the table."""
    columns = enumerate(zip(*table.rows, strict=True) if len(table.rows) > 1 else ())
    constant = {index: cells[0] for index, cells in columns if len(set(cells)) == 1 and cells[0] != ""}
    known = [f"{table.columns[index]}: {cell}" for index, cell in constant.items() if cell != DASH]
    unknown = [table.columns[index] for index, cell in constant.items() if cell == DASH]
    texts = [f"In every row: {'; '.join(known)}."] if known else []
    return constant, " ".join([*texts, *([f"Not known of any row: {', '.join(unknown)}."] if unknown else [])])


def anchor(run_id: str) -> str:
    """Return an id that is safe in an attribute and in a link."""
    return "run-" + quote(run_id, safe="").replace("%", "_")


def _run_entries(build: TableBuilder) -> list[dict[str, Any]]:
    """Return each run with its title, overrides and figures, those of one cell together, and excluded ones last."""
    runs = {run["run_id"]: run for run in build.runs.iter_rows(named=True)}
    entries = []
    for run_id in dict.fromkeys([*build.cells["run_ids"].explode().drop_nulls(), *runs]):
        run = runs[run_id]
        figures = [(name, number(run[name])) for name in _RUN_FIGURES if run[name] is not None]
        known = [(made(METRICS[name].heading, [run["workload"]]), value) for name, value in figures]
        overrides = run["overrides"] or " ".join(recipe_labels.overrides(run["recipe"], run["recipe_parts"]))
        entries.append(run | {"title": base.run_title(run), "figures": known, "overrides": overrides or DASH})
    return entries
