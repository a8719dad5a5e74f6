"""What limits a run: a table of rules of which the first match wins, and what to try next.

docs/bottlenecks.md explains tiers, bands and where the thresholds come from; its table is the output of
`python -m analysis.stats.bottleneck`. An indicator that is not known matches no condition. Three thresholds were set on
our own data. The clock limit of `power_capped`: of 26 runs on two H200, most reported the power cap as active while
their SM clock stayed at 98 to 100 % of its maximum. The MFU of `tensor_bound`: of our runs on Hopper at full clock,
tensor cores were active for 1.1 to 1.2 times the MFU. The MFU of `dram_bound`: below it, runs on Hopper whose rate did
not grow with the batch had more memory traffic than that.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl

from analysis import recipe_labels
from analysis.metrics import flags
from analysis.metrics.audit.board import uses_tensor_cores
from analysis.units import number
from inpaint_bench.core import workloads
from inpaint_bench.core.kernels import CONVOLUTIONS, IDLE, KernelClass
from inpaint_bench.core.schema import Reason
from inpaint_bench.core.workloads.finetune_inpaint import GRAPH_WARMUP

from .best_batch import memory_limit

COUNTERS, PROFILE, SWEEP, RUN = 1, 2, 3, 4
TIERS = {
    COUNTERS: "performance counters of the GPU (GPM, on Hopper and later)",
    PROFILE: "the profile of a step of the cell (profile=torch)",
    SWEEP: "the batch sweep that the run is part of",
    RUN: "the run alone",
}
MIXED, UNKNOWN, NO_VALUE = "mixed", "unknown", "\u2013"
Row = Mapping[str, Any]
Condition = tuple[str, str, float]  # indicator, operator (> or <), threshold
# Label, unit and band of every figure that the rules test; docs/bottlenecks.md says what each means.
INDICATORS = {
    "out_of_memory": ("out of GPU memory", "", 0),
    "throttle_thermal_pct": ("thermal throttling", "%", 0),
    "throttle_power_pct": ("power cap active", "%", 0),
    "power_pct_of_limit": ("power", "% of the limit", 2),
    "clock_pct_of_max": ("SM clock", "% of its maximum", 1),
    "data_wait_pct": ("host waits for data", "%", 0.5),
    "gpu_idle_pct": ("GPU idle", "%", 3),
    "elasticity": ("elasticity", "", 0.05),
    "sm_active_pct": ("SMs active", "%", 2),
    "tensor_active_pct": ("tensor cores active", "%", 2),
    "dram_active_pct": ("memory traffic", "% of the peak", 1),
    "dram_above_tensor_pct": ("memory traffic above the tensor cores' share by", "points", 2),
    "mfu_pct": ("MFU", "%", 1),
    "products_pct": ("convolutions, GEMM and attention", "% of the profile", 2),
    "memory_kernels_pct": ("norms, pointwise kernels and copies", "% of the profile", 2),
    "gaps_pct": ("gaps", "% of the profile", 2),
    "at_memory_limit": ("largest batch that fits", "", 0),
    "larger_batch": ("a larger batch ran", "", 0),
    "no_counters": ("no counters", "", 0),
    "fp32_pipe": ("fp32 without TF32", "", 0),
    "on_tensor_cores": ("16 bits or TF32", "", 0),
}
_BOOLEAN = ("out_of_memory", "at_memory_limit", "larger_batch", "no_counters", "fp32_pipe", "on_tensor_cores")
# What the report shows of every run beside its class, as far as it is known.
_SHARES = {"dram_active_pct": "memory traffic", "tensor_active_pct": "tensor cores", "sm_active_pct": "SMs"}
_SHARES |= {"mfu_pct": "MFU", "products_pct": "products", "memory_kernels_pct": "memory kernels"}
_SHARES |= {"gaps_pct": "gaps", "gpu_idle_pct": "idle"}
_PROFILE_SHARES: dict[str, tuple[str, ...]] = {
    "products_pct": (*CONVOLUTIONS, KernelClass.GEMM, KernelClass.ATTENTION, KernelClass.CROSS_ATTENTION),
    "memory_kernels_pct": (*map(KernelClass, ("norm", "pointwise", "layout conversion", "optimizer", "copy")),),
    "gaps_pct": (IDLE,),
}
_UNCOUNTED: list[Condition] = [("no_counters", ">", 0), ("on_tensor_cores", ">", 0)]


class Advice(NamedTuple):
    """Something to try, a row of advice.tsv. RECIPE, SITE, GPU and NODE in the command stand for the run's values."""

    text: str
    command: str = ""
    fields: tuple[str, ...] = ()  # fields of a recipe that the command sets; `batch` for batch=auto
    # A run with a lever whose name begins so is not advised, mostly since the launcher refuses both together: unet_nhwc
    # has kernels of its own and keeps activations, bf16_ has an optimizer of its own.
    excluded_by: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()  # a run without these levers is not advised


