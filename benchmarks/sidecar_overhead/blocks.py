"""A training that goes on while the sidecar comes and goes beside it, and the blocks that are timed meanwhile.

One process builds the workload once. Blocks have equally many steps and the device idle at their edges and nowhere
else (`measure.Loop`). A sidecar starts and ends beside the running training, so that the device stays as warm as it
was; each block, with a sidecar or without, is led in by steps that do not count. What a start costs is told apart.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow.parquet as pq
import torch

from inpaint_bench import workloads
from inpaint_bench.core.config import BenchConfig
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.files import read_json
from inpaint_bench.core.records import TelemetryReport, Window
from inpaint_bench.core.schema import TELEMETRY, WindowKind
from inpaint_bench.run.loop import Loop, WindowPlan, Windows
from inpaint_bench.run.worker import choose_device
from inpaint_bench.telemetry.client import SidecarClient, SidecarError

LEAST_STEPS = 2  # in a block
CHUNK_S = 0.5  # beside blocks, steps run in synchronised stretches of about this, to see whether a start is done
LANES = ("fast", "slow", "gpm")


@dataclass(frozen=True, kw_only=True)
class Beside:
    """Steps that ran beside the blocks."""

    steps: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class SidecarBlock:
    """A sidecar's account of one block, from its start to its end; only the reads are those within the block."""

    status: str
    problems: list[str]
    ready_s: float  # from the start to the first sample
    start_cpu_s: float  # until then
    cpu_s: float  # afterwards, to the end
    sampling_s: float
    max_rss_mib: float
    ticks_due: int  # of all lanes
    ticks_late: int
    read_us: dict[str, list[float]]  # by lane


@dataclass(frozen=True, kw_only=True)
class Block:
    """One timed stretch and what lay around it. A sidecar that died gave no account."""

    round: int
    arm: str
    hz: float | None  # None: no sidecar
    steps: int
    seconds: float
    device_ms: float | None  # mean of the steps' CUDA events
    data_wait_pct: float
    starting: Beside  # while the sidecar started
    settling: Beside  # afterwards, until the block began
    whole: bool  # no sidecar, or one that sampled until it was told to end
    sidecar: SidecarBlock | None

    @property
    def step_ms(self) -> float:
        return 1000 * self.seconds / self.steps


class Alternation:
    """`watched` names the devices that the sidecar samples."""

    def __init__(self, bench: BenchConfig, loop: Loop, rows: Rows, sidecars: Sidecars, watched: str) -> None:
        self.watched = watched
        self.batch = loop.workload.images_per_step
        self._warmup_steps = bench.workload.warmup_steps
        self._loop, self._rows, self._sidecars = loop, rows, sidecars
        self._chunk = 1

    def calibrate(self, block_s: float) -> tuple[int, float]:
        """Warm up, and find how many steps last about `block_s`. Returns them and the seconds of one."""
        self._loop.run(WindowPlan(kind=WindowKind.WARMUP, steps=self._warmup_steps))
        window = self._loop.run(WindowPlan(kind=WindowKind.MEASURE, steps=LEAST_STEPS, min_s=block_s))
        step_s = _seconds(window) / window.steps
        self._chunk = max(1, round(CHUNK_S / step_s))
        return max(LEAST_STEPS, round(block_s / step_s)), step_s

    def block(self, number: int, arm: str, hz: float | None, steps: int, settle_s: float) -> Block:
        """One block, its sidecar started before and stopped behind it. Raises UserError where it does not start."""
        starting = Beside(steps=0, seconds=0.0)
        started: Started | None = None
        if hz is not None:
            start = self._sidecars.start(f"{number}-{arm}", hz)
            starting = self._beside(start.done)
            started = start.result()
        until = time.monotonic() + settle_s
        settling = self._beside(lambda: time.monotonic() >= until)
        self._rows.take()
        window = self._loop.run(WindowPlan(kind=WindowKind.MEASURE, steps=steps))
        rows = self._rows.take()
        whole, account = True, None
        if started:
            stop = self._sidecars.stop(started)
            self._beside(stop.done)
            state = stop.result()
            if whole := state.status == "complete":
                account = _account(started, state, window)
        seconds = _seconds(window)
        device = [row["device_ms"] for row in rows if row["device_ms"] is not None]
        return Block(
            round=number,
            arm=arm,
            hz=hz,
            steps=window.steps,
            seconds=seconds,
            device_ms=sum(device) / len(device) if device else None,
            data_wait_pct=100 * sum(row["data_wait_ns"] for row in rows) / 1e9 / seconds,
            starting=starting,
            settling=settling,
            whole=whole,
            sidecar=account,
        )

    def _beside(self, done: Callable[[], bool]) -> Beside:
        """Train until `done`."""
        steps, began = 0, time.monotonic()
        while not done():
            self._loop.run(WindowPlan(kind=WindowKind.WARMUP, steps=self._chunk))
            steps += self._chunk
        return Beside(steps=steps, seconds=time.monotonic() - began if steps else 0.0)


