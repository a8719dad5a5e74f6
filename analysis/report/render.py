"""A table as text: for the terminal, as Markdown, CSV and LaTeX."""

import csv
import io
import re
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import polars as pl

from inpaint_bench.core.console import sanitize

from .estimate import Estimate
from .tables import DASH, NUMBER, Table

if TYPE_CHECKING:
    from rich.console import Console

_FORMULA = ["=", "+", "-", "@", "\t", "\r"]  # a spreadsheet runs text that begins so
_LATEX = {c: rf"\{c}" for c in "{}$&#_%"} | {"[": "{[}", "]": "{]}"}  # a bracket behind \\ would begin an argument
_NAMED = {"\\": "backslash", "~": "asciitilde", "^": "asciicircum", '"': "quotedbl", "<": "less", ">": "greater"}
_NAMED |= {"|": "bar", "\u2013": "endash", "\u2014": "emdash", "\u00b0": "degree", "\u00b7": "periodcentered"}
_MATH = {"\u2212": "-", "\u00b1": r"\pm", "\u00d7": r"\times", "\u2717": r"\times"}
_MATH |= {"\u2264": r"\leq", "\u2265": r"\geq"}
_LATEX |= {c: rf"\text{name}{{}}" for c, name in _NAMED.items()} | {c: f"${name}$" for c, name in _MATH.items()}
_LIGATURE = re.compile(r"([-'`,!?])(?=[-'`,])")  # two hyphens would become a dash
_MINUS = re.compile(r"(?<![\w)}-])-(?=\d)")
_JOINT = re.compile(r"\+(?=\w)| \u00b7 ")  # behind which a name may be broken
_BREAK = re.compile(rf"{_JOINT.pattern}|, ")  # as that of a cell, which has settings too
_NOT_SHOWN = "Too wide for this terminal: "
_LONG_TEXT, _MANY_COLUMNS = 42, 9  # above which a column is broken into lines, and a table gets a smaller font
_FLOATING_ROWS = 40  # that fit into a column of a page
_Column = tuple[str, Sequence[str | float | None]]  # column of a CSV file