class Rule(NamedTuple):
    """A class of runs, and conditions that all hold for it. A class with several rules needs one of them."""

    name: str
    tier: int  # tier of the evidence
    conditions: list[Condition]


# In order: what ended or throttled the run, then what keeps the card waiting, then what it is busy with, then VRAM.
RULES = (
    Rule("oom", RUN, [("out_of_memory", ">", 0)]),
    Rule("thermal_throttled", RUN, [("throttle_thermal_pct", ">", flags.THERMAL_PCT)]),
    Rule("power_capped", RUN, [("throttle_power_pct", ">", flags.POWER_CAP_PCT), ("clock_pct_of_max", "<", 97)]),
    Rule("power_capped", RUN, [("power_pct_of_limit", ">", 97), ("clock_pct_of_max", "<", 97)]),
    Rule("data_starved", RUN, [("data_wait_pct", ">", 10), ("gpu_idle_pct", ">", 5)]),
    Rule("data_starved", SWEEP, [("data_wait_pct", ">", 5), ("gpu_idle_pct", ">", 20), ("elasticity", "<", 0.1)]),
    Rule("host_bound", RUN, [("gpu_idle_pct", ">", 15), ("data_wait_pct", "<", 5)]),
    Rule("host_bound", SWEEP, [("gpu_idle_pct", ">", 10), ("elasticity", ">", 0.8)]),
    Rule("host_bound", RUN, [("gpu_idle_pct", ">", 50)]),
    Rule("tensor_bound", COUNTERS, [("tensor_active_pct", ">", 50), ("sm_active_pct", ">", 60)]),
    Rule("tensor_bound", PROFILE, [*_UNCOUNTED, ("products_pct", ">", 50), ("mfu_pct", ">", 30)]),
    Rule("tensor_bound", RUN, [*_UNCOUNTED, ("mfu_pct", ">", 45)]),
    Rule("dram_bound", COUNTERS, [("dram_active_pct", ">", 35), ("dram_above_tensor_pct", ">", 0)]),
    Rule("dram_bound", PROFILE, [("no_counters", ">", 0), ("memory_kernels_pct", ">", 50)]),
    Rule("dram_bound", SWEEP, [*_UNCOUNTED, ("elasticity", "<", 0.15), ("mfu_pct", "<", 20)]),
    Rule("compute_bound", COUNTERS, [("fp32_pipe", ">", 0), ("sm_active_pct", ">", 80)]),
    Rule("compute_bound", PROFILE, [("fp32_pipe", ">", 0), ("products_pct", ">", 50), ("gaps_pct", "<", 5)]),
    Rule("compute_bound", RUN, [("fp32_pipe", ">", 0), ("mfu_pct", ">", 45)]),
    Rule(
        "latency_bound",
        COUNTERS,
        [("sm_active_pct", ">", 60), ("tensor_active_pct", "<", 50), ("dram_active_pct", "<", 35)],
    ),
    Rule("latency_bound", SWEEP, [("no_counters", ">", 0), ("larger_batch", ">", 0), ("elasticity", ">", 0.2)]),
    Rule("vram_limited", SWEEP, [("at_memory_limit", ">", 0), ("elasticity", ">", 0.2)]),
)


