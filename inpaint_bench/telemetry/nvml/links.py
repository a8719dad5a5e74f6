"""How the GPUs of this machine are linked, NVLink or PCIe, and what a link can carry one way."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final

import pynvml

from inpaint_bench.core.console import pluralize
from inpaint_bench.telemetry.driver import Handle

from .real import NvmlError, RealNvml, call

_THROUGH: Final = {
    pynvml.NVML_TOPOLOGY_INTERNAL: "on one board",
    pynvml.NVML_TOPOLOGY_SINGLE: "through one PCIe switch",
    pynvml.NVML_TOPOLOGY_MULTIPLE: "through several PCIe switches",
    pynvml.NVML_TOPOLOGY_HOSTBRIDGE: "through a host bridge",
    pynvml.NVML_TOPOLOGY_NODE: "through one NUMA node",
    pynvml.NVML_TOPOLOGY_SYSTEM: "between NUMA nodes",
}
# The last two are of earlier drivers; an H200 with driver 580 gives no common speed.
_SPEEDS: Final = (
    pynvml.NVML_FI_DEV_NVLINK_GET_SPEED,
    pynvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_L0,
    pynvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON,
)
_LANE_GB_S: Final = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}  # by generation, one way


@dataclass(frozen=True, kw_only=True)
class Link:
    """The link of two GPUs, by their places in the list."""

    gpus: tuple[int, int]
    kind: str
    gb_s: float | None  # one way; None: not known


def links(nvml: RealNvml, uuids: Sequence[str]) -> list[Link]:
    """Return the link of each pair. What NVML does not say is in `kind`."""
    gpus = [nvml.device(uuid) for uuid in uuids]
    return [_link((a, b), gpus[a], gpus[b]) for a, b in combinations(range(len(gpus)), 2)]


def _link(places: tuple[int, int], first: Handle, second: Handle) -> Link:
    try:
        if count := _nvlinks(first, second):
            speed = _link_gb_s(first)
            return Link(gpus=places, kind=pluralize(count, "NVLink"), gb_s=speed and count * speed)
        level = call("nvmlDeviceGetTopologyCommonAncestor", first, second)
        kind = f"PCIe {_THROUGH.get(level, f'through what NVML calls {level}')}"
    except NvmlError as error:
        return Link(gpus=places, kind=f"unknown: {error}", gb_s=None)
    try:
        return Link(gpus=places, kind=kind, gb_s=min(map(_pcie_gb_s, (first, second))))
    except (NvmlError, KeyError):
        return Link(gpus=places, kind=kind, gb_s=None)


def _nvlinks(gpu: Handle, other: Handle) -> int:
    """Return the active NVLinks from one GPU to another: those to it, or those to the switches that join all."""
    count, bus = 0, call("nvmlDeviceGetPciInfo", other).busId
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        try:
            if call("nvmlDeviceGetNvLinkState", gpu, link) != pynvml.NVML_FEATURE_ENABLED:
                continue
            switch = call("nvmlDeviceGetNvLinkRemoteDeviceType", gpu, link) == pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH
            count += switch or call("nvmlDeviceGetNvLinkRemotePciInfo", gpu, link).busId == bus
        except NvmlError as error:
            # A GPU without NVLink supports no such question, one with fewer links refuses the number.
            if error.code in (pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_INVALID_ARGUMENT):
                break
            raise
    return count


def _link_gb_s(gpu: Handle) -> float | None:
    """Return what one NVLink carries one way, which NVML gives in MB/s."""
    elements = call("nvmlDeviceGetFieldValues", gpu, [(field, 0) for field in _SPEEDS])
    speeds = [element.value.uiVal for element in elements if element.nvmlReturn == pynvml.NVML_SUCCESS]
    return next((speed / 1000 for speed in speeds if speed), None)


def _pcie_gb_s(gpu: Handle) -> float:
    """Return what the slot carries one way. The current generation is lower while the GPU is idle."""
    generation = call("nvmlDeviceGetMaxPcieLinkGeneration", gpu)
    return float(_LANE_GB_S[generation] * call("nvmlDeviceGetCurrPcieLinkWidth", gpu))
