"""Gains and their intervals, against values worked out by hand and against simulated truth."""

from __future__ import annotations

import math

import numpy as np
import pytest

from analysis.stats import intervals


@pytest.mark.parametrize(
    ("df", "t"), [(1, 12.7062), (2, 4.30265), (3, 3.18245), (4, 2.77645), (10, 2.22814), (29, 2.04523), (2.5, 3.5747)]
)
def test_students_quantile_is_that_of_the_printed_tables(df: float, t: float) -> None:
    """2.5 degrees: between the printed 3.18 and 4.30; from a numerical integral of the density by itself."""
    assert intervals.t_quantile(df) == pytest.approx(t, rel=2e-4)


def test_two_pairs_give_the_interval_worked_out_by_hand() -> None:
    """Ratios 1.10 and 1.20: logs 0.09531 and 0.18232, mean 0.13882, deviation 0.06153, t(1) = 12.706."""
    found = intervals.gain([("a", 11.0), ("b", 24.0)], [("a", 10.0), ("b", 20.0)])
    assert found is not None
    assert (found.paired, found.n) == (True, 2)
    assert found.value == pytest.approx(math.sqrt(1.10 * 1.20) - 1)
    half = 12.7062 * 0.0615276 / math.sqrt(2)
    assert found.low == pytest.approx(math.exp(0.138816 - half) - 1, abs=1e-4)
    assert found.high == pytest.approx(math.exp(0.138816 + half) - 1, abs=1e-3)
    assert found.tie


def test_a_steady_gain_of_pairs_is_found_where_the_cards_differ_more_than_the_gain() -> None:
    cards = [("a", 10.0), ("b", 13.0), ("c", 17.0)]
    paired = intervals.gain([(card, value * (1.05 + i / 100)) for i, (card, value) in enumerate(cards)], cards)
    loose = intervals.gain([(f"x{card}", value * 1.06) for card, value in cards], cards)
    assert paired is not None
    assert loose is not None
    assert (paired.tie, loose.tie) == (False, True)
    assert (paired.paired, loose.paired) == (True, False)


def test_unpaired_runs_give_welchs_interval_worked_out_by_hand() -> None:
    """Logs 1, 3 against 0, 4: means 2 and 2, variances 2 and 8, error sqrt(5), 25 / (1 + 16) = 1.47 degrees."""
    found = intervals.gain([(1, math.exp(1)), (2, math.exp(3))], [(3, 1.0), (4, math.exp(4))])
    assert found is not None
    assert not found.paired
    assert found.value == pytest.approx(0, abs=1e-12)
    assert found.high == pytest.approx(math.expm1(intervals.t_quantile(25 / 17) * math.sqrt(5)))


def test_one_run_or_one_pair_has_no_interval_and_is_no_tie() -> None:
    for new in ([("a", 12.0)], [("b", 12.0)]):
        found = intervals.gain(new, [("a", 10.0)])
        assert found is not None
        assert found.value == pytest.approx(0.2)
        assert (found.low, found.high, found.tie, found.n) == (None, None, False, 1)


def test_a_single_pair_among_several_runs_does_not_throw_the_others_away() -> None:
    found = intervals.gain([("a", 10.0), ("b", 11.0)], [("a", 10.0), ("c", 11.0)])
    assert found is not None
    assert (found.paired, found.n) == (False, 2)


def test_where_three_are_asked_for_two_pairs_have_a_ratio_and_no_interval() -> None:
    pairs = ([("a", 11.0), ("b", 24.0)], [("a", 10.0), ("b", 20.0)])
    found = intervals.gain(*pairs, min_df=intervals.MIN_DF)
    assert found is not None
    assert found.value == pytest.approx(math.sqrt(1.10 * 1.20) - 1)
    assert (found.low, found.high, found.tie, found.n, found.paired) == (None, None, False, 2, True)