def _read_advice() -> dict[str, list[Advice]]:
    """Return the advice by class, the least effort first."""
    table = pl.read_csv(Path(__file__).with_name("advice.tsv"), separator="\t", infer_schema=False, glob=False)
    advice: dict[str, list[Advice]] = {}
    for name, text, command, *lists in table.fill_null("").rows():
        advice.setdefault(name, []).append(Advice(text, command, *(tuple(names.split()) for names in lists)))
    return advice


ADVICE = _read_advice()
# What a run of class `mixed` is advised to try, for the indicator that it lacks.
MIXED_ADVICE = {
    "elasticity": Advice("other batches, for the elasticity", "batch=8,16,32"),
    "tensor_active_pct": Advice("a GPU with GPM, for its counters", "gpu=h200"),
}
AT_FULL_CLOCK = Advice("the power cap takes at most 3 % of the SM clock: a higher limit would gain no more")
_MIXED_EVIDENCE = ("gpu_idle_pct", "data_wait_pct", "throttle_power_pct", "clock_pct_of_max", "elasticity")


@dataclass(frozen=True, kw_only=True)
class SharedEvidence:
    """What the other batches of a run's series, and the profile of its cell, show about it."""

    elasticity: float | None = None
    at_memory_limit: bool = False
    larger_batch: bool = False  # ran too
    products_pct: float | None = None
    memory_kernels_pct: float | None = None
    gaps_pct: float | None = None


@dataclass(frozen=True, kw_only=True)
class Bottleneck:
    """The class of one run, "A or B" near the limit of A, with the figures that show it."""

    name: str
    shares: str
    evidence: str
    advice: list[Advice]
    tier: int | None = None  # tier of the evidence; None: no rule matched
    runner_up: str = NO_VALUE  # the next class whose rules match too


def classify(row: Row, shared: SharedEvidence | None = None) -> Bottleneck:
    """Return the class of a run by the first rule that matches; if it matches nearly, with the next class.

    The class is `mixed` if no rule matches, `unknown` if neither utilisation nor data wait is known either.
    """
    values = _indicator_values(row, shared or SharedEvidence())
    matches = [rule for rule in RULES if all(_holds(values, *limit) for limit in rule.conditions)]
    shares = ", ".join(f"{text} {values[name]:.0f} %" for name, text in _SHARES.items() if values[name] is not None)
    shares = shares or NO_VALUE
    if not matches:
        if row["gpu_util_pct"] is None and row["data_wait_pct"] is None:
            nothing = [Advice("", "telemetry=nvml")]
            return Bottleneck(name=UNKNOWN, shares=NO_VALUE, evidence="no evidence in this run", advice=nothing)
        useful = [advice for name, advice in MIXED_ADVICE.items() if values[name] is None]
        capped = _holds(values, "throttle_power_pct", ">", flags.POWER_CAP_PCT)
        useful += [AT_FULL_CLOCK] if capped and values["clock_pct_of_max"] is not None else []
        return Bottleneck(name=MIXED, shares=shares, evidence=_evidence(values, _MIXED_EVIDENCE), advice=useful)
    name, *others = dict.fromkeys(rule.name for rule in matches)
    own = [rule for rule in matches if rule.name == name]
    clear = [rule for rule in own if all(_holds(values, *limit, -1) for limit in rule.conditions)]
    classes = [name] if clear else [name, *(others or [MIXED])[:1]]
    # Several rules of the class may match: the strongest evidence is named.
    tier = min(rule.tier for rule in clear or own)
    # Take the figures of all rules of the class, so that two runs of the class show the same figures.
    figures = dict.fromkeys(figure for rule in RULES if rule.name == name for figure, _, _ in rule.conditions)
    evidence = _evidence(values, [figure for figure in figures if figure not in _BOOLEAN])
    runner_up = next((other for other in others if other not in classes), NO_VALUE)
    if name == "oom":  # such a run ended before it had figures
        evidence, runner_up = f"batch {row['batch'] or 'unknown'}", NO_VALUE
    elif tier == COUNTERS and row.get("counters_source"):
        evidence += f" (by {row['counters_source']})"
    advice = list(dict.fromkeys(item for each in classes for item in ADVICE.get(each, [])))
    name = " or ".join(classes)
    return Bottleneck(name=name, shares=shares, tier=tier, evidence=evidence, runner_up=runner_up, advice=advice)


