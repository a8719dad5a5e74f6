"""Every question that the sidecar asks of a GPU, one NVML call each, with what goes missing without an answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from inpaint_bench.telemetry.sampling.streams import FAST, GPM, LANES, SLOW, WINDOW, Field
from inpaint_bench.telemetry.sources.health import PCIE_REPLAY_FIELD, RECOVERY_FIELD

from .api import Handle, Nvml, NvmlError

_POWER_SCOPES: Final = {0: "GPU", 2: "memory"}


@dataclass(frozen=True)
class Question:
    """`ask` gives a return code per name in `feeds`; None where there is nothing to tell yet."""

    function: str  # as NVML names it
    lane: str  # fast | slow | gpm; start: asked once, and again at the end; 30 s
    feeds: tuple[str, ...]  # columns of a lane, or facts of telemetry.json
    ids: tuple[str, ...]  # field, metric or argument of each
    ask: Callable[[Nvml, Handle], Sequence[int] | None]


def _plain(function: str, lane: str, feeds: str, call: Callable[[Nvml, Handle], Any], argument: str = "") -> Question:
    """A call that answers all or nothing; `feeds`: names with spaces between them."""
    names = tuple(feeds.split())

    def ask(nvml: Nvml, handle: Handle) -> Sequence[int]:
        try:
            call(nvml, handle)
        except NvmlError as error:
            return [error.code] * len(names)
        return [0] * len(names)

    return Question(function, lane, names, (argument,) * len(names), ask)


def _fields(lane: str, fields: Sequence[Field]) -> Question:
    def ask(nvml: Nvml, handle: Handle) -> Sequence[int]:
        try:
            return [answer.code for answer in nvml.fields(handle, [(item.field_id, item.scope) for item in fields])]
        except NvmlError as error:
            return [error.code] * len(fields)

    names = tuple(item.column for item in fields)
    return Question("nvmlDeviceGetFieldValues", lane, names, tuple(map(_id, fields)), ask)


def _id(item: Field) -> str:
    return f"field {item.field_id}" + (f", scope {_POWER_SCOPES[item.scope]}" if item.field_id in (185, 186) else "")


def _metrics() -> Question:
    def ask(nvml: Nvml, handle: Handle) -> Sequence[int] | None:
        try:
            window = nvml.gpm(handle, [item.field_id for item in GPM.metrics])
        except NvmlError as error:
            return [error.code] * (1 + len(GPM.metrics))
        return None if window is None else [0, *(answer.code for answer in window.metrics)]

    names = (WINDOW, *(item.column for item in GPM.metrics))
    ids = ("", *(f"metric {item.field_id}" for item in GPM.metrics))
    return Question("nvmlGpmMetricsGet", GPM.name, names, ids, ask)


# The function behind each call of the lanes, by its first column.
_FUNCTIONS: Final = {
    "gpu_util_pct": ("nvmlDeviceGetUtilizationRates", ""),
    "sm_clock_mhz": ("nvmlDeviceGetClockInfo", "SM"),
    "mem_clock_mhz": ("nvmlDeviceGetClockInfo", "memory"),
    "throttle_reasons": ("nvmlDeviceGetCurrentClocksEventReasons", ""),
    "temp_gpu_c": ("nvmlDeviceGetTemperatureV", "GPU"),
    "vram_total_mib": ("nvmlDeviceGetMemoryInfo", "v2"),
}


def _lane_calls() -> list[Question]:
    questions = []
    for lane in LANES:
        for call in lane.calls:
            function, argument = _FUNCTIONS[call.columns[0]]
            questions.append(_plain(function, lane.name, " ".join(call.columns), call.read, argument))
    return questions


def _asked_once() -> list[Question]:
    """What the sidecar asks at the start, some of it again at the end."""
    return [
        _plain("nvmlDeviceGetName", "start", "name", lambda nvml, gpu: nvml.name(gpu)),
        _plain("nvmlDeviceGetPciInfo", "start", "pci_bus_id", lambda nvml, gpu: nvml.pci_bus_id(gpu)),
        _plain("nvmlDeviceGetMinorNumber", "start", "minor", lambda nvml, gpu: nvml.minor(gpu)),
        _plain("nvmlDeviceGetVbiosVersion", "start", "vbios", lambda nvml, gpu: nvml.vbios(gpu)),
        _plain(
            "nvmlDeviceGetPersistenceMode", "start", "persistence_mode", lambda nvml, gpu: nvml.persistence_mode(gpu)
        ),
        _plain("nvmlDeviceGetEccMode", "start", "ecc_mode", lambda nvml, gpu: nvml.ecc_mode(gpu)),
        _plain("nvmlDeviceGetMigMode", "start", "mig_mode", lambda nvml, gpu: nvml.mig_mode(gpu)),
        _plain(
            "nvmlDeviceGetMaxClockInfo", "start", "max_sm_clock_mhz", lambda nvml, gpu: nvml.max_sm_clock_mhz(gpu), "SM"
        ),
        _plain(
            "nvmlDeviceGetTotalEnergyConsumption",
            "start",
            "energy_start_mj",
            lambda nvml, gpu: nvml.total_energy_mj(gpu),
        ),
        _plain(
            "nvmlDeviceGetTotalEccErrors",
            "start",
            "ecc_volatile",
            lambda nvml, gpu: nvml.ecc_volatile(gpu),
            "since the driver was loaded",
        ),
        _plain(
            "nvmlDeviceGetTotalEccErrors",
            "start",
            "ecc_aggregate",
            lambda nvml, gpu: nvml.ecc_aggregate(gpu),
            "over the card's life",
        ),
        _plain("nvmlDeviceGetRemappedRows", "start", "remapped_rows", lambda nvml, gpu: nvml.remapped_rows(gpu)),
        _fields("start", (Field("pcie_replays", PCIE_REPLAY_FIELD), Field("recovery_action", RECOVERY_FIELD))),
        _plain("nvmlDeviceGetEnforcedPowerLimit", "30 s", "power_limit_w", lambda nvml, gpu: nvml.power_limit_mw(gpu)),
        _plain(
            "nvmlDeviceGetComputeRunningProcesses", "30 s", "processes", lambda nvml, gpu: nvml.compute_processes(gpu)
        ),
    ]


_THROTTLE: Final = "whether the card was held back is judged from clock, power and reasons at 1 Hz only"
_HEALTH: Final = "a card that fails during a run is not flagged by this counter"
_COUNTERS: Final = (
    "what held a run back is judged by the sweep (bottleneck tier 2), and the roofline is left out, "
    "unless telemetry.dcgm_url names the site's exporter"
)
WITHOUT: Final = {
    "power_instant_w": "no shape of the power over a step, and the energy counter has one check less",
    "power_avg1s_w": "the energy counter has one check less (an A100 has no 1-s average)",
    "energy_mj": "no joules per image: energy is the difference of this counter",
    "power_mem_avg_w": "memory power stays null (cards before Hopper have no such sensor)",
    "temp_mem_c": "memory temperature stays null",
    "gpu_util_pct": "no share of time with a kernel running",
    "mem_active_pct": "no share of time with memory traffic",
    "throttle_power_cap_ns": _THROTTLE,
    "throttle_sw_thermal_ns": _THROTTLE,
    "throttle_hw_thermal_ns": _THROTTLE,
    "throttle_power_brake_ns": _THROTTLE,
    "sm_clock_mhz": "the power-capped class cannot be told",
    "vram_total_mib": "no memory wall: the largest batch must be found by trying",
    "window_ms": _COUNTERS,
    "sm_active_pct": _COUNTERS,
    "sm_occupancy_pct": "occupancy stays null",
    "tensor_active_pct": _COUNTERS,
    "dram_active_pct": _COUNTERS,
    "mig_mode": "nothing: a card that knows no MIG answers so",
    "ecc_volatile": _HEALTH,
    "ecc_aggregate": _HEALTH,
    "remapped_rows": _HEALTH,
    "pcie_replays": _HEALTH,
    "recovery_action": "the driver gives no recovery hint at the end of a run",
    "power_limit_w": "another power cap, or one that changes within a run, is not seen",
    "processes": "other processes on the GPU are not seen: no run can be called alone",
}

QUESTIONS: Final = (
    _fields(FAST.name, FAST.fields),
    _fields(SLOW.name, SLOW.fields),
    *_lane_calls(),
    _metrics(),
    *_asked_once(),
)
