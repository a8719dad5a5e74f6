"""Whether a measure window can be trusted. Every check that fails is a sentence; no sentence, no objection.

Two kinds of rows in the events table count against a run, whoever writes them: `co_tenant`, detail `pid N`, for
another process on one of its GPUs, and `power_limit`, detail `300 W to 250 W`, for a limit that changed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from .energy import Floats, Ints

Rows = slice | npt.NDArray[np.bool_]  # index of some rows

MAX_GAP_PERIODS = 5.0  # 0.5 s at 10 Hz: the energy counter is interpolated over less than this
MAX_GAP_S = 3.0  # however slowly a run was sampled
DEFAULT_HZ = 10.0
STILL_S = 1.0  # ten updates of an energy counter; an H200's moved at each of 400 readings at 10 Hz
OVER_LIMIT = 1.05  # mean power over the power limit: +/- 5 W of the sensor, and what a regulator lets pass
SHORT_S, SHORT_STEPS = 20.0, 50
INCIDENTS = {"xid": "Xid", "ecc": "memory errors:"}
CLOCK_S, CLOCK_SHARE = 0.5, 0.01  # wall and monotonic clock may differ by the larger of the two
EVENTS = {"co_tenant": "another process was on GPU", "power_limit": "the power limit changed within the run on GPU"}


@dataclass(kw_only=True)
class GpuSamples:
    """Samples of one GPU in the order in which they were written."""

    uuid: str
    t_ns: Ints
    tick: Ints
    columns: dict[str, Floats]  # null is NaN

    @classmethod
    def split(cls, samples: pl.DataFrame, columns: list[str]) -> list[GpuSamples]:
        """One lane per UUID, in order of UUID."""
        lanes = []
        found = samples["gpu_uuid"].unique()
        for uuid in found.drop_nulls().cast(pl.String).sort():
            rows = samples if len(found) == 1 else samples.filter(pl.col("gpu_uuid") == uuid)
            values = {name: rows[name].cast(pl.Float64).to_numpy() for name in columns}  # null becomes NaN
            lane = cls(
                uuid=uuid,
                t_ns=rows["t_mono_ns"].cast(pl.Int64).to_numpy(),
                tick=rows["tick_seq"].cast(pl.Int64).to_numpy(),
                columns=values,
            )
            lanes.append(lane)
        return lanes

    @cached_property
    def ordered(self) -> bool:
        """Whether the clock never goes back: then the rows of a span are a slice, and nothing is copied for it."""
        return bool((self.t_ns[1:] >= self.t_ns[:-1]).all())

    def inside(self, start_ns: int, end_ns: int) -> Rows:
        """The samples from start to end, both included, by clock."""
        if self.ordered:
            return slice(self.t_ns.searchsorted(start_ns, "left"), self.t_ns.searchsorted(end_ns, "right"))
        return (self.t_ns >= start_ns) & (self.t_ns <= end_ns)

    def touches(self, spans: list[tuple[int, int]]) -> bool:
        """Whether any sample lies inside any of the windows."""
        return any(len(self.t_ns[self.inside(*span)]) for span in spans)

    def known(self, column: str) -> GpuSamples:
        """Only the samples that have a value in this column, with this column alone."""
        if column not in self._known:
            values = self.columns[column]
            missing = np.isnan(values)
            self._known[column] = self._take(~missing if missing.any() else slice(None), [column])
        return self._known[column]

    @cached_property
    def _known(self) -> dict[str, GpuSamples]:
        return {}

    def bracket(self, start_ns: int, end_ns: int) -> GpuSamples:
        """From the last sample at or before the start to the first at or after the end, by clock."""
        if self.ordered:
            first, last = self.t_ns.searchsorted(start_ns, "right"), self.t_ns.searchsorted(end_ns, "left")
            before, after = self.t_ns[:first][-1:], self.t_ns[last:][:1]
        else:
            before, after = self.t_ns[self.t_ns <= start_ns], self.t_ns[self.t_ns >= end_ns]
        low = before.max() if len(before) else start_ns
        high = after.min() if len(after) else end_ns
        return self._take(self.inside(low, high), self.columns)

    def _take(self, rows: Rows, columns: Iterable[str]) -> GpuSamples:
        values = {name: self.columns[name][rows] for name in columns}
        taken = GpuSamples(uuid=self.uuid, t_ns=self.t_ns[rows], tick=self.tick[rows], columns=values)
        if self.ordered:
            taken.ordered = True  # without looking again
        return taken


def fast_hz(manifest: dict[str, Any]) -> float:
    """Rate of the fast lane by the manifest; 10 where it is not given."""
    hz = (manifest.get("telemetry") or {}).get("hz")
    if isinstance(hz, dict):
        hz = hz.get("fast") or hz.get("fast_hz") or hz.get("samples_fast")
    return float(hz) if isinstance(hz, int | float) and hz > 0 else DEFAULT_HZ


def gap_limit_s(hz: float) -> float:
    """The longest time without a value that a measurement may have."""
    return min(MAX_GAP_PERIODS / hz, MAX_GAP_S)


def short(window: dict[str, Any]) -> list[str]:
    """A warning where a measure window is too short to say much."""
    seconds = (window["t_end_mono_ns"] - window["t_start_mono_ns"]) * 1e-9
    steps = window.get("steps")
    if seconds >= SHORT_S and (steps is None or steps >= SHORT_STEPS):
        return []
    return [f"short window: {seconds:.1f} s, {'unknown' if steps is None else steps} steps"]


def clocks(window: dict[str, Any]) -> list[str]:
    """A clock jump: the wall clock and the monotonic clock disagree about how long the window was."""
    start, end = window.get("t_start_unix_ns"), window.get("t_end_unix_ns")
    if not isinstance(start, int) or not isinstance(end, int):
        return []
    seconds = (window["t_end_mono_ns"] - window["t_start_mono_ns"]) * 1e-9
    wall = (end - start) * 1e-9
    if abs(wall - seconds) <= max(CLOCK_S, CLOCK_SHARE * seconds):
        return []
    return [f"clock jump: the window lasted {seconds:.2f} s by the monotonic clock, {wall:.2f} s by the wall clock"]


def overlaps(window: dict[str, Any], windows: list[dict[str, Any]]) -> list[str]:
    """Time that a measure window shares with another window of the run; that of warm-up is counted in.

    Windows of an earlier boot may have equal monotonic times by chance: both clocks must say so where both are known.
    """
    found = []
    for other in windows:
        clocks = [both for clock in ("mono", "unix") if (both := _shared_ns(window, other, clock)) is not None]
        if other is window or not clocks or min(clocks) <= 0:
            continue
        what = "warm-up counted in: the measure window" if other.get("kind") == "warmup" else "the measure window"
        seconds = "the start" if other.get("t_end_mono_ns") is None else f"{clocks[0] * 1e-9:.2f} s"
        found.append(f"{what} shares {seconds} with {other.get('kind')} window {other.get('window_id')}")
    return found


def _shared_ns(one: dict[str, Any], other: dict[str, Any], clock: str) -> int | None:
    """How long both are open at once. A window whose end nobody saw is open at its start; None: start unknown."""
    edges = []
    for each in (one, other):
        start, end = each.get(f"t_start_{clock}_ns"), each.get(f"t_end_{clock}_ns")
        if not isinstance(start, int):
            return None
        edges.append((start, end if isinstance(end, int) else start + 1))
    (a, b), (c, d) = edges
    return min(b, d) - max(a, c)


def steps(window: dict[str, Any], table: pl.DataFrame) -> list[str]:
    """The window's steps lie inside it, one after the other."""
    start, end = window["t_start_mono_ns"], window["t_end_mono_ns"]
    rows = table.filter(pl.col("window_id") == str(window.get("window_id"))).sort("step", maintain_order=True)
    first, last = pl.col("t_start_mono_ns"), pl.col("t_end_mono_ns")
    early, late = rows.filter(first < start).height, rows.filter(last > end).height
    back = rows.filter((first.diff() < 0) | (last < first)).height
    words = {
        "warm-up counted in: {} step(s) began before the measure window opened": early,
        "{} step(s) ended after the measure window closed": late,
        "clock jump: the times of steps go back in {} places": back,
    }
    return [text.format(count) for text, count in words.items() if count]


