"""GPM, the counters of Hopper and later: two samples, and the means between them."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from .api import FieldValue, GpmWindow, Handle, NvmlError

_NOT_SUPPORTED: Final = 3
_UNKNOWN: Final = 999
_SHORTEST_NS: Final = 100_000_000
_LONGEST_NS: Final = 30_000_000_000


class Gpm:
    """GPM of the GPUs of one open NVML: two buffers each, swapped, so that a window is the whole interval.

    NVIDIA asks for more than 100 ms between two samples. A window longer than 30 s (the process stood
    still) is given up for a new one. One failure costs its own window and no more.
    """

    def __init__(self, binding: Any, call: Callable[..., Any]) -> None:
        self._binding = binding
        self._call = call
        self._pairs: dict[str, _Pair] = {}

    def read(self, uuid: str, handle: Handle, ids: Sequence[int]) -> GpmWindow | None:
        """None: no window yet, or less than 100 ms since the last sample. Raises NvmlError."""
        pair = self._pairs.get(uuid)
        if pair is None:
            if not self._call("nvmlGpmQueryDeviceSupport", handle).isSupportedDevice:
                raise NvmlError(_NOT_SUPPORTED, "nvmlGpmQueryDeviceSupport")
            pair = self._pairs[uuid] = _Pair(self._call("nvmlGpmSampleAlloc"), self._call("nvmlGpmSampleAlloc"))
        now_ns = time.monotonic_ns()
        since_ns = None if pair.at_ns is None else now_ns - pair.at_ns
        if since_ns is not None and since_ns <= _SHORTEST_NS:
            return None
        self._call("nvmlGpmSampleGet", handle, pair.older)
        pair.older, pair.newer, pair.at_ns = pair.newer, pair.older, now_ns
        if since_ns is None or since_ns > _LONGEST_NS:
            return None
        query = self._binding.c_nvmlGpmMetricsGet_t()
        query.version = self._binding.NVML_GPM_METRICS_GET_VERSION
        query.numMetrics = len(ids)
        query.sample1, query.sample2 = pair.older, pair.newer
        for place, metric in enumerate(ids):
            query.metrics[place].metricId = metric
        self._call("nvmlGpmMetricsGet", query)
        return GpmWindow(since_ns / 1e6, [_value(query.metrics[place]) for place in range(len(ids))])

    def forget(self) -> None:
        """Free the buffers, before NVML is closed."""
        pairs, self._pairs = self._pairs, {}
        for pair in pairs.values():
            for buffer in (pair.older, pair.newer):
                with contextlib.suppress(NvmlError):
                    self._call("nvmlGpmSampleFree", buffer)


@dataclass
class _Pair:
    older: Any
    newer: Any
    at_ns: int | None = None  # when `newer` was taken; None: never


def _value(metric: Any) -> FieldValue:
    code, value = int(metric.nvmlReturn), float(metric.value)
    if code == 0 and not math.isfinite(value):
        code = _UNKNOWN
    return FieldValue(code, None if code else value)
