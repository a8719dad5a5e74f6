"""Simulate how often equal cells differ by the rules of the analysis, and how often its intervals cover the truth.

usage: python -m benchmarks.coverage [--write]

Every figure is a share of 4,000 draws with a fixed seed. Runs and cards are normal around the same images/s, and what
judges them is what judges measured cells: `CellPair.verdict`, `is_distinguishable`, `metric_interval`, `disagree` and
the stopping rule of `repeats=auto`. The scatter that a rule without an interval needs is pooled over 20 other cells of
two runs on one card; each 20 serve four draws. --write puts the tables into docs/dataset.md.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from analysis.dataset import open_dataset
from analysis.stats.agreement import disagree
from analysis.stats.cells import Cell, build_cells, is_distinguishable, metric_interval, scatter_of
from analysis.stats.dataset_comparison import CellPair, Verdict
from analysis.stats.intervals import CARD_SD, mean_interval, observations
from launchers.points.repetitions import examined_sizes, relative_half_width

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "dataset.md"
MARKERS = ("<!-- python -m benchmarks.coverage --write -->\n", "<!-- end of the tables of coverage -->\n")
DRAWS, POOLED, DRAWS_PER_POOL = 4000, 20, 4
RUN_SDS, CARD_SDS = (0.002, 0.01, 0.03), (0.0, 0.01)
METRIC = "images_per_s"
TRUTH = 100.0
EQUAL = (Verdict.SIMILAR, Verdict.ONE_CARD)
REPEATS_TARGET, REPEATS_MAX = 0.02, 10
MAX_RUN_SD = 0.01  # of committed cells that tell how cards differ: above it is the host


@dataclass(frozen=True, kw_only=True)
class Design:
    """Two cells of `n` runs each, on the same cards or each on others."""

    cards: int
    shared: bool = False
    paired: bool = False
    pooled: int = POOLED  # other cells that tell the scatter
    n: int

    @property
    def text(self) -> str:
        cards = ("one card", "two cards", "three cards")[self.cards - 1]
        where = f"the same {cards}" if self.shared else f"{cards} each"
        return where + (", pairs" if self.paired else "") + ("" if self.pooled else ", no other cell")


DESIGNS = [
    *(Design(cards=1, n=n) for n in (1, 2, 3, 5)),
    *(Design(cards=1, n=n, pooled=0) for n in (1, 2)),
    *(Design(cards=2, n=n) for n in (2, 3, 5)),
    *(Design(cards=3, n=n) for n in (3, 5)),
    *(Design(cards=1, shared=True, n=n) for n in (1, 2, 3, 5)),
    *(Design(cards=2, shared=True, n=n) for n in (2, 3, 5)),
    *(Design(cards=1, shared=True, paired=True, n=n) for n in (1, 2, 3, 5)),
    *(Design(cards=2, shared=True, paired=True, n=n) for n in (2, 3, 5)),
    *(Design(cards=3, shared=True, paired=True, n=n) for n in (3, 5)),
]


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Shares of the draws of one design, one scatter of runs and one of cards."""

    differ: float
    covers: float | None  # a cell's own interval covers its card's mean, of several cards that of all cards
    disagree: float


def _cell(rates: Sequence[float], cards: Sequence[str], seeds: Sequence[int], scatter: Any) -> Cell:
    runs = [
        {"gpu_uuid": card, "node": None, "seed": seed, "run_id": f"{card}-{seed}", METRIC: rate}
        for rate, card, seed in zip(rates, cards, seeds, strict=True)
    ]
    return {"runs": runs, "scatter": {METRIC: scatter}}


