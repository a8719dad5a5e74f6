"""The samples of one GPU as arrays: integrals over them, and whether they cover a window. Times are in monotonic ns."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt
import polars as pl

from inpaint_bench.core.schema import POWERS, Null

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Rows = slice | npt.NDArray[np.bool_]  # index of some rows
Span = tuple[int, int]  # start and end of a window
COUNTER = "energy_mj"
FILLED = "energy_mj filled"  # column of `fill_counter`
DENSE_PERIODS = 1.5  # readings in every row are less than so many periods of the rows apart
NO_POWER_W = 1e-3  # power is at least this for `fill_counter`, so that its integral always grows
MAX_GAP_PERIODS = 5.0  # 0.5 s at 10 Hz
MAX_GAP_S = 3.0  # however slowly a run was sampled
DEFAULT_HZ = 10.0
STUCK_COUNTER_S = 1.0  # ten updates of an energy counter; an H200's moved at each of 400 readings at 10 Hz
# Limits are floats: a gap of exactly the limit must pass.
EPS = 1 + 1e-9


@dataclass(kw_only=True)
class GpuSamples:
    """Samples of one GPU in the order in which they were written."""

    uuid: str
    t_ns: Ints
    tick: Ints
    columns: dict[str, Floats]  # null is NaN
    _known: dict[str, "GpuSamples"] = field(default_factory=dict)  # results of `known`

    @classmethod
    def split(cls, samples: pl.DataFrame, columns: Iterable[str]) -> list["GpuSamples"]:
        """Return the samples of each GPU, in order of UUID."""
        uuids = samples["gpu_uuid"].unique().drop_nulls().cast(pl.String).sort()
        return [
            cls(
                uuid=uuid,
                t_ns=rows["t_mono_ns"].cast(pl.Int64).to_numpy(),
                tick=rows["tick_seq"].cast(pl.Int64).to_numpy(),
                columns={name: rows[name].cast(pl.Float64).to_numpy() for name in columns},  # null becomes NaN
            )
            for uuid in uuids
            for rows in [samples.filter(pl.col("gpu_uuid") == uuid)]
        ]

    @cached_property
    def ordered(self) -> bool:
        return bool((self.t_ns[1:] >= self.t_ns[:-1]).all())

    def inside(self, start_ns: int, end_ns: int) -> Rows:
        """Return the index of the samples from start to end, both included."""
        if self.ordered:  # nothing is copied, of a day of samples for each window
            return slice(self.t_ns.searchsorted(start_ns, "left"), self.t_ns.searchsorted(end_ns, "right"))
        return (self.t_ns >= start_ns) & (self.t_ns <= end_ns)

    def touches(self, spans: Iterable[Span]) -> bool:
        return any(len(self.t_ns[self.inside(*span)]) for span in spans)

    def known(self, column: str) -> "GpuSamples":
        """Return only the samples that have a value in this column, with this column alone."""
        if column not in self._known:
            missing = np.isnan(self.columns[column])
            self._known[column] = self._take(~missing if missing.any() else slice(None), [column])
        return self._known[column]

    def bracket(self, start_ns: int, end_ns: int) -> "GpuSamples":
        """Return the samples from the last one at or before the start to the first one at or after the end."""
        # Binary searches if the clock only goes forward, else a test of every sample.
        if self.ordered:
            first, last = self.t_ns.searchsorted(start_ns, "right"), self.t_ns.searchsorted(end_ns, "left")
            before, after = self.t_ns[:first][-1:], self.t_ns[last:][:1]
        else:
            before, after = self.t_ns[self.t_ns <= start_ns], self.t_ns[self.t_ns >= end_ns]
        low, high = before.max() if len(before) else start_ns, after.min() if len(after) else end_ns
        return self._take(self.inside(low, high), self.columns)

    def _take(self, rows: Rows, columns: Iterable[str]) -> "GpuSamples":
        values = {name: self.columns[name][rows] for name in columns}
        taken = GpuSamples(uuid=self.uuid, t_ns=self.t_ns[rows], tick=self.tick[rows], columns=values)
        if self.ordered:
            taken.ordered = True  # without testing again
        return taken

    def values(self, column: str, span: Span) -> tuple[Ints, Floats]:
        samples = self.known(column).bracket(*span)
        return samples.t_ns, samples.columns[column]

    def fill_counter(self) -> None:
        """Add the energy counter in every row between its first and last reading, as the column FILLED.

        Between two readings it grows as the integral of sampled power does, and as time does if power is unknown. A
        counter that was read in every row stays as it is.
        """
        counter = self.columns[COUNTER]
        read = np.flatnonzero(~np.isnan(counter))
        self.columns[FILLED] = counter
        if not self.ordered or len(read) < 2 or read[-1] - read[0] + 1 == len(read):
            return
        powers = [self.columns[name] for name in POWERS if name in self.columns]
        watts = next((power for power in powers if not np.isnan(power).all()), np.full(len(counter), np.nan))
        known = ~np.isnan(watts)
        seconds = (self.t_ns - self.t_ns[0]) * 1e-9
        watts = np.interp(seconds, seconds[known], watts[known]) if known.any() else np.ones(len(counter))
        watts = np.maximum(watts, NO_POWER_W)
        joules = np.concatenate([[0.0], np.cumsum(np.diff(seconds) * (watts[1:] + watts[:-1]) / 2)])
        rows = slice(read[0], read[-1] + 1)
        filled = np.full(len(counter), np.nan)
        filled[rows] = np.interp(joules[rows], joules[read], counter[read])
        self.columns[FILLED] = filled

    def fill_effect(self, span: Span) -> float:
        """Return by how much power instead of time between two readings moves the counter at both edges, in its unit.

        0 if the counter was read in every row.
        """
        if self.columns[FILLED] is self.columns[COUNTER]:
            return 0.0
        (t_ns, counter), (filled_ns, filled) = self.values(COUNTER, span), self.values(FILLED, span)
        at_ns = np.array(span)
        return float(np.abs(np.interp(at_ns, filled_ns, filled) - np.interp(at_ns, t_ns, counter)).sum())

    def update_s(self, span: Span | None = None) -> float | None:
        """Return the median time between two observed updates of the energy counter: at least the time between rows.

        If a counter is not read in every row, the longest stretch in which it was gives that time: the sidecar's first
        reads. Without such a stretch it is the time between two readings.
        """
        known = self.known(COUNTER) if span is None else self.known(COUNTER).bracket(*span)
        if len(self.t_ns) > 1 and self.columns[FILLED] is not self.columns[COUNTER]:
            every = self.known(COUNTER)
            sparse = np.diff(every.t_ns) > DENSE_PERIODS * np.median(np.diff(self.t_ns))
            stretch = max(np.split(np.arange(len(every.t_ns)), np.flatnonzero(sparse) + 1), key=len)
            dense = every._take(slice(stretch[0], stretch[-1] + 1), [COUNTER])
            known = dense if dense._updates_s() is not None else known
        return known._updates_s()

    def _updates_s(self) -> float | None:
        updates = self.t_ns[1:][np.diff(self.columns[COUNTER]) != 0]
        return float(np.median(np.diff(updates))) * 1e-9 if len(updates) > 1 else None

    def integral(self, column: str, span: Span) -> float | None:
        """Return the trapezoidal integral of a column over a span, in units of the column times seconds.

        None if its values do not reach both edges: nothing is extrapolated.
        """
        t_ns, value = self.values(column, span)
        if (edges := _interpolate_edges(t_ns, value, span)) is None:
            return None
        seconds, (first, last) = edges
        inside = (t_ns > span[0]) & (t_ns < span[1])
        x = np.concatenate([[0.0], seconds[inside], [(span[1] - span[0]) * 1e-9]])
        y = np.concatenate([[first], value[inside], [last]])
        return float(np.sum(np.diff(x) * (y[1:] + y[:-1]) / 2))

    def growth(self, column: str, span: Span) -> float | None:
        """Return how much a cumulative counter grows over a span, None if it does not reach both edges."""
        t_ns, counter = self.values(column, span)
        offset = counter - counter[0] if len(counter) else counter  # small numbers interpolate exactly
        if (edges := _interpolate_edges(t_ns, offset, span)) is None:
            return None
        _, (first, last) = edges
        return float(last - first)

    def counted_pct(self, counters: Iterable[str], spans: list[Span]) -> float | None:
        """Return the share of the spans that counters of nanoseconds grow by together; None if none is known.

        A counter that misses an edge or goes back is not known. Two causes may be counted at the same moment: the sum
        is an upper bound, and never more than the spans.
        """
        growths = [[self.growth(name, span) for span in spans] for name in counters]
        known = [[ns for ns in of_counter if ns is not None and ns >= 0] for of_counter in growths]
        complete = [sum(of_counter) for of_counter in known if len(of_counter) == len(spans)]
        total_ns = sum(end - start for start, end in spans)
        return min(100.0, 100 * sum(complete) / total_ns) if complete else None

    def mean(self, column: str, spans: Iterable[Span]) -> float | None:
        """Return the time-weighted mean over the spans in which the column is known."""
        means = [(self._mean(column, span), span[1] - span[0]) for span in spans]
        known = [(value, weight) for value, weight in means if value is not None]
        return sum(value * weight for value, weight in known) / sum(weight for _, weight in known) if known else None

    def _mean(self, column: str, span: Span) -> float | None:
        """Return the mean over one span; from the first to the last value inside if these miss its edges."""
        known = self.known(column)
        inside = known.inside(*span)
        t_ns = known.t_ns[inside]
        if not len(t_ns):
            return None
        for start, end in (span, (int(t_ns[0]), int(t_ns[-1]))):
            if (total := self.integral(column, (start, end))) is not None:
                return total / ((end - start) * 1e-9)
        # A single value, or times that do not move: there is nothing to integrate.
        return float(known.columns[column][inside].mean())

    def maximum(self, column: str, spans: Iterable[Span]) -> float | None:
        known = self.known(column)
        inside = [known.columns[column][known.inside(*span)] for span in spans]
        return max((float(values.max()) for values in inside if len(values)), default=None)


def _interpolate_edges(t_ns: Ints, value: Floats, span: Span) -> tuple[Floats, Floats] | None:
    """Return seconds since the start, and the values at both edges; None if the samples miss an edge."""
    start_ns, end_ns = span
    if len(t_ns) < 2 or t_ns[0] > start_ns or t_ns[-1] < end_ns or end_ns <= start_ns:
        return None
    # Relative to the start: an absolute clock in float seconds would lose the microseconds.
    seconds = (t_ns - start_ns).astype(np.float64) * 1e-9
    return seconds, np.interp([0.0, (end_ns - start_ns) * 1e-9], seconds, value)


def null_reasons(nulls: pl.Series) -> dict[str, str]:
    """Return why columns are null, by the rows' own `nulls`: the first reason of each, in order of their text."""
    reasons: dict[str, str] = {}
    for cell in nulls.unique().drop_nulls().cast(pl.String).sort():
        for pair in cell.split(";"):
            column, _, reason = pair.strip().partition("=")
            if reason and reason != Null.NOT_DUE:
                reasons.setdefault(column, reason)
    return reasons


