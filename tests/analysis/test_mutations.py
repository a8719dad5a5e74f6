"""Random mutations of a valid run directory: none ends a merge, changes another run, or lies unnoticed.

`make test` tries 150 of the two thousand that `make faults` tries.
"""

from __future__ import annotations

import pytest

from analysis.columns import COUNTERS
from inpaint_bench.core import schema
from tests.seeds import sample

from . import mutations
from .mutations import Outcome, Result

COUNT = 2_000
MERGES = range(COUNT // mutations.PER_MERGE)
ONE_SENSOR = "the sensor's only reading of this quantity; other values within its bounds are as likely"
ONE_RECORD = "a setting that the run directory repeats only in .hydra, which merge does not read"
# Fields that no second source which merge reads could contradict, by file and field, and why. A mutation that is missed
# in another field lacks a check, or a line here with its reason.
NO_SECOND_SOURCE: dict[tuple[str, str], str] = {
    (schema.MANIFEST, "site"): ONE_RECORD,
    (schema.MANIFEST, "workload"): ONE_RECORD,
    (schema.MANIFEST, "model"): ONE_RECORD,
    (schema.MANIFEST, "workload_facts.epochs"): ONE_RECORD,
    (schema.MANIFEST, "workload_facts.compile_s"): "the worker's only record of that time",
    ("samples_fast", "gpu_util_pct"): ONE_SENSOR,
    ("samples_fast", "mem_active_pct"): ONE_SENSOR,
    ("samples_slow", "sm_clock_mhz"): ONE_SENSOR,
    ("samples_slow", "temp_gpu_c"): ONE_SENSOR,
    **{("samples_gpm", name): ONE_SENSOR for name in COUNTERS},
}


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
        missed = [
            result for result in outcome[0] if (result.mutation.file, result.mutation.field) not in NO_SECOND_SOURCE
        ]
        assert of(missed, Outcome.MISSED) == []
