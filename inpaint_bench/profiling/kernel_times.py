"""From the kernels of one call to totals by name and to idle gaps. Loads no torch."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

import msgspec

from inpaint_bench.core.kernel_names import KernelClass, classify


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


class Gap(msgspec.Struct, kw_only=True):
    """Time in which no kernel ran, between two kernels."""

    us: float
    after: str
    before: str


def kernel_totals(events: Iterable[KernelEvent]) -> list[KernelTotal]:
    """Return the kernels by name, the heaviest first."""
    us: defaultdict[str, float] = defaultdict(float)
    launches: Counter[str] = Counter()
    for event in events:
        us[event.name] += event.end_us - event.start_us
        launches[event.name] += 1
    return [
        KernelTotal(name=name, kind=kind, detail=detail, ms=us[name] / 1e3, launches=launches[name])
        for name, (kind, detail) in ((name, classify(name)) for name in sorted(us, key=lambda name: (-us[name], name)))
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
