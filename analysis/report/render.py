"""Tables to the terminal, to Markdown and to CSV."""

from __future__ import annotations

import csv
import io
import re
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl

from inpaint_bench.core.console import sanitize

from .estimate import Estimate
from .tables import Table

if TYPE_CHECKING:
    from rich.console import Console, JustifyMethod

_FORMULA = ["=", "+", "-", "@", "\t", "\r"]
NUMBER = re.compile(r"([+-]?)([\d,]+(?:\.\d+)?)(?:e([+-]?)0*(\d+))?")  # as the tables print it: sign, digits, power
_NONE = "\u2013"
_INTERVAL = 12  # characters of a terminal's line in which an interval is still easy to read
_TEXT = 40  # and of a text that goes on
_BETWEEN = 3  # columns of a terminal's table


def to_terminal(table: Table, console: Console) -> None:
    """One table, or one line where it has no rows."""
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    if not table.rows:
        console.print(Text(f"{sanitize(table.title)}: none\n"))
        return
    title: Text | None = Text(sanitize(table.title), style="bold")
    for block in _blocks(table, console.width):
        grid = RichTable(title=title, title_justify="left", box=box.SIMPLE_HEAD)
        title = None
        for index in block:
            justify: JustifyMethod = "left" if index in table.text_columns else "right"
            need = _needs(table, index) - _BETWEEN
            fits = table.key_columns > 0 and all(len(row[index]) <= need for row in table.rows)
            head = textwrap.fill(sanitize(table.columns[index]), need) if fits else sanitize(table.columns[index])
            whole = fits or index == table.run_column
            grid.add_column(Text(head), justify=justify, overflow="fold", no_wrap=whole)
        for number, row in enumerate(table.rows):
            style = "dim" if number in table.muted_rows else None
            grid.add_row(*(Text(sanitize(row[index])) for index in block), style=style)
        console.print(grid)
    if table.note:
        console.print(Text(sanitize(table.note) + "\n", style="dim"))


def _blocks(table: Table, width: int) -> list[list[int]]:
    """The columns of each part of a table that is too wide for the terminal, each behind the key columns.

    Without key columns there is one part, whose texts are broken into lines.
    """
    every = list(range(len(table.columns)))
    keys, rest = every[: table.key_columns], every[table.key_columns :]
    if not keys:
        return [every]
    needs = [_needs(table, index) for index in every]
    room = width - sum(needs[index] for index in keys)
    blocks: list[list[int]] = []
    left = 0
    for index in rest:
        if not blocks or needs[index] > left:
            blocks.append([*keys])
            left = room
        blocks[-1].append(index)
        left -= needs[index]
    return blocks


def _needs(table: Table, index: int) -> int:
    """Characters that a column takes in a terminal: words stay whole, an interval goes on below its mean."""
    words = [len(word) for word in table.columns[index].split()]
    cells = [row[index] for row in table.rows]
    most = _TEXT if index in table.text_columns else None
    room = [min(len(cell), _INTERVAL) if isinstance(cell, Estimate) else len(cell[:most]) for cell in cells]
    return max([*words, *room]) + _BETWEEN


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
    flat = " ".join(sanitize(text).split())
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
    """A column of means as up to six: mean, ends of the interval, of the range where there is none, remarks."""
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
    for words, end in (("lowest run", "least"), ("highest run", "most")):
        ends = [None if mean is None or mean.low is not None else getattr(mean, end) for mean in means]
        if any(mean is not None and mean.spanned for mean in means):
            apart.append((f"{head}, {words}", ends))
    if any(remarks):
        apart.append((f"{name}, remark", list(remarks)))
    return apart


def _figure(cell: str) -> str:
    """As a program reads it: without separators of thousands; nothing for an en dash."""
    if cell == _NONE:
        return ""
    return cell.replace(",", "") if NUMBER.fullmatch(cell) else unformula(cell)