def test_where_three_are_asked_for_two_pairs_give_way_to_three_runs_a_side() -> None:
    new = [(("a", seed), value) for seed, value in enumerate((11.0, 11.1, 11.2))]
    old = [(("a", seed), value) for seed, value in zip((1, 2, 9), (10.0, 10.1, 10.2), strict=True)]
    found = intervals.gain(new, old, min_df=intervals.MIN_DF)
    assert found is not None
    assert (found.paired, found.n) == (False, 3)
    assert found.low is not None
    assert found.low > 0.05


def test_where_three_are_asked_for_six_runs_of_two_cards_have_no_interval() -> None:
    runs = [((card, seed), value) for card, value in (("a", 10.0), ("b", 12.0)) for seed in range(3)]
    assert intervals.mean_interval(runs, min_df=intervals.MIN_DF) is None
    assert intervals.mean_interval([*runs, (("c", 0), 11.0)], min_df=intervals.MIN_DF) is not None


def test_nothing_to_compare_is_no_gain() -> None:
    assert intervals.gain([], [("a", 1.0)]) is None
    assert intervals.gain([("a", 0.0)], [("a", 1.0)]) is None


@pytest.mark.parametrize(("n", "paired"), [(2, True), (3, True), (8, True), (3, False), (8, False)])
def test_95_percent_intervals_hold_the_truth_about_95_times_in_100(n: int, paired: bool) -> None:
    rng, truth, hits, rounds = np.random.default_rng(n), 0.08, 0, 4000
    for _ in range(rounds):
        cards = rng.normal(0, 0.2 if paired else 0, n)
        base, new = (np.exp(cards + shift + rng.normal(0, 0.02, n)) for shift in (0, math.log1p(truth)))
        keys = range(n) if paired else range(n, 2 * n)
        found = intervals.gain(list(zip(keys, new, strict=True)), list(zip(range(n), base, strict=True)))
        assert found is not None
        assert found.low is not None
        assert found.high is not None
        hits += found.low <= truth <= found.high
    assert 0.93 <= hits / rounds <= 0.97


def test_the_mean_of_runs_on_one_card_has_students_interval_worked_out_by_hand() -> None:
    """10, 11, 12: deviation 1, error 1 / sqrt(3), t(2) = 4.30265."""
    found = intervals.mean_interval([(("a", seed), value) for seed, value in enumerate((10.0, 11.0, 12.0))])
    assert found == pytest.approx((11 - 4.30265 / math.sqrt(3), 11 + 4.30265 / math.sqrt(3)), rel=2e-4)
    assert intervals.mean_interval([(("a", 0), 10.0)]) is None
    assert intervals.mean_interval([]) is None


def test_the_mean_over_two_cards_has_one_degree_of_freedom_however_many_runs() -> None:
    """Card means 10 and 12: error of the mean 1, t(1) = 12.7062; that runs agree on each card adds nothing."""
    runs = [((card, seed), value) for card, value in (("a", 10.0), ("b", 12.0)) for seed in range(4)]
    assert intervals.mean_interval(runs) == pytest.approx((11 - 12.7062, 11 + 12.7062), rel=2e-4)


def test_cards_with_one_run_each_give_what_runs_give() -> None:
    values = (10.0, 11.5, 9.0, 12.0)
    of_cards = intervals.mean_interval([((card, 0), value) for card, value in enumerate(values)])
    of_runs = intervals.mean_interval([(("a", seed), value) for seed, value in enumerate(values)])
    assert of_cards == pytest.approx(of_runs)


def test_runs_that_name_no_card_or_no_seed_are_no_pairs() -> None:
    assert intervals.pairing_key("a", 3, "r-1") == ("a", 3)
    assert intervals.pairing_key("a", None, "r-1") == ("a", "r-1")
    assert intervals.pairing_key(None, 3, "r-1") == "r-1"


# Runs per card of cells of 3 to 6 runs.
DESIGNS = [(3,), (4,), (5,), (6,), (1, 1, 1), (2, 1), (2, 2), (2, 1, 1), (2, 2, 1), (3, 2), (2, 2, 2), (3, 3), (1,) * 6]


