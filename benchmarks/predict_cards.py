"""Predict the speed of other cards from the step profile of an H200: a roofline per class of kernels. Not measured.

Every class is scaled by the datasheet peak of what limits it: products (convolutions, GEMM, attention) by dense bf16
FLOP/s, everything else by memory bandwidth. Assumed is that

- a class reaches the same share of its peak on the other card as in the profile, with kernels of the same kind: a
  profile with FlashAttention-4 says nothing about a card that is not Hopper;
- the batch fits, the host is as fast, and idle time between kernels stays as long as it is;
- products are in bf16. A profile of fp32 or TF32 would be scaled by the wrong peak.

The range takes each class by the other peak that may limit it: products by bandwidth, attention by fp32 (its softmax);
and for the faster end convolutions and GEMM at 0.8 of the bf16 peak, the best that libraries reached on an H200. Power
limits are not in it: a card below its peak's clock is slower. The poster's measured ratio stands beside it as a check,
and what such predictions were worth on an H100, the one card that was measured too.

usage: python -m benchmarks.predict_cards PROFILE.json [--images-per-s RATE] [--cards a40 a100 l40s]
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from omegaconf import OmegaConf

from analysis import published
from analysis.dataset import open_dataset
from inpaint_bench.cli.exit_codes import guarded
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.kernels import CONVOLUTIONS, KernelClass
from inpaint_bench.core.paths import conf_dir

from .step_record import ClassTotal, StepProfile, read_profile

# TFLOP/s of fp32 outside of tensor cores, from NVIDIA's data sheets; bf16 and bandwidth are in conf/gpu, likewise.
FP32_TFLOPS = {"a40": 37.4, "a100": 19.5, "l40s": 91.6, "h100": 67.0, "h200": 67.0}
PROFILES = Path(__file__).parent / "profiles" / "2026-11-22-h200"
MEASURED = Path(__file__).parent / "results" / "2026-11-23-h100-h200"
PRODUCTS_REACHED = 0.8  # as in step_work.py
TENSOR, MEMORY, FP32 = "tensor", "memory", "fp32"
# What limits a class: first what it is scaled by, then what else may.
LIMITS: dict[KernelClass, tuple[str, ...]] = {
    **dict.fromkeys((*CONVOLUTIONS, KernelClass.GEMM), (TENSOR, MEMORY)),
    **dict.fromkeys((KernelClass.ATTENTION, KernelClass.CROSS_ATTENTION), (TENSOR, FP32)),
    KernelClass.OTHER: (MEMORY, TENSOR),
}


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """Datasheet peaks of a card."""

    name: str
    tensor: float  # TFLOP/s, dense bf16
    memory: float  # GB/s
    fp32: float  # TFLOP/s


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A time in ms, and the range that the assumptions allow."""

    ms: float
    fastest: float
    slowest: float


def peaks(name: str) -> Peaks:
    """Return the peaks of a GPU of conf/gpu. Raises UserError where they are not known."""
    path = conf_dir() / "gpu" / f"{name}.yaml"
    if name not in FP32_TFLOPS or not path.is_file():
        raise UserError(f"no peaks of a card named {name}; have: {', '.join(FP32_TFLOPS)}")
    content = OmegaConf.load(path)
    return Peaks(name=name, tensor=content.bf16_dense_tflops, memory=content.bandwidth_gb_s, fp32=FP32_TFLOPS[name])


def predict_class(row: ClassTotal, ms: float, base: Peaks, card: Peaks) -> Prediction:
    """Return the class's time on the card; `ms` is its time on `base`."""
    ratios = [getattr(base, limit) / getattr(card, limit) for limit in LIMITS.get(row.kind, (MEMORY,))]
    times = [ms * ratio for ratio in ratios]
    fastest = min(times)
    if row.flop is not None:
        floor_ms = row.flop / (card.tensor * 1e12) * 1e3
        # Where attention is bound by its softmax, its products may not be neglected all the same.
        attention = row.kind in (KernelClass.ATTENTION, KernelClass.CROSS_ATTENTION)
        fastest = max(fastest, floor_ms) if attention else min(fastest, floor_ms / PRODUCTS_REACHED)
    return Prediction(ms=times[0], fastest=fastest, slowest=max(times))


def step_ms(profile: StepProfile, images_per_s: float | None) -> float:
    """Return the time of a step on the profiled card. Raises UserError where neither source knows it."""
    if images_per_s is not None:
        return 1e3 * profile.images / images_per_s
    if profile.step_ms is None:
        raise UserError(f"the profile of phase {profile.phase} has no step time: take the replay, or --images-per-s")
    return profile.step_ms


def predict(profile: StepProfile, card: Peaks, images_per_s: float | None) -> tuple[list[Prediction], Prediction]:
    """Return the times of the classes and of the step on the card. Raises UserError for a profile of no GPU."""
    base, measured_ms = peaks(profile.gpu), step_ms(profile, images_per_s)
    # A profiled step is neither as fast nor as hot as steps under load, and kernels may overlap.
    scale = (measured_ms - profile.idle_ms) / profile.kernel_ms
    if scale <= 0:
        raise UserError(
            f"{measured_ms:.2f} ms per step is less than the {profile.idle_ms:.2f} ms that the GPU was idle"
        )
    parts = [predict_class(row, row.ms * scale, base, card) for row in profile.classes]
    ends = [sum(getattr(part, end) for part in parts) + profile.idle_ms for end in ("ms", "fastest", "slowest")]
    return parts, Prediction(ms=ends[0], fastest=ends[1], slowest=ends[2])


