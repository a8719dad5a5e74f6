"""What held a run back: one table of rules, the first that matches wins, with what to try next.

Evidence comes in three tiers: 1 counters of the GPU (GPM, DCGM), 2 the sweep that the run is part of, 3 the run
alone. A way to match a rule is a list of conditions that all have to hold; a figure that is not known holds
nothing. Thresholds are starting values from the literature and practice; the clock's in `power_capped` is set after 26
runs on two H200, where the cap was counted as active for most of runs whose clock it left at 98 to 100 %.

docs/bottlenecks.md is this table: `python -m analysis.stats.bottleneck > docs/bottlenecks.md`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import polars as pl

from analysis.metrics import flags
from analysis.units import number
from inpaint_bench.core.schema import Reason

from . import best_batch as best

COUNTERS, SWEEP, RUN = 1, 2, 3
TIERS = {
    COUNTERS: "counters of the GPU (GPM on Hopper and later, or DCGM)",
    SWEEP: "the sweep over the batch that the run is part of",
    RUN: "the run alone",
}
Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Fact:
    """A figure that rules ask for, in words and with its unit."""

    words: str
    unit: str = ""
    meaning: str


FACTS = {
    "oom": Fact(words="out of GPU memory", meaning="the run ended so"),
    "throttle_thermal_pct": Fact(words="slowed by temperature", unit="%", meaning="share of the window"),
    "throttle_power_pct": Fact(words="at the power cap", unit="%", meaning="share of the window"),
    "power_share_pct": Fact(words="power", unit="% of the limit", meaning="mean power over the enforced limit"),
    "clock_share_pct": Fact(words="SM clock", unit="% of its maximum", meaning="mean over the window"),
    "data_wait_pct": Fact(words="waiting for data", unit="%", meaning="share of the window"),
    "gpu_idle_pct": Fact(words="GPU idle", unit="%", meaning="share of time without any kernel: 100 less utilisation"),
    "elasticity": Fact(
        words="elasticity",
        meaning="d ln(images/s) / d ln(batch) to the next larger batch, or from the next smaller: 1 where a larger "
        "batch costs no time, 0 where it brings nothing",
    ),
    "sm_active_pct": Fact(words="SMs active", unit="%", meaning="share of SMs that were busy, mean over the window"),
    "tensor_active_pct": Fact(words="tensor cores active", unit="%", meaning="share of time"),
    "dram_active_pct": Fact(words="memory bandwidth", unit="% of peak", meaning="about 80 % is the practical peak"),
    "at_the_wall": Fact(words="largest batch that fits", meaning="the next larger one tried ended out of memory"),
}
_FLAGS = ("oom", "at_the_wall")


@dataclass(frozen=True, kw_only=True)
class Condition:
    fact: str
    above: float | None = None
    below: float | None = None
    known: bool = True  # False: holds where the figure is not known

    @property
    def words(self) -> str:
        fact = FACTS[self.fact]
        if not self.known:
            return f"{fact.words} not known"
        if self.fact in _FLAGS:
            return fact.words
        sign, limit = (">", self.above) if self.above is not None else ("<", self.below)
        return f"{fact.words} {sign} {limit:g}{' ' + fact.unit if fact.unit else ''}"

    def nearness(self, facts: Mapping[str, float | None]) -> float:
        """1 where it holds, else how far the figure is on its way to the limit, 0 where it is not known."""
        value = facts.get(self.fact)
        if not self.known:
            return 1.0 if value is None else 0.0
        if value is None:
            return 0.0
        if self.above is not None:
            return 1.0 if value > self.above else min(max(value / self.above, 0.0), 0.999)
        assert self.below is not None
        return 1.0 if value < self.below else min(max(self.below / value, 0.0), 0.999)


@dataclass(frozen=True, kw_only=True)
class Way:
    """Evidence of one tier that is enough for a class."""

    tier: int
    needs: tuple[Condition, ...]

    @property
    def words(self) -> str:
        return " and ".join(need.words for need in self.needs)

    def nearness(self, facts: Mapping[str, float | None]) -> float:
        return min(need.nearness(facts) for need in self.needs)


@dataclass(frozen=True)
class Advice:
    """What to try. Words in capitals of the command stand for the run's own: RECIPE, SITE, GPU, NODE."""

    words: str
    command: str = ""
    unless: str = ""  # a fact: where it is known, there is no need

    @property
    def markdown(self) -> str:
        return f"{self.words}: `{self.command}`" if self.command else self.words


