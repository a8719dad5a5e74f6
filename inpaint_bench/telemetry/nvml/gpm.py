"""GPM, the performance counters of Hopper and later: two samples, and the means between them."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pynvml

from .api import FieldValue, GpmWindow, Handle, NvmlError

_MIN_WINDOW_NS: Final = 100_000_000  # NVIDIA asks for more than 100 ms between two samples
_MAX_WINDOW_NS: Final = 30_000_000_000  # the process was stopped meanwhile


class GpmReader:
    """Reads GPM through `call(function, *arguments)`.

    Each GPU has two buffers that are swapped after every read, so that the windows follow each other without a gap.
    A failed read costs no more than its own window.
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call
        self._buffers: dict[str, _Buffers] = {}

    def read(self, uuid: str, handle: Handle, metrics: Sequence[int]) -> GpmWindow | None:
        """Return the metrics since the last read; None on the first, too early or too late read. Raises NvmlError."""
        buffers = self._buffers.get(uuid)
        if buffers is None:
            if not self._call("nvmlGpmQueryDeviceSupport", handle).isSupportedDevice:
                raise NvmlError(pynvml.NVML_ERROR_NOT_SUPPORTED, "nvmlGpmQueryDeviceSupport")
            buffers = _Buffers(self._call("nvmlGpmSampleAlloc"), self._call("nvmlGpmSampleAlloc"))
            self._buffers[uuid] = buffers
        now_ns = time.monotonic_ns()
        window_ns = None if buffers.newer_ns is None else now_ns - buffers.newer_ns
        if window_ns is not None and window_ns <= _MIN_WINDOW_NS:
            return None
        self._call("nvmlGpmSampleGet", handle, buffers.older)
        buffers.older, buffers.newer, buffers.newer_ns = buffers.newer, buffers.older, now_ns
        if window_ns is None or window_ns > _MAX_WINDOW_NS:
            return None
        query = pynvml.c_nvmlGpmMetricsGet_t()
        query.version = pynvml.NVML_GPM_METRICS_GET_VERSION
        query.numMetrics = len(metrics)
        query.sample1, query.sample2 = buffers.older, buffers.newer
        for index, metric in enumerate(metrics):
            query.metrics[index].metricId = metric
        self._call("nvmlGpmMetricsGet", query)
        return GpmWindow(window_ns / 1e6, [_value(query.metrics[index]) for index in range(len(metrics))])

    def free(self) -> None:
        """Free the buffers; to be called before NVML is closed."""
        pairs, self._buffers = self._buffers, {}
        for buffers in pairs.values():
            for buffer in (buffers.older, buffers.newer):
                with contextlib.suppress(NvmlError):
                    self._call("nvmlGpmSampleFree", buffer)


@dataclass
class _Buffers:
    """The two samples of a GPU."""

    older: Any
    newer: Any
    newer_ns: int | None = None  # when `newer` was taken


def _value(metric: Any) -> FieldValue:
    code, value = int(metric.nvmlReturn), float(metric.value)
    if code == pynvml.NVML_SUCCESS and not math.isfinite(value):
        code = pynvml.NVML_ERROR_UNKNOWN
    return FieldValue(code, None if code else value)
