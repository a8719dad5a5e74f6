"""Checks of what the sidecar says: telemetry.json, its own account, against manifest, windows and rows; its events.

Two kinds of events make a run invalid: `co_tenant`, detail `pid N`, for another process on one of its GPUs, and
`power_limit`, detail `300 W to 250 W`, for a limit that changed.
"""

from collections.abc import Iterator

import polars as pl

from analysis.metrics.facts import CLOCKS_AGREE_S, Facts
from analysis.metrics.telemetry import Telemetry
from inpaint_bench.core.console import pluralize
from inpaint_bench.core.records import Device
from inpaint_bench.telemetry.report import DeviceReport, TelemetryReport

INCIDENTS = {"xid": "Xid", "ecc": "memory errors:"}
INVALIDATING_EVENTS = {
    "co_tenant": "another process was on GPU",
    "power_limit": "the power limit changed during the run on GPU",
}
COMPLETE = "complete"
XIDS_IN_EVENTS = 100  # per GPU; the rest is counted in telemetry.json alone
# What NVML says of a GPU once, in the manifest and in telemetry.json.
FACTS = (
    *("name", "power_limit_w", "memory_mib", "max_sm_clock_mhz", "pci_bus_id", "mig_mode", "vbios"),
    "energy_start_mj",
)


def check_identity(facts: Facts, report: TelemetryReport) -> Iterator[str]:
    manifest = facts.manifest
    state, host = manifest.telemetry, manifest.environment.hostname if manifest.environment else None
    fast = report.streams.get("fast")
    pairs = {
        "run": (report.run_id, manifest.run_id),
        "boot": (report.boot_id, manifest.boot_id),
        "host": (report.host, host),
        "source": (report.source, state and state.source),
        # A recording has the driver of another machine.
        "driver": (None if facts.replayed else report.driver, manifest.environment and manifest.environment.driver),
        "status": (report.status, state and state.status),
        "energy_hz": (report.energy_hz, state and state.energy_hz),
        "rate in Hz": (fast and round(fast.hz, 3), state and state.hz and round(state.hz, 3)),
    }
    for name, (reported, expected) in pairs.items():
        if reported is not None and expected is not None and reported != expected:
            yield f"telemetry.json has {name} {reported}, the manifest {expected}"
    if report.devices:
        yield from _compare_devices(
            {gpu.uuid: gpu for gpu in report.devices}, {gpu.uuid: gpu for gpu in manifest.devices}
        )


def _compare_devices(reported: dict[str, DeviceReport], listed: dict[str, Device]) -> Iterator[str]:
    if reported.keys() != listed.keys():
        uuids = [", ".join(sorted(gpus)) or "none" for gpus in (reported, listed)]
        yield f"telemetry.json has GPU {uuids[0]}, the manifest {uuids[1]}"
        return
    for uuid, gpu in listed.items():
        for name in FACTS:
            values = getattr(reported[uuid], name), getattr(gpu, name)
            if None not in values and values[0] != values[1]:
                yield f"GPU {uuid}: telemetry.json has {name} {values[0]}, the manifest {values[1]}"


def check_times(facts: Facts, report: TelemetryReport) -> Iterator[str]:
    if report.started_mono_ns is None:
        return
    ended_ns = report.ended_mono_ns
    own = {window.window_id for window in facts.own_windows}
    for window, (start_ns, end_ns) in facts.measured:
        if window.window_id not in own:  # another sidecar's
            continue
        if (late_s := (report.started_mono_ns - start_ns) * 1e-9) > CLOCKS_AGREE_S:
            yield f"telemetry.json says that the sidecar started {late_s:.2f} s after {window.window_id} opened"
        if ended_ns is not None and (early_s := (end_ns - ended_ns) * 1e-9) > CLOCKS_AGREE_S:
            yield f"telemetry.json says that the sidecar ended {early_s:.2f} s before {window.window_id} closed"
    for table, rows in _own_rows(facts, report).items():
        times = rows["t_mono_ns"].cast(pl.Int64)
        early_s = (report.started_mono_ns - int(times.min() or 0)) * 1e-9  # type: ignore[arg-type]
        if len(times) and early_s > CLOCKS_AGREE_S:
            yield f"{table} begins {early_s:.2f} s before the sidecar started, by telemetry.json"
        if ended_ns is not None and (late_s := (int(times.max() or 0) - ended_ns) * 1e-9) > CLOCKS_AGREE_S:  # type: ignore[arg-type]
            yield f"{table} ends {late_s:.2f} s after the sidecar ended, by telemetry.json"


def check_rows(facts: Facts, report: TelemetryReport) -> Iterator[str]:
    for table, rows in _own_rows(facts, report).items():
        counts = report.tables.get(table)
        if counts is None or table in facts.files.incomplete:
            continue
        # If a sidecar was killed, its telemetry.json is older than its last rows.
        lost = rows.height != counts.rows if report.status == COMPLETE else rows.height < counts.rows
        if lost:
            yield f"{table} holds {pluralize(rows.height, 'row')}, and the sidecar wrote {counts.rows}"
        num_parts = len(facts.files.footers.get(table, []))
        countable = facts.files.footers and report.status == COMPLETE and not facts.started_before
        if countable and num_parts != counts.parts:
            yield f"{table} has {pluralize(num_parts, 'part')}, and the sidecar closed {counts.parts}"


