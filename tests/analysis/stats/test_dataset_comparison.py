"""Verdicts between committed datasets that ran the same cells on other cards."""

from __future__ import annotations

import pytest

from analysis.dataset import open_dataset
from analysis.report.sections.dataset_comparison import CellPair, Verdict, cell_name, compare
from inpaint_bench.core.paths import ROOT

RESULTS = ROOT / "benchmarks" / "results"


def pair(old: str, new: str, batch: int, recipe: str) -> CellPair:
    pairs = compare(*(open_dataset(RESULTS / name).runs for name in (old, new))).pairs
    (found,) = (each for each in pairs if (each.new["batch"], each.new["recipe"]) == (batch, recipe))
    return found


def test_two_cells_on_one_card_each_are_not_called_different() -> None:
    """Regression: 1.0071 (1.0004 to 1.0139) of two cards of one day counted as better."""
    found = pair("2026-11-23-h200-lora-sdxl", "2026-11-23-h200-two-gpus", 16, "earlier_baseline")
    gain = found.gain("images_per_s")
    assert gain is not None
    assert gain.value == pytest.approx(0.0071, abs=1e-4)
    assert found.verdict("images_per_s") is Verdict.ONE_CARD


def test_single_runs_differ_beyond_their_scatter_only() -> None:
    """Regression: one run each on two cards, 3 % apart, counted as worse."""
    found = pair("2026-11-29-h200-headlines-2", "2026-11-29-h200-headlines-3", 16, "tuned_online")
    assert found.verdict("images_per_s") is Verdict.ONE_CARD
    for rate, verdict in ((1.2, Verdict.BETTER_BY_MEAN), (0.8, Verdict.WORSE_BY_MEAN)):
        runs = [run | {"images_per_s": rate * found.old["images_per_s"]} for run in found.new["runs"]]
        assert CellPair(old=found.old, new=found.new | {"runs": runs}).verdict("images_per_s") is verdict


def test_a_tolerance_above_the_difference_makes_it_none() -> None:
    found = pair("2026-11-21-h200-levers-x4", "2026-11-23-h100-h200", 16, "earlier_baseline")
    slower = [run | {"images_per_s": 0.5 * run["images_per_s"]} for run in found.new["runs"]]
    halved = CellPair(old=found.old, new=found.new | {"runs": slower})
    assert halved.verdict("images_per_s", 0.2) is Verdict.WORSE_BY_MEAN
    assert halved.verdict("images_per_s", 0.6) is Verdict.SIMILAR


def test_cells_without_any_figure_fail_a_gate() -> None:
    """Regression: --fail-on passed with `0 failures` over three cells that it had called not comparable."""
    runs = open_dataset(RESULTS / "2026-11-23-h200-denoisers").runs
    assert [text.rpartition(": ")[2] for text in compare(runs, runs).failures(0.03)] == [
        "the old dataset has neither images/s nor J/image of it"
    ] * 3


def test_a_program_has_no_batch_in_its_name() -> None:
    """Regression: `H200 \u00b7 command \u00b7 dreambooth batch None`."""
    runs = open_dataset(RESULTS / "2026-11-23-h200-lora-sdxl").runs
    (own,) = (each.new for each in compare(runs, runs).pairs if each.new["workload"] == "command")
    assert cell_name(own) == own["series"]
