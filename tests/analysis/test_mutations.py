"""Random mutations of a valid run directory: none ends a merge, changes another run, or lies unnoticed.

`make test` tries 150 of the two thousand that `make faults` tries. A mutation that is missed lacks a check, or a line
in the list of docs/dataset.md.
"""

from __future__ import annotations

import pytest

from tests.seeds import sample

from . import mutations
from .mutations import Outcome, Result
from .second_source import documented

COUNT = 2_000
MERGES = range(COUNT // mutations.PER_MERGE)


@pytest.fixture(
    scope="module", params=[pytest.param(3, id="some"), pytest.param(len(MERGES), id="all", marks=pytest.mark.faults)]
)
def outcome(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Result], list[str]]:
    """Return what became of each mutant, and what changed of the untouched runs beside them."""
    results: list[Result] = []
    changed: list[str] = []
    folder, merges = tmp_path_factory.mktemp("mutations"), sample(MERGES, request.param)
    for batch, texts in mutations.run_mutations(COUNT, folder=folder, merges=merges):
        results += batch
        changed += texts
    print(mutations.table_of(results))
    assert len(results) == request.param * mutations.PER_MERGE
    return results, changed


def of(results: list[Result], *outcomes: Outcome) -> list[str]:
    return [f"#{r.number} {r.mutation}: {r.detail[:200]}" for r in results if r.outcome in outcomes]


@pytest.mark.slow
@pytest.mark.timeout(3_000)  # all: 100 s on an idle core; the first test waits for all merges
class TestMutations:
    def test_no_merge_crashes_or_hangs(self, outcome: tuple[list[Result], list[str]]) -> None:
        assert of(outcome[0], Outcome.CRASH, Outcome.HANG) == []

    def test_other_runs_stay_the_same_bit_for_bit(self, outcome: tuple[list[Result], list[str]]) -> None:
        assert outcome[1] == []

    def test_every_run_directory_is_a_row_or_listed(self, outcome: tuple[list[Result], list[str]]) -> None:
        assert of(outcome[0], Outcome.UNLISTED) == []

    def test_the_last_resort_is_not_reached(self, outcome: tuple[list[Result], list[str]]) -> None:
        assert of(outcome[0], Outcome.INTERNAL) == []

    def test_figures_that_change_are_told(self, outcome: tuple[list[Result], list[str]]) -> None:
        missed = [result for result in outcome[0] if (result.mutation.file, result.mutation.field) not in documented()]
        assert of(missed, Outcome.MISSED) == []