def check_ticks(facts: Facts, report: TelemetryReport) -> Iterator[str]:
    if report.status != COMPLETE:
        return
    lost = any(gpu.lost for gpu in report.devices)  # has no rows from then on
    for name, stream in report.streams.items():
        if stream.ticks_due != stream.ticks_done + stream.ticks_skipped:
            taken = f"{stream.ticks_done} taken and {stream.ticks_skipped} skipped"
            yield f"telemetry.json counts {stream.ticks_due} {name} ticks, which are not {taken}"
        table = f"samples_{name}"
        # The first read of GPM gives no row.
        if name == "gpm" or lost or table in facts.files.incomplete:
            continue
        rows = _own_rows(facts, report)[table]
        for (uuid,), ticks in rows.group_by("gpu_uuid", maintain_order=True):
            if (num_ticks := ticks["tick_seq"].n_unique()) != stream.ticks_done:
                yield f"GPU {uuid}: {table} has {num_ticks} of {pluralize(stream.ticks_done, 'tick')} that were taken"
            elif num_ticks and (due := int(ticks["tick_seq"].max()) + 1) != stream.ticks_due:  # type: ignore[arg-type]
                counted = f"the sidecar counts {stream.ticks_due} due and {stream.ticks_skipped} skipped"
                yield f"GPU {uuid}: {table} ends with tick {due - 1} and lacks {due - num_ticks}; {counted}"


def check_events(facts: Facts, telemetry: Telemetry) -> Iterator[str]:
    rows = facts.own_events({gpu.uuid for gpu in telemetry.fast}).select("kind", "gpu_uuid", "detail")
    for kind, uuid, detail in rows.unique(maintain_order=True).iter_rows():
        if kind in INVALIDATING_EVENTS:
            yield f"{INVALIDATING_EVENTS[kind]} {uuid or '(not named)'}: {detail or 'no detail'}"


def driver_errors(facts: Facts) -> Iterator[str]:
    rows = facts.own_events().select("kind", "t_mono_ns", "gpu_uuid", "detail")
    for kind, t_ns, uuid, detail in rows.iter_rows():
        start = next((start for start, end in facts.spans if start <= t_ns <= end), None)
        if kind in INCIDENTS and start is not None:
            where = f"on GPU {uuid or '(not named)'} at {(t_ns - start) * 1e-9:.1f} s"
            yield f"{INCIDENTS[kind]} {detail or 'no detail'} {where}"


def check_incidents(facts: Facts, report: TelemetryReport | None) -> Iterator[str]:
    known = set(facts.own_events()["kind"].cast(pl.String))
    for gpu in report.devices if report else ():
        if "co_tenant" not in known and (gpu.processes.verdict == "co_tenant" or gpu.processes.num_co_tenants):
            pids = ", ".join(f"pid {process.pid}" for process in gpu.processes.co_tenants) or "no pid"
            yield f"{INVALIDATING_EVENTS['co_tenant']} {gpu.uuid}: {pids}, by telemetry.json"
        limits = gpu.power_limit_w, gpu.power_limit_last_w
        if "power_limit" not in known and None not in limits and limits[0] != limits[1]:
            change = f"{limits[0]:g} W to {limits[1]:g} W, by telemetry.json"
            yield f"{INVALIDATING_EVENTS['power_limit']} {gpu.uuid}: {change}"


def warnings(facts: Facts, report: TelemetryReport | None) -> Iterator[str]:
    state = facts.manifest.telemetry
    if report is None:
        if facts.files.folder is not None and state is not None and state.source not in (None, "none"):
            yield "no telemetry.json to compare the samples with"
        return
    if report.status not in (COMPLETE, "none"):
        yield f"the sidecar ended as {report.status}"
    kinds = facts.own_events()["kind"].cast(pl.String)
    for gpu in report.devices:
        if (num_xids := gpu.xids.count or 0) > (in_table := int((kinds == "xid").sum())) and in_table < XIDS_IN_EVENTS:
            yield f"GPU {gpu.uuid}: {pluralize(num_xids, 'Xid')} by telemetry.json, {in_table} in the events table"
        counts = [health and health.ecc_uncorrected_volatile for health in (gpu.health_start, gpu.health_end)]
        errors = counts[1] - counts[0] if None not in counts else 0  # type: ignore[operator]
        if "ecc" not in set(kinds) and errors:
            yield f"GPU {gpu.uuid}: {pluralize(errors, 'new uncorrectable memory error')}, by telemetry.json"
        if gpu.lost and "gpu_lost" not in set(kinds):
            yield f"GPU {gpu.uuid} was lost, by telemetry.json"


def _own_rows(facts: Facts, report: TelemetryReport) -> dict[str, pl.DataFrame]:
    """Return what this sidecar wrote: all rows, but of those of an earlier start in the directory."""
    tables = {**facts.samples, "events": facts.tables["events"]}
    if not facts.started_before:
        return tables
    started_ns = (report.started_unix_ns or 0) - round(CLOCKS_AGREE_S * 1e9)
    return {name: rows.filter(pl.col("t_unix_ns") >= started_ns) for name, rows in tables.items()}