def simulate(design: Design, run_sd: float, card_sd: float, draws: int = DRAWS) -> Rates:
    """Draw pairs of equal cells and judge them."""
    rng = np.random.default_rng([DESIGNS.index(design), round(1e4 * run_sd), round(1e4 * card_sd)])
    cards = np.arange(design.n) % design.cards
    of_cards = rng.normal(0, card_sd, (draws, 2, design.cards))
    if design.shared:
        of_cards[:, 1] = of_cards[:, 0]
    rates = TRUTH * np.exp(of_cards[:, :, cards] + rng.normal(0, run_sd, (draws, 2, design.n)))
    pools = TRUTH * np.exp(rng.normal(0, run_sd, (-(-draws // DRAWS_PER_POOL), design.pooled, 2)))
    names = [[f"{0 if design.shared else side}-{card}" for card in cards] for side in (0, 1)]
    seeds = [range(design.n), range(0 if design.paired else design.n, design.n + (0 if design.paired else design.n))]
    truths = TRUTH * np.exp(of_cards[:, 0, 0]) if design.cards == 1 else np.full(draws, TRUTH)
    differ, contradict, covered, scatter = 0, 0, [], None
    for index, (sides, truth) in enumerate(zip(rates.tolist(), truths.tolist(), strict=True)):
        if index % DRAWS_PER_POOL == 0:
            others = [_cell(pair, ("x", "x"), (0, 1), None)["runs"] for pair in pools[index // DRAWS_PER_POOL].tolist()]
            scatter = scatter_of(others, METRIC)
        new, old = (_cell(*side, scatter) for side in zip(sides, names, seeds, strict=True))
        differ += CellPair(old=old, new=new).verdict(METRIC) not in EQUAL
        contradict += disagree(sides[0])
        if interval := metric_interval(METRIC, observations(new["runs"], METRIC)):
            covered.append(interval[0] <= truth <= interval[1])
    covers = sum(covered) / len(covered) if covered else None
    return Rates(differ=differ / draws, covers=covers, disagree=contradict / draws)


def card_sds(design: Design) -> tuple[float, ...]:
    """Return the scatters of cards that matter: on one card for both sides they cancel."""
    return CARD_SDS[-1:] if design.shared and (design.cards == 1 or design.paired) else CARD_SDS


def row(design: Design) -> list[str]:
    """Return a row of the first table: the worst case over the scatters of cards."""
    cases = [[simulate(design, run_sd, card_sd) for card_sd in card_sds(design)] for run_sd in RUN_SDS]
    every = [rates for case in cases for rates in case]
    covers = [rates.covers for rates in every if rates.covers is not None]
    shares = [_percent(max(rates.differ for rates in case)) for case in cases]
    covered = _percent(min(covers)) if covers else "none"
    return [design.text, str(design.n), *shares, covered, _percent(max(rates.disagree for rates in every))]


def best_of(count: int, draws: int = DRAWS) -> float:
    """Return how often the best of some equal cells, of three runs on one card each time the same, beats another."""
    rng = np.random.default_rng(count)
    scatter, beats = scatter_of([], METRIC), 0
    for rates in (TRUTH * np.exp(rng.normal(0, 0.01, (draws, count, 3)))).tolist():
        cells = [_cell(own, ["x"] * 3, range(3 * at, 3 * at + 3), scatter) for at, own in enumerate(rates)]
        best, *others = sorted(cells, key=lambda cell: -sum(run[METRIC] for run in cell["runs"]))
        # The last one is the most likely to differ.
        beats += any(is_distinguishable(best, other, METRIC, lower_is_better=False) for other in reversed(others))
    return beats / draws


def auto(run_sd: float, *, draws: int = DRAWS, target: float = REPEATS_TARGET) -> tuple[float, float, float]:
    """Return how often the interval at the end of `repeats=auto` and that of all its runs cover, and the mean runs."""
    rng = np.random.default_rng(round(1e4 * run_sd))
    covered, fixed, taken = 0, 0, 0
    for rates in (TRUTH * (1 + run_sd * rng.standard_normal((draws, REPEATS_MAX)))).tolist():
        for runs in examined_sizes(REPEATS_MAX):
            interval = _interval(rates[:runs])
            if relative_half_width(*interval) <= target:
                break
        covered, taken = covered + _covers(interval), taken + runs
        fixed += _covers(_interval(rates))
    return covered / draws, fixed / draws, taken / draws


def _interval(rates: Sequence[float]) -> tuple[float, float]:
    interval = mean_interval([(("card", seed), rate) for seed, rate in enumerate(rates)])
    assert interval is not None
    return interval


def _covers(interval: tuple[float, float]) -> bool:
    return interval[0] <= TRUTH <= interval[1]


def committed_cards(metric: str) -> tuple[float, int]:
    """Return the standard deviation between cards of the committed cells on several cards, with its degrees of freedom.

    By the analysis of variance of the logarithms, over cells of one GPU whose runs on one card scatter little.
    """
    excess, weight, df = 0.0, 0.0, 0
    for path in sorted((ROOT / "benchmarks" / "results").glob("*/dataset.json")):
        for cell in build_cells(open_dataset(path.parent).runs).filter(gpus=1, withheld=False).iter_rows(named=True):
            known = [(key[0], math.log(rate)) for key, rate in observations(cell["runs"], metric) if rate > 0]
            cards = [[log for card, log in known if card == name] for name in dict.fromkeys(card for card, _ in known)]
            n, k = len(known), len(cards)
            if k < 2 or n == k:
                continue
            means, mean = [float(np.mean(logs)) for logs in cards], float(np.mean([log for _, log in known]))
            within = sum((log - own) ** 2 for logs, own in zip(cards, means, strict=True) for log in logs) / (n - k)
            if within <= MAX_RUN_SD**2:
                between = sum(len(logs) * (own - mean) ** 2 for logs, own in zip(cards, means, strict=True))
                excess += between - (k - 1) * within
                weight += n - sum(len(logs) ** 2 for logs in cards) / n
                df += k - 1
    return math.sqrt(max(excess / weight, 0)), df


def tables() -> Iterator[str]:
    """Yield the lines for the page."""
    yield (
        "| two equal cells | n | "
        + " | ".join(f"differ, runs {100 * sd:g} % [%]" for sd in RUN_SDS)
        + (" | interval of a mean covers [%] | runs disagree [%] |")
    )
    yield "|---" * 7 + "|"
    yield from (f"| {' | '.join(row(design))} |" for design in DESIGNS)
    yield ""
    shares = ", ".join(f"{_percent(best_of(count))} % ({count})" for count in (4, 8, 20))
    yield f"The best of several equal cells, n = 3 on one card, beats at least one other in {shares}."
    yield ""
    yield "| scatter of runs [%] | `repeats=auto` covers [%] | all ten runs cover [%] | mean runs |"
    yield "|---|---|---|---|"
    for run_sd in (0.005, 0.01, 0.03, 0.05):
        covers, fixed, runs = auto(run_sd)
        yield f"| {100 * run_sd:g} | {_percent(covers)} | {_percent(fixed)} | {runs:.1f} |"
    yield ""
    for metric in CARD_SD:
        sd, df = committed_cards(metric)
        yield (
            f"`{metric}` of committed cells differs between cards by a standard deviation of {_percent(sd)} % ({df} "
            f"degrees of freedom); the rule states {100 * CARD_SD[metric]:g} %."
        )


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def main(arguments: Sequence[str]) -> None:
    """Print the tables, or write them into the page."""
    lines = [f"{line}\n" for line in tables()]
    print(*lines, sep="", end="")
    if "--write" in arguments:
        before, rest = PAGE.read_text(encoding="utf-8").split(MARKERS[0])
        text = "".join([before, MARKERS[0], "\n", *lines, "\n", MARKERS[1], rest.split(MARKERS[1])[1]])
        PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
