r"""A table as LaTeX with booktabs, and as a longtable if it is longer than a page.

Numbers are aligned right; the interval of a mean follows in a column of its own, aligned left: $16.1$ [$15.8$, $16.4$].
"""

from __future__ import annotations

import re

from inpaint_bench.core.console import sanitize

from .estimate import Estimate
from .tables import LONG_TABLE, NUMBER, Table

_ESCAPED = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "$": r"\$",
    "&": r"\&",
    "#": r"\#",
    "_": r"\_",
    "%": r"\%",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\textquotedbl{}",
    "[": "{[}",  # after a line break it would be read as an argument
    "]": "{]}",
    "\u2013": r"\textendash{}",
    "\u2014": r"\textemdash{}",
    "\u00b0": r"\textdegree{}",
    "\u00b7": r"\textperiodcentered{}",
    "\u00b1": r"$\pm$",
    "\u00d7": r"$\times$",
    "\u2212": "$-$",
    "\u2264": r"$\leq$",
    "\u2265": r"$\geq$",
    "\u2717": r"$\times$",
}
_LIGATURE = re.compile(r"([-'`,!?])(?=[-'`,])")  # two hyphens would become a dash
_MAX_COLUMNS = 9  # in the usual font size; more get a smaller one
_MAX_TEXT = 42  # characters; a column with longer text is broken into lines
HEAD = "% Needs \\usepackage[T1]{{fontenc}}, {packages}.\n"


def escape(text: str) -> str:
    """Escape text for LaTeX. A letter that pdflatex does not know becomes its code point."""
    escaped = "".join(_ESCAPED.get(c) or _letter(c) for c in " ".join(sanitize(text).split()))
    return _LIGATURE.sub(r"\1{}", escaped)


def to_latex(table: Table) -> str:
    """Return a float, labelled `tab:<id>`; a long table is a longtable, which breaks over pages."""
    long = len(table.rows) > LONG_TABLE
    columns, head = [], []
    paired = [any(_has_interval(row[index]) for row in table.rows) for index in range(len(table.columns))]
    # A mean with an interval takes two columns under one heading, a long text a paragraph.
    for index, name in enumerate(table.columns):
        if paired[index]:
            columns.append("r@{~}l")
            head.append(rf"\multicolumn{{2}}{{c}}{{{escape(name)}}}")
        elif index in table.text_columns:
            is_long = any(len(row[index]) > _MAX_TEXT for row in table.rows)
            columns.append(r"p{0.3\linewidth}" if is_long else "l")
            head.append(escape(name))
        else:
            columns.append("r")
            head.append(rf"\multicolumn{{1}}{{r}}{{{escape(name)}}}")
    form, lines = f"@{{}}{''.join(columns)}@{{}}", [_line(head)]
    body = [
        _line([_cell(cell, paired[index], text=index in table.text_columns) for index, cell in enumerate(row)])
        for row in table.rows
    ]
    label = re.sub(r"[^A-Za-z0-9:.-]", "-", table.id)
    caption = rf"\caption{{{escape(table.title)}}}\label{{tab:{label}}}"
    note = [rf"\par\smallskip{{\footnotesize {escape(table.note)}\par}}"] if table.note else []
    size = r"\small" if len(columns) <= _MAX_COLUMNS else r"\scriptsize\setlength{\tabcolsep}{3pt}"
    packages = r"\usepackage{booktabs}" + (r", \usepackage{longtable}" if long else "")
    if long:
        # A longtable is no float, so its font size needs a group; \endhead repeats the heading on every page.
        top = [rf"\begingroup{size}", rf"\begin{{longtable}}{{{form}}}", caption + r"\\", r"\toprule", *lines]
        top += [r"\midrule\endfirsthead", r"\toprule", *lines, r"\midrule\endhead", r"\bottomrule\endfoot"]
        out = [*top, *body, r"\end{longtable}", *note, r"\endgroup"]
    else:
        top = [r"\begin{table}[htbp]", rf"\centering{size}", caption, rf"\begin{{tabular}}{{{form}}}", r"\toprule"]
        none = [rf"\multicolumn{{{len(columns) + sum(paired)}}}{{@{{}}l}}{{None.}} \\"]
        out = [*top, *lines, r"\midrule", *(body or none), r"\bottomrule", r"\end{tabular}", *note, r"\end{table}"]
    return HEAD.format(packages=packages) + "\n".join(out) + "\n"


def _line(cells: list[str]) -> str:
    return " & ".join(cells) + r" \\"


def _cell(cell: str, paired: bool, *, text: bool) -> str:
    if not paired:
        return escape(cell) if text else _number(cell)
    if not isinstance(cell, Estimate):
        return f"{_number(cell)} & "
    mean, *ends = map(_number, cell.shown)
    unit = rf"~{escape(cell.unit)}" if cell.unit else ""
    interval = [f"[{', '.join(ends)}]"] if ends else []
    interval += [f"(range {' to '.join(map(_number, cell.range))})"] if cell.range else []
    remarks = [f"({', '.join(map(escape, cell.remarks))})"] if cell.remarks else []
    return f"{mean}{unit} & {' '.join([*interval, *remarks])}"


def _has_interval(cell: str) -> bool:
    """Return whether the cell has an interval, or a range or remark in its place."""
    return isinstance(cell, Estimate) and (len(cell.shown) > 1 or bool(cell.range or cell.remarks))


def _number(text: str) -> str:
    """Return a number in math mode, so that minus is a minus; anything else as text."""
    match = NUMBER.fullmatch(text)
    if match is None:
        return escape(text)
    sign, digits, power_sign, power = match.groups()
    # A bare comma is punctuation in math mode and gets a space behind it.
    digits = digits.replace(",", "{,}")
    times = rf" \times 10^{{{power_sign.replace('+', '')}{power}}}" if power else ""
    return f"${sign}{digits}{times}$"


def _letter(c: str) -> str:
    """Return a Latin letter, which the T1 encoding has, or the code point of anything else."""
    return c if c < "\x7f" or "\u00c0" <= c <= "\u017f" else rf"\texttt{{U+{ord(c):04X}}}"
