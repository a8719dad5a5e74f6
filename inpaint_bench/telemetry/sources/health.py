"""A GPU's health at the start and at the end of a run, and what became worse in between."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from inpaint_bench.telemetry.nvml.api import EccErrors, Handle, Nvml, NvmlError, RemappedRows
from inpaint_bench.telemetry.sampling.streams import null_reason

PCIE_REPLAY_FIELD: Final = 94
RECOVERY_FIELD: Final = 230
_RECOVERY: Final = (
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


def read_health(nvml: Nvml, handle: Handle) -> dict[str, Any]:
    """Counters of memory errors, remapped rows and PCIe replays, and the driver's recovery hint.

    volatile: since the driver was loaded; aggregate: over the card's life. Null where not given, with the
    reasons under `nulls`. Never raises NvmlError.
    """
    found: dict[str, Any] = {}
    nulls: dict[str, str] = {}

    def ask(names: tuple[str, ...], read: Callable[[Handle], EccErrors | RemappedRows]) -> None:
        try:
            found.update(zip(names, read(handle), strict=True))
        except NvmlError as error:
            refuse(names, error.code)

    def refuse(names: tuple[str, ...], code: int) -> None:
        found.update(dict.fromkeys(names))
        nulls.update(dict.fromkeys(names, null_reason(code).value))

    ask(("ecc_corrected_volatile", "ecc_uncorrected_volatile"), nvml.ecc_volatile)
    ask(("ecc_corrected_aggregate", "ecc_uncorrected_aggregate"), nvml.ecc_aggregate)
    kinds = ("corrected", "uncorrected", "pending", "failed")
    ask(tuple(f"remapped_rows_{kind}" for kind in kinds), nvml.remapped_rows)
    names = ("pcie_replays", "recovery_action")
    try:
        answers = nvml.fields(handle, [(PCIE_REPLAY_FIELD, 0), (RECOVERY_FIELD, 0)])
    except NvmlError as error:
        refuse(names, error.code)
    else:
        for name, answer in zip(names, answers, strict=True):
            if answer.code == 0 and answer.value is not None:
                found[name] = int(answer.value)
            else:
                refuse((name,), answer.code)
    action = found["recovery_action"]
    if action is not None:
        found["recovery_action"] = _RECOVERY[action] if action < len(_RECOVERY) else str(action)
    return {**found, "nulls": nulls}


def worsened(start: Mapping[str, Any], end: Mapping[str, Any]) -> list[str]:
    """What makes a run on this GPU doubtful, a phrase each. A counter that is null on one side says nothing.

    Remapping that had failed before the run is told too, in these words.
    """
    phrases = []
    for name, what in _UNCORRECTED.items():
        before, after = start.get(name), end.get(name)
        if before is not None and after is not None and after > before:
            phrases.append(f"{after - before} new {what} ({before} to {after})")
    if end.get("remapped_rows_failed"):
        when = {0: "during the run", None: "at an unknown time"}.get(
            start.get("remapped_rows_failed"), "before the run"
        )
        phrases.append(f"a row could not be remapped, {when}")
    return phrases
