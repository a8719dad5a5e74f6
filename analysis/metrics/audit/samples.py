"""Checks of the samples around the measure windows: GPUs, edges, order, gaps, clocks, counters, power and energy."""

import math
from collections.abc import Iterator
from itertools import product

import numpy as np
import polars as pl

from analysis.metrics.energy import MAX_COUNTER_DEVIATION
from analysis.metrics.facts import CLOCKS_AGREE_S, Facts
from analysis.metrics.flags import THERMAL_COUNTERS, THERMAL_PCT
from analysis.metrics.gpu_samples import COUNTER, EPS, GpuSamples, Span, counter_fell, gap_limit_s, stuck_counter
from analysis.metrics.telemetry import Telemetry
from inpaint_bench.core.console import pluralize
from inpaint_bench.core.records import Window

from .inputs import Finished
from .windows import clock_tolerance_s

ENERGY_ERROR_PCT = 5.0
THERMAL_BITS = 0x8 | 0x20 | 0x40  # NVML's clocks event reasons: hardware slowdown, software and hardware thermal
LATE_TICK_S = 1.0  # the latest tick in 89 H200 runs was 0.35 s late
# Memory in use at its peak in percent of the card, and its mean over its peak: 99.95 and 0.65 where it varied.
FULL_PCT, VARYING = 95.0, 0.9
OWN_SHARE = 0.9  # if PyTorch has reserved less of the memory in use, other processes use the rest
MIN_POWER_SHARE = 0.02  # share of the power limit; idle boards draw 5 to 15 %
POWER_LIMIT_MARGIN = 1.05  # mean power over the limit: +/- 5 W of the sensor, and what the regulator lets pass


def check_power(run: Finished) -> Iterator[str]:
    power_w, manifest = run.row["power_w"], run.facts.manifest
    limits = [device.power_limit_w for device in manifest.devices if device.power_limit_w is not None]
    # Only with the limit of every GPU: the mean power is of all of them.
    if power_w is None or not len(limits) == len(manifest.devices) == (manifest.gpus or 1):
        return
    if power_w > POWER_LIMIT_MARGIN * (limit_w := sum(limits)):
        yield f"mean power of {power_w:.0f} W, over the limit of {limit_w:.0f} W in the manifest: it was not in force"
    elif power_w < MIN_POWER_SHARE * limit_w:
        yield f"mean power of {power_w:.3g} W, of a board limited to {limit_w:.0f} W: even idle ones draw more"
    watts = {gpu.uuid: [gpu.growth(COUNTER, span) for span in run.facts.spans] for gpu in run.telemetry.fast}
    for device in manifest.devices if len(limits) > 1 else ():
        card_w = sum(value or math.nan for value in watts.get(device.uuid, [None])) / 1000 / run.facts.seconds
        share = card_w / (device.power_limit_w or math.nan)
        if share < MIN_POWER_SHARE or share > POWER_LIMIT_MARGIN:  # neither, if one of them is unknown
            yield f"GPU {device.uuid}: mean power of {card_w:.3g} W, with a limit of {device.power_limit_w:g} W"


def check_devices(facts: Facts, telemetry: Telemetry) -> Iterator[str]:
    manifest = facts.manifest
    listed, sampled = facts.gpu_uuids, {gpu.uuid for gpu in telemetry.fast}
    if not sampled:
        yield "no telemetry samples in the measure window"
        return
    # Images are counted for every GPU of the run, and energy for every one that is sampled.
    if listed and len(listed) != (manifest.gpus or 1):
        yield f"the manifest lists {pluralize(len(listed), 'GPU')} in a run on {manifest.gpus or 1}"
    if listed and sampled != listed:
        extra, missing = sorted(sampled - listed), sorted(listed - sampled)
        parts = [f"samples of {', '.join(extra)}, which the manifest does not list"] if extra else []
        parts += [f"no samples of {', '.join(missing)}"] if missing else []
        yield "GPUs differ: " + "; ".join(parts)
    elif not listed:
        if not facts.replayed:
            yield "the manifest lists no GPU to compare the samples with"
        elif len(sampled) != (manifest.gpus or 1):
            yield f"samples of {len(sampled)} GPUs in a run of {manifest.gpus or 1}"
    if listed and (extra := sorted({gpu.uuid for gpu in telemetry.slow} - listed)):
        yield f"GPUs differ: slow samples of {', '.join(extra)}, which the manifest does not list"


