"""Tables to the terminal, to Markdown and to CSV."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl

from .tables import Table

if TYPE_CHECKING:
    from rich.console import Console

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


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
        pl.when(pl.col(name).str.contains(r"^[=+\-@\t\r]")).then("'" + pl.col(name)).otherwise(pl.col(name))
        for name in texts
    ]
    runs.with_columns(expression.alias(name) for expression, name in zip(risky, texts, strict=True)).write_csv(path)
