"""Tables and text for a terminal, and for a pipe or a file if the output is not one."""

import json
import logging
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

PIPE_WIDTH = 240  # a row stays one line for grep
WIDEST = 40  # widest column when it is decided whether a table fits: longer texts wrap

STYLES = {"completed": "green", "failed": "red", "running": "cyan", "queued": "yellow", "planned": "dim"}


@dataclass
class Output:
    """What the command line asked for."""

    quiet: bool = False  # no tables, and of the log only warnings
    as_json: bool = False  # one JSON document on standard output, no tables; what is logged goes to standard error

    def adjust_log(self) -> None:
        """Apply it to the log as it was configured just before."""
        if self.quiet:
            logging.getLogger().setLevel(logging.WARNING)
        for handler in logging.getLogger().handlers if self.as_json else ():
            if isinstance(handler, logging.StreamHandler) and handler.stream is sys.stdout:
                handler.setStream(sys.stderr)


output = Output()


class Terminal(Console):
    """Rich's console, except that a closed pipe raises as with `print`; rich would exit with 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def console() -> Terminal:
    """Return a console as wide as the terminal, or PIPE_WIDTH wide if the output is a pipe or a file."""
    quiet = output.quiet or output.as_json
    terminal = Terminal(quiet=quiet)
    return terminal if terminal.is_terminal else Terminal(width=PIPE_WIDTH, quiet=quiet)


def shell_command(verb: str, *arguments: object) -> str:
    """Return a command of ours to paste into a shell, with quotes if the arguments need them."""
    return shlex.join(["inpaint-bench", verb, *map(str, arguments)])


def echo(*lines: str, error: bool = False) -> None:
    """Print lines, to standard error if it is an error, without control characters."""
    print("\n".join(map(sanitize, lines)), file=sys.stderr if error else sys.stdout, flush=True)


def echo_json(value: Any) -> None:
    """Print a JSON document."""
    echo(*json.dumps(value, indent=1).split("\n"))


def sanitize(text: str, kept: str = "\t") -> str:
    """Replace every control character but those `kept` by "?": a message may come from another machine.

    Not printable are line breaks, ESC, with which the escape sequences of a terminal begin, the C1 controls, the
    characters that reverse the order of text, zero-width ones, and bytes that are no UTF-8.
    """
    return "".join(char if char.isprintable() or char in kept else "?" for char in text)


def table(
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    title: str | None = None,
    optional: Sequence[str] = (),
    width: int | None = None,
) -> Table:
    """Return a table: numbers right-aligned, None as a dash, empty columns left out, states of a point in colour.

    If it is wider than the terminal, the first of the `optional` columns are left out, and named below the table.
    """
    shown = [i for i, _ in enumerate(columns) if not rows or any(row[i] not in (None, "") for row in rows)]
    cells = [[_format_cell(value) for value in row] for row in rows]
    widths = [max(map(len, [name, *(row[i] for row in cells)])) for i, name in enumerate(columns)]
    left_out: list[str] = []
    for index in (columns.index(name) for name in optional if name in columns):
        if index in shown and sum(min(widths[i], WIDEST) + 3 for i in shown) > (width or console().width):
            shown.remove(index)
            left_out.append(columns[index])
    caption = f"in a wider terminal also: {', '.join(left_out)}" if left_out else None
    result = Table(
        box=SIMPLE_HEAD,
        title=title and Text(sanitize(title)),
        title_justify="left",
        pad_edge=False,
        caption=caption,
        caption_justify="left",
    )
    for i in shown:
        numeric = any(isinstance(row[i], int | float) for row in rows)
        result.add_column(columns[i], justify="right" if numeric else "left", overflow="fold")
    for row, texts in zip(rows, cells, strict=True):
        # Text and not markup: a message may hold square brackets.
        result.add_row(*(Text(texts[i], style=STYLES.get(str(row[i]), "")) for i in shown))
    return result


def pluralize(number: int, noun: str) -> str:
    """Return the number with its noun: `1 run`, `2,000 runs`, `2 losses`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "es" if noun.endswith(("ch", "s")) else "s")


def share(part: int, whole: int, noun: str, plural: str = "", singular: str = "") -> str:
    """Return `1 of 2 runs is`, `0 of 2 runs are`: a part of a whole and what is said of it, in its number.

    `singular` need not be given for `are` and `have`.
    """
    singular = singular or {"are": "is", "have": "has"}.get(plural, plural)
    return f"{part:,} of {pluralize(whole, noun)} {singular if 1 in (part, whole) else plural}".rstrip()


def list_some(names: Sequence[str], most: int = 3) -> str:
    """Return the first names, and the number of the others."""
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")


def _format_cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    return sanitize(str(value))
