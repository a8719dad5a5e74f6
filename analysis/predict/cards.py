"""Predict the speed of other cards from the profile of a step: a roofline per class of kernels. Not measured.

Every class is scaled by the datasheet peak of what limits it: products (convolutions, GEMM, attention) by dense bf16
FLOP/s, everything else by memory bandwidth. Assumed is that

- a class reaches the same share of its peak on the other card as in the profile, with kernels of the same kind: a
  profile with FlashAttention-4 says nothing about a card that is not Hopper;
- the batch fits, the host is as fast, and idle time between kernels stays as long as it is;
- products are in bf16. A profile of fp32 or TF32 would be scaled by the wrong peak.

The interval takes each class by the other peak that may limit it: products by bandwidth, attention by fp32 (its
softmax); for the faster end, convolutions and GEMM at 0.8 of the bf16 peak, the best that libraries reached on an H200.
Power limits are not in it: a card below its peak's clock is slower. For a card of another architecture the interval is
at least as wide as the largest error seen, on cards that were measured and on published ratios.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import polars as pl

from analysis import published
from analysis.dataset import Dataset
from analysis.units import gpu_label
from inpaint_bench.core.config.yaml_file import read_config_file
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.kernels import CONVOLUTIONS, KernelClass
from inpaint_bench.core.paths import conf_dir
from inpaint_bench.core.records import read_record

from .claims import METRIC, Claim, ClaimedCell, named, now

# TFLOP/s of fp32 outside of tensor cores, from NVIDIA's data sheets; bf16 and bandwidth are in conf/gpu, likewise.
FP32_TFLOPS = {"a40": 37.4, "a100": 19.5, "l40s": 91.6, "h100": 67.0, "h200": 67.0}
PRODUCTS_REACHED = 0.8  # as in benchmarks/step_work.py
TENSOR, MEMORY, FP32 = "tensor", "memory", "fp32"
# What limits a class: first what it is scaled by, then what else may.
LIMITS: dict[KernelClass, tuple[str, ...]] = {
    **dict.fromkeys((*CONVOLUTIONS, KernelClass.GEMM), (TENSOR, MEMORY)),
    **dict.fromkeys((KernelClass.ATTENTION, KernelClass.CROSS_ATTENTION), (TENSOR, FP32)),
    KernelClass.OTHER: (MEMORY, TENSOR),
}


class ClassTime(msgspec.Struct, kw_only=True):
    """All kernels of one class; `flop` is what the networks need."""

    kind: KernelClass
    ms: float
    flop: float | None


class Profile(msgspec.Struct, kw_only=True):
    """What a prediction needs of a file of benchmarks/step_profile.py."""

    recipe: str
    phase: str
    gpu: str
    model: str
    batch: int
    images: int  # of the step
    step_ms: float | None
    kernel_ms: float
    idle_ms: float
    classes: list[ClassTime]
    kernels: list[dict[str, Any]]


class Peaks(NamedTuple):
    """Datasheet peaks of a card."""

    name: str
    architecture: str
    tensor: float  # TFLOP/s, dense bf16
    memory: float  # GB/s
    fp32: float  # TFLOP/s


class Times(NamedTuple):
    """A time in ms, and the range that the assumptions allow."""

    ms: float
    fastest: float
    slowest: float


class Predicted(NamedTuple):
    """The claims of several profiles, and what such predictions were worth where the answer is known."""

    claims: list[Claim]
    checks: list[tuple[str, float]]  # sentence and error
    refused: list[str]


def read_profile(path: Path) -> Profile:
    """Read a profile. Raises UserError where the file is missing, holds something else, or has no step time."""
    try:
        profile = read_record(path, Profile)
    except (ValueError, OSError) as error:
        raise UserError(f"{error}; give a JSON file that benchmarks/step_profile.py wrote") from None
    if profile is None:
        raise UserError(f"{path} does not exist; benchmarks/step_profile.py writes such a file")
    if profile.step_ms is None:
        raise UserError(f"{path}: the profile of phase {profile.phase} has no step time: take the replay")
    return profile


def peaks(name: str) -> Peaks:
    """Return the peaks of a GPU of conf/gpu. Raises UserError where they are not known."""
    path = conf_dir() / "gpu" / f"{name}.yaml"
    if name not in FP32_TFLOPS or not path.is_file():
        raise UserError(f"no peaks of a card named {name}; have: {', '.join(FP32_TFLOPS)}")
    known = read_config_file(path, "gpu")
    return Peaks(name, known["architecture"], known["bf16_dense_tflops"], known["bandwidth_gb_s"], FP32_TFLOPS[name])


def predict_class(row: ClassTime, ms: float, base: Peaks, card: Peaks) -> Times:
    """Return the class's time on the card; `ms` is its time on `base`."""
    ratios = [getattr(base, limit) / getattr(card, limit) for limit in LIMITS.get(row.kind, (MEMORY,))]
    times = [ms * ratio for ratio in ratios]
    fastest = min(times)
    if row.flop is not None:
        floor_ms = row.flop / (card.tensor * 1e12) * 1e3
        # Where attention is bound by its softmax, its products may not be neglected all the same.
        attention = row.kind in (KernelClass.ATTENTION, KernelClass.CROSS_ATTENTION)
        fastest = max(fastest, floor_ms) if attention else min(fastest, floor_ms / PRODUCTS_REACHED)
    return Times(ms=times[0], fastest=fastest, slowest=max(times))


