"""One sidecar's run: open the GPUs, sample until told to stop, close everything."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import os
import threading
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from inpaint_bench.core.files import replace_json
from inpaint_bench.core.schema import TELEMETRY
from inpaint_bench.core.validation import Endpoint
from inpaint_bench.telemetry.nvml.api import Nvml, NvmlError
from inpaint_bench.telemetry.nvml.capture_file import CaptureError, load
from inpaint_bench.telemetry.nvml.real import RealNvml
from inpaint_bench.telemetry.nvml.reinit_barrier import Gate
from inpaint_bench.telemetry.nvml.replay import Replay
from inpaint_bench.telemetry.sampling.sampler import Sampler
from inpaint_bench.telemetry.sampling.streams import LANES
from inpaint_bench.telemetry.sampling.ticker import Ticker
from inpaint_bench.telemetry.sources.health import read_health, worsened
from inpaint_bench.telemetry.sources.periodic import Rounds
from inpaint_bench.telemetry.sources.xid import XidWatch
from inpaint_bench.telemetry.storage.writer import Storage

from . import signals
from .devices import open_devices
from .log import log
from .report import Account, gpm_hz, identity, part_metadata
from .spec import Spec

if TYPE_CHECKING:
    from inpaint_bench.telemetry.sources.dcgm import DcgmWatch

_LONGEST_WAIT_S: Final = 0.5
_CLAIM_S: Final = 1.0
_saying = threading.Lock()  # a long line goes into a pipe in pieces


class Sidecar:
    """From the orders to the last line. Cannot start: NvmlError, CaptureError, ValueError, OSError."""

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self._parent = os.getppid() if spec.parent is None else spec.parent
        spec.folder.mkdir(parents=True, exist_ok=True)
        _claim(spec.folder)
        source, capture, nvml, uuids = _source(spec)
        nvml.open()
        devices = open_devices(nvml, uuids)
        facts = identity(spec, source, nvml.driver_version(), nvml.nvml_version())
        gate = Gate()
        self._sampler = Sampler(nvml, devices, source, lambda table, row: self._storage.append(table, row), gate)
        self._rounds = Rounds(nvml, devices, self._parent, gate, self._problem)
        self._xids = XidWatch(nvml, devices, gate, self._problem)
        self._dcgm = self._dcgm_watch()
        self._storage = Storage(
            spec.folder, part_metadata(facts, spec), spec.part_s, spec.journal_s, self._problem, self._note
        )
        start_ns = time.monotonic_ns()
        rates = {"fast": spec.fast_hz, "slow": spec.slow_hz, "gpm": gpm_hz(spec)}
        self._tickers = {name: Ticker(round(1e9 / hz), start_ns) for name, hz in rates.items()}
        self._account = Account(facts, spec, capture, self._sampler, self._storage, self._tickers, self._dcgm)
        self._nvml = nvml
        self._next_note_s = time.monotonic() + spec.part_s
        self._hello = {
            "ready": True,
            **{key: facts[key] for key in ("source", "driver", "nvml", "boot_id")},
            "capture": capture,
            "devices": [device.facts for device in devices],
        }

    def run(self) -> int:
        """Sample until told to stop. Returns the exit code."""
        self._sample_due()
        for device in self._sampler.devices:
            device.health["start"] = read_health(self._nvml, device.handle)
        replace_json(self._spec.folder / TELEMETRY, self._account.state("running"))
        self._storage.start()
        say(self._hello)
        self._xids.start()  # not before: what they report must not be the first line
        self._rounds.start()
        if self._dcgm:
            self._dcgm.start()
        gc.freeze()
        ended = False
        try:
            while (reason := self._wait()) is None:
                self._sample_due()
            ended = self._look_last()
        except Exception as error:  # a mistake of ours: what was sampled is still saved
            log(traceback.format_exc())
            self._sampler.fatal = reason = f"internal error: {error!r}"
        return self._close(reason, ended)

    def _sample_due(self) -> None:
        for lane in LANES:
            seq = self._tickers[lane.name].take(time.monotonic_ns())
            if seq is not None:
                self._sampler.sample(lane, seq)

    def _wait(self) -> str | None:
        """Sleep until the next tick. Why to stop, or None."""
        if self._sampler.fatal:
            return self._sampler.fatal
        due_ns = min(ticker.next_ns for ticker in self._tickers.values())
        wait_s = min(max(0.0, (due_ns - time.monotonic_ns()) / 1e9), _LONGEST_WAIT_S)
        return signals.wait(wait_s, self._parent)

    def _note(self) -> None:
        """Refresh telemetry.json once per part, so that a kill -9 leaves recent counts. Storage thread."""
        if time.monotonic() >= self._next_note_s:
            self._next_note_s = time.monotonic() + self._spec.part_s
            try:
                replace_json(self._spec.folder / TELEMETRY, self._account.state("running"))
            except Exception as error:  # whatever it is: the thread that saves the rows goes on
                log(f"{TELEMETRY}: {error!r}")

    def _look_last(self) -> bool:
        """Last sample, last look at health and processes; False where NVML still holds a thread."""
        self._xids.signal()
        if self._dcgm:
            self._dcgm.signal()
        earliest_ns = max(ticker.earliest_ns for ticker in self._tickers.values())
        time.sleep(max(0.0, (earliest_ns - time.monotonic_ns()) / 1e9))
        for lane in LANES:
            self._sampler.sample(lane, self._tickers[lane.name].extra(time.monotonic_ns()))
        self._look_at_health()
        ended = all([self._xids.stop(), self._rounds.stop()])
        if self._dcgm:
            self._dcgm.stop()  # what may still hold it is no call of NVML
        return ended

    def _close(self, reason: str, threads_ended: bool) -> int:
        """Parts, telemetry.json, last line."""
        saved = self._storage.close()
        status = "failed" if self._sampler.fatal else "complete" if saved else "incomplete"
        state = self._account.state(status, reason)
        for device in state["devices"]:
            device["energy_end_mj"] = self._energy(device["uuid"])
        try:
            replace_json(self._spec.folder / TELEMETRY, state)
        except OSError as error:
            state.update(status="incomplete", storage={**state["storage"], "error": f"{TELEMETRY}: {error}"})
        say({"final": state})
        if threads_ended:  # never under a thread that NVML still holds: it ends with the process
            with contextlib.suppress(NvmlError):  # a lost driver cannot be closed
                self._nvml.close()
        return 0 if state["status"] == "complete" else 1

    def _dcgm_watch(self) -> DcgmWatch | None:
        if self._spec.dcgm_url is None:
            return None
        from inpaint_bench.telemetry.sources.dcgm import (
            DcgmWatch,  # its parser is not light, and few sites name an exporter
        )

        append = lambda table, row: self._storage.append(table, row)  # noqa: E731
        endpoint = Endpoint.parse(self._spec.dcgm_url)
        return DcgmWatch(endpoint, self._sampler.devices, append, self._problem, self._spec.dcgm_every_s)

    def _energy(self, uuid: str) -> int | None:
        """The energy counter by its own NVML call, to compare with the sampled field."""
        try:
            return self._nvml.total_energy_mj(self._nvml.device(uuid))
        except NvmlError:
            return None

    def _look_at_health(self) -> None:
        for device in self._sampler.devices:
            start, end = device.health["start"], read_health(self._nvml, device.handle)
            device.health["end"] = end
            for phrase in worsened(start, end):
                self._problem("ecc", phrase, device.uuid)

    def _problem(self, kind: str, detail: str, gpu_uuid: str | None = None) -> None:
        """An event, a line to whoever started us, and a line in telemetry.json. Any thread."""
        self._sampler.event(kind, detail, gpu_uuid)
        if self._account.problem(f"{kind}: {detail}"):
            say({"problem": kind, "detail": detail})


def _source(spec: Spec) -> tuple[str, dict[str, Any] | None, Nvml, list[str]]:
    """The word for the `source` column, the capture's summary, the NVML, the UUIDs to watch."""
    if spec.source == "nvml":
        return "nvml", None, RealNvml(), spec.uuids
    assert spec.capture is not None
    capture = load(spec.capture)
    replay = Replay(capture, max(1, len(spec.uuids)))
    return f"replay:{capture.name}", capture.summary, replay, replay.uuids()


