"""The files beside the page: every table as CSV and LaTeX, every figure as SVG, PDF and PNG."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from inpaint_bench.core.errors import UserError

from . import render
from .figures import svg
from .figures.base import Figure
from .tables import Table

FORMATS = ("csv", "latex", "pdf", "png")
# PNG takes eleven times as long as PDF, and 900 runs have 70 figures: only on request.
DEFAULT_FORMATS = ("csv", "latex", "pdf")
PNG_SCALE = 2


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
