"""Does an optimizer train like another one? Compares losses of the same steps and seeds.

usage: python -m benchmarks.loss_curves DATASET [--reference RECIPE] [--tested RECIPE...] [--block 50] [--margin 0.05]
          [-o FOLDER]

Exit code 0 if every tested recipe is equal within the margin, 1 if one is not or nothing can be shown. By default the
reference is the recipe with bf16_master in its name, fp32 masters and moments, and all others are tested. The runs, of
which h200_validity.sh makes the most important ones:

    launch -m site=local gpu=h200 data=prepared data.root=DATA recipe=tuned,[tuned,bf16_master],[tuned,bf16_stochastic]
              seed=0,1,2 workload.warmup_steps=10 workload.measure_steps=490 workload.min_measure_s=0
    merge SWEEP -o DATASET

How they are compared: analysis/report/sections/curves.py. The report of such a dataset has the same verdict and figure.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from analysis.dataset import open_dataset
from analysis.report.figures import svg
from analysis.report.sections.curves import (
    BLOCK,
    MARGIN_PCT,
    Comparison,
    block_rows,
    choose,
    compare,
    draw,
    read_curves,
)
from inpaint_bench.commands.exit_codes import guarded


def describe(name: str, reference: str, comparison: Comparison, block: int, margin: float) -> list[str]:
    """Return the table of blocks and the verdict as lines of Markdown."""
    seeds = len(comparison.reference)
    lines = [
        f"{name} against {reference}, {seeds} seeds, blocks of {block} steps, noise {comparison.noise:.4g}",
        "",
        "| steps | loss of the reference | difference | its range over seeds | standard deviation over seeds |",
        "|---|---|---|---|---|",
    ]
    for number in range(comparison.reference.shape[1]):
        difference = comparison.difference[:, number]
        lines.append(
            f"| {number * block + 1}-{(number + 1) * block} | {comparison.reference[:, number].mean():.5f} "
            f"| {difference.mean():+.2e} | {difference.min():+.2e} to {difference.max():+.2e} "
            f"| {comparison.spread[number]:.2e} |"
        )
    noise, largest = comparison.noise, comparison.largest
    problems = comparison.problems(margin)
    lines += [
        "",
        f"largest difference of a block: {largest:.2e} ({largest / noise:.1%} of the noise)",
        f"difference of the mean loss: {comparison.change_text} (95 %, n = {seeds}), margin {margin} %",
        f"loss of the reference fell by {comparison.fall:.4g}, {comparison.fall / noise:.1f} times the noise",
        f"verdict: {'; '.join(problems) if problems else f'equal within {margin} %'}",
        "",
    ]
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", type=Path)
    parser.add_argument("--reference", metavar="RECIPE")
    parser.add_argument("--tested", nargs="+", metavar="RECIPE")
    parser.add_argument("--block", type=int, default=BLOCK, metavar="STEPS")
    parser.add_argument("--margin", type=float, default=MARGIN_PCT, metavar="PERCENT", help="of the mean loss")
    parser.add_argument("-o", "--output", type=Path, metavar="FOLDER", help="for loss_curves.md, .csv and .svg")
    options = parser.parse_args(argv)
    dataset = open_dataset(options.dataset)
    reference, tested = choose(dataset, options.reference, options.tested)
    curves = read_curves(dataset, [reference, *tested])
    comparisons = {name: compare(curves[reference], curves[name], options.block) for name in tested}
    settings = options.block, options.margin
    blocks = [describe(name, reference, each, *settings) for name, each in comparisons.items()]
    text = "\n".join(line for lines in blocks for line in lines)
    print(text)
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "loss_curves.md").write_text(text)
        block_rows(comparisons, reference, options.block).write_csv(options.output / "loss_curves.csv")
        (options.output / "loss_curves.svg").write_text(svg.standalone(draw(comparisons, reference, options.block).svg))
    return int(any(comparison.problems(options.margin) for comparison in comparisons.values()))


if __name__ == "__main__":
    sys.exit(guarded(main))
