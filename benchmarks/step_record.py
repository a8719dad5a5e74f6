"""The profile of one training step as a file, and how a list of kernels becomes one. Loads no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from inpaint_bench.core.errors import UserError
from inpaint_bench.core.kernel_names import CONVOLUTIONS, KernelClass, classify
from inpaint_bench.core.records import read_record

GAPS = 10  # the longest ones are kept


class KernelEvent(msgspec.Struct, kw_only=True):
    """One kernel on the device; on a CPU the time of an operator without the operators that it calls."""

    name: str
    start_us: float
    end_us: float


class KernelTotal(msgspec.Struct, kw_only=True):
    """All launches of the kernels of one name."""

    name: str
    kind: KernelClass
    detail: str
    ms: float
    launches: int


class ClassTotal(msgspec.Struct, kw_only=True):
    """All kernels of one class. `flop` is what the networks need, not what kernels execute; null: not counted."""

    kind: KernelClass
    ms: float
    share: float  # of the time of all kernels
    launches: int
    flop: float | None
    tflops: float | None
    floor_ms: float | None


class Gap(msgspec.Struct, kw_only=True):
    """Time in which no kernel ran, between two kernels."""

    us: float
    after: str
    before: str


class StepProfile(msgspec.Struct, kw_only=True):
    """One training step by kernels. A profiled step is no measurement of speed: `step_ms` is of steps before it."""

    recipe: str
    overrides: list[str]
    phase: str  # eager, replay (of a CUDA graph) or operators (on a CPU)
    gpu: str  # of conf/gpu
    device: str
    torch: str
    model: str
    batch: int
    resolution_px: int
    images: int  # of the step
    step_ms: float | None  # without the profiler; null where there was no such step
    span_ms: float  # from the first kernel's start to the last one's end, profiled
    kernel_ms: float  # the sum over kernels, of which some may have run at once
    idle_ms: float  # within the span, no kernel ran
    idle_gaps: int
    norm_pointwise_floor_ms: float | None
    classes: list[ClassTotal]
    kernels: list[KernelTotal]  # the heaviest first
    gaps: list[Gap]  # the longest first


def kernel_totals(events: Iterable[KernelEvent]) -> list[KernelTotal]:
    """Return the kernels by name, the heaviest first."""
    us: Counter[str] = Counter()
    launches: Counter[str] = Counter()
    for event in events:
        us[event.name] += event.end_us - event.start_us
        launches[event.name] += 1
    return [
        KernelTotal(name=name, kind=kind, detail=detail, ms=us[name] / 1e3, launches=launches[name])
        for name, (kind, detail) in ((name, classify(name)) for name in sorted(us, key=lambda name: (-us[name], name)))
    ]


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


def idle_gaps(events: Iterable[KernelEvent]) -> list[Gap]:
    """Return the stretches between the first and the last kernel in which none ran, the longest first.

    Kernels may overlap: on several streams, or launched before their predecessor has ended.
    """
    gaps, last = [], None
    for event in sorted(events, key=lambda event: event.start_us):
        if last is not None and event.start_us > last.end_us:
            gaps.append(Gap(us=event.start_us - last.end_us, after=last.name, before=event.name))
        if last is None or event.end_us > last.end_us:
            last = event
    return sorted(gaps, key=lambda gap: -gap.us)


def read_profile(path: Path) -> StepProfile:
    """Read a profile. Raises UserError where the file is missing or holds something else."""
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
        words = f"{kernel.kind}{', ' * bool(kernel.detail)}{kernel.detail}"
        lines.append(f"{kernel.ms:9.3f} ms {kernel.launches:5} x {words}: {kernel.name[:100]}")
    for gap in profile.gaps[:3]:
        lines.append(f"idle {gap.us:8.1f} us after {gap.after[:50]} before {gap.before[:50]}")
    return "\n".join(lines)


def _text(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