def to_terminal(table: Table, console: "Console") -> None:
    """Print one table."""
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    title = Text(sanitize(table.title), style="bold") if table.title else None
    grid = RichTable(title=title, title_justify="left", box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    rows = [list(map(_folded, row)) for row in table.rows]
    least, wanted = [], []  # the width of each column, in characters
    for index, name in enumerate(table.columns):
        is_text = index in table.text_columns
        is_whole = index == table.run_column or any("\n" in row[index] for row in rows)
        # Rich narrows columns in proportion, and would break "(provisional)" and headings.
        texts = (name, *(row[index] for row in rows))
        lengths = (len(part) for text in texts for part in (text.split("\n") if is_whole else text.split()))
        width = max((size for size in lengths if size <= NAME_CHARS or is_whole or not is_text), default=0)
        # Broken here, a heading never makes rich narrow the other columns.
        longest = max([width, *(len(line) for row in rows for line in row[index].split("\n"))])
        heading = textwrap.wrap(sanitize(name), min(longest, NAME_CHARS), break_long_words=False)
        least.append(width)
        wanted.append(max([longest, *map(len, heading)]))
        grid.add_column(
            Text("\n".join(heading)),
            justify="left" if is_text else "right",
            overflow="fold",
            no_wrap=is_whole,
            min_width=width,
        )
    for number, row in enumerate(rows):
        grid.add_row(*(Text(sanitize(cell, "\n")) for cell in row), style="dim" if number in table.muted_rows else None)
    room = console.width - sum(least) - _GAP * len(least)
    if room < 0 and len(table.columns) > FEWEST:
        to_terminal(_narrower(table), console)
        return
    # Rich would make some columns narrower than their least width, so that others are wider.
    if 0 <= room < sum(wanted) - sum(least):
        columns = sorted(zip(least, wanted, grid.columns, strict=True), key=lambda each: each[1] - each[0])
        for place, (narrow, wide, column) in enumerate(columns):
            column.width = min(wide, narrow + room // (len(columns) - place))
            room -= column.width - narrow
    console.print(grid)
    if table.note:
        console.print(Text(sanitize(table.note) + "\n", style="dim"))


NAME_CHARS = 18  # the longest name that a table of 80 characters has in one line
_GAP = 2  # characters between two columns
FEWEST = 2  # columns that a table has in a terminal of any width


def _narrower(table: Table) -> Table:
    """Return the table without its last column, which the note names."""
    *columns, last = table.columns
    before, mark, names = table.note.partition(_NOT_SHOWN)
    note = f"{before}{_NOT_SHOWN}{last}, {names}" if mark else f"{before} {_NOT_SHOWN}{last}.".strip()
    rows = [row[:-1] for row in table.rows]
    return replace(table, columns=columns, rows=rows, note=note)


BRIEF_CHARS = 24  # length of a name that fits into one line of a table of 80 characters


def _folded(cell: str) -> str:
    """Return a long name as lines that end behind its joints, ` · `, `+` and `, `, and other text as it is."""
    if len(cell) <= NAME_CHARS or isinstance(cell, Estimate) or not _JOINT.search(cell):
        return cell
    if "\n" in cell:
        return "\n".join(map(_folded, cell.split("\n")))
    lines = [""]
    for part in _BREAK.sub("\\g<0>\n", cell).split("\n"):
        lines = [*lines[:-1], lines[-1] + part] if len(lines[-1] + part) <= NAME_CHARS else [*lines, part]
    return "\n".join(line.rstrip() for line in lines if line)


def first_rows(table: Table) -> Table:
    """Return what a terminal of 80 characters has room for: no intervals."""
    brief = table.brief()
    return replace(brief, title="", rows=[list(map(_mean, row)) for row in brief.rows])


def _mean(cell: str) -> str:
    if not isinstance(cell, Estimate):
        return cell.replace(" \u00b7 ", " \u00b7\n") if len(cell) > BRIEF_CHARS else cell
    return cell.partition(" (")[0]


def to_markdown(table: Table) -> str:
    """Return a Markdown table with its title and note."""
    rule = ["---" if index in table.text_columns else "---:" for index in range(len(table.columns))]
    lines = [f"### {inline(table.title)}", "", _markdown_row(table.columns), _markdown_row(rule)]
    lines += map(_markdown_row, table.rows)
    return "\n".join([*lines, "", *([inline(table.note), ""] if table.note else [])]) + "\n"


def _markdown_row(cells: list[str]) -> str:
    return "| " + " | ".join(map(inline, cells)) + " |"


def inline(text: str) -> str:
    """Return the text as one line in which Markdown and HTML markup is escaped."""
    line = " ".join(sanitize(text).split())
    # `&` is replaced first: otherwise the entity of `<` would be escaped again.
    return re.sub(r"([|\\`*\[\]])", r"\\\1", line.replace("&", "&amp;").replace("<", "&lt;"))


def runs_csv(runs: pl.DataFrame) -> str:
    """Return every column of every run; text that a spreadsheet would run as a formula gets an apostrophe."""
    text = pl.col(pl.String)
    is_formula = text.str.slice(0, 1).is_in(_FORMULA)
    return runs.with_columns(pl.when(is_formula).then("'" + text).otherwise(text).name.keep()).write_csv()


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


def to_latex(table: Table) -> str:
    """Return the table with booktabs, labelled `tab:<id>`: a longtable, which breaks over pages.

    A table that is too wide for a page has the columns of the first screen, without intervals, and floats: it fits into
    a column of a two-column article.
    """
    name = re.sub("[^A-Za-z0-9:.-]", "-", table.id)
    caption = rf"\caption{{{escape_latex(table.title)}}}\label{{tab:{name}}}"
    if table.lead_columns and len(table.columns) > _MANY_COLUMNS and len(table.rows) <= _FLOATING_ROWS:
        return _float(table.brief(range(len(table.rows))), caption)
    is_long = [any(len(row[index]) > _LONG_TEXT for row in table.rows) for index in range(len(table.columns))]
    texts = [(r"p{0.3\linewidth}" if long else "l") for long in is_long]
    form = "".join(text if index in table.text_columns else "r" for index, text in enumerate(texts))
    size = r"\small" if len(texts) <= _MANY_COLUMNS else r"\scriptsize\setlength{\tabcolsep}{3pt}"
    head, *body = (" & ".join(map(escape_latex, cells)) + r" \\" for cells in (table.columns, *table.rows))
    lines = [
        r"% Needs \usepackage[T1]{fontenc}, \usepackage{booktabs}, \usepackage{longtable}.",
        rf"\begingroup{size}\begin{{longtable}}{{@{{}}{form}@{{}}}}",
        *(rf"{caption}\\", r"\toprule", head, r"\midrule\endhead", r"\bottomrule\endfoot", *body),
        r"\end{longtable}",
        *([rf"\par\smallskip{{\footnotesize {escape_latex(table.note)}\par}}"] if table.note else []),
        r"\endgroup",
    ]
    return "\n".join(lines) + "\n"


def _float(table: Table, caption: str) -> str:
    form = "".join("l" if index in table.text_columns else "r" for index in range(1, len(table.columns)))
    heads = [r"\\".join(map(escape_latex, textwrap.wrap(name, 8, break_long_words=False))) for name in table.columns]
    head = " & ".join([escape_latex(table.columns[0]), *(rf"\shortstack[r]{{{text}}}" for text in heads[1:])]) + r" \\"
    rows = [[_latex_mean(cell) for cell in row] for row in table.rows]
    # A long name breaks behind an underscore or a plus.
    names = [re.sub(r"(\\_|\+)", r"\1\\allowbreak{}", row[0]) for row in rows]
    lines = [
        r"% Needs \usepackage[T1]{fontenc}, \usepackage{booktabs}, \usepackage{tabularx}.",
        rf"\begin{{table}}\centering\scriptsize\setlength{{\tabcolsep}}{{1.5pt}}{caption}",
        rf"\begin{{tabularx}}{{\linewidth}}{{@{{}}>{{\raggedright\arraybackslash}}X{form}@{{}}}}",
        *(r"\toprule", head, r"\midrule"),
        *(" & ".join([name, *row[1:]]) + r" \\" for name, row in zip(names, rows, strict=True)),
        *(r"\bottomrule", r"\end{tabularx}", r"\end{table}"),
    ]
    return "\n".join(lines) + "\n"


def _latex_mean(cell: str) -> str:
    """Return a mean with its 95 % interval below, if it has one."""
    mean = escape_latex(_mean(cell).replace("\n", " "))
    interval = cell.partition(" (")[2].partition(")")[0].partition(", ")[0]
    if not isinstance(cell, Estimate) or cell.low is None or " to " not in interval:
        return mean  # without an interval, or with one whose ends print alike
    return rf"\shortstack[r]{{{mean}\\\tiny {escape_latex(interval)}}}"


def escape_latex(text: str) -> str:
    """Escape text for LaTeX. A letter that pdflatex does not know becomes its code point."""
    line = _MINUS.sub("\u2212", " ".join(sanitize(text).split()))
    # The T1 encoding has Latin letters.
    letters = [c if c < "\x7f" or "\u00c0" <= c <= "\u017f" else rf"\texttt{{U+{ord(c):04X}}}" for c in line]
    return _LIGATURE.sub(r"\1{}", "".join(_LATEX.get(c, text) for c, text in zip(line, letters, strict=True)))