def format_advice(advice: Iterable[Advice], row: Row) -> str:
    """Return the advice with the run's own recipe, site, GPU and node.

    Without levers that the run already has, and without what its workload does not obey.
    """
    declared = workloads.declarations().get(row["workload"])
    obeyed: set[str] | None = None
    if declared:
        # Among our workloads, a training with an optimizer can search its batch.
        searches = {"batch"} if "optimizer" in declared.Config.capabilities else set()
        obeyed = {*declared.Config.levers(), *searches}
    requested = recipe_labels.requested_parts(row["recipe"] or recipe_labels.BASELINE, row["recipe_parts"])
    present = {*requested, *(lever["name"] for lever in json.loads(row["levers"] or "[]"))}
    sentences = []
    for item in advice:
        command = item.command
        # The run was on that GPU already, or has no such lever.
        if command == f"gpu={row['gpu']}" or (obeyed is not None and not {*item.fields} <= obeyed):
            continue
        if not {*item.needs} <= present or any(name.startswith(item.excluded_by) for name in present):
            continue
        if match := re.search(r"\[RECIPE,([^\]]+)\]", command):
            missing = [lever for lever in match[1].split(",") if lever not in present]
            if not missing:
                continue
            # Names of YAMLs, e.g. `memmap`, go into the list; `num_workers=16` follows it as an override.
            choices = [part for part in requested if "=" not in part]
            settings = [f" recipe.{part}" for part in requested if "=" in part]
            command = command.replace(match[0], f"[{','.join([*choices, *missing])}]" + "".join(settings))
        if (row["gpus"] or 1) > 1:  # it searches on one
            command = command.replace("batch=auto", "").strip()
            is_captured = "cuda_graph" in present or "cuda_graph" in command
            command += f" {GRAPH_WARMUP}" if "recipe=[" in command and is_captured else ""
        for placeholder in ("SITE", "GPU", "NODE"):
            command = re.sub(rf"\b{placeholder}\b", str(row[placeholder.lower()] or placeholder), command)
        sentences.append(": ".join(filter(None, (item.text, command))))
    return "; ".join(sentences) or NO_VALUE


def shared_evidence(
    cells: pl.DataFrame, runs: pl.DataFrame, kernel_times: pl.DataFrame | None = None
) -> dict[str, SharedEvidence]:
    """Return the evidence of the batch sweep and of profiles by run id, for every run of the cells."""
    evidence: dict[str, SharedEvidence] = {}
    for (_,), group in cells.group_by("series", maintain_order=True):
        series = group.sort("batch").to_dicts()
        _, oom = memory_limit(series[0], runs)
        for index, cell in enumerate(series):
            # Towards the next larger batch; for the largest one, from the batch below it.
            low = index if index + 1 < len(series) else index - 1
            slope = _elasticity(series[low], series[low + 1]) if low >= 0 else None
            at_limit = index == len(series) - 1 and oom is not None and oom > cell["batch"]
            profile = {} if kernel_times is None else _profile_shares(kernel_times, cell["run_ids"])
            own = low == index  # no larger batch ran where the slope is that of the batch below
            shared = SharedEvidence(elasticity=slope, at_memory_limit=at_limit, larger_batch=own, **profile)
            evidence.update(dict.fromkeys(cell["run_ids"], shared))
    return evidence