@dataclass(frozen=True, kw_only=True)
class Rule:
    name: str
    ways: tuple[Way, ...]
    shows: tuple[str, ...]  # facts that are the evidence
    advice: tuple[Advice, ...]  # what to try, the least effort first
    means: str

    @property
    def when(self) -> str:
        return "; or ".join(f"{way.words} (tier {way.tier})" for way in self.ways)

    def best(self, facts: Mapping[str, float | None]) -> tuple[float, Way]:
        """The nearest way, and of equals the one with the strongest evidence."""
        return max(((way.nearness(facts), way) for way in self.ways), key=lambda pair: (pair[0], -pair[1].tier))


def _way(tier: int, *needs: Condition) -> Way:
    return Way(tier=tier, needs=needs)


def _above(fact: str, limit: float) -> Condition:
    return Condition(fact=fact, above=limit)


def _below(fact: str, limit: float) -> Condition:
    return Condition(fact=fact, below=limit)


RULES = (
    Rule(
        name="oom",
        means="The batch does not fit into the GPU's memory.",
        ways=(_way(RUN, _above("oom", 0.5)),),
        shows=(),
        advice=(
            Advice("a smaller batch, or the one that fits", "batch=auto"),
            Advice("memory for time", "recipe=[RECIPE,grad_checkpoint]"),
            Advice("the same optimiser step in halves", "recipe=[RECIPE,accumulate_2]"),
        ),
    ),
    Rule(
        name="thermal_throttled",
        means="The card got too hot and slowed down: the run says more of its cooling than of the GPU.",
        ways=(_way(RUN, _above("throttle_thermal_pct", flags.THERMAL_PCT)),),
        shows=("throttle_thermal_pct", "clock_share_pct"),
        advice=(
            Advice("leave this node out, tell the site, and compare nothing with these figures", "--exclude=NODE"),
        ),
    ),
    Rule(
        name="power_capped",
        means="The card drew what it may and lowered its clock.",
        ways=(
            _way(RUN, _above("throttle_power_pct", flags.POWER_CAP_PCT), _below("clock_share_pct", 97)),
            _way(RUN, _above("power_share_pct", 97), _below("clock_share_pct", 97)),
        ),
        shows=("throttle_power_pct", "power_share_pct", "clock_share_pct"),
        advice=(
            Advice("less work per image, from prepared data", "recipe=[RECIPE,cache_image,cache_masked,cache_text]"),
            Advice("the cap is the site's: compare J/image, not watts"),
        ),
    ),
    Rule(
        name="data_starved",
        means="The GPU waited for images.",
        ways=(
            _way(RUN, _above("data_wait_pct", 10)),
            _way(SWEEP, _above("gpu_idle_pct", 20), _below("elasticity", 0.1)),
        ),
        shows=("data_wait_pct", "gpu_idle_pct", "elasticity"),
        advice=(
            Advice("more loader processes", "recipe.num_workers=16 recipe.prefetch_factor=4"),
            Advice("as many cores, Slurm's --cpus-per-task", "sites.SITE.gpus.GPU.cpus_per_gpu=16"),
            Advice("no decoding, from prepared data", "recipe=[RECIPE,memmap]"),
        ),
    ),
    Rule(
        name="host_bound",
        means="The GPU waited for the program to launch its kernels.",
        ways=(
            _way(SWEEP, _above("gpu_idle_pct", 10), _above("elasticity", 0.8)),
            _way(RUN, _above("gpu_idle_pct", 10), Condition(fact="elasticity", known=False)),
        ),
        shows=("gpu_idle_pct", "data_wait_pct", "elasticity"),
        advice=(
            Advice("a larger batch", "batch=auto"),
            Advice("fewer launches", "recipe=[RECIPE,compile,cuda_graph]"),
            Advice("an optimiser of few kernels", "recipe=[RECIPE,adamw_fused]"),
        ),
    ),
    Rule(
        name="tensor_bound",
        means="The tensor cores were busy: the GPU does what it is bought for.",
        ways=(_way(COUNTERS, _above("tensor_active_pct", 50), _above("sm_active_pct", 60)),),
        shows=("tensor_active_pct", "sm_active_pct"),
        advice=(
            Advice("less work per image, from prepared data", "recipe=[RECIPE,cache_image,cache_masked,cache_text]"),
        ),
    ),
    Rule(
        name="dram_bound",
        means="The GPU's memory was the limit.",
        ways=(_way(COUNTERS, _above("dram_active_pct", 50)),),
        shows=("dram_active_pct", "tensor_active_pct"),
        advice=(
            Advice("fewer passes over memory", "recipe=[RECIPE,compile]"),
            Advice("attention that stays on chip", "recipe=[RECIPE,attn_flash]"),
        ),
    ),
    Rule(
        name="latency_bound",
        means="The SMs were busy, but neither tensor cores nor memory: many short kernels, conversions and waits.",
        ways=(
            _way(
                COUNTERS,
                _above("sm_active_pct", 60),
                _below("tensor_active_pct", 50),
                _below("dram_active_pct", 50),
            ),
        ),
        shows=("sm_active_pct", "tensor_active_pct", "dram_active_pct"),
        advice=(
            Advice("fewer and larger kernels", "recipe=[RECIPE,compile]"),
            Advice("less work per image, from prepared data", "recipe=[RECIPE,cache_image,cache_masked,cache_text]"),
        ),
    ),
    Rule(
        name="vram_limited",
        means="A larger batch would still be faster, and does not fit.",
        ways=(_way(SWEEP, _above("at_the_wall", 0.5), _above("elasticity", 0.2)),),
        shows=("elasticity",),
        advice=(
            Advice("smaller weights and moments", "recipe=[RECIPE,bf16_stochastic] batch=auto"),
            Advice("memory for time", "recipe=[RECIPE,grad_checkpoint] batch=auto"),
        ),
    ),
)
MIXED, UNKNOWN, NO_VALUE = "mixed", "unknown", "\u2013"
NEAR = 0.7  # a rule that is less than so much of the way to its limits is no runner-up
MIXED_WHEN = "none of the rules above: no single cause is seen"
MIXED_ADVICE = (
    Advice("other batches, for the elasticity", "batch=8,16,32", unless="elasticity"),
    Advice("a card with GPM, for the counters", "gpu=h200", unless="tensor_active_pct"),
)
_MIXED_SHOWS = ("gpu_idle_pct", "data_wait_pct", "throttle_power_pct", "elasticity", "sm_active_pct")


