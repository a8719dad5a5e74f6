"""From the kernels of one call to totals by name and to idle gaps. Loads no torch."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import msgspec

from inpaint_bench.core.kernels import KernelClass, classify
from inpaint_bench.core.records import Communication


@dataclass(frozen=True, kw_only=True)
class ProfiledCall:
    """One step or call, as a profile shows it; `work` may be run any number of times."""

    name: str
    work: Callable[[], object]
    measured: bool = True  # false: the windows ran it in another way


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
    """Return the stretches in which no kernel ran, the longest first. Kernels may overlap."""
    gaps, last = [], None
    for event in sorted(events, key=lambda event: event.start_us):
        if last is not None and event.start_us > last.end_us:
            gaps.append(Gap(us=event.start_us - last.end_us, after=last.name, before=event.name))
        if last is None or event.end_us > last.end_us:
            last = event
    return sorted(gaps, key=lambda gap: -gap.us)


def communication(events: Sequence[KernelEvent]) -> Communication | None:
    """Return how long communication ran, and how much of that without another kernel; None where there was none."""
    # At each time how many kernels of either kind begin, less those that end.
    changes: defaultdict[float, list[int]] = defaultdict(lambda: [0, 0])
    for event in events:
        other = classify(event.name).kind is not KernelClass.COMMUNICATION
        changes[event.start_us][other] += 1
        changes[event.end_us][other] -= 1
    times = sorted(changes)
    total_us = exposed_us = 0.0
    communicating = computing = 0
    for start_us, end_us in pairwise(times):
        communicating += changes[start_us][0]
        computing += changes[start_us][1]
        if communicating:
            total_us += end_us - start_us
            exposed_us += 0 if computing else end_us - start_us
    if not total_us:
        return None
    return Communication(ms=total_us / 1e3, exposed_ms=exposed_us / 1e3, call_ms=(times[-1] - times[0]) / 1e3)