def _profile_shares(kernel_times: pl.DataFrame, run_ids: list[str]) -> dict[str, Any]:
    """Return shares of the profiled calls that the windows ran too; empty without a profile of a GPU."""
    rows = kernel_times.filter(pl.col("run_id").is_in(run_ids) & pl.col("measured"))
    ms = dict(rows.group_by("kind").agg(pl.col("ms").sum()).iter_rows())
    if IDLE not in ms:
        return {}
    shares = {name: sum(ms.get(kind, 0.0) for kind in kinds) for name, kinds in _PROFILE_SHARES.items()}
    return {name: 100 * share / sum(ms.values()) for name, share in shares.items()}


def _elasticity(small: Row, large: Row) -> float | None:
    rates = small["images_per_s"], large["images_per_s"]
    # Labels that differ in case, e.g. of GPUs without a file in conf/gpu, give one series.
    if None in rates or small["batch"] == large["batch"]:
        return None
    # 1: the rate doubles with the batch, so there was room on the GPU. 0: a larger batch gains nothing.
    return math.log(rates[1] / rates[0]) / math.log(large["batch"] / small["batch"])


def _indicator_values(row: Row, shared: SharedEvidence) -> dict[str, float | None]:
    values: dict[str, float | None] = {name: row.get(name) for name in INDICATORS} | asdict(shared)
    values["out_of_memory"] = float(row["reason"] == Reason.OOM_GPU)
    values["power_pct_of_limit"] = _percentage(row["power_w"], row["power_limit_w"])
    values["clock_pct_of_max"] = _percentage(row["sm_clock_mhz_mean"], row["sm_clock_mhz_limit"])
    values["gpu_idle_pct"] = None if row["gpu_util_pct"] is None else max(0.0, 100 - row["gpu_util_pct"])
    dram, tensor = values["dram_active_pct"], values["tensor_active_pct"]
    values["dram_above_tensor_pct"] = None if dram is None or tensor is None else dram - tensor
    values["no_counters"] = float(dram is None and tensor is None and values["sm_active_pct"] is None)
    values["on_tensor_cores"] = float(uses_tensor_cores(row))
    values["fp32_pipe"] = float(not values["on_tensor_cores"])
    return values


def _percentage(part: float | None, total: float | None) -> float | None:
    return 100 * part / total if part is not None and total else None


def _holds(values: Mapping[str, float | None], name: str, operator: str, threshold: float, bands: int = 1) -> bool:
    """Return whether a figure is beyond its threshold by `-bands` of its bands: with 1 nearly, with -1 clearly."""
    value, sign = values[name], 1 if operator == ">" else -1
    return value is not None and sign * (value - threshold) > -bands * INDICATORS[name][2]


def _evidence(values: Mapping[str, float | None], names: Iterable[str]) -> str:
    return ", ".join(_label(name, number(values[name])) for name in names if values[name] is not None)


def _label(name: str, text: str) -> str:
    label, unit, _ = INDICATORS[name]
    return " ".join(filter(None, (label, text, unit)))


def _describe(name: str, operator: str, threshold: float) -> str:
    if name in _BOOLEAN:
        return INDICATORS[name][0]
    return _label(name, f"{operator} {threshold:g}")


def describe_rules() -> list[tuple[str, str, str, str]]:
    """Return class, conditions, tier and advice of every rule as text, in their order."""
    rows = []
    for index, (name, tier, conditions) in enumerate(RULES):
        when = " and ".join(_describe(*condition) for condition in conditions)
        repeated = index > 0 and RULES[index - 1].name == name
        rows.append((name, when, str(tier), "" if repeated else _join(ADVICE[name])))
    return [
        *rows,
        (MIXED, "none of the above: no single limit shows", "", _join([*MIXED_ADVICE.values(), AT_FULL_CLOCK])),
    ]


def _join(advice: Iterable[Advice]) -> str:
    return "; ".join(f"{item.text}: `{item.command}`" if item.command else item.text for item in advice)


def markdown() -> str:
    """Return the table of docs/bottlenecks.md."""
    head = ["| class | when | tier | try |", "|---|---|---:|---|"]
    return "\n".join([*head, *(f"| {' | '.join(row)} |" for row in describe_rules())])


if __name__ == "__main__":
    print(markdown())