@dataclass(frozen=True, kw_only=True)
class SweepEvidence:
    """What the other batches of a run's series say of it."""

    elasticity: float | None = None
    at_the_wall: bool = False


@dataclass(frozen=True, kw_only=True)
class Finding:
    name: str
    tier: int | None  # of the evidence; None: no rule matched
    evidence: str
    runner_up: str
    advice: tuple[Advice, ...]


def classify(row: Row, sweep: SweepEvidence | None = None) -> Finding:
    """The class of a run, the evidence in numbers, and the rule that came next.

    `unknown` where neither utilisation nor data wait is known and no rule matches.
    """
    facts = _facts(row, sweep or SweepEvidence())
    near = [(rule, *rule.best(facts)) for rule in RULES]
    won = next((found for found in near if found[1] == 1), None)
    runner_up = _runner_up([found for found in near if found is not won])
    if won is not None:
        rule, _, way = won
        evidence = _evidence(facts, rule.shows)
        if rule.name == "oom":  # it ended before there were figures
            evidence, runner_up = f"batch {row['batch'] or 'unknown'}", NO_VALUE
        elif way.tier == COUNTERS and row.get("counters_source"):
            evidence += f" (by {row['counters_source']})"
        return Finding(name=rule.name, tier=way.tier, evidence=evidence, runner_up=runner_up, advice=rule.advice)
    if row["gpu_util_pct"] is None and row["data_wait_pct"] is None:
        why = "no evidence in this run"
        return Finding(
            name=UNKNOWN, tier=None, evidence=why, runner_up=NO_VALUE, advice=(Advice("", "telemetry=nvml"),)
        )
    evidence = _evidence(facts, _MIXED_SHOWS)
    advice = tuple(one for one in MIXED_ADVICE if facts[one.unless] is None)
    return Finding(name=MIXED, tier=None, evidence=evidence, runner_up=runner_up, advice=advice)


def _runner_up(others: list[tuple[Rule, float, Way]]) -> str:
    also = next((rule for rule, nearness, _ in others if nearness == 1), None)
    if also:
        return f"{also.name}, matches too"
    rule, nearness, _ = max(others, key=lambda found: found[1])
    return f"{rule.name}, {100 * nearness:.0f} % of the way" if nearness >= NEAR else "none near"


def format_advice(advice: Iterable[Advice], row: Row) -> str:
    """Advice for one run: with its own recipe, site, GPU and node, and without what it already has."""
    asked = (row["recipe_parts"] or "").split(",") if row["recipe_parts"] else ["baseline"]
    if not row["recipe_parts"] and row["recipe"]:
        asked += [part for part in row["recipe"].split("+") if part != "baseline"]
    has = {*asked, *(lever["name"] for lever in json.loads(row["levers"] or "[]"))}
    words = []
    for one in advice:
        command = one.command
        if command == f"gpu={row['gpu']}":
            continue
        if found := re.search(r"\[RECIPE,([^\]]+)\]", command):
            wanted = [lever for lever in found[1].split(",") if lever not in has]
            if not wanted:
                continue
            command = command.replace(found[0], f"[{','.join([*asked, *wanted])}]")
        for word, value in (("SITE", row["site"]), ("GPU", row["gpu"]), ("NODE", row["node"])):
            command = re.sub(rf"\b{word}\b", str(value or word), command)
        words.append(": ".join(text for text in (one.words, command) if text))
    return "; ".join(words) or NO_VALUE


