"""Intervals of means and gains, against hand calculations and against simulated data."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from analysis.dataset import open_dataset
from analysis.stats import intervals
from analysis.stats.cells import build_cells
from inpaint_bench.core.paths import ROOT


@pytest.mark.parametrize(
    ("df", "t"), [(1, 12.7062), (2, 4.30265), (3, 3.18245), (4, 2.77645), (10, 2.22814), (29, 2.04523), (2.5, 3.5747)]
)
def test_t_quantile_matches_printed_tables(df: float, t: float) -> None:
    """2.5 degrees: between the printed 3.18 and 4.30; from a numerical integral of the density by itself."""
    assert intervals.t_quantile(df) == pytest.approx(t, rel=2e-4)


def test_interval_of_two_pairs_matches_hand_calculation() -> None:
    """Ratios 1.10 and 1.20: logs 0.09531 and 0.18232, mean 0.13882, deviation 0.06153, t(1) = 12.706."""
    result = intervals.gain([("a", 11.0), ("b", 24.0)], [("a", 10.0), ("b", 20.0)])
    assert result is not None
    assert (result.paired, result.n) == (True, 2)
    assert result.value == pytest.approx(math.sqrt(1.10 * 1.20) - 1)
    half = 12.7062 * 0.0615276 / math.sqrt(2)
    assert result.low == pytest.approx(math.exp(0.138816 - half) - 1, abs=1e-4)
    assert result.high == pytest.approx(math.exp(0.138816 + half) - 1, abs=1e-3)
    assert result.tie


def test_pairing_detects_a_gain_smaller_than_the_difference_between_cards() -> None:
    cards = [("a", 10.0), ("b", 13.0), ("c", 17.0)]
    paired = intervals.gain([(card, value * (1.05 + i / 100)) for i, (card, value) in enumerate(cards)], cards)
    unpaired = intervals.gain([(f"x{card}", value * 1.06) for card, value in cards], cards)
    assert paired is not None
    assert unpaired is not None
    assert (paired.tie, unpaired.tie) == (False, True)
    assert (paired.paired, unpaired.paired) == (True, False)


def test_welch_interval_matches_hand_calculation() -> None:
    """Logs 1, 3 against 0, 4: means 2 and 2, variances 2 and 8, error sqrt(5), 25 / (1 + 16) = 1.47 degrees."""
    result = intervals.gain([(1, math.exp(1)), (2, math.exp(3))], [(3, 1.0), (4, math.exp(4))])
    assert result is not None
    assert not result.paired
    assert result.value == pytest.approx(0, abs=1e-12)
    assert result.high == pytest.approx(math.expm1(intervals.t_quantile(25 / 17) * math.sqrt(5)))


def test_single_run_or_pair_has_no_interval_and_is_no_tie() -> None:
    for new in ([("a", 12.0)], [("b", 12.0)]):
        result = intervals.gain(new, [("a", 10.0)])
        assert result is not None
        assert result.value == pytest.approx(0.2)
        assert (result.low, result.high, result.tie, result.n) == (None, None, False, 1)


@pytest.mark.parametrize(("change", "tie"), [(0.0948, False), (0.09, True)])
def test_without_an_interval_a_tie_does_not_depend_on_which_side_is_called_new(change: float, tie: bool) -> None:
    """Regression: 8.7 % less was a tie and 9.5 % more, the same two runs, was none."""
    for value in (change, 1 / (1 + change) - 1):
        assert intervals.Gain(value=value, low=None, high=None, n=1, paired=False, limit=0.0925).tie is tie


def test_single_pair_among_several_runs_is_not_used_alone() -> None:
    result = intervals.gain([("a", 10.0), ("b", 11.0)], [("a", 10.0), ("c", 11.0)])
    assert result is not None
    assert (result.paired, result.n) == (False, 2)


def test_the_ratio_is_that_of_all_runs_where_some_have_no_partner() -> None:
    """Three runs a side, of which two are pairs: the third ones count too."""
    result = intervals.gain([("a", 11.0), ("b", 11.0), ("c", 22.0)], [("a", 10.0), ("b", 10.0), ("d", 5.0)])
    assert result is not None
    assert (result.paired, result.n) == (False, 3)
    assert result.value == pytest.approx((11 * 11 * 22 / (10 * 10 * 5)) ** (1 / 3) - 1)


def test_two_pairs_have_no_interval_with_min_df_2() -> None:
    pairs = ([("a", 11.0), ("b", 24.0)], [("a", 10.0), ("b", 20.0)])
    result = intervals.gain(*pairs, min_df=intervals.MIN_DF)
    assert result is not None
    assert result.value == pytest.approx(math.sqrt(1.10 * 1.20) - 1)
    assert (result.low, result.high, result.tie, result.n, result.paired) == (None, None, False, 2, True)


def test_three_runs_per_side_are_preferred_to_two_pairs_with_min_df_2() -> None:
    new = [(("a", seed), value) for seed, value in enumerate((11.0, 11.1, 11.2))]
    old = [(("a", seed), value) for seed, value in zip((1, 2, 9), (10.0, 10.1, 10.2), strict=True)]
    result = intervals.gain(new, old, min_df=intervals.MIN_DF)
    assert result is not None
    assert (result.paired, result.n) == (False, 3)
    assert result.low is not None
    assert result.low > 0.05


def test_six_runs_of_two_cards_have_no_interval_with_min_df_2() -> None:
    runs = [((card, seed), value) for card, value in (("a", 10.0), ("b", 12.0)) for seed in range(3)]
    assert intervals.mean_interval(runs, min_df=intervals.MIN_DF) is None
    assert intervals.mean_interval([*runs, (("c", 0), 11.0)], min_df=intervals.MIN_DF) is not None


def test_gain_is_none_without_positive_values() -> None:
    assert intervals.gain([], [("a", 1.0)]) is None
    assert intervals.gain([("a", 0.0)], [("a", 1.0)]) is None


@pytest.mark.slow  # thousands of draws
@pytest.mark.parametrize(("n", "paired"), [(2, True), (3, True), (8, True), (3, False), (8, False)])
def test_coverage_of_gain_intervals_is_about_95_percent(n: int, paired: bool) -> None:
    rng, truth, hits, trials = np.random.default_rng(n), 0.08, 0, 4000
    for _ in range(trials):
        cards = rng.normal(0, 0.2 if paired else 0, n)
        base, new = (np.exp(cards + shift + rng.normal(0, 0.02, n)) for shift in (0, math.log1p(truth)))
        keys = range(n) if paired else range(n, 2 * n)
        result = intervals.gain(list(zip(keys, new, strict=True)), list(zip(range(n), base, strict=True)))
        assert result is not None
        assert result.low is not None
        assert result.high is not None
        hits += result.low <= truth <= result.high
    assert 0.93 <= hits / trials <= 0.97


def test_t_interval_of_runs_on_one_card_matches_hand_calculation() -> None:
    """10, 11, 12: deviation 1, error 1 / sqrt(3), t(2) = 4.30265."""
    result = intervals.mean_interval([(("a", seed), value) for seed, value in enumerate((10.0, 11.0, 12.0))])
    assert result == pytest.approx((11 - 4.30265 / math.sqrt(3), 11 + 4.30265 / math.sqrt(3)), rel=2e-4)
    assert intervals.mean_interval([(("a", 0), 10.0)]) is None
    assert intervals.mean_interval([]) is None


def test_two_cards_have_one_degree_of_freedom_however_many_runs() -> None:
    """Card means 10 and 12: error of the mean 1, t(1) = 12.7062; that runs agree on each card adds nothing."""
    runs = [((card, seed), value) for card, value in (("a", 10.0), ("b", 12.0)) for seed in range(4)]
    assert intervals.mean_interval(runs) == pytest.approx((11 - 12.7062, 11 + 12.7062), rel=2e-4)


def test_runs_without_card_or_seed_are_not_paired() -> None:
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


@pytest.mark.slow  # thousands of draws
@pytest.mark.parametrize("between", [0.0, 0.5, 0.8])
@pytest.mark.parametrize("design", DESIGNS)
def test_coverage_of_mean_intervals_is_about_95_percent(design: tuple[int, ...], between: float) -> None:
    rng, trials, hits = np.random.default_rng(sum(design) * 100 + len(design)), 2000, 0
    for _ in range(trials):
        result = intervals.mean_interval(drawn(rng, design, between))
        assert result is not None
        hits += result[0] <= 0 <= result[1]
    assert 0.93 <= hits / trials <= 0.97


@pytest.mark.slow  # thousands of draws
@pytest.mark.parametrize("between", [0.0, 0.5, 0.8])
@pytest.mark.parametrize("design", [(3,), (6,), (1, 1, 1), (2, 2), (2, 1), (3, 3), (2, 2, 2)])
def test_coverage_of_unpaired_gain_intervals_is_at_least_about_95_percent(
    design: tuple[int, ...], between: float
) -> None:
    """Welch with few degrees of freedom errs to the wide side, and more so where there are but two cards."""
    rng, trials, hits = np.random.default_rng(len(design)), 1500, 0
    for _ in range(trials):
        sides = [
            [((side, *key), math.exp(0.01 * value)) for key, value in drawn(rng, design, between)]
            for side in ("new", "old")
        ]
        sides = [[((key[:2], key[2]), value) for key, value in side] for side in sides]
        result = intervals.gain(*sides)
        assert result is not None
        assert not result.paired
        assert result.low is not None
        assert result.high is not None
        hits += result.low <= 0 <= result.high
    assert 0.935 <= hits / trials <= 0.995


def test_repeats_of_one_seed_on_one_card_are_compared_unpaired() -> None:
    """Avoid the single pair, which would have no interval though each side has three runs."""
    new, old = ([(("a", 0), value + shift) for value in (10.0, 10.1, 10.2)] for shift in (1.0, 0.0))
    result = intervals.gain(new, old)
    assert result is not None
    assert (result.paired, result.n, result.tie) == (False, 3, False)


def test_side_without_scatter_leaves_one_degree_of_freedom() -> None:
    result = intervals.gain([(("a", 0), 10.0), (("a", 1), 10.0)], [(("b", 0), 9.0), (("b", 1), 9.1)])
    assert result is not None
    assert result.low is not None


def of_card(card: str, *values: float, first_seed: int = 0) -> list[intervals.Observation]:
    return [((card, first_seed + seed), value) for seed, value in enumerate(values)]


def test_two_single_cards_add_the_variance_between_cards() -> None:
    """Runs without scatter: error sqrt(2) of 1 %, t(20) = 2.08596. The same card adds nothing."""
    new, old = of_card("a", *[102.0] * 3), of_card("b", *[100.0] * 3)
    apart = intervals.gain(new, old, min_df=intervals.MIN_DF, card_sd=0.01)
    assert apart is not None
    assert apart.high == pytest.approx(1.02 * math.exp(2.08596 * 0.01 * math.sqrt(2)) - 1, abs=1e-5)
    assert (apart.tie, apart.one_card_each) == (True, True)
    same = intervals.gain(new, of_card("a", *[100.0] * 3, first_seed=9), min_df=intervals.MIN_DF, card_sd=0.01)
    assert same is not None
    assert (same.low, same.tie, same.one_card_each) == (pytest.approx(0.02), False, False)


def test_two_single_cards_of_unknown_variance_have_no_interval() -> None:
    result = intervals.gain(of_card("a", 1.0, 1.1, 1.2), of_card("b", 2.0, 2.1, 2.2), card_sd=math.inf)
    assert result is not None
    assert (result.low, result.one_card_each) == (None, True)


def test_runs_on_two_gpus_are_not_called_one_card_each() -> None:
    """Regression: 2 H200 beside another 2 H200, four cards, stood there as `one card each`."""
    apart = intervals.gain(of_card("a, b", 102.0), of_card("c, d", 100.0))
    assert apart is not None
    assert apart.remark == "one card set each"
    sides = [of_card("a, b", value) + of_card("c, d", value) + of_card("e, f", value) for value in (102.0, 100.0)]
    paired = intervals.gain(*sides, min_df=intervals.MIN_DF)
    assert paired is not None
    assert paired.remark == "paired within 3 card sets"


def test_three_cards_each_do_not_add_it_again() -> None:
    sides = [[((f"{side}{card}", 0), 100.0 + card) for card in range(3)] for side in "ab"]
    with_cards, without = (intervals.gain(*sides, card_sd=sd) for sd in (0.05, 0.0))
    assert with_cards == without


def test_a_run_on_two_gpus_shares_a_card_with_one_on_either() -> None:
    """Shares 1 and 1/2, 1/2 of the cards: distance 1/2, where two single cards have 2."""
    new, old = of_card("a, b", 100.0, 100.0, 100.0), of_card("a", 100.0, 100.0, 100.0, first_seed=9)
    result = intervals.gain(new, old, min_df=intervals.MIN_DF, card_sd=0.01)
    assert result is not None
    assert result.high == pytest.approx(math.expm1(2.08596 * 0.01 * math.sqrt(0.5)), abs=1e-6)


@pytest.mark.parametrize(("sd", "limit"), [(0.005, 0.02), (0.02, math.expm1(1.96 * 0.02 * math.sqrt(2)))])
def test_one_run_each_differs_by_more_than_2_8_times_the_scatter(sd: float, limit: float) -> None:
    scatter = [(sd**2, 1e9)] * 2
    result = intervals.gain(of_card("a", 103.0), of_card("a", 100.0, first_seed=9), card_sd=0.01, scatter=scatter)
    assert result is not None
    assert result.limit == pytest.approx(limit, rel=1e-4)
    assert result.tie == (limit > 0.03)


def test_runs_that_overlap_do_not_differ_without_an_interval() -> None:
    new, old = of_card("a", 100.0, 120.0), of_card("a", 101.0, 102.0, first_seed=9)
    result = intervals.gain(new, old, min_df=intervals.MIN_DF, scatter=[(1e-6, 20.0)] * 2)
    assert result is not None
    assert result.tie


def test_scatter_is_pooled_within_cells_and_cards() -> None:
    """Squares of deviations of the logs, 2 * 0.01**2 twice and 0, over 1 + 1 + 2 degrees of freedom."""
    cells = [of_card("a", math.exp(1.01), math.exp(0.99)), [*of_card("a", math.exp(2.01), math.exp(1.99))]]
    cells.append([*of_card("a", 5.0, 5.0, 5.0), (("b", 0), 9.0)])
    assert intervals.pooled_scatter(cells) == (pytest.approx(0.0001), 4)
    assert intervals.pooled_scatter(cells[:1]) == intervals.UNKNOWN_SCATTER
    assert intervals.pooled_scatter([of_card("a", 1.0, 2.0)]) == (pytest.approx(math.log(2) ** 2 / 2), 20)


MAX_RUN_SD = 0.01  # of the runs of one card: above it the host decides, not the card


@pytest.mark.slow  # opens all committed datasets
@pytest.mark.parametrize(
    ("metric", "expected_sd", "expected_df"), [("images_per_s", 0.0067, 24), ("joules_per_image", 0.031, 27)]
)
def test_the_stated_variance_of_cards_is_that_of_the_committed_cells_rounded_up(
    metric: str, expected_sd: float, expected_df: int
) -> None:
    """By the analysis of variance of the logarithms, over the cells of one GPU that ran on several cards."""
    excess, weight, df = 0.0, 0.0, 0
    for path in sorted((ROOT / "benchmarks" / "results").glob("2026-11-2*/dataset.json")):
        for cell in build_cells(open_dataset(path.parent).runs).filter(gpus=1, withheld=False).iter_rows(named=True):
            cards: dict[Any, list[float]] = {}
            for key, value in intervals.observations(cell["runs"], metric):
                cards.setdefault(key[0], []).append(math.log(value))  # type: ignore[index]
            sizes = np.array([len(logs) for logs in cards.values()])
            if len(cards) < 2 or sizes.sum() == len(cards):
                continue
            means = np.array([np.mean(logs) for logs in cards.values()])
            within = sum(np.var(logs) * len(logs) for logs in cards.values()) / (sizes.sum() - len(cards))
            if within <= MAX_RUN_SD**2:
                mean = np.average(means, weights=sizes)
                excess += np.sum(sizes * (means - mean) ** 2) - (len(cards) - 1) * within
                weight += sizes.sum() - np.sum(sizes**2) / sizes.sum()
                df += len(cards) - 1
    assert math.sqrt(excess / weight) == pytest.approx(expected_sd, abs=0.0005)
    assert df == expected_df
    assert expected_sd <= intervals.CARD_SD[metric]
    assert expected_df >= intervals.STATED_DF
