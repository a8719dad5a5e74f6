"""Simulate how often equal cells differ by the rules of the analysis, and how often its intervals cover the truth.

usage: python -m benchmarks.coverage [--write]

Every share is of 4,000 draws with a fixed seed. Runs and cards are normal around the same images/s, and what judges
measured cells judges them. The scatter that a rule without an interval needs is pooled over 20 other cells of two runs
on one card; each 20 serve four draws. --write puts the tables into docs/dataset.md.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from analysis.report.sections.dataset_comparison import CellPair, Verdict
from analysis.stats.agreement import disagree
from analysis.stats.cells import Cell, is_distinguishable, metric_interval, scatter_of
from analysis.stats.intervals import mean_interval, observations
from launchers.points.repetitions import examined_sizes, relative_half_width

PAGE = Path(__file__).parents[1] / "docs" / "dataset.md"
MARKERS = ("<!-- python -m benchmarks.coverage --write -->\n", "<!-- end of the tables of coverage -->\n")
DRAWS, POOLED, DRAWS_PER_POOL = 4000, 20, 4
RUN_SDS, CARD_SDS, SDS_OF_AUTO = (0.002, 0.01, 0.03), (0.0, 0.01), (0.005, 0.01, 0.03, 0.05)
METRIC = "images_per_s"
TRUTH = 100.0
TARGET, MAX_RUNS = 0.02, 10  # the defaults of repeats=auto


@dataclass(frozen=True, kw_only=True)
class Design:
    """Two cells of `n` runs each, on the same cards or each on others."""

    cards: int
    n: int
    shared: bool = False
    paired: bool = False
    pooled: int = POOLED  # other cells that tell the scatter

    @property
    def text(self) -> str:
        cards = ("one card", "two cards", "three cards")[self.cards - 1]
        where = f"the same {cards}" if self.shared else f"{cards} each"
        return where + (", pairs" if self.paired else "") + ("" if self.pooled else ", no other cell")


_SIZES = {1: (1, 2, 3, 5), 2: (2, 3, 5), 3: (3, 5)}  # runs of each cell by the number of its cards
DESIGNS = [Design(cards=1, n=n, pooled=0) for n in (1, 2)]
for _shared, _paired in ((False, False), (True, False), (True, True)):
    DESIGNS += [Design(cards=k, n=n, shared=_shared, paired=_paired) for k, sizes in _SIZES.items() for n in sizes]


def _cell(rates: Sequence[float], cards: Iterable[str], first_seed: int = 0, scatter: Any = None) -> Cell:
    runs = [
        {"gpu_uuid": card, "node": None, "seed": seed, "run_id": f"{card}-{seed}", METRIC: rate}
        for seed, (rate, card) in enumerate(zip(rates, cards, strict=True), start=first_seed)
    ]
    return {"runs": runs, "scatter": {METRIC: scatter}}


def simulate(design: Design, run_sd: float, card_sd: float, draws: int = DRAWS) -> tuple[float, float, float, float]:
    """Return how often two equal cells differ, the interval of a mean covers (1 without one), and its runs disagree.

    The last value is the median of half the interval of the difference; NaN without one.
    """
    rng = np.random.default_rng([*design.text.encode(), design.n, round(1e4 * run_sd), round(1e4 * card_sd)])
    at = np.arange(design.n) % design.cards
    of_cards = rng.normal(0, card_sd, (draws, 2, design.cards))
    of_cards[:, 1] = of_cards[:, 0] if design.shared else of_cards[:, 1]
    rates = TRUTH * np.exp(of_cards[:, :, at] + rng.normal(0, run_sd, (draws, 2, design.n)))
    pools = TRUTH * np.exp(rng.normal(0, run_sd, (-(-draws // DRAWS_PER_POOL), design.pooled, 2)))
    names = [[f"{0 if design.shared else side}-{card}" for card in at] for side in (0, 1)]
    # A single card says nothing about others.
    truths = TRUTH * np.exp(of_cards[:, 0, 0] * (design.cards == 1))
    differ, covered, contradict, scatter, halves = 0, [], 0, None, []
    for draw, ((new_rates, old_rates), truth) in enumerate(zip(rates.tolist(), truths.tolist(), strict=True)):
        if draw % DRAWS_PER_POOL == 0:
            others = [_cell(pair, "xx")["runs"] for pair in pools[draw // DRAWS_PER_POOL].tolist()]
            scatter = scatter_of(others, METRIC)
        new = _cell(new_rates, names[0], 0, scatter)
        old = _cell(old_rates, names[1], 0 if design.paired else design.n, scatter)
        pair = CellPair(old=old, new=new)
        differ += pair.verdict(METRIC) not in (Verdict.SIMILAR, Verdict.ONE_CARD)
        if (gain := pair.gain(METRIC)) and gain.low is not None and gain.high is not None:
            halves.append((gain.high - gain.low) / 2)
        contradict += disagree(new_rates)
        low, high = metric_interval(METRIC, observations(new["runs"], METRIC)) or (truth, truth)
        covered.append(low <= truth <= high)
    half = float(np.median(halves)) if len(halves) > draws / 2 else math.nan
    return differ / draws, sum(covered) / draws, contradict / draws, half


def row(design: Design) -> list[str]:
    """Return a row of the first table: the worst case over the scatters of cards."""
    # If both sides ran on one card, or in pairs, cards cancel.
    card_sds = CARD_SDS[-1:] if design.paired or (design.shared and design.cards == 1) else CARD_SDS
    cases = [[simulate(design, run_sd, card_sd) for card_sd in card_sds] for run_sd in RUN_SDS]
    covers = min(covers for case in cases for _, covers, *_ in case)
    shares = [_percent(max(differ for differ, *_ in case)) for case in cases]
    disagreeing = max(share for case in cases for _, _, share, _ in case)
    # Where cards differ: with runs that scatter little, and much.
    halves = ["none" if math.isnan(half) else f"{100 * half:.2g}" for *_, half in (case[-1] for case in cases[:2])]
    return [
        *(design.text, str(design.n), *shares, "none" if covers == 1 else _percent(covers)),
        *(_percent(disagreeing), *halves),
    ]


def best_of(count: int) -> float:
    """Return how often the best of some equal cells, each of three runs on one and the same card, beats another."""
    rates = TRUTH * np.exp(np.random.default_rng(count).normal(0, 0.01, (DRAWS, count, 3)))
    beats, scatter = 0, scatter_of([], METRIC)
    for draw in rates.tolist():
        cells = [_cell(own, "xxx", 3 * at, scatter) for at, own in enumerate(sorted(draw, key=sum))]
        # The slowest first: it is the most likely to differ.
        beats += any(is_distinguishable(cells[-1], cell, METRIC, lower_is_better=False) for cell in cells[:-1])
    return beats / DRAWS


def auto(run_sd: float, *, draws: int = DRAWS) -> tuple[float, float, float]:
    """Return how often the interval at the end of `repeats=auto` and that of all its runs cover, and the mean runs."""
    ends = []
    for rates in (TRUTH * (1 + run_sd * np.random.default_rng(0).standard_normal((draws, MAX_RUNS)))).tolist():
        every = {n: mean_interval([(("x", at), rate) for at, rate in enumerate(rates[:n])]) for n in _EXAMINED}
        known = {n: interval for n, interval in every.items() if interval}
        n = next((n for n, interval in known.items() if relative_half_width(*interval) <= TARGET), MAX_RUNS)
        ends.append([*(known[size][0] <= TRUTH <= known[size][1] for size in (n, MAX_RUNS)), n])
    covers, fixed, runs = np.mean(ends, axis=0).tolist()
    return covers, fixed, runs


_EXAMINED = examined_sizes(MAX_RUNS)


def tables() -> Iterator[str]:
    """Yield the lines for the page."""
    shares = " | ".join(f"differ, runs {100 * sd:g} % [%]" for sd in RUN_SDS)
    halves = " | ".join(f"difference, runs {100 * sd:g} % [± %]" for sd in RUN_SDS[:2])
    yield f"| two equal cells | n | {shares} | interval of a mean covers [%] | runs disagree [%] | {halves} |"
    yield "|---" * 9 + "|"
    yield from (f"| {' | '.join(row(design))} |" for design in DESIGNS)
    yield ""
    shares = ", ".join(f"{_percent(best_of(count))} % ({count})" for count in (4, 8, 20))
    yield f"The best of several equal cells, n = 3 on one card, beats at least one other in {shares}."
    yield ""
    yield "| scatter of runs [%] | `repeats=auto` covers [%] | all ten runs cover [%] | mean runs |"
    yield "|---" * 4 + "|"
    for run_sd in SDS_OF_AUTO:
        covers, fixed, runs = auto(run_sd)
        yield f"| {100 * run_sd:g} | {_percent(covers)} | {_percent(fixed)} | {runs:.1f} |"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def main(arguments: Sequence[str]) -> None:
    """Print the tables, or write them into the page too."""
    text = "".join(f"{line}\n" for line in tables())
    print(text, end="")
    if "--write" in arguments:
        before, rest = PAGE.read_text(encoding="utf-8").split(MARKERS[0])
        after = rest.split(MARKERS[1])[1]
        PAGE.write_text(f"{before}{MARKERS[0]}\n{text}\n{MARKERS[1]}{after}", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
