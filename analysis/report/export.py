"""What lies beside the page: every table as CSV and LaTeX, every figure as SVG, PDF and PNG."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial

from analysis.report.figures.base import Figure
from inpaint_bench.core.errors import UserError

from . import latex, render
from .figures import svg
from .tables import Table

TABLES, FIGURES = "tables", "figures"
FORMATS = ("csv", "latex", "pdf", "png")
# A PNG takes eleven times as long as a PDF, and 900 runs have 70 figures: those only for who asks.
USUAL = ("csv", "latex", "pdf")
PNG_SCALE = 2
Write = Callable[[], bytes]


def formats(text: str) -> tuple[str, ...]:
    """`all`, `none`, or names with commas between. Raises UserError on another."""
    if text in ("all", "none"):
        return FORMATS if text == "all" else ()
    names = text.split(",")
    if wrong := [name for name in names if name not in FORMATS]:
        raise UserError(f"--export {text}: no format {wrong[0]!r}; give all, none, or some of {','.join(FORMATS)}.")
    return tuple(name for name in FORMATS if name in names)


def planned(
    tables: Sequence[Table], figures: Sequence[Figure], wanted: Collection[str], *, demonstration: bool
) -> dict[str, Write]:
    """Every file by its name below the report, and what makes its content. SVG is always among them."""
    files: dict[str, Write] = {}
    for table in tables:
        if "csv" in wanted:
            files[f"{TABLES}/{table.id}.csv"] = partial(_csv, table, demonstration)
        if "latex" in wanted:
            files[f"{TABLES}/{table.id}.tex"] = partial(_latex, table)
    for figure in figures:
        files[f"{FIGURES}/{figure.id}.svg"] = partial(_svg, figure)
        if "pdf" in wanted:
            files[f"{FIGURES}/{figure.id}.pdf"] = partial(_pdf, figure)
        if "png" in wanted:
            files[f"{FIGURES}/{figure.id}.png"] = partial(_png, figure)
    return files


def _csv(table: Table, demonstration: bool) -> bytes:
    return render.to_csv(table, demonstration=demonstration).encode()


def _latex(table: Table) -> bytes:
    return latex.to_latex(table).encode()


def _svg(figure: Figure) -> bytes:
    return svg.standalone(figure.svg).encode()


def _pdf(figure: Figure) -> bytes:
    import vl_convert

    return bytes(vl_convert.svg_to_pdf(svg.on_paper(figure.svg)))


def _png(figure: Figure) -> bytes:
    import vl_convert

    return bytes(vl_convert.svg_to_png(svg.on_paper(figure.svg), scale=PNG_SCALE))
