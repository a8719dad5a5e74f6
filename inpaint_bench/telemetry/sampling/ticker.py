"""When to sample: absolute deadlines on CLOCK_MONOTONIC, so that a slow read does not shift the rest."""

from __future__ import annotations

import math
from collections import Counter
from typing import Final

from inpaint_bench.telemetry.nvml.api import MIN_GAP_NS

ENOUGH_FOR_P99: Final = 100  # of fewer, the 99th percentile is the maximum under another name


class Ticker:
    """Tick i is due at start + i * period.

    A tick more than a period late is skipped and counted, never made up for in a burst. Two ticks are at
    least 50 ms apart, whatever the deadlines say.
    """

    def __init__(self, period_ns: int, start_ns: int) -> None:
        self.period_ns = period_ns
        self.done = 0
        self.late = 0  # skipped
        self._start_ns = start_ns
        self._seq = 0
        self._last_ns: int | None = None

    @property
    def due(self) -> int:
        return self._seq

    @property
    def next_ns(self) -> int:
        """When to wake up for this ticker."""
        deadline = self._start_ns + self._seq * self.period_ns
        return deadline if self._last_ns is None else max(deadline, self._last_ns + MIN_GAP_NS)

    def take(self, now_ns: int) -> int | None:
        """The number of the tick to do now, or None where none is due."""
        if now_ns < self.next_ns:
            return None
        skipped = (now_ns - self._start_ns - self._seq * self.period_ns) // self.period_ns
        self.late += skipped
        self._seq += skipped
        return self._use(now_ns)

    def extra(self, now_ns: int) -> int:
        """The number of one more tick ahead of its deadline: the last sample of a run."""
        return self._use(now_ns)

    def _use(self, now_ns: int) -> int:
        seq = self._seq
        self._seq += 1
        self.done += 1
        self._last_ns = now_ns
        return seq

    @property
    def earliest_ns(self) -> int:
        """The first moment at which an extra tick is allowed."""
        return 0 if self._last_ns is None else self._last_ns + MIN_GAP_NS


class Durations:
    """Quantiles of how long reads took, in microseconds; buckets of 9 %, so any run fits in a kilobyte."""

    _PER_OCTAVE = 8

    def __init__(self) -> None:
        self._buckets: Counter[int] = Counter()
        self.max_us = 0.0

    def add(self, us: float) -> None:
        self._buckets[round(math.log2(max(us, 1.0)) * self._PER_OCTAVE)] += 1
        self.max_us = max(self.max_us, us)

    def quantile_us(self, share: float) -> float | None:
        """The quantile to within 5 %, and never more than the maximum; None before the first read."""
        total = self._buckets.total()
        seen = 0
        for bucket in sorted(self._buckets):
            seen += self._buckets[bucket]
            if seen >= share * total:
                return round(min(2.0 ** (bucket / self._PER_OCTAVE), self.max_us), 1)
        return None
