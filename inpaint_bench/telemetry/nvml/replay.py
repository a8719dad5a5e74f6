"""A GPU that is a recording: NVML's answers from a capture, for machines without a GPU.

It can never be taken for a real one: its UUID is REPLAY-<capture>, and every row's source is
replay:<capture>. Recorded failures fail again with their code; what was not recorded fails with
NOT_IN_CAPTURE. After its end the capture is played again from its loop point, and cumulative counters go
on counting at the rate that the loop had. `read_us` of its rows is the replay's own time, not a GPU's.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from inpaint_bench.telemetry.sources.co_tenants import REPLAYED

from .api import (
    NOT_IN_CAPTURE,
    EccErrors,
    FieldValue,
    GpmWindow,
    Handle,
    MemoryInfo,
    NvmlError,
    RemappedRows,
    Utilization,
    Xid,
)
from .capture_file import Capture, Series

_CUMULATIVE = frozenset(("total_energy_mj", "field:83:0", "field:74:0", "field:269:0", "field:270:0", "field:271:0"))
_NOT_FOUND = 6


class Replay:
    """`num_devices` copies of the captured GPU, all playing the same answers at the same time."""

    def __init__(self, capture: Capture, num_devices: int = 1) -> None:
        self._capture = capture
        names = [f"REPLAY-{capture.name}"]
        names += [f"REPLAY-{capture.name}-{index}" for index in range(1, num_devices)]
        self._uuids = names
        self._start_ns = time.monotonic_ns()
        self._gpm_ns: dict[str, int] = {}  # when each device's last GPM sample was
        self._xids_told = 0
        self._gain = {key: self._loop_gain(key) for key in _CUMULATIVE & capture.calls.keys()}

    def _loop_gain(self, key: str) -> int:
        """How much a cumulative counter grows in one loop."""
        first_ms, last_ms = self._capture.loop_from_ms, self._capture.duration_ms
        series = self._capture.calls[key]
        good = [
            (t, series.at(t)[1]) for t in series.t_ms if t >= first_ms and series.at(t)[0] == 0
        ]  # the time from the last answer to the end has no answer of its own: it takes the mean rate
        if len(good) < 2:
            return 0
        (t0, v0), (t1, v1) = good[0], good[-1]
        return max(0, round((v1 - v0) * (last_ms - first_ms) / (t1 - t0)))

    def _position(self) -> tuple[float, int]:
        """Where in the capture we are, in ms, and how often it has been looped."""
        elapsed_ms = (time.monotonic_ns() - self._start_ns) / 1e6
        if elapsed_ms < self._capture.duration_ms:
            return elapsed_ms, 0
        length_ms = self._capture.duration_ms - self._capture.loop_from_ms
        loops, rest_ms = divmod(elapsed_ms - self._capture.loop_from_ms, length_ms)
        return self._capture.loop_from_ms + rest_ms, int(loops)

    def _answer(self, key: str) -> tuple[int, Any]:
        series: Series | None = self._capture.calls.get(key)
        if series is None:
            return NOT_IN_CAPTURE, None
        t_ms, loops = self._position()
        if loops:  # never an answer from before the loop: a counter would step back
            t_ms = max(t_ms, next((t for t in series.t_ms if t >= self._capture.loop_from_ms), t_ms))
        code, value = series.at(t_ms)
        if code == 0 and loops and key in self._gain:
            value += loops * self._gain[key]
        return code, value

    def _get(self, key: str) -> Any:
        code, value = self._answer(key)
        if code != 0:
            raise NvmlError(code, f"replay of {key}")
        return value

    def open(self) -> None:
        """Nothing to open; the capture has been playing since it was loaded."""

    def close(self) -> None: ...

    def driver_version(self) -> str:
        return str(self._get("driver_version"))

    def nvml_version(self) -> str:
        return str(self._get("nvml_version"))

    def uuids(self) -> list[str]:
        return list(self._uuids)

    def device(self, uuid: str) -> Handle:
        if uuid not in self._uuids:
            raise NvmlError(_NOT_FOUND, f"replay of {uuid}")
        return uuid

    def uuid(self, handle: Handle) -> str:
        return str(handle)

    def name(self, handle: Handle) -> str:
        return str(self._get("name"))

    def pci_bus_id(self, handle: Handle) -> str:
        return str(self._get("pci_bus_id"))

    def minor(self, handle: Handle) -> int:
        return int(self._get("minor"))

    def vbios(self, handle: Handle) -> str:
        return str(self._get("vbios"))

    def power_limit_mw(self, handle: Handle) -> int:
        return int(self._get("power_limit_mw"))

    def persistence_mode(self, handle: Handle) -> int:
        return int(self._get("persistence_mode"))

    def ecc_mode(self, handle: Handle) -> int:
        return int(self._get("ecc_mode"))

    def mig_mode(self, handle: Handle) -> int:
        return int(self._get("mig_mode"))

    def max_sm_clock_mhz(self, handle: Handle) -> int:
        return int(self._get("max_sm_clock_mhz"))

    def fields(self, handle: Handle, ids: Sequence[tuple[int, int]]) -> list[FieldValue]:
        return [FieldValue(*self._answer(f"field:{field_id}:{scope}")) for field_id, scope in ids]

    def utilization(self, handle: Handle) -> Utilization:
        return Utilization(*self._get("utilization"))

    def total_energy_mj(self, handle: Handle) -> int:
        same = "field:83:0"  # the same counter; a recording asks for it all the time, for this one once
        return int(self._get(same if same in self._capture.calls else "total_energy_mj"))

    def sm_clock_mhz(self, handle: Handle) -> int:
        return int(self._get("sm_clock_mhz"))

    def mem_clock_mhz(self, handle: Handle) -> int:
        return int(self._get("mem_clock_mhz"))

    def throttle_reasons(self, handle: Handle) -> int:
        return int(self._get("throttle_reasons"))

    def temperature_c(self, handle: Handle) -> int:
        return int(self._get("temperature_c"))

    def memory(self, handle: Handle) -> MemoryInfo:
        return MemoryInfo(*self._get("memory"))

    def gpm(self, handle: Handle, ids: Sequence[int]) -> GpmWindow | None:
        """The capture's means, each over its recorded window; where none was recorded, the replay's own.

        Where every metric fails, so does the call. As on a card, a GPU's first read has no window.
        """
        answers = [FieldValue(*self._answer(f"gpm:{metric}")) for metric in ids]
        if all(answer.code for answer in answers):
            raise NvmlError(answers[0].code, "replay of gpm")
        now_ns = time.monotonic_ns()
        last_ns, self._gpm_ns[handle] = self._gpm_ns.get(handle), now_ns
        if last_ns is None:
            return None
        code, window_ms = self._answer("gpm_window_ms")
        return GpmWindow(float(window_ms) if code == 0 else (now_ns - last_ns) / 1e6, answers)

    def ecc_volatile(self, handle: Handle) -> EccErrors:
        return EccErrors(*self._get("ecc_volatile"))

    def ecc_aggregate(self, handle: Handle) -> EccErrors:
        return EccErrors(*self._get("ecc_aggregate"))

    def remapped_rows(self, handle: Handle) -> RemappedRows:
        return RemappedRows(*self._get("remapped_rows"))

    def compute_processes(self, handle: Handle) -> list[int]:
        """Ids that no process has, one for each word of the recorded list; `tell_apart` knows them."""
        return [REPLAYED[word] for word in self._get("compute_processes")]

    def event_set(self) -> Any:
        """Xids are the series "xids": a number at its time, once; null is none, which says that one can listen."""
        if "xids" not in self._capture.calls:
            raise NvmlError(NOT_IN_CAPTURE, "replay of xids")
        return "xids"

    def watch_xids(self, events: Any, handle: Handle) -> None:
        code = self._capture.calls["xids"].at(0)[0]
        if code != 0:
            raise NvmlError(code, "replay of xids")

    def next_xid(self, events: Any, timeout_ms: int) -> Xid | None:
        series = self._capture.calls["xids"]
        deadline_ms = (time.monotonic_ns() - self._start_ns) / 1e6 + timeout_ms
        due = series.t_ms[self._xids_told] if self._xids_told < len(series.t_ms) else deadline_ms + 1
        time.sleep(max(0.0, min(due, deadline_ms) * 1e6 - (time.monotonic_ns() - self._start_ns)) / 1e9)
        if due > deadline_ms:
            return None
        number = series.value[self._xids_told]
        self._xids_told += 1
        return None if number is None else Xid(self._uuids[0], int(number))

    def free_events(self, events: Any) -> None: ...