def check_samples(facts: Facts, telemetry: Telemetry) -> Iterator[str]:
    for gpu, span in product(telemetry.fast, facts.spans):
        yield from (f"GPU {gpu.uuid}: {text}" for text in _problems(gpu, span, telemetry.hz, telemetry.counter_hz))


def _problems(samples: GpuSamples, span: Span, hz: float, counter_hz: float) -> Iterator[str]:
    start_ns, end_ns = span
    if samples.t_ns.min() > start_ns:
        yield f"first sample {(int(samples.t_ns.min()) - start_ns) * 1e-9:.2f} s after the window opened"
    if samples.t_ns.max() < end_ns:
        yield f"last sample {(end_ns - int(samples.t_ns.max())) * 1e-9:.2f} s before the window closed"
    # From here on only the samples around this window: what happens between two windows is no problem of either.
    near = samples.bracket(*span)
    if len(near.t_ns) < 2:
        yield "fewer than two samples around the window"
        return
    periods = np.diff(near.t_ns)
    if (periods <= 0).any():
        yield f"clock does not move forward in {int((periods <= 0).sum())} places"
    if (np.diff(near.tick) <= 0).any():
        yield "tick_seq repeats or goes back"
    limit_s, longest = gap_limit_s(hz), int(periods.argmax())
    if periods[longest] * 1e-9 > limit_s * EPS:
        at_s, gap_s = (int(near.t_ns[longest]) - span[0]) * 1e-9, periods[longest] * 1e-9
        yield f"gap of {gap_s:.2f} s at {at_s:.1f} s of the window (limit {limit_s:.2f} s)"
    # A step of the wall clock that is undone before the window closes shows in the samples alone.
    offset = near.columns["t_unix_ns"] - near.t_ns
    drift_s = float(np.nanmax(offset) - np.nanmin(offset)) * 1e-9
    if drift_s > clock_tolerance_s((span[1] - span[0]) * 1e-9):
        yield f"clock jump: wall clock and monotonic clock of the samples drift {drift_s:.2f} s apart"
    # Also between the readings around the window, which may be further apart than the rows.
    if counter_fell(samples.known(COUNTER).bracket(*span)):
        yield "energy counter went back (driver reloaded?)"
    if stuck := stuck_counter(samples, span, counter_hz):
        yield stuck


def check_clock_offsets(facts: Facts, window: Window, span: Span) -> Iterator[str]:
    """Compare the clocks of worker and sidecar: on one host the wall clock leads the monotonic clock by the same.

    If only one edge of a window disagrees, the wall clock was set between them, which `check_clocks` judges.
    """
    for table, rows in facts.samples.items():
        inside = rows.filter(pl.col("t_mono_ns").is_between(*span)).sort("t_mono_ns", maintain_order=True)
        if inside.is_empty():
            continue
        leads = inside.select(pl.col("t_unix_ns") - pl.col("t_mono_ns")).to_series()
        differences = [leads[0] - (window.t_start_unix_ns - span[0])]
        if window.t_end_unix_ns is not None:
            differences.append(leads[-1] - (window.t_end_unix_ns - span[1]))
        ahead_s = min(differences, key=abs) * 1e-9
        if abs(ahead_s) > CLOCKS_AGREE_S:
            yield (
                f"clocks disagree: from monotonic clock to wall clock it is {ahead_s:+.2f} s more in {table} "
                f"than in {window.window_id}"
            )


def check_ticks(facts: Facts) -> Iterator[str]:
    rates = {name: stream.hz for name, stream in facts.files.sidecar.streams.items()} if facts.files.sidecar else {}
    state = facts.manifest.telemetry
    if state is not None and state.hz:
        rates.setdefault("fast", state.hz)
    for name, hz in rates.items():
        rows = facts.samples[f"samples_{name}"]
        if hz <= 0 or rows.is_empty():
            continue
        read_s = float(rows["read_us"].median() or 0) * 1e-6  # type: ignore[arg-type]
        if read_s * hz > 1:
            yield f"a row of samples_{name} took {read_s:.2g} s to read, which is more than {hz:g} Hz allow"
        # By window: a sidecar that was started again counts from 0.
        for span in facts.spans:
            inside = rows.filter(pl.col("t_mono_ns").is_between(*span))
            for (uuid,), ticks in inside.group_by("gpu_uuid", maintain_order=True):
                due_s = ticks["t_mono_ns"].cast(pl.Float64) * 1e-9 - ticks["tick_seq"].cast(pl.Float64) / hz
                # A row has the time of the middle of its read, and a slow driver delays it.
                off_s = (due_s - due_s.median()).abs() - ticks["read_us"].fill_null(0).cast(pl.Float64) * 1e-6
                if (worst_s := float(off_s.max())) > max(LATE_TICK_S, gap_limit_s(hz)):  # type: ignore[arg-type]
                    yield f"GPU {uuid}: samples_{name} is up to {worst_s:.2f} s off the times of its ticks at {hz:g} Hz"


