"""`overhead`: what the telemetry sidecar costs the training on this machine, measured.

How it is measured: alternation.py; in which order, and what the figures say: crossover.py.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import secrets
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from inpaint_bench.cli.exit_codes import guarded, unwind_on_signals
from inpaint_bench.core import environment
from inpaint_bench.core.config import BenchConfig, parse_config
from inpaint_bench.core.console import console, table
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.files import replace_json
from inpaint_bench.core.hydra_support import register
from inpaint_bench.core.paths import conf_dir
from inpaint_bench.core.recipe import name as recipe_name
from inpaint_bench.core.schema import PRODUCER
from inpaint_bench.core.validation import check

if TYPE_CHECKING:  # torch takes seconds to import, --help should not
    from analysis.stats.intervals import Gain

    from .blocks import Alternation, Block, SidecarBlock

log = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sidecar_overhead.main",
        description="Measure what the telemetry sidecar costs the training here: the workload trains in one process "
        "while the sidecar is off, and on at each rate, in blocks of balanced, shuffled order. Prints the cost in "
        "percent of step time with its 95 % interval, off against off to show what the method resolves, and the "
        "sidecar's own account.",
        epilog="example: ... gpu=h200 batch=16 'recipe=[baseline,pin_memory,non_blocking]' --rounds 8 --block-s 4",
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="what is trained, as for launch")
    parser.add_argument("--rates", default="10,20", metavar="HZ,...", help="of the sidecar's fast lane (10,20)")
    parser.add_argument("--block-s", type=float, default=8.0, metavar="S", help="length of a block (8)")
    parser.add_argument("--rounds", type=int, default=12, metavar="N", help="an even number (12)")
    parser.add_argument("--settle-s", type=float, default=1.5, metavar="S", help="steps before each block (1.5)")
    parser.add_argument("--limit", type=float, default=0.3, metavar="PCT", help="the cost to stay below (0.3)")
    parser.add_argument("--order-seed", type=int, metavar="N", help="of the blocks' order (drawn, and printed)")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="every block; rewritten after each round")
    options = parser.parse_intermixed_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)

    def measure() -> None:
        with unwind_on_signals():
            _body(options)

    return guarded(measure)


def _body(options: argparse.Namespace) -> None:
    _check(options)
    bench = _compose(options.overrides)
    rates = _rates(options.rates, bench)
    seed = secrets.randbelow(2**31) if options.order_seed is None else options.order_seed
    from .blocks import alternation
    from .design import OFF, orders

    arms = {**dict.fromkeys(OFF), **rates}
    account: dict[str, Any] | None = None
    with alternation(bench, min(rates.values())) as training:
        steps, step_s = training.calibrate(options.block_s)
        about = _about(bench, training, options, seed, steps)
        _announce(about, len(arms), step_s)
        blocks: list[Block] = []
        try:
            for number, order in enumerate(orders(list(arms), options.rounds, Random(seed)), start=1):
                blocks += [training.block(number, arm, arms[arm], steps, options.settle_s) for arm in order]
                _say_round(blocks[-len(arms) :], options.rounds)
                account = {**about, **figures(blocks, rates, options.limit)}
                if options.out:
                    replace_json(options.out, account)
        finally:  # also of what was cut short: the rounds that are whole count
            if account is not None:
                _tell(account)


def _check(options: argparse.Namespace) -> None:
    if options.rounds < 2 or options.rounds % 2:
        raise UserError(f"--rounds {options.rounds}: must be even, each order is followed by its mirror image")
    for name in ("block_s", "limit"):
        if not 0 < getattr(options, name) < math.inf:
            raise UserError(f"--{name.replace('_', '-')} {getattr(options, name):g}: must be above 0")
    if not 0 <= options.settle_s < math.inf:
        raise UserError(f"--settle-s {options.settle_s:g}: must not be negative")
    out: Path | None = options.out
    if out and not (out.absolute().parent.is_dir() and os.access(out.absolute().parent, os.W_OK)):
        raise UserError(f"--out {out}: {out.parent} is no folder that can be written to")
    if out and out.is_dir():
        raise UserError(f"--out {out}: is a folder; name a file")


def _compose(overrides: list[str]) -> BenchConfig:
    from hydra import compose, initialize_config_dir

    if any(one.lstrip("+").startswith("telemetry.fast_hz=") for one in overrides):
        raise UserError("telemetry.fast_hz: here --rates says how often the sidecar samples")
    register()
    with initialize_config_dir(version_base="1.3", config_dir=str(conf_dir()), job_name="overhead"):
        bench = parse_config(compose("config", overrides=overrides))
    if bench.telemetry.source == "none":
        raise UserError("telemetry=none: there is then no sidecar whose cost could be measured; take nvml or replay")
    if bench.workload.train_steps is not None:
        raise UserError("workload.train_steps: the cost is that in the benchmark's loop; leave train_steps away")
    return bench


def _rates(text: str, bench: BenchConfig) -> dict[str, float]:
    """Rates in Hz, by the name of their arm."""
    try:
        rates = {f"{hz:g} Hz": hz for hz in map(float, text.split(","))}
    except ValueError:
        raise UserError(f"--rates {text}: must be numbers with commas between them, as in 10,20") from None
    if len(rates) <= text.count(","):
        raise UserError(f"--rates {text}: names a rate twice")
    for hz in rates.values():
        try:
            check(replace(bench.telemetry, fast_hz=hz), "telemetry")
        except UserError as error:
            raise UserError(f"--rates {text}: {error}") from None
    return rates


def _about(
    bench: BenchConfig, training: Alternation, options: argparse.Namespace, seed: int, steps: int
) -> dict[str, Any]:
    return {
        "producer": PRODUCER,
        "overrides": options.overrides,
        "source": bench.telemetry.source,
        "watched": training.watched,
        "gpu": bench.gpu.name,
        "recipe": recipe_name(bench.recipe),
        "model": bench.model.name,
        "batch": training.batch,
        "rounds": options.rounds,
        "order_seed": seed,
        "steps_per_block": steps,
        "settle_s": options.settle_s,
        "limit_pct": options.limit,
        "rarely_s": _rarely(bench),
        "environment": environment.fingerprint(),
    }


def _rarely(bench: BenchConfig) -> dict[str, float]:
    """What a sidecar does more rarely than it samples, and every how many seconds."""
    from inpaint_bench.telemetry.sources.periodic import INTERVAL_S

    return {
        "saving its journal": bench.telemetry.journal_s,
        "listing processes": INTERVAL_S,
        "closing a part": bench.telemetry.part_s,
    }


def figures(blocks: Sequence[Block], rates: dict[str, float], limit_pct: float) -> dict[str, Any]:
    """All that follows from the blocks of whole rounds. A round in which a sidecar broke down is left out.

    Raises UserError where no round is left.
    """
    from . import design

    broken = sorted({block.round for block in blocks if not block.whole})
    good = [block for block in blocks if block.round not in broken]
    if not good:
        raise UserError("the sidecar did not sample until it was told to end, so that no round counts")
    numbers = sorted({b.round for b in good})
    rounds = [{b.arm: b.step_ms for b in good if b.round == number} for number in numbers]
    arms = []
    for name, hz in rates.items():
        found = design.cost(rounds, name)
        own = [block.sidecar for block in good if block.arm == name and block.sidecar]
        arms.append(
            {
                "arm": name,
                "hz": hz,
                "step_ms": _mean(one[name] for one in rounds),
                "cost": _percent(found),
                "median_pct": 100 * design.median(rounds, name),
                "verdict": design.verdict(found, limit_pct),
                "sidecar": _together(own),
            }
        )
    return {
        "rounds_done": max(block.round for block in blocks),
        "rounds_left_out": broken,
        "off_step_ms": _mean(one[name] for one in rounds for name in design.OFF),
        "off_over_off": _percent(design.nothing(rounds)),
        "arms": arms,
        "outlying": [
            {"round": numbers[one.place], "arm": one.arm, "above_median_pct": 100 * one.above_median}
            for one in design.outlying(rounds)
        ],
        "start": _start(good),
        "blocks": [asdict(block) | {"step_ms": block.step_ms} for block in blocks],
    }


def _percent(found: Gain) -> dict[str, float | int | None]:
    low, high = (None if end is None else 100 * end for end in (found.low, found.high))
    return {"pct": 100 * found.value, "low_pct": low, "high_pct": high, "n": found.n}


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)


def _together(accounts: Sequence[SidecarBlock]) -> dict[str, Any]:
    """The sidecars of all blocks of one rate."""
    import numpy as np

    from inpaint_bench.telemetry.nvml.probe import MIN_FOR_P99

    cpu_s = sum(one.cpu_s for one in accounts)
    result: dict[str, Any] = {
        "ticks_due": sum(one.ticks_due for one in accounts),
        "ticks_late": sum(one.ticks_late for one in accounts),
        "cpu_s": round(cpu_s, 3),
        "cpu_pct_of_a_core": 100 * cpu_s / sum(one.sampling_s for one in accounts),
        "max_rss_mib": max(one.max_rss_mib for one in accounts),
        "problems": sorted({problem for one in accounts for problem in one.problems}),
    }
    for lane in accounts[0].read_us:
        reads = [us for one in accounts for us in one.read_us[lane]]
        for share in (50, 99):
            enough = len(reads) >= (MIN_FOR_P99 if share == 99 else 1)
            result[f"{lane}_read_us_p{share}"] = float(np.percentile(reads, share)) if enough else None
    return result


def _start(blocks: Sequence[Block]) -> dict[str, Any]:
    """What starting a sidecar costs the training beside it: over the pace of the steps that lead to blocks without."""
    plain = [block.settling for block in blocks if block.hz is None]
    started = [(block.starting, block.sidecar) for block in blocks if block.sidecar]
    steps = sum(one.steps for one in plain)
    lost_s = None
    if steps:
        pace_s = sum(one.seconds for one in plain) / steps
        lost_s = _mean(beside.seconds - beside.steps * pace_s for beside, _ in started)
    return {
        "n": len(started),
        "ready_s": _mean(sidecar.ready_s for _, sidecar in started),
        "cpu_s": _mean(sidecar.start_cpu_s for _, sidecar in started),
        "training_lost_s": lost_s,
    }


def _announce(about: dict[str, Any], arms: int, step_s: float) -> None:
    log.info("sidecar: %s of %s", about["source"], about["watched"])
    log.info("training: recipe %s, model %s, batch %d", about["recipe"], about["model"], about["batch"])
    rounds, steps = about["rounds"], about["steps_per_block"]
    log.info(
        "%d rounds of %d blocks of %d steps of %.4g ms, order seed %d: about %.0f s",
        rounds,
        arms,
        steps,
        1000 * step_s,
        about["order_seed"],
        rounds * arms * (steps * step_s + about["settle_s"] + 1),  # 1: most of a start and a stop
    )


def _say_round(blocks: Sequence[Block], rounds: int) -> None:
    steps = ", ".join(f"{block.arm} {block.step_ms:.6g}" for block in blocks)
    log.info("round %d of %d, ms per step: %s", blocks[0].round, rounds, steps)


OWN = {
    "arm": "rate",
    "fast_read_us_p50": "fast p50 us",
    "fast_read_us_p99": "fast p99",
    "slow_read_us_p50": "slow p50",
    "slow_read_us_p99": "slow p99",
    "gpm_read_us_p50": "gpm p50",
    "gpm_read_us_p99": "gpm p99",
    "ticks_late": "ticks late",
    "ticks_due": "of",
    "cpu_s": "CPU s",
    "cpu_pct_of_a_core": "% of a core",
    "max_rss_mib": "RSS MiB",
}


def _tell(account: dict[str, Any]) -> None:
    screen = console()

    def say(text: str) -> None:
        screen.print(text, highlight=False, markup=False, soft_wrap=True)

    nothing, start = account["off_over_off"], account["start"]
    rows: list[list[object]] = [
        ["off", _digits(account["off_step_ms"]), None, None, None, 2 * nothing["n"], None],
        ["off against off", None, *_cells(nothing), None],
    ]
    for one in account["arms"]:
        rows.append([f"on, {one['arm']}", _digits(one["step_ms"]), *_cells(one["cost"]), round(one["median_pct"], 3)])
    say("\nThe sidecar's cost in percent of step time, with 95 % intervals (Student's t over rounds):")
    screen.print(table(("sidecar", "ms per step", "cost %", "from %", "to %", "n", "median %"), rows))
    for one in account["arms"]:
        say(f"{one['arm']}: {one['verdict']}")
    for one in account["outlying"]:
        say(_stands_out(one, account["blocks"]))
    if nothing["low_pct"] is not None and not nothing["low_pct"] <= 0 <= nothing["high_pct"]:
        say("Off differs from off: chance (1 in 20), or this machine was not steady. Measure again.")
    block_s = account["steps_per_block"] * account["off_step_ms"] / 1000
    if rare := [f"{what} (every {every:g} s)" for what, every in account["rarely_s"].items() if every > block_s]:
        say(f"Not in every block, since it is shorter: {', '.join(rare)}.")
    say("\nThe sidecar's own account, all blocks of a rate together:")
    own = [{**one["sidecar"], "arm": one["arm"]} for one in account["arms"]]
    screen.print(table(list(OWN.values()), [[one[key] for key in OWN] for one in own]))
    lost = "" if start["training_lost_s"] is None else f" and delays the training by {start['training_lost_s']:.2f} s"
    say(
        f"A start, once per run and not in these figures, takes {start['ready_s']:.2f} s and {start['cpu_s']:.2f} CPU "
        f"seconds{lost} (means of {start['n']})."
    )
    for problem in sorted({problem for one in own for problem in one["problems"]}):
        say(f"The sidecar reported: {problem}")
    if account["rounds_left_out"]:
        say(f"Left out, since a sidecar broke down: round {', '.join(map(str, account['rounds_left_out']))}")


def _stands_out(one: dict[str, Any], blocks: Sequence[dict[str, Any]]) -> str:
    """One block that is far from the rest, and where its time went."""
    block = next(block for block in blocks if (block["round"], block["arm"]) == (one["round"], one["arm"]))
    by = one["above_median_pct"]
    device = "" if block["device_ms"] is None else f"{block['device_ms']:.6g} ms of it on the device, "
    return (
        f"Stands out: {one['arm']} in round {one['round']}, {block['step_ms']:.6g} ms per step, {abs(by):.3g} % "
        f"{'above' if by > 0 else 'below'} the median of its blocks ({device}{block['data_wait_pct']:.2g} % waiting "
        "for data). Whatever the cause, it counts in every figure above; the median hardly moves by it."
    )


def _cells(found: dict[str, Any]) -> list[object]:
    ends = [None if found[key] is None else round(found[key], 3) for key in ("pct", "low_pct", "high_pct")]
    return [*ends, found["n"]]


def _digits(value: float) -> float:
    return float(f"{value:.6g}")


if __name__ == "__main__":
    sys.exit(main())