def table(profile: StepProfile, cards: Sequence[str], images_per_s: float | None) -> str:
    """Return the prediction as text. Raises UserError for a profile of no GPU, and for unknown cards."""
    base, others = peaks(profile.gpu), [peaks(card) for card in cards]
    predicted = [predict(profile, card, images_per_s) for card in [base, *others]]
    width = 26
    lines = [
        f"PREDICTION, NOT MEASURED, from a profile of {profile.device} ({profile.recipe}, {profile.model}, "
        f"batch {profile.batch}, {profile.resolution_px} px, {profile.phase})",
        f"{'ms per step':30} {base.name.upper() + ' profile':>14}"
        + "".join(f"{card.name.upper() + ' predicted':>{width}}" for card in others),
    ]
    rows = [*[row.kind for row in profile.classes], "idle", "step"]
    idle = Prediction(ms=profile.idle_ms, fastest=profile.idle_ms, slowest=profile.idle_ms)
    for index, name in enumerate(rows):
        times = [[*parts, idle, step][index] for parts, step in predicted]
        lines.append(f"{name:30} {times[0].ms:14.2f}" + "".join(f"{_range(each):>{width}}" for each in times[1:]))
    rates = [_rate(profile, step) for _, step in predicted]
    lines.append(f"{'images/s':30} {rates[0].ms:14.1f}" + "".join(f"{_range(each):>{width}}" for each in rates[1:]))
    ratios = "".join(f"{rates[0].ms / each.ms:>{width}.2f}" for each in rates[1:])
    lines.append(f"{base.name.upper() + ' over the card':30} {'':14}{ratios}")
    poster = [_published_ratio(base.name, card.name, profile.batch) for card in others]
    lines.append(f"{'the same, poster (published)':30} {'':14}" + "".join(f"{text:>{width}}" for text in poster))
    if any(kernel.detail == "FlashAttention-4" for kernel in profile.kernels):
        lines.append("The profile has FlashAttention-4, which needs Hopper: profile recipe=tuned for other cards.")
    lines.append("In parentheses: range over what may limit a class. Assumptions: see the script's docstring.")
    return "\n".join([*lines, *tests()])


def tests() -> list[str]:
    """Return how far predictions were from the one card that was measured beside an H200, an H100."""
    runs = open_dataset(MEASURED).runs.filter("valid", gpu="h100")
    lines = [f"Tested on an H100 alone, by the profiles in {PROFILES.name} and the runs in {MEASURED.name}, images/s:"]
    for name in ("tuned_hopper", "baseline"):
        profile = read_profile(PROFILES / f"{name}.json")
        rate = _rate(profile, predict(profile, peaks("h100"), None)[1])
        rates = runs.filter(recipe=name, batch=profile.batch)["images_per_s"].to_list()
        error = 100 * (rate.ms / statistics.mean(rates) - 1)
        outside = "" if rate.fastest <= min(rates) and max(rates) <= rate.slowest else ", outside of the range"
        measured = f"measured {min(rates):.1f} to {max(rates):.1f}: {error:+.0f} %{outside}"
        lines.append(f"  {name}, batch {profile.batch}: predicted {_range(rate)}, {measured}")
    return [*lines, "  Cards that differ more from an H200 may be further off."]


def _rate(profile: StepProfile, step: Prediction) -> Prediction:
    """Return images/s in place of the time of a step; the lowest rate comes first in its range."""
    low, value, high = (1e3 * profile.images / ms for ms in (step.slowest, step.ms, step.fastest))
    return Prediction(ms=value, fastest=low, slowest=high)


def _range(predicted: Prediction) -> str:
    if predicted.fastest == predicted.slowest:
        return f"{predicted.ms:.1f}"
    return f"{predicted.ms:.1f} ({predicted.fastest:.1f} to {predicted.slowest:.1f})"


def _published_ratio(base: str, card: str, batch: int) -> str:
    """Return how many times longer the poster's training took on the card; of its own loop, not of this recipe."""
    hours = published.read("poster_runtime_hours.csv")
    known = {(gpu.lower(), size): value for gpu, size, value, _ in hours.iter_rows()}
    ends = known.get((base, batch)), known.get((card, batch))
    return "-" if ends[0] is None or ends[1] is None else f"{ends[1] / ends[0]:.2f}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profile", type=Path, help="of benchmarks/step_profile.py")
    rate = "measured under load on the profiled card; else the profile's few steps count"
    parser.add_argument("--images-per-s", type=float, metavar="RATE", help=rate)
    parser.add_argument("--cards", nargs="+", default=["a40", "a100", "l40s"])
    options = parser.parse_args(argv)
    if options.images_per_s is not None and options.images_per_s <= 0:
        raise UserError(f"--images-per-s {options.images_per_s:g}: must be above 0")
    print(table(read_profile(options.profile), options.cards, options.images_per_s))
    return 0


if __name__ == "__main__":
    sys.exit(guarded(main))
