"""What `repeats=auto` does to an interval: how often the one at the end holds the truth, and how many runs it takes.

usage: python benchmarks/stopping.py [--cells 20000] [--target 0.02] [--max 10] [--seed 0]

Runs of one card, normal around the true images/s; a line per scatter (standard deviation over the mean). The rule and
the interval are those of the benchmark (inpaint_bench/stopping.py, analysis/ratio.py). Beside it the same cells with
as many runs as auto may take, all of them: their interval holds the truth in 95 of 100.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import numpy as np

from analysis.stats.intervals import mean_interval
from launchers.points.stopping import enough, half_width, looks

SCATTERS = (0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1)
TRUTH = 100.0  # images/s


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Shares are of all cells."""

    scatter: float
    covered: float  # the interval at the end holds the truth
    fixed: float  # the interval over all runs that auto may take does
    narrow: float  # ended because the interval was narrow enough
    runs: float  # mean number


def simulate(scatter: float, *, target: float, most: int, cells: int, rng: np.random.Generator) -> Outcome:
    figures = TRUTH * (1 + scatter * rng.standard_normal((cells, most)))
    ends = [_cell(row, target, looks(most)) for row in figures]
    fixed = [_holds(_interval(row)) for row in figures]
    return Outcome(
        scatter=scatter,
        covered=float(np.mean([holds for holds, _, _ in ends])),
        fixed=float(np.mean(fixed)),
        narrow=float(np.mean([narrow for _, narrow, _ in ends])),
        runs=float(np.mean([runs for _, _, runs in ends])),
    )


def _cell(row: np.ndarray, target: float, stops: list[int]) -> tuple[bool, bool, int]:
    """Whether the last interval holds the truth, whether it is narrow enough, and after how many runs it came."""
    for runs in stops:
        interval = _interval(row[:runs])
        if narrow := enough(half_width(*interval), target):
            break
    return _holds(interval), narrow, runs


def _interval(row: np.ndarray) -> tuple[float, float]:
    found = mean_interval([(("card", seed), float(value)) for seed, value in enumerate(row)])
    assert found is not None
    return found


def _holds(interval: tuple[float, float]) -> bool:
    return interval[0] <= TRUTH <= interval[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, default=20_000)
    parser.add_argument("--target", type=float, default=0.02, help="repeats_target")
    parser.add_argument("--max", type=int, default=10, help="repeats_max")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = np.random.default_rng(options.seed)
    print(f"{options.cells} cells a line, target {options.target:g}, looks after {looks(options.max)} runs")
    print("scatter  holds the truth  all runs do  narrow enough  mean runs")
    for scatter in SCATTERS:
        one = simulate(scatter, target=options.target, most=options.max, cells=options.cells, rng=rng)
        print(f"{scatter:7.3f}  {one.covered:15.3f}  {one.fixed:11.3f}  {one.narrow:13.3f}  {one.runs:9.2f}")


if __name__ == "__main__":
    main()
