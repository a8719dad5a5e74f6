"""Coverage of the interval at the end of `repeats=auto`, and the number of runs that it takes.

usage: python benchmarks/stopping.py [--cells 20000] [--target 0.02] [--max 10] [--seed 0]

Simulates runs of one card, normal around the true images/s; prints a line per scatter (standard deviation over mean).
Stopping rule and interval are those of the benchmark (launchers/points/repetitions.py, analysis/stats/intervals.py).
For comparison, the same cells with all the runs that auto may take: their interval covers the truth in 95 of 100.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import numpy as np

from analysis.stats.intervals import mean_interval
from launchers.points.repetitions import examined_sizes, relative_half_width

SCATTERS = (0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1)
TRUTH = 100.0  # images/s


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Shares of all cells of one scatter."""

    scatter: float
    covered: float  # the interval at the end covers the truth
    fixed: float  # the interval over all runs that auto may take covers it
    narrow: float  # stopped because the interval was narrow enough
    runs: float  # mean number of runs


def simulate(scatter: float, *, target: float, max_runs: int, cells: int, rng: np.random.Generator) -> Outcome:
    """Simulate cells of one scatter."""
    rates = TRUTH * (1 + scatter * rng.standard_normal((cells, max_runs)))
    results = [_run_cell(row, target, examined_sizes(max_runs)) for row in rates]
    fixed = [_covers(_interval(row)) for row in rates]
    return Outcome(
        scatter=scatter,
        covered=float(np.mean([covered for covered, _, _ in results])),
        fixed=float(np.mean(fixed)),
        narrow=float(np.mean([narrow for _, narrow, _ in results])),
        runs=float(np.mean([runs for _, _, runs in results])),
    )


def _run_cell(row: np.ndarray, target: float, sizes: list[int]) -> tuple[bool, bool, int]:
    """Return whether the last interval covers the truth, whether it is narrow enough, and the number of runs."""
    for runs in sizes:
        interval = _interval(row[:runs])
        if narrow := relative_half_width(*interval) <= target:
            break
    return _covers(interval), narrow, runs


def _interval(row: np.ndarray) -> tuple[float, float]:
    interval = mean_interval([(("card", seed), float(value)) for seed, value in enumerate(row)])
    assert interval is not None
    return interval


def _covers(interval: tuple[float, float]) -> bool:
    return interval[0] <= TRUTH <= interval[1]


def main() -> None:
    """Print a table of scatters."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, default=20_000)
    parser.add_argument("--target", type=float, default=0.02, help="repeats_target")
    parser.add_argument("--max", type=int, default=10, help="repeats_max")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = np.random.default_rng(options.seed)
    sizes = examined_sizes(options.max)
    print(f"{options.cells} cells a line, target {options.target:g}, examined after {sizes} runs")
    print("scatter  auto covers  all runs cover  narrow enough  mean runs")
    for scatter in SCATTERS:
        result = simulate(scatter, target=options.target, max_runs=options.max, cells=options.cells, rng=rng)
        print(
            f"{scatter:7.3f}  {result.covered:11.3f}  {result.fixed:14.3f}  {result.narrow:13.3f}  {result.runs:9.2f}"
        )


if __name__ == "__main__":
    main()
