"""Record a real GPU: every answer that the sidecar would get, at its rates, for replay (`doctor gpu --out`).

Each call's return code, value and latency is kept, failures too. A capture holds no UUID, no serial number
and no process id: of a process only whether it was ours. Let the GPU do something meanwhile, started from
the same shell or job: what is recorded is what replay plays.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from inpaint_bench.core.schema import PRODUCER
from inpaint_bench.telemetry.devices import describe, open_device
from inpaint_bench.telemetry.sampling.streams import FAST, GPM, LANES, SLOW, Reader
from inpaint_bench.telemetry.sampling.ticker import Ticker
from inpaint_bench.telemetry.sources.co_tenants import FOREIGN, OURS, UNKNOWN, tell_apart
from inpaint_bench.telemetry.sources.health import read_health

from .api import FieldValue, GpmWindow, Handle, Nvml, NvmlError, Xid

HZ: Final = {FAST.name: 10.0, SLOW.name: 1.0, GPM.name: 1.0}
_NOT_RECORDED: Final = frozenset(("open", "close", "uuids", "device", "uuid", "event_set", "free_events"))


class Recorder:
    """Stands before an Nvml and notes every answer. `fields` and `gpm` are noted per element.

    `worker`: the process whose descendants a process list calls ours.
    """

    def __init__(self, inner: Nvml, worker: int | None = None) -> None:
        self.calls: dict[str, dict[str, Any]] = {}
        self._inner = inner
        self._worker = our_root() if worker is None else worker
        self._start_ns = time.monotonic_ns()

    @property
    def age_ms(self) -> float:
        return round((time.monotonic_ns() - self._start_ns) / 1e6, 1)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._inner, name)
        if name in _NOT_RECORDED:
            return cast(Callable[..., Any], method)

        def call(*args: Any) -> Any:
            before_ns = time.monotonic_ns()
            try:
                value, code = method(*args), 0
            except NvmlError as error:
                self._note(name, before_ns, error.code, None)
                raise
            self._note(name, before_ns, code, value)
            return value

        return call

    def fields(self, handle: Handle, ids: Sequence[tuple[int, int]]) -> list[FieldValue]:
        before_ns = time.monotonic_ns()
        try:
            answers = self._inner.fields(handle, ids)
        except NvmlError as error:
            answers = [FieldValue(error.code, None)] * len(ids)
            for key in ids:
                self._note_field(key, before_ns, answers[0])
            raise
        self._note("fields:" + ",".join(f"{i}:{s}" for i, s in ids), before_ns, 0, None)
        for key, answer in zip(ids, answers, strict=True):
            self._note_field(key, before_ns, answer)
        return answers

    def gpm(self, handle: Handle, ids: Sequence[int]) -> GpmWindow | None:
        """Noted with its window and per metric, where there was a window."""
        before_ns = time.monotonic_ns()
        try:
            window = self._inner.gpm(handle, ids)
        except NvmlError as error:
            for key in ("gpm_window_ms", *(f"gpm:{metric}" for metric in ids)):
                self._note(key, before_ns, error.code, None)
            raise
        if window is not None:
            self._note("gpm_window_ms", before_ns, 0, round(window.window_ms, 1))
            for metric, answer in zip(ids, window.metrics, strict=True):
                self._series(f"gpm:{metric}", before_ns, answer.code, answer.value)
        return window

    def compute_processes(self, handle: Handle) -> list[int]:
        """Noted as one word per process, never its id."""
        before_ns = time.monotonic_ns()
        try:
            pids = self._inner.compute_processes(handle)
        except NvmlError as error:
            self._note("compute_processes", before_ns, error.code, None)
            raise
        self._note("compute_processes", before_ns, 0, None)
        found = tell_apart(pids, self._worker)
        words = [OURS] * len(found.ours) + [FOREIGN] * len(found.strangers) + [UNKNOWN] * len(found.unknown)
        self.calls["compute_processes"]["value"][-1] = words
        return pids

    def watch_xids(self, events: Any, handle: Handle) -> None:
        """Noted as the first entry of `xids`: whether one may listen."""
        before_ns = time.monotonic_ns()
        try:
            self._inner.watch_xids(events, handle)
        except NvmlError as error:
            self._series("xids", before_ns, error.code, None)
            raise
        self._series("xids", before_ns, 0, None)

    def next_xid(self, events: Any, timeout_ms: int) -> Xid | None:
        xid = self._inner.next_xid(events, timeout_ms)
        if xid is not None:
            self._series("xids", time.monotonic_ns(), 0, xid.number)
        return xid

    def _note_field(self, key: tuple[int, int], before_ns: int, answer: FieldValue) -> None:
        series = self._series(f"field:{key[0]}:{key[1]}", before_ns, answer.code, answer.value)
        series.setdefault("driver_us", []).append(answer.latency_us)

    def _note(self, name: str, before_ns: int, code: int, value: Any) -> None:
        took_us = round((time.monotonic_ns() - before_ns) / 1000, 1)
        self._series(name, before_ns, code, value).setdefault("us", []).append(took_us)

    def _series(self, key: str, at_ns: int, code: int, value: Any) -> dict[str, Any]:
        series = self.calls.setdefault(key, {"t_ms": [], "code": [], "value": []})
        series["t_ms"].append(round((at_ns - self._start_ns) / 1e6, 1))
        series["code"].append(code)
        series["value"].append(value)
        return series


@dataclass(frozen=True)
class Recording:
    """What a GPU answered for a while: the two halves of a capture file."""

    meta: dict[str, Any]
    calls: dict[str, dict[str, Any]]


def our_root() -> int:
    """The process whose descendants are ours: whoever started us (a shell, a job), ourselves where that is init."""
    parent = os.getppid()
    return parent if parent > 1 else os.getpid()


def record(nvml: Nvml, uuid: str, seconds: float) -> Recording:
    """What the GPU answers for so long. Raises NvmlError where it cannot be opened, ValueError for no such UUID."""
    recorder = Recorder(nvml)
    recorded = cast(Nvml, recorder)
    handle = open_device(nvml, uuid)
    driver = recorded.driver_version()
    recorded.nvml_version()
    facts = describe(recorded, handle)
    read_health(recorded, handle)
    _look(recorded, handle)
    with _Listener(recorder, handle) as listener:
        start_ns = time.monotonic_ns()
        tickers = {name: Ticker(round(1e9 / hz), start_ns) for name, hz in HZ.items()}
        readers = {lane.name: Reader(lane) for lane in LANES}
        end_ns = start_ns + round(seconds * 1e9)
        while time.monotonic_ns() < end_ns:
            for lane in LANES:
                if tickers[lane.name].take(time.monotonic_ns()) is not None:
                    readers[lane.name].read(recorded, handle)
                    if lane is SLOW:
                        listener.hear()
            wake_ns = min(end_ns, *(ticker.next_ns for ticker in tickers.values()))
            time.sleep(max(0, wake_ns - time.monotonic_ns()) / 1e9)
    _look(recorded, handle)
    meta = {
        "gpu": facts["name"],
        "driver": driver,
        "recorded_on": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "tool": f"{PRODUCER} doctor gpu",
        "synthetic": False,
        "duration_ms": recorder.age_ms,
    }
    return Recording(meta, recorder.calls)


def _look(nvml: Nvml, handle: Handle) -> None:
    """What the sidecar asks for at the start, every 30 s and at the end."""
    for ask in (nvml.compute_processes, nvml.power_limit_mw):
        with contextlib.suppress(NvmlError):  # noted with its code
            ask(handle)


class _Listener:
    """Asks for Xids without waiting for them: the recording has one thread."""

    def __init__(self, recorder: Recorder, handle: Handle) -> None:
        self._recorder = recorder
        self._handle = handle
        self._events: Any = None

    def __enter__(self) -> _Listener:
        try:
            events = self._recorder.event_set()
        except NvmlError as error:
            self._recorder.calls["xids"] = {"t_ms": [0], "code": [error.code], "value": [None]}
            return self
        try:
            self._recorder.watch_xids(events, self._handle)
        except NvmlError:
            with contextlib.suppress(NvmlError):
                self._recorder.free_events(events)
        else:
            self._events = events
        return self

    def hear(self) -> None:
        """Note every Xid that has come since the last call."""
        if self._events is None:
            return
        try:
            while self._recorder.next_xid(self._events, 0) is not None:
                pass
        except NvmlError:
            self.close()

    def close(self) -> None:
        if self._events is not None:
            with contextlib.suppress(NvmlError):
                self._recorder.free_events(self._events)
            self._events = None

    def __exit__(self, *_: object) -> None:
        self.close()