def drawn(rng: np.random.Generator, design: tuple[int, ...], between: float) -> list[tuple[tuple[int, int], float]]:
    """Runs around 0 with variance 1, of which `between` is the cards'; with one card all of it is the runs'."""
    between = between if len(design) > 1 else 0.0
    return [
        ((card, seed), shift + float(rng.normal(0, math.sqrt(1 - between))))
        for card, runs in enumerate(design)
        for shift in [float(rng.normal(0, math.sqrt(between)))]
        for seed in range(runs)
    ]


@pytest.mark.parametrize("between", [0.0, 0.5, 0.8])
@pytest.mark.parametrize("design", DESIGNS)
def test_the_interval_of_a_mean_holds_the_truth_about_95_times_in_100(design: tuple[int, ...], between: float) -> None:
    rng, rounds, hits = np.random.default_rng(sum(design) * 100 + len(design)), 2000, 0
    for _ in range(rounds):
        found = intervals.mean_interval(drawn(rng, design, between))
        assert found is not None
        hits += found[0] <= 0 <= found[1]
    assert 0.93 <= hits / rounds <= 0.97


def test_a_percentile_bootstrap_of_so_few_runs_would_not_hold_it_nor_would_t_over_runs() -> None:
    """Why neither is used: cards drawn first, then runs within them, 2000 draws; 3 runs on each of 2 cards."""
    rng, rounds, boot, pooled = np.random.default_rng(7), 500, 0, 0
    for _ in range(rounds):
        runs = drawn(rng, (3, 3), 0.5)
        values = np.array([value for _, value in runs]).reshape(2, 3)
        cards = rng.integers(0, 2, (2000, 2))
        means = values[cards[:, :, None], rng.integers(0, 3, (2000, 2, 3))].mean(axis=(1, 2))
        low, high = np.percentile(means, [2.5, 97.5])
        boot += low <= 0 <= high
        found = intervals.mean_interval([(("one", index), value) for index, (_, value) in enumerate(runs)])
        assert found is not None
        pooled += found[0] <= 0 <= found[1]
    assert boot / rounds < 0.85
    assert pooled / rounds < 0.88


@pytest.mark.parametrize("between", [0.0, 0.5, 0.8])
@pytest.mark.parametrize("design", [(3,), (6,), (1, 1, 1), (2, 2), (2, 1), (3, 3), (2, 2, 2)])
def test_unpaired_ratios_of_other_cards_hold_the_truth_at_least_about_95_times_in_100(
    design: tuple[int, ...], between: float
) -> None:
    """Welch with few degrees of freedom errs to the wide side, and more so where there are but two cards."""
    rng, rounds, hits = np.random.default_rng(len(design)), 1500, 0
    for _ in range(rounds):
        sides = [
            [((side, *key), math.exp(0.01 * value)) for key, value in drawn(rng, design, between)]
            for side in ("new", "old")
        ]
        sides = [[((key[:2], key[2]), value) for key, value in side] for side in sides]
        found = intervals.gain(*sides)
        assert found is not None
        assert not found.paired
        assert found.low is not None
        assert found.high is not None
        hits += found.low <= 0 <= found.high
    assert 0.935 <= hits / rounds <= 0.995


def test_repeats_of_one_seed_on_one_card_are_compared_as_runs() -> None:
    """One pair would have no interval, though each side has three runs."""
    new, old = ([(("a", 0), value + shift) for value in (10.0, 10.1, 10.2)] for shift in (1.0, 0.0))
    found = intervals.gain(new, old)
    assert found is not None
    assert (found.paired, found.n, found.tie) == (False, 3, False)


def test_one_side_without_scatter_has_one_degree_of_freedom_left() -> None:
    found = intervals.gain([(("a", 0), 10.0), (("a", 1), 10.0)], [(("b", 0), 9.0), (("b", 1), 9.1)])
    assert found is not None
    assert found.low is not None
