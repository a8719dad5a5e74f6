"""What held a run back, as far as one run can tell (tier 3): a table of rules, the first that matches wins.

Thresholds are starting values, not yet fitted on our own runs. Not decided here, because one run cannot:
tensor_bound and dram_bound (need GPM or DCGM counters), vram_limited (needs a sweep over the batch), and the
elasticity arms of data_starved and host_bound.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from inpaint_bench.contract import Reason

from .metrics import number

TIER = 3
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Rule:
    name: str
    when: str  # the rule in words, for the report
    test: Callable[[Row], bool]
    shows: tuple[tuple[str, str], ...]  # (column, words) that are the evidence


def _above(column: str, limit: float) -> Callable[[Row], bool]:
    return lambda row: row[column] is not None and row[column] > limit


def _below(column: str, limit: float) -> Callable[[Row], bool]:
    return lambda row: row[column] is not None and row[column] < limit


def _at_the_limit(row: Row) -> bool:
    power, limit = row["power_w"], row["power_limit_w"]
    clock, most = row["sm_clock_mhz_mean"], row["sm_clock_mhz_limit"]
    known = None not in (power, limit, clock, most)
    return bool(known and power > 0.97 * limit and clock < 0.97 * most)


RULES = (
    Rule(
        name="oom",
        when="the run ended out of GPU memory",
        test=lambda row: row["reason"] == Reason.OOM_GPU,
        shows=(("batch", "batch"),),
    ),
    Rule(
        name="thermal_throttled",
        when="thermal throttling for more than 1 % of the window",
        test=_above("throttle_thermal_pct", 1),
        shows=(("throttle_thermal_pct", "% of the window throttled by temperature"),),
    ),
    Rule(
        name="power_capped",
        when="held at the power cap for more than 5 % of the window, or power above 97 % of the limit with the "
        "SM clock below 97 % of its maximum",
        test=lambda row: _above("throttle_power_pct", 5)(row) or _at_the_limit(row),
        shows=(
            ("throttle_power_pct", "% of the window at the power cap"),
            ("power_w", "W"),
            ("power_limit_w", "W limit"),
            ("sm_clock_mhz_mean", "MHz"),
        ),
    ),
    Rule(
        name="data_starved",
        when="waiting for data for more than 10 % of the window",
        test=_above("data_wait_pct", 10),
        shows=(("data_wait_pct", "% waiting for data"), ("gpu_util_pct", "% GPU utilisation")),
    ),
    Rule(
        name="host_bound",
        when="GPU idle for more than 10 % of the window, without waiting for data",
        test=_below("gpu_util_pct", 90),
        shows=(("gpu_util_pct", "% GPU utilisation"), ("data_wait_pct", "% waiting for data")),
    ),
)
MIXED = "none of the rules above: one run shows no single cause"
_MIXED_SHOWS = (
    ("gpu_util_pct", "% GPU utilisation"),
    ("data_wait_pct", "% waiting for data"),
    ("throttle_power_pct", "% at the power cap"),
)


def classify(row: Row) -> tuple[str, str]:
    """(class, evidence in numbers). `unknown` where the run has neither utilisation nor data wait."""
    for rule in RULES:
        if rule.test(row):
            return rule.name, _evidence(row, rule.shows)
    if row["gpu_util_pct"] is None and row["data_wait_pct"] is None:
        return "unknown", "no evidence in this run"
    return "mixed", _evidence(row, _MIXED_SHOWS)


def _evidence(row: Row, shows: tuple[tuple[str, str], ...]) -> str:
    return ", ".join(f"{number(row[column])} {words}" for column, words in shows if row[column] is not None)
