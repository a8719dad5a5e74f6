"""A table as text: for the terminal, as Markdown and as CSV."""

from __future__ import annotations

import csv
import io
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl

from inpaint_bench.core.console import sanitize

from .estimate import Estimate
from .tables import DASH, NUMBER, Table

if TYPE_CHECKING:
    from rich.console import Console, JustifyMethod

_FORMULA = ["=", "+", "-", "@", "\t", "\r"]  # a spreadsheet runs text that begins so
_MIN_INTERVAL, _MIN_TEXT = 12, 40  # characters to which a terminal may break an interval, and a text
_Column = tuple[str, Sequence[str | float | None]]  # of a CSV file
_GAP = 3  # characters between the columns of a terminal's table


def to_terminal(table: Table, console: Console) -> None:
    """Print one table, or one line if it has no rows."""
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    if not table.rows:
        console.print(Text(f"{sanitize(table.title)}: none\n"))
        return
    title: Text | None = Text(sanitize(table.title), style="bold")
    for block in _blocks(table, console.width):
        grid = RichTable(title=title, title_justify="left", box=box.SIMPLE_HEAD)
        # Only the first block of a divided table has the title.
        title = None
        for index in block:
            justify: JustifyMethod = "left" if index in table.text_columns else "right"
            width = _min_width(table, index) - _GAP
            fits = table.key_columns > 0 and all(len(row[index]) <= width for row in table.rows)
            heading = sanitize(table.columns[index])
            # Broken at words here: a column with `no_wrap` is not broken by rich.
            heading = textwrap.fill(heading, width) if fits else heading
            # A column with line breaks of its own gets no others.
            fixed = fits or index == table.run_column or any("\n" in row[index] for row in table.rows)
            # Rich narrows columns in proportion, and would break "(provisional)"; of texts it may break any word.
            words = (len(word) for row in table.rows for word in row[index].split())
            least = None if index in table.text_columns else max(words, default=0)
            grid.add_column(Text(heading), justify=justify, overflow="fold", no_wrap=fixed, min_width=least)
        for number, row in enumerate(table.rows):
            style = "dim" if number in table.muted_rows else None
            grid.add_row(*(Text(sanitize(row[index])) for index in block), style=style)
        console.print(grid)
    if table.note:
        console.print(Text(sanitize(table.note) + "\n", style="dim"))


def _blocks(table: Table, width: int) -> list[list[int]]:
    """Divide the columns of a table that is too wide for the terminal; every block begins with the key columns.

    A table without key columns is not divided: its texts are broken into lines.
    """
    keys = list(range(table.key_columns))
    blocks = [keys]
    for index in range(len(keys), len(table.columns)):
        # However narrow the terminal, a block has at least one column beside the keys.
        full = 1 + sum(_min_width(table, i) for i in [*blocks[-1], index]) > width  # 1 at the left edge
        if keys and full and blocks[-1] != keys:
            blocks.append(keys)
        blocks[-1] = [*blocks[-1], index]
    return blocks


def _min_width(table: Table, index: int) -> int:
    """Return the characters that a column needs in a terminal: words stay unbroken, intervals may be broken."""
    words = [len(word) for word in table.columns[index].split()]
    longest = _MIN_TEXT if index in table.text_columns else None
    cells = [row[index] for row in table.rows]
    lengths = [min(len(cell), _MIN_INTERVAL) if isinstance(cell, Estimate) else len(cell[:longest]) for cell in cells]
    return max([*words, *lengths]) + _GAP


def to_markdown(table: Table) -> str:
    """Return a Markdown table with its title and note."""
    lines = [f"### {inline(table.title)}", ""]
    if table.rows:
        rule = ["---" if index in table.text_columns else "---:" for index in range(len(table.columns))]
        lines += [_markdown_row(table.columns), _markdown_row(rule), *map(_markdown_row, table.rows)]
    else:
        lines.append("None.")
    return "\n".join([*lines, "", *([inline(table.note), ""] if table.note else [])]) + "\n"


def _markdown_row(cells: list[str]) -> str:
    return "| " + " | ".join(map(inline, cells)) + " |"


def inline(text: str) -> str:
    """Return the text as one line in which Markdown and HTML markup is escaped."""
    line = " ".join(sanitize(text).split())
    # `&` is replaced first: otherwise the entity of `<` would be escaped again.
    return re.sub(r"([|\\`*\[\]])", r"\\\1", line.replace("&", "&amp;").replace("<", "&lt;"))


def runs_csv(runs: pl.DataFrame, path: Path) -> None:
    """Write every column of every run; text that a spreadsheet would run as a formula gets an apostrophe."""
    text = pl.col(pl.String)
    is_formula = text.str.slice(0, 1).is_in(_FORMULA)
    runs.with_columns(pl.when(is_formula).then("'" + text).otherwise(text).name.keep()).write_csv(path)


def _escape_formula(text: str) -> str:
    return f"'{text}" if text[:1] in _FORMULA else text


def to_csv(table: Table, *, demonstration: bool) -> str:
    """Return the table as CSV: means are not rounded, and have columns for interval, range and remarks.

    Text in a column of means (such as `unavailable`) is a remark; a dash is an empty cell.
    """
    columns: list[_Column] = []  # a table may have two columns of one name
    for index, name in enumerate(table.columns):
        cells = [row[index] for row in table.rows]
        if any(isinstance(cell, Estimate) for cell in cells):
            columns += _estimate_columns(name, cells)
        else:
            write = _escape_formula if index in table.text_columns else _csv_number
            columns.append((name, [write(cell) for cell in cells]))
    if demonstration:
        columns.append(("Demonstration", ["yes"] * len(table.rows)))
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([name for name, _ in columns])
    writer.writerows(zip(*(values for _, values in columns), strict=True))
    return out.getvalue()


def _estimate_columns(name: str, cells: list[str]) -> list[_Column]:
    """Return the columns of mean, interval, range (of cells without an interval) and remarks, without empty ones."""
    means = [cell if isinstance(cell, Estimate) else None for cell in cells]
    unit = next((mean.unit for mean in means if mean and mean.unit), "")
    head = f"{name} [{unit}]" if unit else name
    columns: list[_Column] = [(head, [mean and mean.value for mean in means])]
    columns += [(f"{head}, {end} 95 %", [mean and getattr(mean, end) for mean in means]) for end in ("low", "high")]
    has_range = any(mean and mean.range for mean in means)
    for label, end in (("lowest run", "least"), ("highest run", "most")):
        # The range stands in for a missing interval; beside an interval it stays empty.
        ends = [None if mean is None or mean.low is not None else getattr(mean, end) for mean in means]
        columns.append((f"{head}, {label}", ends if has_range else []))
    remarks = [
        "; ".join(mean.remarks) if mean is not None else "" if cell == DASH else _escape_formula(cell)
        for mean, cell in zip(means, cells, strict=True)
    ]
    columns.append((f"{name}, remark", remarks))
    return [(label, values) for label, values in columns if any(value not in (None, "") for value in values)]


def _csv_number(cell: str) -> str:
    """Return a number without thousands separators, and an empty string for a dash."""
    if cell == DASH:
        return ""
    return cell.replace(",", "") if NUMBER.fullmatch(cell) else _escape_formula(cell)