def gap_limit_s(hz: float) -> float:
    """Return the longest time without a value that a measurement may have."""
    return min(MAX_GAP_PERIODS / hz, MAX_GAP_S)


def check_column(samples: GpuSamples, column: str, span: Span, limit_s: float) -> str | None:
    """Return why this column's values do not cover the window, None if they do. Nulls do not count as values."""
    known = samples.known(column)
    near = known.bracket(*span).t_ns
    # A short window may have no reading of the energy counter, whose growth is known all the same.
    if not len(near) or (column != COUNTER and not known.touches([span])):
        return f"no {column} in the measure window"
    if near[0] > span[0] or near[-1] < span[1]:
        return f"{column} does not reach the edges of the window"
    # A clock that goes back is reported by the audit; here only the time without a value counts.
    in_order = near if known.ordered else np.sort(near)
    gap = float(np.diff(in_order).max()) * 1e-9 if len(near) > 1 else 0.0
    return f"{column} unknown for {gap:.2f} s (limit {limit_s:.2f} s)" if gap > limit_s * EPS else None


def stuck_counter(samples: GpuSamples, span: Span, hz: float) -> str | None:
    """Describe the longest part of the window in which power is drawn and the energy counter does not move."""
    known = samples.known(COUNTER)
    inside = known.inside(*span)
    t_ns, moves = known.t_ns[inside], np.diff(known.columns[COUNTER][inside]) != 0
    if not len(t_ns) or moves.all():
        return None
    # Divided into stretches of equal values: a new one begins at each reading that differs from the one before.
    edges = np.concatenate([[0], np.flatnonzero(moves) + 1, [len(t_ns)]])
    lengths = t_ns[edges[1:] - 1] - t_ns[edges[:-1]]
    longest = int(lengths.argmax())
    first_ns, length_ns = int(t_ns[edges[longest]]), int(lengths[longest])
    if length_ns * 1e-9 <= max(STUCK_COUNTER_S, gap_limit_s(hz)):
        return None
    during = samples.inside(first_ns, first_ns + length_ns)
    # Instant power, or its average if that is all there is. Below 1 W there is nothing to count.
    for name in POWERS:
        watts = samples.columns[name][during]
        if not np.isnan(watts).all():
            where = f"for {length_ns * 1e-9:.2f} s at {(first_ns - span[0]) * 1e-9:.1f} s of the window"
            mean_w = float(np.nanmean(watts))
            return f"energy counter does not move {where}, while {mean_w:.0f} W are drawn" if mean_w >= 1 else None
    return None


def counter_fell(samples: GpuSamples) -> bool:
    """Return whether the cumulative energy counter decreases between two readings."""
    counter = samples.columns[COUNTER]
    return bool((np.diff(counter[~np.isnan(counter)]) < 0).any())
