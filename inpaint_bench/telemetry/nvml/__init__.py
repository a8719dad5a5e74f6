"""GPUs by NVML: the driver of this machine, and replays of captures."""

from inpaint_bench.telemetry.driver import Source
from inpaint_bench.telemetry.report import SidecarSpec

from .real import RealNvml, gpu_uuid
from .replay import ReplayNvml, load


def open_source(spec: SidecarSpec) -> Source:
    """Return what the sidecar samples. Raises ValueError."""
    if spec.settings.source == "nvml":
        return Source("nvml", RealNvml(), [gpu_uuid(text) for text in spec.uuids])
    capture = load(spec.settings.capture or "")
    # One copy of the captured GPU per requested one; a machine without a GPU requests none and gets one.
    replay = ReplayNvml(capture, max(1, len(spec.uuids)), spec.first)
    return Source(f"replay:{capture.meta.name}", replay, replay.uuids(), capture.meta)