def check_throttle_counters(facts: Facts) -> Iterator[str]:
    counters = [
        name for name in facts.tables["samples_slow"].columns if name.startswith("throttle_") and name.endswith("_ns")
    ]
    for gpu in GpuSamples.split(facts.samples["samples_slow"], counters):
        for span, name in product(facts.spans, counters):
            grown_s, seconds = (gpu.growth(name, span) or 0.0) * 1e-9, (span[1] - span[0]) * 1e-9
            if grown_s > seconds + clock_tolerance_s(seconds):
                yield f"GPU {gpu.uuid}: {name} grows by {grown_s:.2f} s in a window of {seconds:.2f} s"


def check_sources(facts: Facts) -> Iterator[str]:
    state = facts.manifest.telemetry
    if state is None or state.source in (None, "none"):
        return
    for table, rows in facts.samples.items():
        sources = {str(source) for source in rows["source"].unique().drop_nulls()}
        if other := sorted(source for source in sources if not source.startswith(str(state.source))):
            yield f"{table} is from {', '.join(other)}, and the manifest says {state.source}"


def check_kinds(facts: Facts) -> Iterator[str]:
    if len({source.partition(":")[0] for source in facts.sources}) > 1:
        yield f"telemetry of several kinds: {', '.join(facts.sources)}"


def check_energy(_: Facts, telemetry: Telemetry) -> Iterator[str]:
    """Name the first integral of sampled power that is so far from the energy that one of the two is wrong."""
    wrong = [each for each in telemetry.energy.deviations if abs(each.pct) > each.limit_pct]
    yield from (f"{each.text} of {each.column}" for each in wrong[:1])


def warnings(run: Finished) -> Iterator[str]:
    facts, telemetry, energy = run.facts, run.telemetry, run.telemetry.energy
    if not telemetry.requested:
        yield "no telemetry was requested: throughput only"
        return
    yield from filter(None, [energy.problem])
    if not any(check_energy(facts, telemetry)):
        far = [each.text for each in energy.deviations if abs(each.pct) > 100 * MAX_COUNTER_DEVIATION]
        yield from far[:1]
    if (pct := run.row["throttle_thermal_pct"] or 0) > THERMAL_PCT:
        yield f"thermally throttled for {pct:.1f} % of the measure window"
    if (pct := run.row["energy_error_pct"] or 0) > ENERGY_ERROR_PCT:
        yield f"the energy may be wrong by up to {pct:.1f} %: its counter stood still, or the window is short"
    yield from _varying_memory(run)
    # The bits of throttle_reasons count if no counter says how long it was throttled.
    rows = facts.measured_samples["samples_slow"].filter(pl.col("throttle_reasons").is_not_null())
    unknown = pl.all_horizontal(pl.col(name).is_null() for name in THERMAL_COUNTERS)
    hot = rows.filter(unknown, (pl.col("throttle_reasons").cast(pl.Int64) & THERMAL_BITS) != 0).height
    if 100 * hot > THERMAL_PCT * rows.height:
        samples = f"{hot} of {rows.height} samples"
        yield f"thermal throttling in {samples}, by throttle_reasons; no counter says for how long"
    yield from (f"left out: {gap}" for gap in telemetry.left_out)


def _varying_memory(run: Finished) -> Iterator[str]:
    """Tell whether memory in use varies: PyTorch's allocator keeps what it has reserved until the card is full."""
    names = ("vram_pct", "vram_used_mib_mean", "vram_used_mib_peak", "torch_reserved_peak_mib")
    full_pct, mean_mib, peak_mib, reserved_mib = (run.row[name] or 0.0 for name in names)
    # What other processes use, and GPUs that use unequal amounts, say nothing of the allocator.
    if run.row["gpus"] != 1 or not run.facts.uniform_steps or reserved_mib < OWN_SHARE * peak_mib:
        return
    if full_pct > FULL_PCT and mean_mib < VARYING * peak_mib:
        used = f"memory in use varies, {mean_mib:,.0f} MiB in the mean and {peak_mib:,.0f} at its peak"
        yield f"{used}, {full_pct:.1f} % of the card: PyTorch frees and reserves again; try a smaller batch"
