"""Gains and their intervals, against values worked out by hand and against simulated truth."""

from __future__ import annotations

import math

import numpy as np
import pytest

from analysis import ratio


@pytest.mark.parametrize(
    ("df", "t"), [(1, 12.7062), (2, 4.30265), (3, 3.18245), (4, 2.77645), (10, 2.22814), (29, 2.04523), (2.5, 3.5747)]
)
def test_students_quantile_is_that_of_the_printed_tables(df: float, t: float) -> None:
    """2.5 degrees: between the printed 3.18 and 4.30; from a numerical integral of the density by itself."""
    assert ratio.student(df) == pytest.approx(t, rel=2e-4)


def test_two_pairs_give_the_interval_worked_out_by_hand() -> None:
    """Ratios 1.10 and 1.20: logs 0.09531 and 0.18232, mean 0.13882, deviation 0.06153, t(1) = 12.706."""
    found = ratio.gain([("a", 11.0), ("b", 24.0)], [("a", 10.0), ("b", 20.0)])
    assert found is not None
    assert (found.paired, found.n) == (True, 2)
    assert found.value == pytest.approx(math.sqrt(1.10 * 1.20) - 1)
    half = 12.7062 * 0.0615276 / math.sqrt(2)
    assert found.low == pytest.approx(math.exp(0.138816 - half) - 1, abs=1e-4)
    assert found.high == pytest.approx(math.exp(0.138816 + half) - 1, abs=1e-3)
    assert found.tie


def test_a_steady_gain_of_pairs_is_found_where_the_cards_differ_more_than_the_gain() -> None:
    cards = [("a", 10.0), ("b", 13.0), ("c", 17.0)]
    paired = ratio.gain([(card, value * (1.05 + i / 100)) for i, (card, value) in enumerate(cards)], cards)
    loose = ratio.gain([(f"x{card}", value * 1.06) for card, value in cards], cards)
    assert paired is not None
    assert loose is not None
    assert (paired.tie, loose.tie) == (False, True)
    assert (paired.paired, loose.paired) == (True, False)


def test_unpaired_runs_give_welchs_interval_worked_out_by_hand() -> None:
    """Logs 1, 3 against 0, 4: means 2 and 2, variances 2 and 8, error sqrt(5), 25 / (1 + 16) = 1.47 degrees."""
    found = ratio.gain([(1, math.exp(1)), (2, math.exp(3))], [(3, 1.0), (4, math.exp(4))])
    assert found is not None
    assert not found.paired
    assert found.value == pytest.approx(0, abs=1e-12)
    assert found.high == pytest.approx(math.expm1(ratio.student(25 / 17) * math.sqrt(5)))


def test_one_run_or_one_pair_has_no_interval_and_is_no_tie() -> None:
    for new in ([("a", 12.0)], [("b", 12.0)]):
        found = ratio.gain(new, [("a", 10.0)])
        assert found is not None
        assert found.value == pytest.approx(0.2)
        assert (found.low, found.high, found.tie, found.n) == (None, None, False, 1)


def test_a_single_pair_among_several_runs_does_not_throw_the_others_away() -> None:
    found = ratio.gain([("a", 10.0), ("b", 11.0)], [("a", 10.0), ("c", 11.0)])
    assert found is not None
    assert (found.paired, found.n) == (False, 2)


def test_nothing_to_compare_is_no_gain() -> None:
    assert ratio.gain([], [("a", 1.0)]) is None
    assert ratio.gain([("a", 0.0)], [("a", 1.0)]) is None


@pytest.mark.parametrize(("n", "paired"), [(2, True), (3, True), (8, True), (3, False), (8, False)])
def test_95_percent_intervals_hold_the_truth_about_95_times_in_100(n: int, paired: bool) -> None:
    rng, truth, hits, rounds = np.random.default_rng(n), 0.08, 0, 4000
    for _ in range(rounds):
        cards = rng.normal(0, 0.2 if paired else 0, n)
        base, new = (np.exp(cards + shift + rng.normal(0, 0.02, n)) for shift in (0, math.log1p(truth)))
        keys = range(n) if paired else range(n, 2 * n)
        found = ratio.gain(list(zip(keys, new, strict=True)), list(zip(range(n), base, strict=True)))
        assert found is not None
        assert found.low is not None
        assert found.high is not None
        hits += found.low <= truth <= found.high
    assert 0.93 <= hits / rounds <= 0.97
