"""Energy over the measure windows, by the counter or by sampled power, and its uncertainty.

Sampled energy is of instant power alone: one-second averages are another quantity, and a mean over runs must not hold
both. CPU energy is the sum over the packages of all nodes, if the run had its nodes to itself.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import polars as pl

from inpaint_bench.core.records import Environment
from inpaint_bench.core.schema import POWERS

from . import gpu_samples
from .facts import Columns, Facts
from .gpu_samples import COUNTER, FILLED, GpuSamples, Span, null_reasons

SENSOR_W = 5.0  # accuracy of a power reading per GPU, by the vendor: +/- 5 W (nvidia-smi's help, driver 590)
MAX_COUNTER_DEVIATION = 0.05  # deviation of counter from integral beyond which the run has a warning
# Percent of the integral beyond which one of the two is wrong, besides the bounds of edges and sensor. Instant power
# deviated by up to 2.1 % in 89 H200 runs of 8 to 40 s. It covers a quarter of the time on an A100 or H200, so steps in
# rhythm with the samples may bias it; a one-second average cannot be biased so, but lags.
CONTRADICTION_PCT = {"power_instant_w": 15.0, "power_avg1s_w": 5.0}
STUCK_READINGS = 20  # equal power readings in a window under load: the sensor does not measure
LAG_S = {"power_instant_w": 0.0, "power_avg1s_w": 0.5}
# A call has to last so many updates of the counter, or readings if these are rarer: either of its edges is wrong by
# up to one, together by 10 %.
MIN_UPDATES = 20
AT_CALLS = ("counter_start_j", "counter_end_j", "counter_update_s")
CPU_TABLE, CPU_COUNTER = "samples_cpu", "energy_uj"
# Power of a node's packages between two samples: idle laptops draw more, eight large sockets less.
CPU_WATTS = (1.0, 5000.0)
UNCERTAINTY = ("energy_error_pct", "energy_edge_pct", "energy_sensor_pct", "energy_update_ms", "joules_per_image_error")


@dataclass(frozen=True, kw_only=True)
class Deviation:
    """How far the energy is from an integral of sampled power."""

    column: str
    pct: float
    limit_pct: float  # beyond it one of the two is wrong
    text: str


@dataclass(frozen=True, kw_only=True)
class Energy(Columns):
    """The columns, and what the checks need to know of where they come from."""

    problem: str | None = None  # why it is not by the counter beside sampled power
    deviations: Sequence[Deviation] = ()


def find_energy(samples: list[GpuSamples], spans: list[Span], gaps: Mapping[str, str], counter_hz: float) -> Energy:
    """Return the energy of all GPUs: by the counter if it can be trusted, else by the integral of instant power.

    `gaps` says of columns that do not cover the windows why; they give no energy. The counter was read at
    `counter_hz`; between two readings, at an edge of a window, sampled power tells how it grew.
    """
    pairs = list(product(samples, spans))
    sampled = {
        name: None if name in gaps else _total([gpu.integral(name, span) for gpu, span in pairs]) for name in POWERS
    }
    integral_j, averaged_j = sampled.values()
    for gpu in samples:
        gpu.fill_counter()
    growth_mj = [] if COUNTER in gaps else [gpu.growth(FILLED, span) for gpu, span in pairs]
    counter_mj = _total(growth_mj)
    stuck = any(gpu_samples.stuck_counter(gpu, span, counter_hz) for gpu, span in pairs)
    # Also in a window that is too short for `stuck_counter`: a counter that does not grow gives no energy.
    stuck = stuck or any(value is not None and value <= 0 for value in growth_mj)
    joules: float | None = None
    source = reason = problem = None
    # No integral in place of a counter that went back: the audit makes such a run invalid.
    if any(gpu_samples.counter_fell(gpu.known("energy_mj").bracket(*span)) for gpu, span in pairs):
        reason = "energy counter went back"
    elif counter_mj is not None and not stuck:
        joules, source = counter_mj / 1000, "counter"
    elif still := next(filter(None, (_still(gpu, POWERS[0], span) for gpu, span in pairs)), None):
        reason, problem = still, f"no energy: {still}"
    elif integral_j is not None:
        joules, source = integral_j, "integral"
        cause = "energy counter does not move" if stuck else "no energy counter"
        problem = f"{cause}: energy is the integral of sampled power"
    elif averaged_j is not None:
        reason = "only one-second averages of power are known, and those are not mixed with instant power"
        problem = f"no energy: {reason}"
    elif stuck:
        reason = "energy counter does not move and power is unknown"
    else:
        reason = "neither an energy counter nor power around the window"
    values: dict[str, Any] = {"energy_j": joules, "energy_source": source, "energy_integral_j": integral_j}
    reasons = {} if reason is None else {"energy_j": reason}
    compared = {} if joules is None else sampled if source == "counter" else {"power_avg1s_w": averaged_j}
    if joules is not None and source == "counter" and integral_j:
        values["energy_ratio"] = joules / integral_j
    else:
        reasons["energy_ratio"] = "energy counter does not move" if stuck else "counter and integral are not both known"
    # One-second averages are good enough to check the counter, but not as energy.
    sampled_j = averaged_j if integral_j is None else integral_j
    if joules is None or source != "counter":
        # The integral alone has no uncertainty: nothing says what the samples missed.
        reasons |= dict.fromkeys(UNCERTAINTY, reason or "no energy counter to derive it from")
    elif not sampled_j:
        problem, compared = "no sampled power to check the energy counter against", {}
        reasons |= dict.fromkeys(UNCERTAINTY, problem)
    elif bounds := _uncertainty(joules, pairs, spans, sampled_j):
        values |= bounds
    else:
        reasons |= dict.fromkeys(UNCERTAINTY, "too few updates of the counter")
    known = {name: sampled_j for name, sampled_j in compared.items() if sampled_j}
    deviations = [_deviation(values, name, sampled_j, pairs, spans) for name, sampled_j in known.items()]
    return Energy(values=values, reasons=reasons, problem=problem, deviations=deviations)


def _still(samples: GpuSamples, column: str, span: Span) -> str | None:
    """Describe a power that never changes. A sensor of whole watts is judged by idle samples too."""
    known = samples.known(column)
    inside, readings = known.columns[column][known.inside(*span)], known.columns[column]
    readings = readings if (readings % 1 == 0).all() else inside
    if len(inside) < STUCK_READINGS or np.ptp(readings):
        return None
    return f"{column} is {inside[0]:.4g} W in all of {len(readings)} readings: its sensor does not measure"


def _deviation(
    values: Mapping[str, Any], name: str, sampled_j: float, pairs: list[tuple[GpuSamples, Span]], spans: list[Span]
) -> Deviation:
    joules, by_counter = values["energy_j"], values["energy_source"] == "counter"
    source, subject = ("counter", "energy counter") if by_counter else ("integral of instant power", "instant power")
    sampled_name = "sampled power" if by_counter else "its one-second average"
    deviation_pct = 100 * (joules / sampled_j - 1)
    joules_text = f"{joules:.0f} J by the {source}, {sampled_j:.0f} J by the integral"
    seconds = sum(end - start for start, end in spans) * 1e-9
    sensor_pct = 100 * (len(pairs) // len(spans)) * SENSOR_W * seconds / sampled_j
    # A lagging reading misses the change of power from the start to the end of a window.
    lag_pct = 100 * LAG_S[name] * sum(float(np.ptp(gpu.values(name, span)[1])) for gpu, span in pairs) / sampled_j
    limit_pct = CONTRADICTION_PCT[name if by_counter else "power_instant_w"]
    return Deviation(
        column=name,
        pct=deviation_pct,
        limit_pct=limit_pct + sensor_pct + (values.get("energy_edge_pct") or 0.0) + lag_pct,
        text=f"{subject} deviates {deviation_pct:+.1f} % from the integral of {sampled_name}: {joules_text}",
    )


def _uncertainty(
    joules: float, pairs: list[tuple[GpuSamples, Span]], spans: list[Span], sampled_j: float
) -> dict[str, float]:
    """Return by how much energy by the counter may be wrong: bounds that add up, in %; nothing without updates.

    Edges: in each of n windows of together T seconds, the slowest counter was last updated up to u before either edge:
    2 u n / T, and between two readings power in place of time moves it by what is filled. Sensor: SENSOR_W on each of G
    GPUs over the mean power: G SENSOR_W T / E. Disagreement: |counter / integral - 1|, of two ways to measure the same
    joules.
    """
    updates = [update for gpu, span in pairs if (update := gpu.update_s(span)) is not None]
    if not updates:
        return {}
    update_s, seconds = max(updates), sum(end - start for start, end in spans) * 1e-9
    filled_j = sum(gpu.fill_effect(span) for gpu, span in pairs) / 1000
    edge_pct = 100 * (2 * update_s * len(spans) / seconds + filled_j / joules)
    sensor_pct = 100 * (len(pairs) // len(spans)) * SENSOR_W * seconds / joules
    error_pct = edge_pct + sensor_pct + 100 * abs(joules / sampled_j - 1)
    bounds = {"energy_edge_pct": edge_pct, "energy_sensor_pct": sensor_pct, "energy_error_pct": error_pct}
    return {"energy_update_ms": 1000 * update_s, **bounds}


def _total(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None


def add_counter(calls: pl.DataFrame, samples: pl.DataFrame) -> pl.DataFrame:
    """Add the counter (J, of all GPUs) at `t_start_mono_ns` and `t_end_mono_ns` of one run's calls, and its period.

    Null if the samples do not reach the call, or the counter is unknown or goes back.
    """
    edges = [calls[name].cast(pl.Float64).to_numpy() for name in ("t_start_mono_ns", "t_end_mono_ns")]
    start_j, end_j = np.zeros(calls.height), np.zeros(calls.height)
    periods_s = []
    nothing = [pl.lit(None, pl.Float64).alias(name) for name in AT_CALLS]
    for gpu in GpuSamples.split(samples, [COUNTER, *(name for name in POWERS if name in samples.columns)]):
        gpu.fill_counter()
        update_s, known = gpu.update_s(), gpu.known(FILLED)
        counter = known.columns[FILLED]
        if not known.ordered or update_s is None or (np.diff(counter) < 0).any():
            return calls.with_columns(nothing)
        periods_s.append(max(update_s, float(np.median(np.diff(gpu.known(COUNTER).t_ns))) * 1e-9))
        for total_j, at_ns in zip((start_j, end_j), edges, strict=True):
            total_j += np.interp(at_ns, known.t_ns, counter, left=np.nan, right=np.nan) / 1000
    if not periods_s:
        return calls.with_columns(nothing)
    values = (start_j, end_j, np.full(calls.height, max(periods_s)))
    series = [pl.Series(name, value).fill_nan(None) for name, value in zip(AT_CALLS, values, strict=True)]
    return calls.with_columns(series)


def find_cpu_energy(facts: Facts) -> Columns:
    """Return the energy, which is null with a reason if it is unknown on any node."""
    nodes = facts.by_node()
    joules = [_of_node(node, node.files.rows.get(CPU_TABLE) if node.node else node.tables[CPU_TABLE]) for node in nodes]
    if reason := next((reason for reason in joules if isinstance(reason, str)), None):
        return Columns(values={}, reasons=dict.fromkeys(("cpu_energy_j", "joules_per_image_with_cpu"), reason))
    return Columns(values={"cpu_energy_j": sum(joules)})


def _of_node(facts: Facts, rows: pl.DataFrame | None) -> float | str:
    # Each sidecar counts from 0, and a requeued job leaves the rows of an earlier one.
    own = None if rows is None else rows.filter(pl.col("t_unix_ns") >= (facts.manifest.started_unix_ns or 0))
    if own is None or own.is_empty():
        return f"no {CPU_TABLE}"
    if own[CPU_COUNTER].null_count() == own.height:
        return null_reasons(own["nulls"]).get(CPU_COUNTER, f"no {CPU_COUNTER}")
    if not own["whole_node"].all():
        return "the job did not hold every CPU of its node, whose packages other jobs may have used"
    manifest, sidecar = facts.manifest, facts.files.sidecar
    environment = manifest.environment or Environment()
    held = (environment.cores or 0) * max(1, (manifest.gpus or 1) // max(manifest.nodes, 1))  # the ranks of a node
    known = max([environment.node_cores or 0, *(cpu + 1 for cpu in (sidecar.cpus if sidecar else ()))])
    if 0 < held < known:
        return f"the samples say that the job held every CPU of its node, and it had {held} of {known} or more"
    (samples,) = GpuSamples.split(own.with_columns(gpu_uuid=pl.lit(CPU_TABLE)), [CPU_COUNTER])
    grown_uj = [samples.growth(CPU_COUNTER, span) or 0.0 for span in facts.spans]
    if min(grown_uj) <= 0:
        return f"{CPU_COUNTER} does not reach the edges of the window, or does not grow in it"
    for t_ns, counter_uj in (samples.values(CPU_COUNTER, span) for span in facts.spans):
        watts = np.diff(counter_uj) * 1e3 / np.diff(t_ns)
        if len(wrong := watts[~((watts >= CPU_WATTS[0]) & (watts <= CPU_WATTS[1]))]):
            bounds = f"outside {CPU_WATTS[0]:g} to {CPU_WATTS[1]:,g} W: it wrapped, stands still or has another unit"
            return f"{CPU_COUNTER} grows as by {wrong[0]:.3g} W in {len(wrong)} of {len(watts)} steps, {bounds}"
    return sum(grown_uj) * 1e-6
