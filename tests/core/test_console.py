"""Tables for terminals of any width."""

from __future__ import annotations

import io

from rich.console import Console

from inpaint_bench.core.console import table

COLUMNS = ("point", "site", "partition", "message")
ROWS = [(0, "grace", "gpu-a40", "a text"), (1, "delta", "gpuH200x8", "another text")]


def printed(width: int) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(table(COLUMNS, ROWS, optional=("partition", "site"), width=width))
    return out.getvalue()


def test_a_wide_terminal_has_every_column() -> None:
    assert [name for name in COLUMNS if name not in printed(80)] == []
    assert "also" not in printed(80)


def test_a_narrow_terminal_names_the_columns_that_it_lacks() -> None:
    text = printed(40)
    assert "gpuH200x8" not in text
    assert "grace" in text
    assert "in a wider terminal also: partition" in " ".join(text.split())
    assert "also: partition, site" in " ".join(printed(30).split())