def _claim(folder: Path) -> None:
    """Lock the run directory for as long as this process lives. Raises ValueError where another sidecar holds it.

    One whose worker was killed ends within a second, which is waited for.
    """
    handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    give_up_s = time.monotonic() + _CLAIM_S
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > give_up_s:
                raise ValueError(f"{folder}: another sidecar is writing here") from None
            time.sleep(0.05)
            continue
        except OSError:
            pass  # a file system without locks on folders; a journal that is in use is refused all the same
        return


def say(message: dict[str, Any]) -> None:
    """One line of JSON to whoever started us. A reader that is gone is no reason to stop."""
    with _saying, contextlib.suppress(OSError):
        os.write(1, json.dumps(message).encode() + b"\n")


def not_ready(error: Exception) -> str:
    """One sentence for the user."""
    if isinstance(error, NvmlError) and error.code in (9, 12):
        return f"this node has no working NVIDIA driver ({error}); telemetry=replay or telemetry=none runs without one"
    return str(error)


def main(orders: str) -> int:
    """Run a sidecar by its orders (JSON); signals must be blocked already. Returns the exit code."""
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    try:
        sidecar = Sidecar(Spec.parse(orders))
        return sidecar.run()
    except (NvmlError, CaptureError, ValueError, TypeError, OSError) as error:
        say({"ready": False, "error": not_ready(error)})
        log(repr(error))
        return 2