def events(table: pl.DataFrame, manifest: dict[str, Any], uuids: set[str]) -> list[str]:
    """What happened to the run's GPUs that no other sample shows. A requeued job's earlier events are another run's."""
    began = manifest.get("started_unix_ns") or 0
    ours = (pl.col("gpu_uuid").is_in(sorted(uuids)) | pl.col("gpu_uuid").is_null()) & (pl.col("t_unix_ns") >= began)
    found: dict[str, None] = {}
    for kind, uuid, detail in table.filter(ours).select("kind", "gpu_uuid", "detail").iter_rows():
        if kind in EVENTS:
            found[f"{EVENTS[kind]} {uuid or '(not named)'}: {detail or 'no detail'}"] = None
    return list(found)


def incidents(table: pl.DataFrame, manifest: dict[str, Any], usable: list[dict[str, Any]]) -> list[str]:
    """What the driver reported of the run's GPUs while it was measured: told, because not every Xid spoils figures."""
    uuids = [device["uuid"] for device in manifest.get("devices") or [] if device.get("uuid")]
    ours = pl.col("t_unix_ns") >= (manifest.get("started_unix_ns") or 0)
    if uuids:
        ours &= pl.col("gpu_uuid").is_in(uuids) | pl.col("gpu_uuid").is_null()
    found = []
    for kind, at, uuid, detail in table.filter(ours).select("kind", "t_mono_ns", "gpu_uuid", "detail").iter_rows():
        inside = [w for w in usable if w["t_start_mono_ns"] <= at <= w["t_end_mono_ns"]]
        if kind in INCIDENTS and inside:
            seconds = (at - inside[0]["t_start_mono_ns"]) * 1e-9
            found.append(f"{INCIDENTS[kind]} {detail or 'no detail'} on GPU {uuid or '(not named)'} at {seconds:.1f} s")
    return found