@contextmanager
def alternation(bench: BenchConfig, hz: float) -> Iterator[Alternation]:
    """The configured training, built. A sidecar at `hz` is tried before: a compilation may take minutes.

    Raises UserError where the device, the sidecar or the workload cannot be had.
    """
    device, uuids = choose_device(bench)
    if bench.telemetry.source == "nvml" and not uuids:
        raise UserError("telemetry=nvml watches a GPU, and this training uses none: take telemetry=replay")
    with _scratch(bench.out) as name:
        sidecars = Sidecars(bench, uuids, Path(name))
        try:
            tried = sidecars.start("tried", hz).result()
            sidecars.stop(tried).result()
            watched = ", ".join(str(one.name) for one in tried.sidecar.devices)
            if device.type == "cuda":
                torch.cuda.set_device(device)
            workload = workloads.load(bench, device)
            try:
                rows = Rows()
                loop = Loop(workload, device, Windows(Path(name)), rows, lambda *_: None)
                yield Alternation(bench, loop, rows, sidecars, watched)
            finally:
                workload.close()
        finally:
            sidecars.close()


def _scratch(out: str) -> TemporaryDirectory[str]:
    """Where runs write too: what the sidecar writes then costs what it costs there."""
    try:
        Path(out).mkdir(parents=True, exist_ok=True)
        return TemporaryDirectory(prefix=".overhead-", dir=out)
    except OSError as error:
        raise UserError(f"out={out}: {error.strerror}; the sidecar needs a folder to write to") from None


@dataclass(frozen=True, kw_only=True)
class Started:
    sidecar: SidecarClient
    run_dir: Path
    ready_s: float
    ready_mono_ns: int
    cpu_s: float  # it took to be ready


class Sidecars:
    """Starts and stops sidecars on a thread of its own, while the caller trains; none outlives `close`."""

    def __init__(self, bench: BenchConfig, uuids: list[str], folder: Path) -> None:
        self._bench, self._uuids, self._folder = bench, uuids, folder
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._last: SidecarClient | None = None

    def start(self, name: str, hz: float) -> Future[Started]:
        return self._thread.submit(self._start, self._folder / name.replace(" ", ""), hz)

    def stop(self, started: Started) -> Future[TelemetryReport]:
        """The sidecar's own account of itself."""
        return self._thread.submit(started.sidecar.stop)

    def close(self) -> None:
        self._thread.shutdown()  # a start that is under way ends first
        if self._last:
            self._last.stop()

    def _start(self, run_dir: Path, hz: float) -> Started:
        settings = replace(self._bench.telemetry, fast_hz=hz)
        began_ns = time.monotonic_ns()
        try:
            self._last = SidecarClient.start(
                run_dir, f"overhead-{run_dir.name}", self._uuids, settings, self._bench.gpu.capture
            )
        except SidecarError as error:
            raise UserError(str(error)) from None
        now_ns = time.monotonic_ns()
        state = read_json(run_dir / TELEMETRY) or {}  # as it was when the sidecar said it was ready
        return Started(
            sidecar=self._last,
            run_dir=run_dir,
            ready_s=(now_ns - began_ns) / 1e9,
            ready_mono_ns=now_ns,
            cpu_s=float(state["cpu_s"]),
        )


class Rows:
    """The step rows of a window, kept in memory: a `measure.StepWriter`."""

    def __init__(self) -> None:
        self._rows: list[dict[str, Any]] = []

    def append(self, **row: Any) -> None:
        self._rows.append(row)

    def close(self) -> None:
        """There is no file to close."""

    def take(self) -> list[dict[str, Any]]:
        taken, self._rows = self._rows, []
        return taken


def _seconds(window: Window) -> float:
    assert window.seconds is not None  # it is closed
    return window.seconds


def _account(started: Started, state: TelemetryReport, window: Window) -> SidecarBlock:
    lanes = state.streams.values()
    return SidecarBlock(
        status=state.status,
        problems=state.problems,
        ready_s=started.ready_s,
        start_cpu_s=started.cpu_s,
        cpu_s=(state.cpu_s or 0.0) - started.cpu_s,
        sampling_s=((state.ended_mono_ns or 0) - started.ready_mono_ns) / 1e9,
        max_rss_mib=state.max_rss_mib or 0.0,
        ticks_due=sum(lane.ticks_due for lane in lanes),
        ticks_late=sum(lane.ticks_skipped for lane in lanes),
        read_us={lane: _reads(started.run_dir / f"samples_{lane}", window) for lane in LANES},
    )


def _reads(folder: Path, window: Window) -> list[float]:
    """How long the lane's reads within the window took, in us. A lane that the card does not have has none."""
    if not folder.is_dir():
        return []
    end_ns = window.t_end_mono_ns or window.t_start_mono_ns
    rows = pq.read_table(folder, columns=["t_mono_ns", "read_us"]).to_pylist()
    return [row["read_us"] for row in rows if window.t_start_mono_ns <= row["t_mono_ns"] <= end_ns]
