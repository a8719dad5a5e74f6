"""From blocks to figures: the cost of each rate, outliers, and the sidecar's own use of time and memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

import numpy as np

from inpaint_bench.core.console import console, table
from inpaint_bench.core.errors import UserError

from . import design
from .blocks import STREAMS, Block, SidecarBlock

MIN_FOR_P99 = 100  # with fewer values, the 99th percentile is the maximum


def figures(blocks: Sequence[Block], rates: dict[str, float], max_overhead_pct: float) -> dict[str, Any]:
    """Return all that follows from the blocks of complete rounds, without those in which a sidecar failed.

    Raises UserError if no round is left.
    """
    failed = sorted({block.round for block in blocks if not block.complete})
    valid = [block for block in blocks if block.round not in failed]
    if not valid:
        raise UserError("sidecar or tracker did not work to the end of their blocks, so no round counts")
    numbers = sorted({block.round for block in valid})
    rounds = [{block.arm: block.step_ms for block in valid if block.round == number} for number in numbers]
    arms = []
    for name, hz in rates.items():
        estimate = design.cost(rounds, name)
        sidecar = sidecar_figures([b.sidecar for b in valid if b.arm == name and b.sidecar])
        rate_hz = sidecar["rate_hz"]
        sidecar["rate_off_pct"] = None if rate_hz is None else 100 * (rate_hz / hz - 1)
        arms.append(
            {
                "arm": name,
                "hz": hz,
                "step_ms": fmean(times[name] for times in rounds),
                "cost": _percent(estimate),
                "median_pct": 100 * design.median_cost(rounds, name),
                "verdict": design.verdict(estimate, max_overhead_pct),
                "sidecar": sidecar,
            }
        )
    sidecars = [block.sidecar for block in valid if block.sidecar]
    trackers_cpu_s = [block.tracker_cpu_s for block in valid if block.tracker_cpu_s is not None]
    return {
        "rounds_done": max(block.round for block in blocks),
        "rounds_left_out": failed,
        "off_step_ms": fmean(times[name] for times in rounds for name in design.OFF),
        "off_against_off": _percent(design.off_against_off(rounds)),
        "arms": arms,
        "outliers": [
            {"round": numbers[item.round], "arm": item.arm, "above_median_pct": 100 * item.above_median}
            for item in design.outliers(rounds)
        ],
        "start": {
            "n": len(sidecars),
            "ready_s": fmean(sidecar.ready_s for sidecar in sidecars),
            "cpu_s": fmean(sidecar.start_cpu_s for sidecar in sidecars),
        },
        "tracker_cpu_s": fmean(trackers_cpu_s) if trackers_cpu_s else None,
        "blocks": [asdict(block) | {"step_ms": block.step_ms} for block in blocks],
    }


def _percent(estimate: design.Estimate) -> dict[str, float | int | None]:
    low, high = (None if end is None else 100 * end for end in (estimate.low, estimate.high))
    return {"pct": 100 * estimate.value, "low_pct": low, "high_pct": high, "n": estimate.n}


def sidecar_figures(sidecars: Sequence[SidecarBlock]) -> dict[str, Any]:
    """Return what the sidecars of one rate used, all blocks together."""
    cpu_s = sum(sidecar.cpu_s for sidecar in sidecars)
    result: dict[str, Any] = {
        "ticks_due": sum(sidecar.ticks_due for sidecar in sidecars),
        "ticks_skipped": sum(sidecar.ticks_skipped for sidecar in sidecars),
        "cpu_s": round(cpu_s, 3),
        "cpu_pct_of_a_core": 100 * cpu_s / sum(sidecar.seconds for sidecar in sidecars),
        "rate_hz": fmean(rates) if (rates := [sidecar.rate_hz for sidecar in sidecars if sidecar.rate_hz]) else None,
        "max_rss_mib": max(sidecar.max_rss_mib for sidecar in sidecars),
        "problems": sorted({problem for sidecar in sidecars for problem in sidecar.problems}),
    }
    for stream in STREAMS:
        reads = [us for sidecar in sidecars for us in sidecar.read_us[stream]]
        result[f"{stream}_read_us_p50"] = float(np.percentile(reads, 50)) if reads else None
        result[f"{stream}_read_us_p99"] = float(np.percentile(reads, 99)) if len(reads) >= MIN_FOR_P99 else None
    return result


_SIDECAR_COLUMNS = {
    **{f"{stream}_read_us_p{share}": f"{stream} p{share} us" for stream in STREAMS for share in (50, 99)},
    "rate_off_pct": "% off rate",
    "ticks_skipped": "ticks skipped",
    "ticks_due": "of",
    "cpu_s": "CPU s",
    "cpu_pct_of_a_core": "% of a core",
    "max_rss_mib": "RSS MiB",
}


def print_figures(result: dict[str, Any]) -> None:
    """Print the tables and sentences of an experiment."""
    screen = console()
    baseline, start = result["off_against_off"], result["start"]
    rows: list[list[object]] = [
        ["off", _digits(result["off_step_ms"]), None, None, None, 2 * baseline["n"], None],
        ["off against off", None, *_cells(baseline), None],
    ]
    for arm in result["arms"]:
        rows.append([f"on, {arm['arm']}", _digits(arm["step_ms"]), *_cells(arm["cost"]), round(arm["median_pct"], 3)])
    measured = result.get("measured", "sidecar")
    print(f"\nCost of {measured} in percent of step time, with 95 % intervals (Student's t over rounds):")
    screen.print(table((measured, "ms per step", "cost %", "from %", "to %", "n", "median %"), rows))
    for arm in result["arms"]:
        print(f"{arm['arm']}: {arm['verdict']}")
    for item in result["outliers"]:
        print(_outlier_sentence(item, result["blocks"]))
    if baseline["low_pct"] is not None and not baseline["low_pct"] <= 0 <= baseline["high_pct"]:
        print("Off differs from off: chance (1 in 20), or this machine was not steady. Measure again.")
    print("\nThe sidecar's own figures, all blocks of a rate together:")
    sidecar_rows = [[arm["arm"], *(arm["sidecar"][key] for key in _SIDECAR_COLUMNS)] for arm in result["arms"]]
    screen.print(table(["rate", *_SIDECAR_COLUMNS.values()], sidecar_rows))
    print(
        f"A start, once per run and not in these figures, takes {start['ready_s']:.2f} s and {start['cpu_s']:.2f} CPU "
        f"seconds (means of {start['n']})."
    )
    if result["tracker_cpu_s"] is not None:
        print(
            f"A tracker used {result['tracker_cpu_s']:.2f} CPU seconds from its start to its end (mean of the blocks)."
        )
    for problem in sorted({problem for arm in result["arms"] for problem in arm["sidecar"]["problems"]}):
        print(f"The sidecar reported: {problem}")
    if result["rounds_left_out"]:
        print(f"Left out because a sidecar or tracker failed: round {', '.join(map(str, result['rounds_left_out']))}")


def _outlier_sentence(item: dict[str, Any], blocks: Sequence[dict[str, Any]]) -> str:
    block = next(block for block in blocks if (block["round"], block["arm"]) == (item["round"], item["arm"]))
    deviation_pct = item["above_median_pct"]
    direction = "above" if deviation_pct > 0 else "below"
    device = "" if block["device_ms"] is None else f"{block['device_ms']:.6g} ms of it on the device, "
    return (
        f"Outlier: {item['arm']} in round {item['round']}, {block['step_ms']:.6g} ms per step, "
        f"{abs(deviation_pct):.3g} % {direction} the median of its blocks ({device}{block['data_wait_pct']:.2g} % "
        "waiting for data). It counts in every figure above, whatever its cause; the median hardly changes."
    )


def _cells(cost: dict[str, Any]) -> list[object]:
    ends = [None if cost[key] is None else round(cost[key], 3) for key in ("pct", "low_pct", "high_pct")]
    return [*ends, cost["n"]]


def _digits(value: float) -> float:
    return float(f"{value:.6g}")
