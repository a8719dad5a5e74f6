"""Random mutations of a valid run directory: none ends a merge, changes another run, or lies unnoticed.

A mutation that is missed lacks a check, or a line in the list of docs/dataset.md.
"""

from __future__ import annotations

import pytest

from . import mutations
from .mutations import Outcome, Result
from .second_source import documented

COUNT = 2_000


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Result], list[str]]:
    """Return what became of each mutant, and what changed of the untouched runs beside them."""
    results: list[Result] = []
    changed: list[str] = []
    for batch, texts in mutations.run_mutations(COUNT, folder=tmp_path_factory.mktemp("mutations")):
        results += batch
        changed += texts
    assert len(results) == COUNT
    return results, changed


def of(results: list[Result], *outcomes: Outcome) -> list[str]:
    return [f"#{r.number} {r.mutation}: {r.detail[:200]}" for r in results if r.outcome in outcomes]


@pytest.mark.faults
@pytest.mark.timeout(3_000)  # 100 s on an idle core; the first test waits for all merges
class TestMutations:
    def test_no_merge_crashes(self, outcome: tuple[list[Result], list[str]]) -> None:
        assert of(outcome[0], Outcome.CRASH) == []

    def test_other_runs_stay_the_same_bit_for_bit(self, outcome: tuple[list[Result], list[str]]) -> None:
        assert outcome[1] == []

    def test_every_run_directory_is_a_row_or_listed(self, outcome: tuple[list[Result], list[str]]) -> None:
        assert of(outcome[0], Outcome.UNLISTED) == []

    def test_figures_that_change_are_told(self, outcome: tuple[list[Result], list[str]]) -> None:
        missed = [result for result in outcome[0] if (result.mutation.file, result.mutation.field) not in documented()]
        assert of(missed, Outcome.MISSED) == []
