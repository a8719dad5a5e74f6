"""Tables to the terminal, to Markdown and to CSV."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl

from .estimate import Estimate
from .tables import Table

if TYPE_CHECKING:
    from rich.console import Console

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_FORMULA = ["=", "+", "-", "@", "\t", "\r"]
NUMBER = re.compile(r"([+-]?)([\d,]+(?:\.\d+)?)(?:e([+-]?)0*(\d+))?")  # as the tables print it: sign, digits, power
_NONE = "\u2013"


def plain(text: str) -> str:
    """Without control characters: a message from a job must not steer somebody's terminal."""
    return _CONTROL.sub("?", text)


def to_terminal(table: Table, console: Console) -> None:
    """One table, or one line where it has no rows."""
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    if not table.rows:
        console.print(Text(f"{plain(table.title)}: none\n"))
        return
    grid = RichTable(title=Text(plain(table.title), style="bold"), title_justify="left", box=box.SIMPLE_HEAD)
    for index, name in enumerate(table.columns):
        left = index in table.text_columns
        grid.add_column(
            Text(plain(name)), justify="left" if left else "right", overflow="fold", no_wrap=index == table.run_column
        )
    for index, row in enumerate(table.rows):
        grid.add_row(*(Text(plain(cell)) for cell in row), style="dim" if index in table.muted_rows else None)
    console.print(grid)
    if table.note:
        console.print(Text(plain(table.note) + "\n", style="dim"))


def to_markdown(table: Table) -> str:
    """A pipe table under its title."""
    lines = [f"### {inline(table.title)}", ""]
    if table.rows:
        rule = ["---" if i in table.text_columns else "---:" for i in range(len(table.columns))]
        lines += [_line(table.columns), _line(rule), *map(_line, table.rows)]
    else:
        lines.append("None.")
    return "\n".join([*lines, "", *([inline(table.note), ""] if table.note else [])]) + "\n"


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(inline(cell) for cell in cells) + " |"


def inline(text: str) -> str:
    """One line, with what Markdown would read as markup or HTML made harmless."""
    flat = " ".join(plain(text).split())
    return re.sub(r"([|\\`*\[\]])", r"\\\1", flat.replace("&", "&amp;").replace("<", "&lt;"))


def runs_csv(runs: pl.DataFrame, path: Path) -> None:
    """Every column of every run. Text that a spreadsheet would run as a formula gets an apostrophe."""
    texts = [name for name, kind in runs.schema.items() if kind == pl.String]
    risky = [
        pl.when(pl.col(name).str.slice(0, 1).is_in(_FORMULA)).then("'" + pl.col(name)).otherwise(pl.col(name))
        for name in texts
    ]
    runs.with_columns(expression.alias(name) for expression, name in zip(risky, texts, strict=True)).write_csv(path)


def unformula(text: str) -> str:
    """As in `runs_csv`."""
    return f"'{text}" if text[:1] in _FORMULA else text


def to_csv(table: Table, *, demonstration: bool) -> str:
    """The table with its figures unrounded where they are means: with the ends of their intervals and remarks.

    What is no number in a column of means (an en dash, `unavailable`) is a remark, but the dash, which is empty.
    """
    columns: list[tuple[str, list[str | float | None]]] = []
    for index, name in enumerate(table.columns):
        cells = [row[index] for row in table.rows]
        if any(isinstance(cell, Estimate) for cell in cells):
            columns += _apart(name, cells)
        elif index in table.text_columns:
            columns.append((name, [unformula(cell) for cell in cells]))
        else:
            columns.append((name, [_figure(cell) for cell in cells]))
    if demonstration:
        columns.append(("Demonstration", ["yes"] * len(table.rows)))
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([name for name, _ in columns])
    writer.writerows(zip(*(values for _, values in columns), strict=True))
    return out.getvalue()


def _apart(name: str, cells: list[str]) -> list[tuple[str, list[str | float | None]]]:
    """A column of means as up to four: mean, low, high, remarks."""
    means = [cell if isinstance(cell, Estimate) else None for cell in cells]
    unit = next((mean.unit for mean in means if mean and mean.unit), "")
    head = f"{name} [{unit}]" if unit else name
    remarks = [
        "; ".join(mean.remarks) if mean is not None else "" if cell == _NONE else unformula(cell)
        for mean, cell in zip(means, cells, strict=True)
    ]
    apart: list[tuple[str, list[str | float | None]]] = [(head, [None if m is None else m.value for m in means])]
    for end in ("low", "high"):
        ends = [None if mean is None else getattr(mean, end) for mean in means]
        if any(value is not None for value in ends):
            apart.append((f"{head}, {end} 95 %", list(ends)))
    if any(remarks):
        apart.append((f"{name}, remark", list(remarks)))
    return apart


def _figure(cell: str) -> str:
    """As a program reads it: without separators of thousands; nothing for an en dash."""
    if cell == _NONE:
        return ""
    return cell.replace(",", "") if NUMBER.fullmatch(cell) else unformula(cell)