def over_limit(power_w: float | None, manifest: dict[str, Any]) -> list[str]:
    """Mean power that the manifest's power limits do not allow: they were not those of the window."""
    limits = [device.get("power_limit_w") for device in manifest.get("devices") or []]
    if power_w is None or not limits or None in limits or len(limits) != int(manifest.get("gpus") or 1):
        return []
    limit_w = float(sum(limits))
    if power_w <= OVER_LIMIT * limit_w:
        return []
    return [f"{power_w:.0f} W on average, over the power limit of {limit_w:.0f} W by the manifest: it was not in force"]


def counts(window: dict[str, Any], manifest: dict[str, Any]) -> list[str]:
    """Images processed are steps times batch times GPUs, where all of them are known."""
    images, steps, batch = window.get("images"), window.get("steps"), manifest.get("batch")
    if images is None or steps is None or not batch:
        return []
    gpus = int(manifest.get("gpus") or 1)
    if images == steps * batch * gpus:
        return []
    return [f"{images} images are not {steps} steps of batch {batch} on {gpus} GPU(s)"]


def column(lane: GpuSamples, name: str, start_ns: int, end_ns: int, limit_s: float) -> str | None:
    """Why this column's values do not cover the window, or None where they do. Nulls do not count as values."""
    known = lane.known(name)
    if not known.touches([(start_ns, end_ns)]):
        return f"no {name} in the measure window"
    near = known.bracket(start_ns, end_ns).t_ns
    if near[0] > start_ns or near[-1] < end_ns:
        return f"{name} does not reach the edges of the window"
    in_order = near if known.ordered else np.sort(near)
    gap = float(np.diff(in_order).max()) * 1e-9 if len(near) > 1 else 0.0
    return f"{name} unknown for {gap:.2f} s (limit {limit_s:.2f} s)" if gap > limit_s * (1 + 1e-9) else None


def telemetry_off(manifest: dict[str, Any]) -> bool:
    """True where the run was asked to take no samples: then throughput stands alone."""
    source = (manifest.get("telemetry") or {}).get("source", "missing")
    return source is None or source == "none"


def strangers(lanes: list[GpuSamples], manifest: dict[str, Any]) -> list[str]:
    """Samples of GPUs that the manifest does not name, where it names any."""
    named = {device.get("uuid") for device in manifest.get("devices") or [] if device.get("uuid")}
    extra = sorted({lane.uuid for lane in lanes} - named) if named else []
    return [f"GPUs differ: slow samples of {', '.join(extra)}, which the manifest does not name"] if extra else []


def devices(lanes: list[GpuSamples], manifest: dict[str, Any]) -> list[str]:
    """The sampled UUIDs are the manifest's. A replay on a machine without GPU has no devices to compare."""
    sampled = {lane.uuid for lane in lanes}
    named = {device.get("uuid") for device in manifest.get("devices") or [] if device.get("uuid")}
    if named and sampled != named:
        extra, lost = sorted(sampled - named), sorted(named - sampled)
        what = [f"samples of {', '.join(extra)}, which the manifest does not name"] if extra else []
        what += [f"no samples of {', '.join(lost)}"] if lost else []
        return ["GPUs differ: " + "; ".join(what)]
    expected = int(manifest.get("gpus") or 1)
    replayed = str((manifest.get("telemetry") or {}).get("source") or "").startswith("replay")
    if not named and not replayed:
        return ["the manifest names no GPU to compare the samples with"]
    if not named and len(sampled) != expected:
        return [f"samples of {len(sampled)} GPUs in a run of {expected}"]
    return []


