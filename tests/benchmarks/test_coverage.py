"""How often equal cells differ: the page says what the script prints, and no more than 7 % do."""

from __future__ import annotations

import pytest

from analysis.report.page import method
from benchmarks import coverage
from benchmarks.coverage import DESIGNS, MARKERS, PAGE

PRINTED = PAGE.read_text(encoding="utf-8").split(MARKERS[0])[1].split(MARKERS[1])[0].strip().splitlines()
ROWS = [line.strip("| ").split(" | ") for line in PRINTED[2 : 2 + len(DESIGNS)]]


def test_at_most_seven_percent_of_equal_cells_differ() -> None:
    for text, n, *shares, _, _, _, _ in ROWS:
        assert max(map(float, shares)) <= 7, (text, n)


@pytest.mark.parametrize("at", [2, 9, 11])  # one card each, n = 1; three cards each, n = 3; the same card, n = 1
def test_the_page_has_the_rows_that_the_script_prints(at: int) -> None:
    assert ROWS[at] == coverage.row(DESIGNS[at])


def test_the_method_says_what_auto_covers() -> None:
    lines = [line.strip("| ").split(" | ") for line in PRINTED if line.startswith("| ")]
    worst = min(float(line[1]) for line in lines if len(line) == 4 and line[0][0].isdigit())
    assert any(f"repeats=auto holds it in {worst:.0f} of 100 cells at worst" in text for text in method())


@pytest.mark.faults  # minutes
def test_the_page_has_all_that_the_script_prints() -> None:
    assert list(coverage.tables()) == PRINTED


def test_cards_that_differ_by_more_than_stated_are_called_different_more_often() -> None:
    """Show that the simulation can fail: three times the stated variance between cards."""
    design = coverage.Design(cards=1, n=3)
    assert coverage.simulate(design, 0.002, 0.03, 400)[0] > 0.3
