"""The files beside the page: every table as CSV and LaTeX, every figure as SVG, PDF and PNG."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

from inpaint_bench.core import files
from inpaint_bench.core.errors import UserError

from . import render
from .contents import Report
from .figures import svg
from .figures.base import Figure
from .tables import Table

FORMATS = ("csv", "latex", "pdf", "png")
# PNG takes eleven times as long as PDF, and 900 runs have 70 figures: only on request.
DEFAULT_FORMATS = ("csv", "latex", "pdf")
PNG_SCALE = 2
BATCH_CURVE = "fig-images_per_s"


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
            contents[f"figures/{figure.id}.pdf"] = svg.to_pdf(figure.svg)
        if "png" in formats:
            contents[f"figures/{figure.id}.png"] = svg.to_png(figure.svg, scale=PNG_SCALE)
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