def predict_step(profile: Profile, card: Peaks) -> Times:
    """Return the time of the step on the card. Raises UserError for a profile of no GPU."""
    base, step_ms = peaks(profile.gpu), profile.step_ms or 0.0
    # A profiled step is neither as fast nor as hot as steps under load, and kernels may overlap.
    scale = (step_ms - profile.idle_ms) / profile.kernel_ms
    if scale <= 0:
        raise UserError(f"{step_ms:.2f} ms per step is less than the {profile.idle_ms:.2f} ms that the GPU was idle")
    parts = [predict_class(row, row.ms * scale, base, card) for row in profile.classes]
    ends = [sum(getattr(part, end) for part in parts) + profile.idle_ms for end in ("ms", "fastest", "slowest")]
    return Times(ms=ends[0], fastest=ends[1], slowest=ends[2])


def predict(dataset: Dataset, paths: Sequence[Path], cards: Sequence[str]) -> Predicted:
    """Return the claims for the cards, and the errors on cards that the dataset or the poster has measured."""
    profiles = [(path, read_profile(path)) for path in paths]
    result = Predicted([], [], [])
    for path, profile in profiles:
        result.checks.extend([*_leave_one_out(profile, dataset, path.stem), *_published(profile, path.stem)])
    largest = min(0.99, max((abs(error) for _, error in result.checks), default=0.0))
    for path, profile in profiles:
        base = peaks(profile.gpu)
        for card in map(peaks, cards):
            foreign = card.architecture != base.architecture
            if foreign and any(kernel["detail"] == "FlashAttention-4" for kernel in profile.kernels):
                text = "has FlashAttention-4, which needs Hopper: profile recipe=tuned"
                result.refused.append(f"{path.name} for {gpu_label(card.name)}: {text}")
                continue
            step = predict_step(profile, card)
            value, low, high = (1e3 * profile.images / ms for ms in (step.ms, step.slowest, step.fastest))
            if foreign:
                low, high = min(low, value / (1 + largest)), max(high, value / (1 - largest))
            claim = Claim(
                kind="cards",
                cell=ClaimedCell(model=profile.model, recipe=profile.recipe, gpu=card.name, batch=profile.batch),
                value=value,
                low=low,
                high=high,
                made_at=now(),
                inputs=[named(path), named(dataset.folder)],
                label=f"extrapolated from {base.architecture}" if foreign else "",
            )
            result.claims.append(claim)
    return result


def _leave_one_out(profile: Profile, dataset: Dataset, name: str) -> Iterator[tuple[str, float]]:
    """Yield the error on each measured card, predicted from the measured rate of each other one."""
    same = {"model": profile.model, "recipe": profile.recipe, "batch": profile.batch, "gpus": 1, "demonstration": False}
    runs = dataset.runs.filter("valid", **same).filter(pl.col("gpu").is_in(list(FP32_TFLOPS)))
    rates = dict(runs.drop_nulls(METRIC).group_by("gpu").agg(pl.col(METRIC).mean()).sort("gpu").iter_rows())
    steps = {gpu: predict_step(profile, peaks(gpu)).ms for gpu in rates}
    for gpu, other in permutations(rates, 2):
        rate, predicted = rates[gpu], rates[other] * steps[other] / steps[gpu]
        error = predicted / rate - 1
        text = f"{gpu_label(gpu)} left out, from the {gpu_label(other)}'s rate: predicted {predicted:.1f} images/s"
        shares = "; the shares of classes are its own" if gpu == profile.gpu else ""
        yield f"{name}: {text}, measured {rate:.1f}: {100 * error:+.1f} %{shares}", error


def _published(profile: Profile, name: str) -> Iterator[tuple[str, float]]:
    """Yield the error of the ratio to each card of the poster, which ran a loop of its own."""
    hours = published.read("poster_runtime_hours.csv").filter(batch=profile.batch)
    known = {gpu.lower(): value for gpu, _, value, _ in hours.drop_nulls("hours").iter_rows()}
    if profile.model != published.MODEL or profile.gpu not in known:
        return
    for gpu in sorted(FP32_TFLOPS.keys() & known.keys() - {profile.gpu}):
        ratio, stated = predict_step(profile, peaks(gpu)).ms / (profile.step_ms or 1), known[gpu] / known[profile.gpu]
        text = f"{gpu_label(profile.gpu)} over {gpu_label(gpu)} predicted {ratio:.2f}, poster's loop {stated:.2f}"
        yield f"{name}: {text} (published): {100 * (stated / ratio - 1):+.1f} %", stated / ratio - 1
