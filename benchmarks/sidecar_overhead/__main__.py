"""Measures what the sidecar, or a tracker, costs the training here: `python -m benchmarks.sidecar_overhead`.

How it is measured: blocks.py. In which order, and what the figures say: design.py.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import secrets
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import msgspec

from inpaint_bench.commands.exit_codes import guarded, unwind_on_signals
from inpaint_bench.core import environment
from inpaint_bench.core.config.bench import BenchConfig
from inpaint_bench.core.config.parse import parse_config, require_tracker
from inpaint_bench.core.config.recipe import name as recipe_name
from inpaint_bench.core.config.validation import check
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.files import replace_json
from inpaint_bench.core.hydra_support import register
from inpaint_bench.core.paths import conf_dir
from inpaint_bench.core.schema import PRODUCER

if TYPE_CHECKING:  # torch takes seconds to import, --help should not
    from .blocks import Block, Experiment

log = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the experiment and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sidecar_overhead",
        description="Measure what the telemetry sidecar costs the training here. The workload trains in one process "
        "while the sidecar is off, and on at each rate, in blocks of balanced, shuffled order. Prints the cost in "
        "percent of step time with its 95 % interval, and off against off to show what the method resolves. With "
        "track=... the sidecar runs in every block, and it is the tracker that is off or on.",
        epilog="example: ... gpu=h200 batch=16 'recipe=[baseline,pin_memory,non_blocking]' --rounds 8 --block-s 4",
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help="configuration of the training, as for launch"
    )
    parser.add_argument("--rates", default="10,20", metavar="HZ,...", help="rates of the fast stream (10,20)")
    parser.add_argument("--block-s", type=float, default=8.0, metavar="S", help="length of a block (8)")
    parser.add_argument("--rounds", type=int, default=12, metavar="N", help="an even number (12)")
    parser.add_argument("--settle-s", type=float, default=1.5, metavar="S", help="training before each block (1.5)")
    parser.add_argument(
        "--max-overhead-pct", type=float, default=0.3, metavar="PCT", help="cost that must not be exceeded (0.3)"
    )
    parser.add_argument("--order-seed", type=int, metavar="N", help="seed of the order (drawn, and printed)")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="all blocks; rewritten after each round")
    options = parser.parse_intermixed_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)

    def measure() -> None:
        """Run the experiment; a signal unwinds it."""
        with unwind_on_signals():
            _run(options)

    return guarded(measure)


def _run(options: argparse.Namespace) -> None:
    _check_options(options)
    bench = _compose(options.overrides)
    rates = _parse_rates(options.rates, bench)
    tracker = bench.track.name if bench.track.module else None
    if tracker:
        require_tracker(bench.track)
        if len(rates) > 1:
            raise UserError(f"--rates {options.rates}: one rate with track={tracker}, whose cost is then measured")
        rates = {f"{name} + {tracker}": hz for name, hz in rates.items()}
        logging.getLogger("inpaint_bench.run.progress_log").setLevel(logging.WARNING)
    seed = secrets.randbelow(2**31) if options.order_seed is None else options.order_seed
    from .blocks import experiment
    from .design import OFF, orders
    from .figures import figures, print_figures

    # The cost of a tracker is that of a run with sidecar and tracker over one with the sidecar alone.
    arms = {**dict.fromkeys(OFF, min(rates.values()) if tracker else None), **rates}
    tracked = {arm: tracker is not None and arm in rates for arm in arms}
    result: dict[str, Any] | None = None
    with experiment(bench, min(rates.values())) as training:
        steps, step_s = training.calibrate(options.block_s)
        setup = _setup(bench, training, options, seed, steps)
        _log_setup(setup, len(arms), step_s)
        blocks: list[Block] = []
        try:
            for number, order in enumerate(orders(list(arms), options.rounds, Random(seed)), start=1):
                done = [
                    training.block(number, arm, arms[arm], steps, options.settle_s, tracked=tracked[arm])
                    for arm in order
                ]
                blocks += done
                steps_ms = ", ".join(f"{block.arm} {block.step_ms:.6g}" for block in done)
                log.info("round %d of %d, ms per step: %s", number, options.rounds, steps_ms)
                result = {**setup, **figures(blocks, rates, options.max_overhead_pct)}
                if options.out:
                    replace_json(options.out, result)
        finally:  # if interrupted, the complete rounds count
            if result is not None:
                print_figures(result)


def _check_options(options: argparse.Namespace) -> None:
    """Raise UserError for impossible options."""
    if options.rounds < 2 or options.rounds % 2:
        raise UserError(f"--rounds {options.rounds}: must be even, each order is followed by its mirror image")
    for name in ("block_s", "max_overhead_pct"):
        if not 0 < getattr(options, name) < math.inf:
            raise UserError(f"--{name.replace('_', '-')} {getattr(options, name):g}: must be above 0")
    if not 0 <= options.settle_s < math.inf:
        raise UserError(f"--settle-s {options.settle_s:g}: must not be negative")
    out: Path | None = options.out
    if out and out.is_dir():
        raise UserError(f"--out {out} is a folder; name a file")
    if out and not (out.absolute().parent.is_dir() and os.access(out.absolute().parent, os.W_OK)):
        raise UserError(f"--out {out}: {out.parent} is not a writable folder")


def _compose(overrides: list[str]) -> BenchConfig:
    from hydra import compose, initialize_config_dir

    if any(override.lstrip("+").startswith("telemetry.fast_hz=") for override in overrides):
        raise UserError("telemetry.fast_hz: use --rates")
    register()
    with initialize_config_dir(version_base="1.3", config_dir=str(conf_dir()), job_name="overhead"):
        bench = parse_config(compose("config", overrides=overrides))
    if bench.telemetry.source == "none":
        raise UserError("telemetry=none has no sidecar to measure; set nvml or replay")
    if bench.workload.resumes:
        raise UserError("workload.train_steps: the cost is measured in the benchmark's loop; leave train_steps unset")
    return bench


def _parse_rates(text: str, bench: BenchConfig) -> dict[str, float]:
    """Return the rates in Hz by the name of their arm."""
    try:
        rates = {f"{hz:g} Hz": hz for hz in map(float, text.split(","))}
    except ValueError:
        raise UserError(f"--rates {text}: must be numbers separated by commas, such as 10,20") from None
    if len(rates) <= text.count(","):
        raise UserError(f"--rates {text}: duplicate rate")
    for hz in rates.values():
        try:
            check(replace(bench.telemetry, fast_hz=hz), "telemetry")
        except UserError as error:
            raise UserError(f"--rates {text}: {error}") from None
    return rates


def _setup(
    bench: BenchConfig, training: Experiment, options: argparse.Namespace, seed: int, steps: int
) -> dict[str, Any]:
    return {
        "producer": PRODUCER,
        "overrides": options.overrides,
        "measured": f"track={bench.track.name}" if bench.track.module else "sidecar",
        "source": bench.telemetry.source,
        "sampled": training.sampled,
        "gpu": bench.gpu.name,
        "recipe": recipe_name(bench),
        "model": bench.model.name,
        "batch": training.batch,
        "rounds": options.rounds,
        "order_seed": seed,
        "steps_per_block": steps,
        "settle_s": options.settle_s,
        "max_overhead_pct": options.max_overhead_pct,
        "environment": msgspec.to_builtins(environment.fingerprint()),
    }


def _log_setup(setup: dict[str, Any], num_arms: int, step_s: float) -> None:
    rounds, steps = setup["rounds"], setup["steps_per_block"]
    total_s = rounds * num_arms * (steps * step_s + setup["settle_s"] + 1)  # 1: most of a start and a stop
    log.info("sidecar: %s of %s", setup["source"], setup["sampled"])
    log.info("training: recipe %s, model %s, batch %d", setup["recipe"], setup["model"], setup["batch"])
    log.info("%d rounds of %d blocks of %d steps of %.4g ms", rounds, num_arms, steps, 1000 * step_s)
    log.info("order seed %d, about %.0f s", setup["order_seed"], total_s)


if __name__ == "__main__":
    sys.exit(main())
