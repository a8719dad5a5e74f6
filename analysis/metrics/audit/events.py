"""Events that the sidecar wrote. Two kinds make a run invalid: `co_tenant`, detail `pid N`, for another process on one
of its GPUs, and `power_limit`, detail `300 W to 250 W`, for a limit that changed.
"""

from __future__ import annotations

from collections.abc import Iterator

from analysis.metrics.facts import Facts
from analysis.metrics.telemetry import Telemetry

INCIDENTS = {"xid": "Xid", "ecc": "memory errors:"}
INVALIDATING_EVENTS = {
    "co_tenant": "another process was on GPU",
    "power_limit": "the power limit changed during the run on GPU",
}


def check_events(facts: Facts, telemetry: Telemetry) -> Iterator[str]:
    uuids = {gpu.uuid for gpu in telemetry.fast}
    rows = facts.own_events(uuids).select("kind", "gpu_uuid", "detail").unique(maintain_order=True)
    for kind, uuid, detail in rows.iter_rows():
        if kind in INVALIDATING_EVENTS:
            yield f"{INVALIDATING_EVENTS[kind]} {uuid or '(not named)'}: {detail or 'no detail'}"


def check_incidents(facts: Facts) -> Iterator[str]:
    rows = facts.own_events().select("kind", "t_mono_ns", "gpu_uuid", "detail")
    for kind, t_ns, uuid, detail in rows.iter_rows():
        start = next((start for start, end in facts.spans if start <= t_ns <= end), None)
        if kind in INCIDENTS and start is not None:
            where = f"on GPU {uuid or '(not named)'} at {(t_ns - start) * 1e-9:.1f} s"
            yield f"{INCIDENTS[kind]} {detail or 'no detail'} {where}"
