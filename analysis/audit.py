"""Whether a measure window can be trusted. Every check that fails is a sentence; no sentence, no objection."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from .energy import Floats, Ints

MAX_GAP_PERIODS = 5.0  # 0.5 s at 10 Hz: the energy counter is interpolated over less than this
MAX_GAP_S = 3.0  # however slowly a run was sampled
DEFAULT_HZ = 10.0
SHORT_S, SHORT_STEPS = 20.0, 50
CLOCK_S, CLOCK_SHARE = 0.5, 0.01  # wall and monotonic clock may differ by the larger of the two


@dataclass(kw_only=True)
class Lane:
    """Samples of one GPU in the order in which they were written."""

    uuid: str
    t_ns: Ints
    tick: Ints
    columns: dict[str, Floats]  # null is NaN

    @classmethod
    def split(cls, samples: pl.DataFrame, columns: list[str]) -> list[Lane]:
        """One lane per UUID, in order of UUID."""
        lanes = []
        for uuid in sorted(samples["gpu_uuid"].unique().drop_nulls().to_list()):
            rows = samples.filter(pl.col("gpu_uuid") == uuid)
            values = {name: rows[name].cast(pl.Float64).fill_null(np.nan).to_numpy() for name in columns}
            lane = cls(
                uuid=uuid,
                t_ns=rows["t_mono_ns"].cast(pl.Int64).to_numpy(),
                tick=rows["tick_seq"].cast(pl.Int64).to_numpy(),
                columns=values,
            )
            lanes.append(lane)
        return lanes

    def touches(self, spans: list[tuple[int, int]]) -> bool:
        """Whether any sample lies inside any of the windows."""
        return any(((self.t_ns >= start) & (self.t_ns <= end)).any() for start, end in spans)

    def known(self, column: str) -> Lane:
        """Only the samples that have a value in this column."""
        keep = ~np.isnan(self.columns[column])
        return Lane(
            uuid=self.uuid, t_ns=self.t_ns[keep], tick=self.tick[keep], columns={column: self.columns[column][keep]}
        )

    def bracket(self, start_ns: int, end_ns: int) -> Lane:
        """From the last sample at or before the start to the first at or after the end, by clock."""
        before, after = self.t_ns[self.t_ns <= start_ns], self.t_ns[self.t_ns >= end_ns]
        low = before.max() if len(before) else start_ns
        high = after.min() if len(after) else end_ns
        keep = (self.t_ns >= low) & (self.t_ns <= high)
        columns = {name: values[keep] for name, values in self.columns.items()}
        return Lane(uuid=self.uuid, t_ns=self.t_ns[keep], tick=self.tick[keep], columns=columns)


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


def counts(window: dict[str, Any], manifest: dict[str, Any]) -> list[str]:
    """Images processed are steps times batch times GPUs, where all of them are known."""
    images, steps, batch = window.get("images"), window.get("steps"), manifest.get("batch")
    if images is None or steps is None or not batch:
        return []
    gpus = int(manifest.get("gpus") or 1)
    if images == steps * batch * gpus:
        return []
    return [f"{images} images are not {steps} steps of batch {batch} on {gpus} GPU(s)"]


def column(lane: Lane, name: str, start_ns: int, end_ns: int, hz: float) -> str | None:
    """Why this column's values do not cover the window, or None where they do. Nulls do not count as values."""
    known = lane.known(name)
    inside = (known.t_ns >= start_ns) & (known.t_ns <= end_ns)
    if not inside.any():
        return f"no {name} in the measure window"
    limit_s = gap_limit_s(hz)
    near = known.bracket(start_ns, end_ns).t_ns
    if near[0] > start_ns or near[-1] < end_ns:
        return f"{name} does not reach the edges of the window"
    gap = float(np.diff(np.sort(near)).max()) * 1e-9 if len(near) > 1 else 0.0
    return f"{name} unknown for {gap:.2f} s (limit {limit_s:.2f} s)" if gap > limit_s * (1 + 1e-9) else None


def telemetry_off(manifest: dict[str, Any]) -> bool:
    """True where the run was asked to take no samples: then throughput stands alone."""
    source = (manifest.get("telemetry") or {}).get("source", "missing")
    return source is None or source == "none"


def devices(lanes: list[Lane], manifest: dict[str, Any]) -> list[str]:
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


def window(lane: Lane, start_ns: int, end_ns: int, hz: float) -> list[str]:
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
    return problems


def counter_fell(lane: Lane) -> bool:
    """True where the cumulative energy counter decreases between two readings."""
    counter = lane.columns["energy_mj"]
    return bool((np.diff(counter[~np.isnan(counter)]) < 0).any())
