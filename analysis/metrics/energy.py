"""Integrals over a window of sampled values, with the edges interpolated. Times in ns of one clock."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
SENSOR_W = 5.0  # accuracy of a power reading per GPU, by the vendor: +/- 5 W (nvidia-smi's help, driver 590)


def _known(t_ns: Ints, value: Floats) -> tuple[Ints, Floats]:
    missing = np.isnan(value)
    return (t_ns[~missing], value[~missing]) if missing.any() else (t_ns, value)


def integral(t_ns: Ints, value: Floats, start_ns: int, end_ns: int) -> float | None:
    """Trapezoid of `value` from start to end, in units of value times seconds.

    NaN are dropped first. None where the samples do not reach both edges: nothing is extrapolated.
    """
    t_ns, value = _known(t_ns, value)
    if len(t_ns) < 2 or t_ns[0] > start_ns or t_ns[-1] < end_ns or end_ns <= start_ns:
        return None
    inside = (t_ns > start_ns) & (t_ns < end_ns)
    # Relative to the start: an absolute clock in float seconds would lose the microseconds.
    seconds = (t_ns - start_ns).astype(np.float64) * 1e-9
    edges = np.array([0.0, (end_ns - start_ns) * 1e-9])
    at_edges = np.interp(edges, seconds, value)
    x = np.concatenate([edges[:1], seconds[inside], edges[1:]])
    y = np.concatenate([at_edges[:1], value[inside], at_edges[1:]])
    return float(np.sum(np.diff(x) * (y[1:] + y[:-1]) / 2))


def mean(t_ns: Ints, value: Floats, start_ns: int, end_ns: int) -> float | None:
    """Time-weighted mean over the window; of the samples inside where they do not reach the edges."""
    t_ns, value = _known(t_ns, value)
    inside = (t_ns >= start_ns) & (t_ns <= end_ns)
    if not inside.any():
        return None
    whole = integral(t_ns, value, start_ns, end_ns)
    if whole is not None:
        return whole / ((end_ns - start_ns) * 1e-9)
    t_in, v_in = t_ns[inside], value[inside]
    part = integral(t_in, v_in, int(t_in[0]), int(t_in[-1]))
    return float(v_in.mean()) if part is None else part / ((int(t_in[-1]) - int(t_in[0])) * 1e-9)


def growth(t_ns: Ints, counter: Floats, start_ns: int, end_ns: int) -> float | None:
    """How much a cumulative counter grows between the edges, interpolated at both; None where it is unknown there."""
    t_ns, counter = _known(t_ns, counter)
    if len(t_ns) < 2 or t_ns[0] > start_ns or t_ns[-1] < end_ns:
        return None
    seconds = (t_ns - start_ns).astype(np.float64) * 1e-9
    edges = np.array([0.0, (end_ns - start_ns) * 1e-9])
    first, last = np.interp(edges, seconds, counter - counter[0])
    return float(last - first)


def counter_j(t_ns: Ints, counter_mj: Floats, start_ns: int, end_ns: int) -> float | None:
    """Joules between the edges by a cumulative counter in mJ.

    The counter moves about every 100 ms, so the edges cost up to 0.2 s of power: 1 % of a 20 s window.
    """
    grown = growth(t_ns, counter_mj, start_ns, end_ns)
    return None if grown is None else grown / 1000


def update_s(t_ns: Ints, counter: Floats) -> float | None:
    """Median time between two changes of a counter, as seen: never less than the sampling period."""
    changes = t_ns[1:][np.diff(counter) != 0]
    return float(np.median(np.diff(changes))) * 1e-9 if len(changes) > 1 else None


@dataclass(frozen=True, kw_only=True)
class EnergyUncertainty:
    """By how much energy may be wrong, in % of it: bounds that add up, no standard deviation.

    Edges: in each of n windows of together T seconds, the counter was last updated up to u before either edge:
    2 u n / T. Sensor: SENSOR_W on each of G GPUs over the mean power: G SENSOR_W T / E. Disagreement:
    |counter / integral - 1|, of two ways to measure the same joules.
    """

    edge_pct: float
    sensor_pct: float
    disagreement_pct: float

    @classmethod
    def of(
        cls, joules: float, seconds: float, windows: int, gpus: int, update_s: float, ratio: float
    ) -> EnergyUncertainty:
        return cls(
            edge_pct=100 * 2 * update_s * windows / seconds,
            sensor_pct=100 * gpus * SENSOR_W * seconds / joules,
            disagreement_pct=100 * abs(ratio - 1),
        )

    @property
    def pct(self) -> float:
        return self.edge_pct + self.sensor_pct + self.disagreement_pct
