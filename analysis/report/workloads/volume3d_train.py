"""Training of volume diffusion: rate, energy and memory of each recipe, with its validation beside it.

Published figures of TF32 and channels_last_3d in Med-DDPM are the claims of an abstract: the largest changes of any
kernel. Here kernels are compared by class, because two recipes launch kernels of different names.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from itertools import permutations
from typing import Any

import polars as pl

from analysis import published
from analysis.dataset import Dataset
from analysis.report.sections import counters, profiles
from analysis.report.sections.counters import UNUSED_PCT, Counted
from analysis.report.sections.profiles import COMPARED_WORK, Profile
from analysis.report.tables import DASH, Table, TableBuilder
from analysis.units import gpu_label, number
from inpaint_bench.core.console import pluralize
from inpaint_bench.core.kernels import CONVOLUTIONS, IDLE

from . import Section, _volumes

COLUMNS = {
    "Steps/s": "steps_per_s",
    "Energy [J/step]": "joules_per_step",
    "Energy error, at most [%]": "energy_error_pct",
    "Speed-up": "speedup",
    "VRAM peak, measured [MiB]": "vram_used_mib_peak",
    "VRAM peak, whole run [MiB]": "vram_run_mib_peak",
    "Allocated peak [MiB]": "torch_allocated_peak_mib",
    "Validation L1": "validation_l1",
    "MS-SSIM": "validation_ms_ssim",
    "Prediction error": "parity_prediction_rel",
    "Gradient error": "parity_gradient_rel",
}
CLAIMED = frozenset({"tf32", "channels_last"})  # levers of the claims
EXTREME = 2  # factor within which the largest change of any kernel agrees with that of a class
COUNTED_PCT = 80  # percent of the time of a class; if less is counted, its sums are not judged
DOMINANT = 0.75  # share of the kernel time from which a class takes it "overwhelmingly"
GAIN_POINTS = 5  # per cent of instructions per cycle
LOSS_REL, LOSS_MS_SSIM = 0.01, 0.01  # losses in the validation that count as none
_PUBLISHED = ["Figure", "Published", "GPU", "Network", "Batch", "From", "To", "Measured", "Measured / published"]
_PUBLISHED += ["Agrees", "Why"]
_BY_CLASS = "sum of a class of kernels here, one kernel there, on GPUs of which only the A100 is named"


def section(build: TableBuilder, results: pl.DataFrame, runs: pl.DataFrame) -> Section:
    """Return the table of recipes, and the published networks beside those that ran."""
    rows = _volumes.cells(results, runs, ["validation_l1", "validation_ms_ssim", "trained_steps"])
    trained = sorted({int(row["trained_steps"]) for row in rows if row["trained_steps"] is not None})
    scales = sorted(set(results["ms_ssim_scales"].drop_nulls().to_list()))
    counted = " or ".join(pluralize(int(count), "scale") for count in scales) or "no scales"
    note = (
        "Means over n runs. Speed-up: over fp32 with IEEE rounding and no other lever, on the same GPU, network and "
        f"batch. Validated after {' or '.join(map(str, trained)) or 'no'} steps of training from the same weights, on "
        f"held-out volumes: L1 of the predicted noise, and MS-SSIM ({counted}) of the volumes without it. Errors: "
        "relative to fp32 with IEEE rounding, contiguous and eager, before the first step."
    )
    section = _volumes.section(build, rows, COLUMNS, note, runs["run_id"].to_list(), "train")
    paragraphs = [
        "So few steps train no usable network: the validation shows whether recipes learn alike, no more.",
        "The slices are of held-out volumes: with noise of steps of the schedule, and without the predicted noise.",
    ]
    return replace(section, paragraphs=paragraphs, tables=[*section.tables, _volumes.networks(build, results)])


def more_tables(build: TableBuilder, dataset: Dataset, results: pl.DataFrame, runs: pl.DataFrame) -> list[Table]:
    """Return every published claim beside each pair of recipes of which one adds TF32 and channels_last_3d."""
    workload = runs["workload"][0]
    counted = [each for each in counters.counted_runs(dataset, build) if _is_published(each.run, workload)]
    pairs = [(old, new) for old, new in permutations(counted, 2) if _is_pair(old.run, new.run)]
    profiled = [each for each in profiles.of_cells(dataset, build) if _is_published(each.cell, workload)]
    stated = {row["claim"]: row for row in published.read("medddpm_claims.csv").to_dicts()}
    rows: list[list[str]] = []
    claims = {"sm_cycles_reduction_max": "sm_cycles", "dynamic_instruction_reduction_max": "instructions"}
    for claim, name in claims.items():
        times = stated[claim]["value"]
        rows += _counter_rows(claim, f"{times:g} times", pairs, partial(_reduction, name=name, stated=times))
    low, high = (stated[f"tensor_core_utilization_gain_{end}"]["value"] for end in ("low", "high"))
    gain = partial(_tensor_gain, low=low, high=high)
    rows += _counter_rows("tensor_core_utilization_gain", f"{low:g} to {high:g} times", pairs, gain)
    ipc = stated["ipc_gain"]["value"]
    rows += _counter_rows("ipc_gain", f"+{ipc:g} %", pairs, partial(_ipc_gain, stated=ipc))
    rows += _dominant(stated["dominant_kernels"]["scope"], profiled)
    networks = pl.col("model").str.split(" ").list.first()
    real = runs.filter(networks.is_in(list(_volumes.PUBLISHED_NAMES)), ~pl.col("demonstration").fill_null(False))
    rows += _of_cells(_volumes.cells(results, real, ["validation_l1", "validation_ms_ssim"]))
    note = (
        f"Published: {_volumes.SOURCE}; never averaged with a measurement. Demonstrations are left out. Agrees: "
        f"reductions within a factor of {EXTREME}; the gain of tensor cores if all classes of convolutions lie in the "
        f"published range; instructions per cycle within {GAIN_POINTS} points; convolutions from {100 * DOMINANT:.0f} "
        "% of the kernel time on, in part if no other class takes longer than all of them; a loss if validation L1 "
        f"changes by less than {100 * LOSS_REL:g} % and MS-SSIM by less than {LOSS_MS_SSIM:g}. Counters are those of "
        "the heaviest kernels, by class."
    )
    title = "Published and measured: TF32 and channels_last_3d"
    return [build.table("volume3d-published", title, _PUBLISHED, rows, note=note)]


def _is_published(run: dict[str, Any], workload: str) -> bool:
    """Return whether a run or cell is of this workload with a published network, and no demonstration."""
    network = str(run["model"]).partition(" ")[0]
    return run["workload"] == workload and not run["demonstration"] and network in _volumes.PUBLISHED_NAMES


def _is_pair(before: dict[str, Any], after: dict[str, Any], work: Iterable[str] = COMPARED_WORK) -> bool:
    """Return whether `after` has both levers of the claims, and `before` differs from it in these alone."""
    old, new = (frozenset(str(run["recipe"]).split("+")) for run in (before, after))
    same = all(before.get(key) == after.get(key) for key in work)
    return same and new >= CLAIMED and old < new and new - old <= CLAIMED


def _missing(figure: str, stated: str, why: str) -> list[list[str]]:
    return [[figure, stated, *[DASH] * 7, "not measured", why]]


def _row(figure: str, stated: str, run: dict[str, Any], rest: Iterable[str]) -> list[str]:
    return [figure, stated, gpu_label(run["gpu"]), str(run["model"]), str(run["batch"]), *rest]


Judged = tuple[str, str, str, str]  # measured, measured over published, agrees, why


def _counter_rows(
    claim: str, stated: str, pairs: list[tuple[Counted, Counted]], judge: Callable[[Counted, Counted], Judged]
) -> list[list[str]]:
    figure = _volumes.CLAIMS[claim]
    rows = [_row(figure, stated, old.run, [old.recipe, new.recipe, *judge(old, new)]) for old, new in pairs]
    return rows or _missing(figure, stated, "no counters of two recipes of the same work: profile=ncu")


def _by_class(old: Counted, new: Counted, name: str) -> dict[str, tuple[float, float]]:
    """Return the values of a counter before and after, of the classes that have both."""
    before, after = (counters.by_class(counted) for counted in (old, new))
    known = {kind: (before[kind][name], after[kind][name]) for kind in before if kind in after}
    return {kind: (a, b) for kind, (a, b) in known.items() if a is not None and b is not None}


def _reduction(old: Counted, new: Counted, *, name: str, stated: float) -> Judged:
    factors = {kind: a / b for kind, (a, b) in _by_class(old, new, name).items() if b}
    if not factors:
        return (DASH, DASH, "not measured", "no class of kernels was counted in both runs")
    kind = max(factors, key=lambda each: factors[each])
    measured, ratio = f"{number(factors[kind])} times ({kind})", number(factors[kind] / stated)
    before, after = old.coverage(kind), new.coverage(kind)
    if any(each.missing or each.pct < COUNTED_PCT for each in (before, after)):
        return (measured, ratio, "incomplete", f"of the time of this class {before} was counted before, {after} after")
    agrees = 1 / EXTREME <= factors[kind] / stated <= EXTREME
    return (measured, ratio, *(("yes", DASH) if agrees else ("no", _BY_CLASS)))


def _tensor_gain(old: Counted, new: Counted, *, low: float, high: float) -> Judged:
    pairs = [pair for kind, pair in _by_class(old, new, "tensor_pct").items() if kind in CONVOLUTIONS and pair[1]]
    if not pairs:
        return (DASH, DASH, "not measured", "no convolution uses tensor cores in the second run")
    gains = sorted(after / before for before, after in pairs if before >= UNUSED_PCT)
    if not gains:
        old_use, new_use = (_span(column) for column in zip(*pairs, strict=True))
        why = "IEEE fp32 leaves the tensor cores unused but for stray instructions: there is no ratio to that"
        return (f"from {old_use} to {new_use} % of the peak", DASH, "no ratio", why)
    ratio = " to ".join(dict.fromkeys([number(gains[0] / low), number(gains[-1] / high)]))
    agrees = "yes" if low <= gains[0] and gains[-1] <= high else "no"
    agrees = "in part" if agrees == "no" and gains[-1] >= low and gains[0] <= high else agrees
    return (f"{_span(gains, ' to ')} times", ratio, agrees, DASH if agrees == "yes" else _BY_CLASS)


def _span(values: Iterable[float], between: str = "\u2013") -> str:
    ordered = sorted(values)
    return between.join(dict.fromkeys([number(ordered[0]), number(ordered[-1])]))


def _ipc_gain(old: Counted, new: Counted, *, stated: float) -> Judged:
    ipc = counters.weighted_mean("ipc", "sm_cycles")
    before, after = (counted.kernels.select(ipc).item() for counted in (old, new))
    if not before or after is None:
        return (DASH, DASH, "not measured", "instructions per cycle were not counted")
    gain = 100 * (after / before - 1)
    why = "likely: an instruction of the tensor cores does the work of many, so that fewer are executed per cycle"
    why = f"stated for an A100 alone, measured on {gpu_label(old.run['gpu'])}" if gain > stated else why
    agrees = abs(gain - stated) <= GAIN_POINTS
    return (f"{gain:+.0f} %", number(gain / stated), *(("yes", DASH) if agrees else ("no", why)))


def _dominant(stated: str, profiled: list[Profile]) -> list[list[str]]:
    """Return a row per profile: the heaviest class, and the share of all convolutions."""
    figure = _volumes.CLAIMS["dominant_kernels"]
    rows = []
    for profile in profiled:
        classes = {kind: ms for kind, (ms, _) in profile.classes.items() if kind != IDLE}
        if not (total := sum(classes.values())):
            continue
        heaviest = max(classes, key=lambda kind: classes[kind])
        others = [ms / total for kind, ms in classes.items() if kind not in CONVOLUTIONS]
        share = 1 - sum(others)
        measured = f"{heaviest}, {100 * classes[heaviest] / total:.0f} % of the kernel time"
        agrees = "yes" if share >= DOMINANT else "in part" if share >= max(others) else "no"
        why = DASH if agrees == "yes" else f"below {100 * DOMINANT:.0f} % of the kernel time"
        measured += f"; all convolutions {100 * share:.0f} %"
        rows.append(_row(figure, stated, profile.cell, [DASH, profile.name, measured, DASH, agrees, why]))
    return rows or _missing(figure, stated, "no profile: profile=torch")


def _of_cells(cells: list[dict[str, Any]]) -> list[list[str]]:
    work = [key for key in _volumes.KEYS if key not in ("recipe", "precision")]
    quality = _volumes.CLAIMS["quality_degradation"]
    pairs = [(old, new) for old, new in permutations(cells, 2) if _is_pair(old, new, work)]
    rows = [_row(quality, "none", old, [old["recipe"], new["recipe"], *_quality(old, new)]) for old, new in pairs]
    return rows or _missing(quality, "none", "no valid runs of both recipes of the same work")


def _quality(old: dict[str, Any], new: dict[str, Any]) -> Judged:
    values = [row[name] for row in (old, new) for name in ("validation_l1", "validation_ms_ssim")]
    if any(value is None for value in values):
        return (DASH, DASH, "not measured", "a validation is missing or not finite")
    loss, similarity = values[2] / values[0] - 1, values[3] - values[1]
    agrees = abs(loss) < LOSS_REL and abs(similarity) < LOSS_MS_SSIM
    why = "after so few steps: says that both recipes learn alike, nothing of finished samples"
    return (f"L1 {100 * loss:+.2f} %, MS-SSIM {similarity:+.4f}", DASH, "yes" if agrees else "no", why)