def window(lane: GpuSamples, start_ns: int, end_ns: int, hz: float) -> list[str]:
    """What is wrong with one GPU's fast samples around one measure window."""
    who = f"GPU {lane.uuid}: "
    if not len(lane.t_ns):
        return [who + "no samples"]
    problems = []
    if lane.t_ns.min() > start_ns:
        late = (int(lane.t_ns.min()) - start_ns) * 1e-9
        problems.append(f"{who}first sample {late:.2f} s after the window opened")
    if lane.t_ns.max() < end_ns:
        early = (end_ns - int(lane.t_ns.max())) * 1e-9
        problems.append(f"{who}last sample {early:.2f} s before the window closed")
    near = lane.bracket(start_ns, end_ns)
    if len(near.t_ns) < 2:
        return [*problems, who + "fewer than two samples around the window"]
    steps = np.diff(near.t_ns)
    if (steps <= 0).any():
        problems.append(f"{who}clock does not move forward in {int((steps <= 0).sum())} places")
    if (np.diff(near.tick) <= 0).any():
        problems.append(f"{who}tick_seq repeats or goes back")
    limit_s = gap_limit_s(hz)
    worst = int(steps.argmax())
    if steps[worst] * 1e-9 > limit_s * (1 + 1e-9):
        at = (int(near.t_ns[worst]) - start_ns) * 1e-9
        gap = steps[worst] * 1e-9
        problems.append(f"{who}gap of {gap:.2f} s at {at:.1f} s of the window (limit {limit_s:.2f} s)")
    if counter_fell(near):
        problems.append(f"{who}energy counter went back (driver reloaded?)")
    if still := counter_still(lane, start_ns, end_ns, hz):
        problems.append(who + still)
    return [*problems, *(who + text for text in sample_clocks(near, (end_ns - start_ns) * 1e-9))]


def sample_clocks(lane: GpuSamples, seconds: float) -> list[str]:
    """A step of the wall clock that is undone before the window closes shows in the samples alone."""
    apart = lane.columns["t_unix_ns"] - lane.t_ns
    drift_s = float(np.nanmax(apart) - np.nanmin(apart)) * 1e-9
    if not drift_s > max(CLOCK_S, CLOCK_SHARE * seconds):
        return []
    return [f"clock jump: wall and monotonic clock of the samples move {drift_s:.2f} s against each other"]


def counter_still(lane: GpuSamples, start_ns: int, end_ns: int, hz: float) -> str | None:
    """The longest stretch of the window in which power is drawn and the energy counter does not count it."""
    known = lane.known("energy_mj")
    inside = known.inside(start_ns, end_ns)
    t_ns, moves = known.t_ns[inside], np.diff(known.columns["energy_mj"][inside]) != 0
    if not len(t_ns) or moves.all():
        return None
    edges = np.concatenate([[0], np.flatnonzero(moves) + 1, [len(t_ns)]])
    lengths = t_ns[edges[1:] - 1] - t_ns[edges[:-1]]
    longest = int(lengths.argmax())
    first_ns, still_s = int(t_ns[edges[longest]]), float(lengths[longest]) * 1e-9
    if still_s <= max(STILL_S, gap_limit_s(hz)):
        return None
    during = lane.inside(first_ns, first_ns + int(lengths[longest]))
    for name in ("power_instant_w", "power_avg1s_w"):
        watts = lane.columns[name][during]
        if not np.isnan(watts).all():
            mean_w, at = float(np.nanmean(watts)), (first_ns - start_ns) * 1e-9
            text = f"energy counter does not move for {still_s:.2f} s at {at:.1f} s of the window"
            return f"{text}, while {mean_w:.0f} W are drawn" if mean_w >= 1 else None
    return None


def counter_fell(lane: GpuSamples) -> bool:
    """True where the cumulative energy counter decreases between two readings."""
    counter = lane.columns["energy_mj"]
    return bool((np.diff(counter[~np.isnan(counter)]) < 0).any())