def sweep_evidence(cells: pl.DataFrame, runs: pl.DataFrame) -> dict[str, SweepEvidence]:
    """By run id, for the runs of the cells: elasticity from the neighbouring batch, and whether memory ended there."""
    found: dict[str, SweepEvidence] = {}
    for (_,), group in cells.group_by("series", maintain_order=True):
        each = group.sort("batch").to_dicts()
        _, oom = best.memory_limit(each[0], runs)
        for index, cell in enumerate(each):
            low = index if index + 1 < len(each) else index - 1
            slope = _elasticity(each[low], each[low + 1]) if low >= 0 else None
            wall = index == len(each) - 1 and oom is not None and oom > cell["batch"]
            found.update(dict.fromkeys(cell["run_ids"], SweepEvidence(elasticity=slope, at_the_wall=wall)))
    return found


def _elasticity(small: Row, large: Row) -> float | None:
    speeds = small["images_per_s"], large["images_per_s"]
    if None in speeds or min(speeds) <= 0 or small["batch"] == large["batch"]:
        return None
    return math.log(speeds[1] / speeds[0]) / math.log(large["batch"] / small["batch"])


def _facts(row: Row, sweep: SweepEvidence) -> dict[str, float | None]:
    facts: dict[str, float | None] = {name: row.get(name) for name in FACTS}
    facts["oom"] = float(row["reason"] == Reason.OOM_GPU)
    facts["power_share_pct"] = _share(row["power_w"], row["power_limit_w"])
    facts["clock_share_pct"] = _share(row["sm_clock_mhz_mean"], row["sm_clock_mhz_limit"])
    facts["gpu_idle_pct"] = None if row["gpu_util_pct"] is None else 100 - row["gpu_util_pct"]
    facts["elasticity"] = sweep.elasticity
    facts["at_the_wall"] = float(sweep.at_the_wall)
    return facts


def _share(part: float | None, whole: float | None) -> float | None:
    return 100 * part / whole if part is not None and whole else None


def _evidence(facts: Mapping[str, float | None], shown: Iterable[str]) -> str:
    words = []
    for name in shown:
        if facts[name] is not None:
            unit = FACTS[name].unit
            words.append(f"{FACTS[name].words} {number(facts[name])}{' ' + unit if unit else ''}")
    return ", ".join(words)


def _markdown(advice: Iterable[Advice]) -> str:
    return "; ".join(one.markdown for one in advice)


def document() -> str:
    """docs/bottlenecks.md."""
    lines = [
        "# What held a run back",
        "",
        "Generated from the table of rules in `analysis/bottleneck.py`; a test fails where the two differ. Write it",
        "anew with `python -m analysis.stats.bottleneck > docs/bottlenecks.md`.",
        "",
        "The first rule that matches names the class. The runner-up is the next that matches too, or else the one that",
        f"came nearest to its limits, if it came {100 * NEAR:.0f} % of the way. Thresholds are starting values;",
        "only the clock's in power_capped is set after our own runs.",
        "",
        "Evidence has tiers, the strongest first:",
        "",
        *(f"{tier}. {words}" for tier, words in TIERS.items()),
        "",
        "| | class | when | tier | try |",
        "|---:|---|---|---:|---|",
    ]
    for index, rule in enumerate(RULES, 1):
        for way in rule.ways:
            first = way is rule.ways[0]
            head = f"{index} | {rule.name}" if first else " | or"
            lines.append(f"| {head} | {way.words} | {way.tier} | {_markdown(rule.advice) if first else ''} |")
    lines += [f"| {len(RULES) + 1} | {MIXED} | {MIXED_WHEN} | | {_markdown(MIXED_ADVICE)} |", "", "## Classes", ""]
    lines += [f"- **{rule.name}**: {rule.means}" for rule in RULES]
    lines += ["", "## Figures", "", "| figure | means |", "|---|---|"]
    for fact in FACTS.values():
        lines.append(f"| {fact.words}{f' [{fact.unit}]' if fact.unit else ''} | {fact.meaning} |")
    lines += [
        "",
        "Without counters nothing parts tensor-bound from memory-bound: GPU utilisation is a share of time, and NVML's",
        "memory utilisation is not bandwidth. Words in capitals in the advice stand for the run's own: the report",
        "writes them out, and leaves out levers that the run already has.",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(document(), end="")
