"""Error counters of a GPU at the start and at the end of a run, and what became worse in between."""

from __future__ import annotations

from typing import Final

import pynvml

from inpaint_bench.core.records import GpuHealth
from inpaint_bench.telemetry.nvml.api import FieldValue, Handle, Nvml, NvmlError, null_reason

# Query -> the fields of GpuHealth that it feeds, in its order.
_QUERIES: Final = {
    "ecc_volatile": ("ecc_corrected_volatile", "ecc_uncorrected_volatile"),
    "ecc_aggregate": ("ecc_corrected_aggregate", "ecc_uncorrected_aggregate"),
    "remapped_rows": tuple(f"remapped_rows_{kind}" for kind in ("corrected", "uncorrected", "pending", "failed")),
}
_FIELDS: Final = {
    "pcie_replays": (pynvml.NVML_FI_DEV_PCIE_REPLAY_COUNTER, 0),
    "recovery_action": (pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, 0),
}
# NVML_GPU_RECOVERY_ACTION_* in the order of their values; older bindings name only the first five.
RECOVERY_ACTIONS: Final = (
    "none",
    "gpu_reset",
    "node_reboot",
    "drain_p2p",
    "drain_and_reset",
    "recover_imex_domain",
    "bus_reset",
    "system_reboot",
)
_UNCORRECTED: Final = {
    "ecc_uncorrected_volatile": "uncorrectable memory errors since the driver was loaded",
    "ecc_uncorrected_aggregate": "uncorrectable memory errors over the card's life",
    "remapped_rows_uncorrected": "rows remapped after uncorrectable errors",
}


def read_health(nvml: Nvml, handle: Handle) -> GpuHealth:
    """Read the error counters; one that is not given is None, with the reason in `nulls`. Never raises NvmlError."""
    health = GpuHealth(nulls={})
    for query, names in _QUERIES.items():
        try:
            for name, value in zip(names, nvml.query(handle, query), strict=True):
                setattr(health, name, int(value))
        except NvmlError as error:
            health.nulls |= dict.fromkeys(names, null_reason(error.code).value)
    try:
        results = nvml.fields(handle, list(_FIELDS.values()))
    except NvmlError as error:
        results = [FieldValue(error.code, None)] * len(_FIELDS)
    for name, result in zip(_FIELDS, results, strict=True):
        if result.code != 0 or result.value is None:
            health.nulls[name] = null_reason(result.code).value
        elif name == "pcie_replays":
            health.pcie_replays = int(result.value)
        else:
            action = int(result.value)
            health.recovery_action = RECOVERY_ACTIONS[action] if action < len(RECOVERY_ACTIONS) else str(action)
    return health


def worsened(start: GpuHealth, end: GpuHealth) -> list[str]:
    """Return what makes a run on this GPU doubtful, as phrases. A counter that is None on either side says nothing."""
    phrases = []
    # Corrected errors are left out: they cost nothing.
    for name, meaning in _UNCORRECTED.items():
        before, after = getattr(start, name), getattr(end, name)
        if before is not None and after is not None and after > before:
            phrases.append(f"{after - before} new {meaning} ({before} to {after})")
    if end.remapped_rows_failed:
        when = {0: "during the run", None: "at an unknown time"}.get(start.remapped_rows_failed, "before the run")
        phrases.append(f"a row could not be remapped, {when}")
    return phrases
