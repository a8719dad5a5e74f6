"""The page of a report: one HTML file without external resources, whose only script sorts and filters tables."""

from __future__ import annotations

import base64
import hashlib
import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any
from urllib.parse import quote

from markupsafe import Markup, escape

from analysis import published, recipe_labels
from analysis.columns import METRICS
from analysis.dataset import Dataset
from analysis.stats import bottleneck
from analysis.stats.cells import CELL_KEYS
from analysis.units import number

from . import captions
from .contents import Report
from .figures import base, svg
from .figures.base import Figure
from .sections import sample_grids, study_tables
from .tables import DASH, TableBuilder, mean_text

_UNITS = re.compile(r"(?<=\d) (?=%|W\b|s\b|MiB\b|h\b)|(?<=\bn) (?==)|(?<=\bn =) ")
_RANGE = re.compile(r"(?<=\d)\u2013(?=\d)")
_TEMPLATES = Path(__file__).parent / "templates"
FOLDED_ROWS = 20  # above which a table is collapsed
_RUN_FIGURES = ("images_per_s", "joules_per_image", "power_w", "gpu_util_pct", "vram_pct", "temp_gpu_c_mean")


def html(
    report: Report,
    build: TableBuilder,
    figures: dict[str, list[Figure]],
    missing: list[str],
    out: Path,
    formats: Collection[str],
) -> str:
    """Return the HTML. Everything is escaped except our own SVG, whose text is escaped already, style and script."""
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
    sections = [*figures.values(), *(section.figures for section in report.workloads)]
    notes = [table.note for table in report.all_tables()]
    notes += [figure.caption for section in sections for figure in section]
    general = captions.general_sentences(notes)
    groups = _cell_groups(build)
    recommended = {ids[0] for table in report.tables["decision"] for ids in table.row_runs if ids}
    environment.globals.update(
        anchor=anchor,
        cell_of={run_id: group["id"] for group in groups for run_id in group["run_ids"]},
        constant_columns=captions.constant_columns,
        constants_text=captions.constants_text,
        figure_css=Markup(svg.css()),
        figure_font=Markup(svg.FONT),
        formats=formats,
        folded_rows=FOLDED_ROWS,
        mark=study_tables.NOT_ACTIVE,
        own=lambda text: captions.own_sentences(text, general),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        split_count=captions.split_count,
        style=Markup((_TEMPLATES / "report.css").read_text()),
        svg=lambda figure: Markup(figure.svg),
    )
    environment.filters |= {"unbroken": _unbroken, "breakable": _breakable}
    own = {section.workload for section in report.workloads}  # these show their pictures themselves
    samples, samples_note = sample_grids.embed(report.dataset.folder, report.dataset.runs, CELL_KEYS)
    return environment.get_template("report.html.j2").render(
        report=report,
        tables=report.tables,
        figures=figures,
        first_timelines=[f for f in figures["timelines"] if recommended.intersection(f.run_ids)],
        general=general,
        groups=groups,
        missing=missing,
        samples=samples,
        other_samples=[picture for picture in samples if picture["workload"] not in own],
        samples_note=samples_note,
        runs=_run_entries(report.dataset, out),
        rules=bottleneck.describe_rules(),
        source=published.SOURCE,
    )


def _unbroken(text: str) -> str:
    """Keep a number and its unit, `n = 3` and `1.6\u20131.7` on one line."""
    # A word joiner (U+2060) on either side of the dash, a no-break space (U+00A0) before the unit.
    return _RANGE.sub("\u2060\u2013\u2060", _UNITS.sub("\u00a0", text))


def _breakable(text: str) -> Markup:
    """Let a line end behind a comma or plus without a blank, by no character that would be pasted with the text."""
    return Markup(re.sub(r"([,+])(?=\S)", r"\1<wbr>", str(escape(text))))


def anchor(run_id: str) -> str:
    """Return an id that is safe in an attribute and in a link."""
    return "run-" + quote(run_id, safe="").replace("%", "_")


def _cell_groups(build: TableBuilder) -> list[dict[str, Any]]:
    """Return the cells, to which the numbers of the tables lead, and at the end the runs that belong to none."""
    groups = [
        {"id": f"cell-{index}", "title": f"{cell['series']}, batch {cell['batch'] or DASH}", "run_ids": cell["run_ids"]}
        | {"figures": f"n = {cell['n']}, {mean_text(cell, 'images_per_s')} images/s"}
        for index, cell in enumerate(build.all_cells.iter_rows(named=True))
    ]
    known = {run_id for group in groups for run_id in group["run_ids"]}
    excluded = [run_id for run_id in build.runs["run_id"] if run_id not in known]
    if excluded:
        groups.append({"id": "cell-none", "title": "Excluded", "run_ids": excluded, "figures": ""})
    return groups


def _run_entries(dataset: Dataset, out: Path) -> dict[str, dict[str, Any]]:
    """Return each run by id with its title, overrides, figures, and its files as links relative to the page."""
    entries = {}
    for run in dataset.runs.iter_rows(named=True):
        # `=` stays as it is: it is in the folder names of the dataset (site=, gpu=, run=).
        links = {
            quote(os.path.relpath(path.resolve(), out.resolve()), safe="/="): str(path.relative_to(dataset.folder))
            for path in dataset.files(run["run_id"])
        }
        known = [(METRICS[name].heading, number(run[name])) for name in _RUN_FIGURES if run[name] is not None]
        overrides = run["overrides"] or " ".join(recipe_labels.overrides(run["recipe"], run["recipe_parts"]))
        more = {"links": links, "title": base.run_title(run), "figures": known, "overrides": overrides or DASH}
        entries[run["run_id"]] = run | more
    return entries
