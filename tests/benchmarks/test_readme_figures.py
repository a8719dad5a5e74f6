"""The measured figures in the README are those of the committed datasets."""

import re
from pathlib import Path

import polars as pl
import pytest

ROOT = Path(__file__).resolve().parents[2]


def _rows() -> list[tuple[frozenset[str], list[str]]]:
    """Return the levers and the cells of every row of the README that names a dataset; `+a` is the row above with a."""
    rows: list[tuple[frozenset[str], list[str]]] = []
    for line in (ROOT / "README.md").read_text().splitlines():
        if re.search(r"\| \d{4}-\d\d-\d\d-\S+ \|$", line):
            cells = line.strip("| ").split(" | ")
            (name,) = re.findall(r"`([^`]+)`", cells[0])
            above = rows[-1][0] if name.startswith("+") else frozenset()
            rows.append((above | set(name.strip("+").split("+")), cells))
    return rows


def test_readme_has_measured_figures():
    assert len(_rows()) >= 7


@pytest.mark.parametrize(("levers", "cells"), _rows(), ids=[cells[0] for _, cells in _rows()])
def test_a_row_of_the_readme_is_the_range_of_the_valid_runs(levers, cells):
    _, rates, energies, count, dataset = cells
    table = pl.read_parquet(ROOT / "benchmarks/results" / dataset / "runs.parquet")
    runs = [row for row in table.filter(pl.col("valid")).to_dicts() if set(row["recipe"].split("+")) == levers]
    runs = [row for row in runs if row["batch"] == 16]
    for column, printed in (("images_per_s", rates), ("joules_per_image", energies)):
        values = [row[column] for row in runs]
        assert (f"{min(values):.1f} to {max(values):.1f}", str(len(values))) == (printed, count)
