"""The files beside the page: every table as CSV and LaTeX, every figure as SVG, PDF and PNG."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial

from analysis.report.figures.base import Figure
from inpaint_bench.core.errors import UserError

from . import latex, render
from .figures import svg
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
        raise UserError(
            f"--export {text}: unknown format {unknown[0]!r}; give all, none, or any of {','.join(FORMATS)}."
        )
    return tuple(name for name in FORMATS if name in names)


def plan(
    tables: Sequence[Table], figures: Sequence[Figure], formats: Collection[str], *, demonstration: bool
) -> dict[str, Callable[[], bytes]]:
    """Return every file by its path below the report, with the function that makes its content.

    Figures are always written as SVG.
    """
    files: dict[str, Callable[[], bytes]] = {}
    for table in tables:
        if "csv" in formats:
            files[f"tables/{table.id}.csv"] = partial(_csv, table, demonstration)
        if "latex" in formats:
            files[f"tables/{table.id}.tex"] = partial(_latex, table)
    for figure in figures:
        for suffix in ("svg", *(name for name in ("pdf", "png") if name in formats)):
            files[f"figures/{figure.id}.{suffix}"] = partial(_figure, figure, suffix)
    return files


def _csv(table: Table, demonstration: bool) -> bytes:
    return render.to_csv(table, demonstration=demonstration).encode()


def _latex(table: Table) -> bytes:
    return latex.to_latex(table).encode()


def _figure(figure: Figure, suffix: str) -> bytes:
    if suffix == "svg":
        return svg.standalone(figure.svg).encode()
    return svg.to_pdf(figure.svg) if suffix == "pdf" else svg.to_png(figure.svg, scale=PNG_SCALE)
