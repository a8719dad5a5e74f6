"""When to sample: absolute deadlines on CLOCK_MONOTONIC, so that a slow read does not shift the later ones."""

from __future__ import annotations

import math
from collections import Counter

from inpaint_bench.telemetry.nvml.api import MIN_INTERVAL_NS


class Ticker:
    """Tick i is due at start + i * period.

    A tick that is more than a period late is skipped and counted, never made up for in a burst. Two ticks are at least
    50 ms apart, whatever the deadlines say.
    """

    def __init__(self, period_ns: int, start_ns: int) -> None:
        self.period_ns = period_ns
        self.due = 0  # ticks so far, and the number of the next one
        self.skipped = 0
        self._start_ns = start_ns
        self._last_ns: int | None = None

    @property
    def done(self) -> int:
        """Return the number of ticks that were taken."""
        return self.due - self.skipped

    @property
    def next_ns(self) -> int:
        """Return when the next tick is due."""
        return max(self._start_ns + self.due * self.period_ns, self.earliest_ns)

    @property
    def earliest_ns(self) -> int:
        """Return the first moment at which a tick may be forced."""
        return self._start_ns if self._last_ns is None else self._last_ns + MIN_INTERVAL_NS

    def take(self, now_ns: int) -> int | None:
        """Return the number of the tick that is due now, None if none is due."""
        if now_ns < self.next_ns:
            return None
        skipped = (now_ns - self._start_ns - self.due * self.period_ns) // self.period_ns
        self.skipped += skipped
        self.due += skipped
        return self.force(now_ns)

    def force(self, now_ns: int) -> int:
        """Take the next tick ahead of its deadline and return its number."""
        self._last_ns = now_ns
        self.due += 1
        return self.due - 1


class Durations:
    """Quantiles of read times in us. Buckets of 9 % keep a run of any length within a kilobyte."""

    _BUCKETS_PER_OCTAVE = 8

    def __init__(self) -> None:
        self._buckets: Counter[int] = Counter()
        self.max_us = 0.0

    def add(self, us: float) -> None:
        """Add a read time."""
        self._buckets[round(math.log2(max(us, 1.0)) * self._BUCKETS_PER_OCTAVE)] += 1
        self.max_us = max(self.max_us, us)

    def quantile_us(self, share: float) -> float | None:
        """Return the quantile to within 5 %, at most the maximum; None before the first read."""
        total, count = self._buckets.total(), 0
        for bucket in sorted(self._buckets):
            count += self._buckets[bucket]
            if count >= share * total:
                return round(min(2.0 ** (bucket / self._BUCKETS_PER_OCTAVE), self.max_us), 1)
        return None
