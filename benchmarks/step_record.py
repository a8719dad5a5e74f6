"""The profile of one training step as a file, with rates and floors. Loads no torch.

usage: python -m benchmarks.step_record PROFILE.json ...     prints their classes side by side, each beside the first
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from inpaint_bench.commands.exit_codes import guarded
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.kernels import CONVOLUTIONS, KernelClass
from inpaint_bench.core.records import read_record
from inpaint_bench.profiling.profile import Gap, KernelTotal

GAPS = 10  # the longest ones are kept


class ClassTotal(msgspec.Struct, kw_only=True):
    """All kernels of one class. `flop` is what the networks need, not what kernels execute; null: not counted."""

    kind: KernelClass
    ms: float
    share: float  # share of the time of all kernels
    launches: int
    flop: float | None
    tflops: float | None
    floor_ms: float | None


class StepProfile(msgspec.Struct, kw_only=True):
    """One training step by kernels. A profiled step is no measurement of speed: `step_ms` is of steps before it."""

    recipe: str
    overrides: list[str]
    phase: str  # eager, replay (of a CUDA graph) or operators (on a CPU)
    gpu: str  # name of a GPU in conf/gpu
    device: str
    torch: str
    model: str
    batch: int
    resolution_px: int
    images: int  # images of the step
    step_ms: float | None  # without the profiler; null if there was no such step
    span_ms: float  # from the first kernel's start to the last one's end, profiled
    kernel_ms: float  # the sum over kernels, of which some may have run at once
    idle_ms: float  # within the span, no kernel ran
    idle_gaps: int
    norm_pointwise_floor_ms: float | None
    classes: list[ClassTotal]
    kernels: list[KernelTotal]  # the heaviest first
    gaps: list[Gap]  # the longest first


def class_totals(
    kernels: Iterable[KernelTotal], flop: Mapping[KernelClass, float], floors_ms: Mapping[KernelClass, float]
) -> list[ClassTotal]:
    """Return the classes, the heaviest first."""
    ms: Counter[KernelClass] = Counter()
    launches: Counter[KernelClass] = Counter()
    for kernel in kernels:
        ms[kernel.kind] += kernel.ms
        launches[kernel.kind] += kernel.launches
    total = sum(ms.values())
    return [
        ClassTotal(
            kind=kind,
            ms=time,
            share=time / total,
            launches=launches[kind],
            flop=flop.get(kind),
            tflops=flop[kind] / time / 1e9 if kind in flop and time else None,
            floor_ms=floors_ms.get(kind),
        )
        for kind, time in ms.most_common()
    ]


def read_profile(path: Path) -> StepProfile:
    """Read a profile. Raises UserError if the file is missing or holds something else."""
    try:
        profile = read_record(path, StepProfile)
    except (ValueError, OSError) as error:
        raise UserError(f"{error}; give a JSON file that benchmarks/step_profile.py wrote") from None
    if profile is None:
        raise UserError(f"{path} does not exist; benchmarks/step_profile.py writes such a file")
    return profile


def describe(profile: StepProfile) -> str:
    """Return the profile as text: classes, heaviest kernels, idle gaps."""
    head = f"{profile.recipe}, {profile.model}, batch {profile.batch}, {profile.resolution_px} px, {profile.phase}"
    lines = [f"{head}: {profile.device}, torch {profile.torch}"]
    if profile.step_ms is not None:
        rate = 1e3 * profile.images / profile.step_ms
        lines.append(f"{profile.step_ms:.2f} ms per step before the profile ({rate:.1f} images/s, no benchmark)")
    lines.append(f"{'class':30} {'ms':>9} {'share':>7} {'launches':>9} {'TFLOP/s':>9} {'floor ms':>9}")
    for row in profile.classes:
        rate_text, floor = _text(row.tflops, 1), _text(row.floor_ms, 2)
        share = f"{100 * row.share:.1f} %"
        lines.append(f"{row.kind:30} {row.ms:9.3f} {share:>7} {row.launches:9} {rate_text:>9} {floor:>9}")
    convolutions = [row for row in profile.classes if row.kind in CONVOLUTIONS]
    known = [row.flop for row in convolutions if row.flop is not None]
    if len(convolutions) > 1 and known:
        ms = sum(row.ms for row in convolutions)
        lines.append(f"{'all convolutions':30} {ms:9.3f} {'':7} {'':9} {_text(sum(known) / ms / 1e9, 1):>9}")
    if profile.norm_pointwise_floor_ms is not None:
        memory = (KernelClass.NORM, KernelClass.POINTWISE, KernelClass.COPY, KernelClass.LAYOUT)
        ms = sum(row.ms for row in profile.classes if row.kind in memory)
        floor = _text(profile.norm_pointwise_floor_ms, 2)
        lines.append(f"{'norm, pointwise and copies':30} {ms:9.3f} {'':7} {'':9} {'':9} {floor:>9}")
    if profile.phase != "operators":
        times = f"{profile.span_ms:.2f} ms from first to last kernel, {profile.kernel_ms:.2f} ms of kernels"
        lines.append(f"{times}, idle {profile.idle_ms:.2f} ms in {profile.idle_gaps} gaps")
    lines.append("heaviest kernels:")
    for kernel in profile.kernels[:10]:
        label = f"{kernel.kind}{', ' * bool(kernel.detail)}{kernel.detail}"
        lines.append(f"{kernel.ms:9.3f} ms {kernel.launches:5} x {label}: {kernel.name[:100]}")
    for gap in profile.gaps[:3]:
        lines.append(f"idle {gap.us:8.1f} us after {gap.after[:50]} before {gap.before[:50]}")
    return "\n".join(lines)


def _text(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def side_by_side(profiles: Sequence[StepProfile]) -> str:
    """Return the milliseconds of every class in each profile, and the change from the first one."""
    names = [f"{profile.recipe}, batch {profile.batch}, {profile.phase}" for profile in profiles]
    lines = [
        f"[{number}] {name}, {profile.device}"
        for number, (name, profile) in enumerate(zip(names, profiles, strict=True))
    ]
    lines.append(f"{'ms':30}" + "".join(f"{f'[{number}]':>20}" for number in range(len(profiles))))
    times = [{row.kind: row.ms for row in profile.classes} for profile in profiles]
    rows: list[tuple[str, list[float]]] = [
        (kind, [time.get(kind, 0.0) for time in times])
        for kind in sorted(KernelClass, key=lambda kind: -max(time.get(kind, 0.0) for time in times))
        if any(kind in time for time in times) or kind is KernelClass.LAYOUT
    ]
    rows.append(("all kernels", [profile.kernel_ms for profile in profiles]))
    rows.append(("idle", [profile.idle_ms for profile in profiles]))
    for name, values in rows:
        cells = [
            f"{value:.2f}" + (f" ({value - values[0]:+.2f})" if place else "") for place, value in enumerate(values)
        ]
        lines.append(f"{name:30}" + "".join(f"{cell:>20}" for cell in cells))
    lines.append(f"{'step, not profiled':30}" + "".join(f"{_text(profile.step_ms, 2):>20}" for profile in profiles))
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    paths = sys.argv[1:] if argv is None else argv
    if not paths:
        raise UserError("name the JSON files that benchmarks/step_profile.py wrote")
    print(side_by_side([read_profile(Path(path)) for path in paths]))
    return 0


if __name__ == "__main__":
    sys.exit(guarded(main))
