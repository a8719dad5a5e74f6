"""NVIDIA's binding with its driver calls replaced: real structures and names, no driver."""

# ruff: noqa: N802 - the binding's names
from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from inpaint_bench.telemetry.nvml.real import RealNvml
from tests.telemetry.support import uuid


class FakeDriver:
    """A driver with one GPU, whose handles are UUIDs.

    `fail[function]` is the return code of a function, `metric_codes[id]` that of a GPM metric. A GPM sample is the
    number of the sample; a metric's value is its id.
    """

    def __init__(self) -> None:
        self.fail: dict[str, int] = {}
        self.metric_codes: dict[int, int] = {}
        self.metric_values: dict[int, float] = {}
        self.called: list[str] = []
        self.gpm_supported = True
        self.ecc = {(0, 0): 3, (1, 0): 0, (0, 1): 7, (1, 1): 2}  # (kind, counter)
        self.rows = (1, 2, 0, 0)
        self.fields: dict[int, tuple[int, int]] = {94: (0, 5), 230: (0, 1)}  # id -> code, value
        self.pids: list[int] = []
        self.events: list[Any] = []
        self.allocated = 0
        self.freed = 0
        self.samples: dict[int, int] = {}  # address of a buffer -> number of the sample in it
        self.windows: list[tuple[int, int]] = []
        self.gpus = [uuid(0)]
        self.mig = 0
        self.power_limit_mw = 700_000
        self.memory = SimpleNamespace(total=8 << 30, reserved=1 << 30, used=2 << 30, free=5 << 30)
        self.remotes = [2, 2, 2, 2]  # what each NVLink leads to: 0 another machine's GPU, 1 the second GPU, 2 a switch
        self.watts: dict[int, tuple[float, float]] = {}  # field -> (W, s between two updates)
        self._start_s = time.monotonic()

    def functions(self) -> Iterator[tuple[str, Any]]:
        """Yield the functions that replace those of the binding."""
        for name in dir(self):
            if name.startswith("nvml"):
                yield name, self._failing(name, getattr(self, name))

    def _failing(self, name: str, function: Any) -> Any:
        def call(*args: Any) -> Any:
            self.called.append(name)
            if code := self.fail.get(name):
                raise pynvml.NVMLError(code)
            return function(*args)

        return call

    def nvmlInit(self) -> None: ...

    def nvmlShutdown(self) -> None: ...

    def nvmlSystemGetDriverVersion(self) -> str:
        return "999.0"

    def nvmlSystemGetNVMLVersion(self) -> str:
        return "13.999.0"

    def nvmlDeviceGetHandleByUUID(self, name: str) -> str:
        if name not in self.gpus:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return name

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return self.gpus[index]

    def nvmlDeviceGetName(self, handle: str) -> str:
        return "NVIDIA H999"

    def nvmlDeviceGetPciInfo(self, handle: str) -> Any:
        return SimpleNamespace(busId="00000000:99:00.0")

    def nvmlDeviceGetNvLinkState(self, handle: str, link: int) -> int:
        if link >= len(self.remotes):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return 1

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: str, link: int) -> int:
        return pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH if self.remotes[link] == 2 else 0

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle: str, link: int) -> Any:
        return SimpleNamespace(busId=f"00000000:{99 if self.remotes[link] else 11}:00.0")

    def nvmlDeviceGetTopologyCommonAncestor(self, handle: str, other: str) -> int:
        return pynvml.NVML_TOPOLOGY_SYSTEM

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: str) -> int:
        return 4

    def nvmlDeviceGetCurrPcieLinkWidth(self, handle: str) -> int:
        return 16

    def nvmlDeviceGetMinorNumber(self, handle: str) -> int:
        return 9

    def nvmlDeviceGetVbiosVersion(self, handle: str) -> str:
        return "99.00.99"

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: str) -> int:
        return self.power_limit_mw

    def nvmlDeviceGetPowerManagementLimit(self, handle: str) -> int:
        return self.power_limit_mw

    def nvmlDeviceGetPowerManagementLimitConstraints(self, handle: str) -> list[int]:
        return [200_000, 700_000]

    def nvmlDeviceSetPowerManagementLimit(self, handle: str, limit: int) -> None:
        self.power_limit_mw = limit

    def nvmlDeviceGetPersistenceMode(self, handle: str) -> int:
        return 1

    def nvmlDeviceGetEccMode(self, handle: str) -> list[int]:
        return [1, 1]

    def nvmlDeviceGetMigMode(self, handle: str) -> list[int]:
        return [self.mig, self.mig]

    def nvmlDeviceGetMaxClockInfo(self, handle: str, kind: int) -> int:
        return 1980

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:
        return 1900

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: str) -> int:
        return 4

    def nvmlDeviceGetTemperatureV(self, handle: str, sensor: int) -> int:
        return 55

    def nvmlDeviceGetMemoryInfo(self, handle: str, version: Any) -> Any:
        assert version == pynvml.nvmlMemory_v2
        return self.memory

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        return self._field(83)[1]

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        return SimpleNamespace(gpu=50, memory=5)

    def nvmlDeviceGetUUID(self, handle: str) -> str:
        return handle

    def nvmlDeviceGetTotalEccErrors(self, handle: str, kind: int, counter: int) -> int:
        return self.ecc[kind, counter]

    def nvmlDeviceGetRemappedRows(self, handle: str) -> tuple[int, ...]:
        return self.rows

    def nvmlDeviceGetFieldValues(self, handle: str, ids: list[tuple[int, int]]) -> Any:
        elements = (pynvml.c_nvmlFieldValue_t * len(ids))()
        for element, (field_id, _) in zip(elements, ids, strict=True):
            element.nvmlReturn, element.value.uiVal = self._field(field_id)
            element.valueType = pynvml.NVML_VALUE_TYPE_UNSIGNED_INT
            element.latencyUsec = 3000 if field_id == 83 else 2
        return elements

    def _field(self, field_id: int) -> tuple[int, int]:
        """Return code and value from `fields`, or of a card that draws `watts`: power jitters by 1 mW per update."""
        if field_id in self.watts:
            watts, period_s = self.watts[field_id]
            updates = int((time.monotonic() - self._start_s) / period_s)
            return 0, round(watts * 1000 * updates * period_s if field_id == 83 else watts * 1000 + updates % 2)
        return self.fields.get(field_id, (0, 1000))

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[Any]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=None) for pid in self.pids]

    def nvmlDeviceGetComputeRunningProcesses_v2(self, handle: str) -> list[Any]:
        return self.nvmlDeviceGetComputeRunningProcesses(handle)

    def nvmlEventSetCreate(self) -> list[str]:
        return []

    def nvmlDeviceRegisterEvents(self, handle: str, types: int, events: list[str]) -> None:
        assert types == pynvml.nvmlEventTypeXidCriticalError
        events.append(handle)

    def nvmlEventSetWait_v2(self, events: list[str], timeout_ms: int) -> Any:
        if not self.events:
            time.sleep(min(timeout_ms, 50) / 1000)
            raise pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT)
        return self.events.pop(0)

    def nvmlEventSetFree(self, events: list[str]) -> None: ...

    def nvmlGpmQueryDeviceSupport(self, handle: str) -> Any:
        return SimpleNamespace(isSupportedDevice=int(self.gpm_supported))

    def nvmlGpmSampleAlloc(self) -> Any:
        self.allocated += 1
        return ctypes.cast(ctypes.c_void_p(4096 * self.allocated), pynvml.c_nvmlGpmSample_t)

    def nvmlGpmSampleGet(self, handle: str, buffer: Any) -> Any:
        self.samples[_address(buffer)] = max(self.samples.values(), default=0) + 1
        return buffer

    def nvmlGpmMetricsGet(self, query: Any) -> Any:
        assert query.version == pynvml.NVML_GPM_METRICS_GET_VERSION
        self.windows.append((self.samples[_address(query.sample1)], self.samples[_address(query.sample2)]))
        for place in range(query.numMetrics):
            metric = query.metrics[place]
            metric.nvmlReturn = self.metric_codes.get(metric.metricId, 0)
            metric.value = self.metric_values.get(metric.metricId, float(metric.metricId))
        return query

    def nvmlGpmSampleFree(self, buffer: Any) -> None:
        self.freed += 1


def _address(buffer: Any) -> int:
    return int(ctypes.cast(buffer, ctypes.c_void_p).value or 0)


@contextmanager
def driver() -> Iterator[tuple[FakeDriver, RealNvml, str]]:
    """Yield the fake driver, the real implementation over it, and the handle of its GPU."""
    fake = FakeDriver()
    with pytest.MonkeyPatch.context() as patch:
        for name, function in fake.functions():
            patch.setattr(pynvml, name, function)  # raises where the binding has no such function
        yield fake, RealNvml(), uuid(0)
