"""Captions and notes said once on the page: sentences that explain every table or figure in the same way."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from .tables import DASH, Table

_BREAK = re.compile(r"(?<=\.) (?=[A-Z0-9]|n = )")
# Beginnings of sentences that hold wherever they stand. Others may be true of one table only, and stay there.
_GENERAL = (
    "Batch sizes. ",
    "Cells whose runs differ: ",
    "Fewer than three pairs",
    "Found by a search ",
    "Gains are ratios ",
    "In parentheses",
    "Intervals that extend ",
    "Mean (95 %",
    "No whisker: ",
    "One card says ",
    "One run per cell",
    "Published: Kim",
    "Recipes: ",
    "Runs differ within ",
    "Runtime is projected ",
    "The intervals are not corrected ",
    "Tie: ",
    "Whiskers ",
    "With fewer than three ",
)


def general_sentences(texts: Iterable[str]) -> list[str]:
    """Return the general sentences that at least two of these captions and notes have, in their order."""
    counts = Counter(sentence for text in texts for sentence in dict.fromkeys(_BREAK.split(text)))
    return [sentence for sentence, count in counts.items() if count > 1 and sentence.startswith(_GENERAL)]


def own_sentences(text: str, general: Sequence[str]) -> str:
    """Return a caption or note without the general sentences."""
    return " ".join(sentence for sentence in _BREAK.split(text) if sentence not in general)


def split_count(caption: str) -> tuple[str, str]:
    """Return a figure's caption without its sentence on the number of runs, and that sentence."""
    sentences = _BREAK.split(caption)
    counts = [sentence for sentence in sentences if sentence.startswith("n = ")]
    return " ".join(sentence for sentence in sentences if sentence not in counts), " ".join(counts)


def constant_columns(table: Table) -> dict[int, str]:
    """Return the columns with one value in all of several rows, which the page states once above the table."""
    if len(table.rows) < 2:
        return {}
    columns = enumerate(zip(*table.rows, strict=True))
    return {index: cells[0] for index, cells in columns if len(set(cells)) == 1 and cells[0] != ""}


def constants_text(table: Table, constant: dict[int, str]) -> str:
    """Return what the constant columns say: `GPU: H200. Not known: MFU [%].`"""
    known = [f"{table.columns[index]}: {cell}" for index, cell in constant.items() if cell != DASH]
    unknown = [table.columns[index] for index, cell in constant.items() if cell == DASH]
    return " ".join(filter(None, [
        f"In every row: {'; '.join(known)}." if known else "",
        f"Not known of any row: {', '.join(unknown)}." if unknown else "",
    ]))  # fmt: skip
