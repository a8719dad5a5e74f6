"""Events that the sidecar wrote. Two kinds make a run invalid: `co_tenant`, detail `pid N`, for another process on one
of its GPUs, and `power_limit`, detail `300 W to 250 W`, for a limit that changed.
"""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl

from analysis.metrics.gpu_samples import Span
from inpaint_bench.core.records import Manifest

INCIDENTS = {"xid": "Xid", "ecc": "memory errors:"}
INVALIDATING_EVENTS = {
    "co_tenant": "another process was on GPU",
    "power_limit": "the power limit changed during the run on GPU",
}


def device_uuids(manifest: Manifest) -> set[str]:
    """Return the UUIDs of the GPUs that the manifest lists."""
    return {device.uuid for device in manifest.devices if device.uuid}


def own_events(events: pl.DataFrame, manifest: Manifest, uuids: set[str] | None = None) -> pl.DataFrame:
    """Return the events of these GPUs, by default the manifest's, or of no GPU in particular, since this start.

    A requeued job keeps its directory: its earlier events belong to another node.
    """
    if events.is_empty():
        return events
    own = pl.col("t_unix_ns") >= (manifest.started_unix_ns or 0)
    uuids = uuids if uuids is not None else device_uuids(manifest) or None
    if uuids is not None:
        own &= pl.col("gpu_uuid").is_in(sorted(uuids)) | pl.col("gpu_uuid").is_null()
    return events.filter(own)


def check_events(events: pl.DataFrame, manifest: Manifest, uuids: set[str]) -> Iterator[str]:
    """Look for events that make the run invalid, on the GPUs that were sampled."""
    rows = own_events(events, manifest, uuids).select("kind", "gpu_uuid", "detail").unique(maintain_order=True)
    for kind, uuid, detail in rows.iter_rows():
        if kind in INVALIDATING_EVENTS:
            yield f"{INVALIDATING_EVENTS[kind]} {uuid or '(not named)'}: {detail or 'no detail'}"


def check_incidents(events: pl.DataFrame, manifest: Manifest, spans: list[Span]) -> Iterator[str]:
    """Warn of errors that the driver reported during the measurement; not every Xid spoils the figures."""
    rows = own_events(events, manifest).select("kind", "t_mono_ns", "gpu_uuid", "detail")
    for kind, t_ns, uuid, detail in rows.iter_rows():
        start = next((start for start, end in spans if start <= t_ns <= end), None)
        if kind in INCIDENTS and start is not None:
            where = f"on GPU {uuid or '(not named)'} at {(t_ns - start) * 1e-9:.1f} s"
            yield f"{INCIDENTS[kind]} {detail or 'no detail'} {where}"
