"""Record a real GPU: `python -m inpaint_bench.telemetry.capture --out h200.json.gz --seconds 30`.

Reads what the sidecar reads, at its rates, and keeps each call's return code, value and latency. The file
holds no UUID and no serial number. Let the GPU do something meanwhile: what is recorded is what replay plays.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from ..contract import PRODUCER
from .clock import Ticker
from .devices import describe, open_device
from .health import read_health
from .lanes import FAST, GPM, LANES, SLOW, Reader
from .nvml import FieldValue, GpmWindow, Handle, Nvml, NvmlError, RealNvml, gpu_uuid
from .recording import SUFFIX, save

_NOT_RECORDED = frozenset(("open", "close", "uuids", "device", "uuid"))


class Recorder:
    """Stands before an Nvml and notes every answer. `fields` is noted per element."""

    def __init__(self, inner: Nvml) -> None:
        self.calls: dict[str, dict[str, Any]] = {}
        self._inner = inner
        self._start_ns = time.monotonic_ns()

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

    def fields(self, handle: Any, ids: Sequence[tuple[int, int]]) -> list[FieldValue]:
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
        """Noted per metric, where there was a window."""
        before_ns = time.monotonic_ns()
        try:
            window = self._inner.gpm(handle, ids)
        except NvmlError as error:
            for metric in ids:
                self._note(f"gpm:{metric}", before_ns, error.code, None)
            raise
        if window is not None:
            for metric, answer in zip(ids, window.metrics, strict=True):
                self._note(f"gpm:{metric}", before_ns, answer.code, answer.value)
        return window

    def _note_field(self, key: tuple[int, int], before_ns: int, answer: FieldValue) -> None:
        series = self._series(f"field:{key[0]}:{key[1]}", before_ns, answer.code, answer.value)
        series.setdefault("driver_us", []).append(answer.latency_us)

    def _note(self, name: str, before_ns: int, code: int, value: Any) -> None:
        took_us = round((time.monotonic_ns() - before_ns) / 1000)
        self._series(name, before_ns, code, value).setdefault("us", []).append(took_us)

    def _series(self, key: str, at_ns: int, code: int, value: Any) -> dict[str, Any]:
        series = self.calls.setdefault(key, {"t_ms": [], "code": [], "value": []})
        series["t_ms"].append(round((at_ns - self._start_ns) / 1e6, 1))
        series["code"].append(code)
        series["value"].append(value)
        return series


def record(nvml: Nvml, uuid: str, seconds: float) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """What the GPU answers for so long, as (facts about it, calls). Raises NvmlError, ValueError."""
    recorder = Recorder(nvml)
    recorded = cast(Nvml, recorder)
    handle = open_device(nvml, uuid)
    driver = recorded.driver_version()
    recorded.nvml_version()
    facts = describe(recorded, handle)
    read_health(recorded, handle)
    start_ns = time.monotonic_ns()
    tickers = {FAST.name: Ticker(100_000_000, start_ns), SLOW.name: Ticker(1_000_000_000, start_ns)}
    tickers[GPM.name] = Ticker(1_000_000_000, start_ns)
    readers = {lane.name: Reader(lane) for lane in LANES}
    end_ns = start_ns + round(seconds * 1e9)
    while time.monotonic_ns() < end_ns:
        for lane in LANES:
            if tickers[lane.name].take(time.monotonic_ns()) is not None:
                readers[lane.name].read(recorded, handle)
        wake_ns = min(end_ns, *(ticker.next_ns for ticker in tickers.values()))
        time.sleep(max(0, wake_ns - time.monotonic_ns()) / 1e9)
    meta = {
        "gpu": facts["name"],
        "driver": driver,
        "recorded_on": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "tool": f"{PRODUCER} telemetry.capture",
        "synthetic": False,
        "duration_ms": round((time.monotonic_ns() - recorder._start_ns) / 1e6, 1),
    }
    return meta, recorder.calls


def _choose(nvml: Nvml, given: str | None) -> str:
    if given:
        return gpu_uuid(given)
    uuids = nvml.uuids()
    if len(uuids) != 1:
        raise ValueError(f"{len(uuids)} GPUs here; name one with --uuid: {', '.join(uuids) or 'none'}")
    return uuids[0]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="capture", description="Record a GPU's NVML answers for replay.")
    parser.add_argument("--out", type=Path, required=True, help=f"file to write, ending in {SUFFIX}")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--uuid", help="which GPU; needed where there are several")
    parser.add_argument("--name", help="model in short, such as h200")
    parser.add_argument("--note", default="", help="what the GPU was doing")
    parser.add_argument("--loop-from", type=float, default=0.0, help="s; replay loops from here to the end")
    options = parser.parse_args(argv)
    if not options.out.name.endswith(SUFFIX):
        parser.error(f"--out must end in {SUFFIX}")
    if not 0 <= options.loop_from < options.seconds:
        parser.error("--loop-from must lie before --seconds")
    try:
        nvml = RealNvml()
        nvml.open()
        meta, calls = record(nvml, _choose(nvml, options.uuid), options.seconds)
        nvml.close()
    except (NvmlError, ValueError) as error:
        print(f"capture: {error}", file=sys.stderr)
        return 2
    meta.update(name=options.name, note=options.note, loop_from_ms=options.loop_from * 1000)
    save(options.out, meta, calls)
    failed = sorted(key for key, item in calls.items() if item["code"] != 0)
    print(f"{options.out}: {meta['gpu']}, {options.seconds:g} s, {options.out.stat().st_size / 1000:.1f} kB")
    print(f"calls that failed at least once: {', '.join(failed) or 'none'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
