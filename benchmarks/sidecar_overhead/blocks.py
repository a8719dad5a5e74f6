"""A training that continues while sidecars start and stop beside it, and the blocks that are timed meanwhile.

One process builds the workload once. All blocks have the same number of steps, and the device is idle only at their
edges (`run.loop`). Sidecars start and stop beside the running training, so that the device stays warm; every block is
preceded by steps that do not count.
"""

from __future__ import annotations

import os
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
from inpaint_bench.core.config.bench import BenchConfig
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.records import Window, read_record
from inpaint_bench.core.schema import TELEMETRY, WINDOWS, WindowKind
from inpaint_bench.ranks.group import choose_device
from inpaint_bench.run.loop import Loop, WindowPlan
from inpaint_bench.run.windows import Windows
from inpaint_bench.telemetry.client import SidecarClient, SidecarError
from inpaint_bench.telemetry.report import TelemetryReport

from .tracked import BlockFiles

MIN_STEPS = 2  # in a block
CHUNK_S = 0.5  # between blocks, the training is interrupted about this often to see whether a sidecar is ready
STREAMS = ("fast", "slow", "gpm")


@dataclass(frozen=True, kw_only=True)
class SidecarBlock:
    """What the sidecar of a block did; CPU time, rate and reads are those within the block."""

    problems: list[str]
    ready_s: float  # from the start to the first sample
    start_cpu_s: float  # until then
    cpu_s: float
    seconds: float
    rate_hz: float | None  # rate of the fast stream, from the first to the last read; None: fewer than two
    max_rss_mib: float
    ticks_due: int  # ticks of all streams
    ticks_skipped: int
    read_us: dict[str, list[float]]  # by stream


@dataclass(frozen=True, kw_only=True)
class Block:
    """One timed stretch of training."""

    round: int
    arm: str
    hz: float | None  # None: no sidecar
    steps: int
    seconds: float
    device_ms: float | None  # mean of the steps' CUDA events
    data_wait_pct: float
    complete: bool  # no sidecar, or one that sampled until it was stopped
    sidecar: SidecarBlock | None
    tracker_cpu_s: float | None = None  # from its start to its end

    @property
    def step_ms(self) -> float:
        """Return the time per step."""
        return 1000 * self.seconds / self.steps


class Experiment:
    """A built training, and the sidecars beside it. `sampled` names the devices that they sample."""

    def __init__(self, bench: BenchConfig, loop: Loop, rows: StepRows, sidecars: Sidecars, sampled: str) -> None:
        self.sampled = sampled
        self.batch = loop.workload.images_per_step
        self._warmup_steps = bench.workload.warmup_steps
        self._loop, self._rows, self._sidecars = loop, rows, sidecars
        self._chunk_steps = 1

    def calibrate(self, block_s: float) -> tuple[int, float]:
        """Warm up, and return how many steps last about `block_s`, and the seconds of one."""
        self._run(WindowKind.WARMUP, self._warmup_steps)
        window = self._loop.run(WindowPlan(kind=WindowKind.MEASURE, steps=MIN_STEPS, min_s=block_s))
        step_s = _seconds(window) / window.steps
        self._chunk_steps = max(1, round(CHUNK_S / step_s))
        return max(MIN_STEPS, round(block_s / step_s)), step_s

    def block(
        self, number: int, arm: str, hz: float | None, steps: int, settle_s: float, *, tracked: bool = False
    ) -> Block:
        """Time one block; sidecar and tracker start before and stop after it. Raises UserError if one does not."""
        started: StartedSidecar | None = None
        if hz is not None:
            start = self._sidecars.start(f"{number}-{arm}", hz, tracked=tracked)
            self._train_until(start.done)
            started = start.result()
            self._rows.files = started.files
        settled_s = time.monotonic() + settle_s
        self._train_until(lambda: time.monotonic() >= settled_s)
        self._rows.take()
        before_s = started.used_cpu_s() if started else 0.0
        window = self._run(WindowKind.MEASURE, steps)
        cpu_s = started.used_cpu_s() - before_s if started else 0.0
        rows = self._rows.take()
        complete, sidecar = True, None
        if started:
            self._rows.files = None
            stop = self._sidecars.stop(started)
            self._train_until(stop.done)
            report, problem = stop.result()
            complete = report.status == "complete" and problem is None
            if not complete:
                print(f"round {number}, {arm}: sidecar {report.status}{f', tracker: {problem}' if problem else ''}")
            sidecar = _sidecar_block(started, report, window, cpu_s) if complete else None
        device_ms = [row["device_ms"] for row in rows if row["device_ms"] is not None]
        return Block(
            round=number,
            arm=arm,
            hz=hz,
            steps=window.steps,
            seconds=_seconds(window),
            device_ms=sum(device_ms) / len(device_ms) if device_ms else None,
            data_wait_pct=100 * sum(row["data_wait_ns"] for row in rows) / 1e9 / _seconds(window),
            complete=complete,
            sidecar=sidecar,
            tracker_cpu_s=started.files.tracker_cpu_s if started and started.files else None,
        )

    def _train_until(self, done: Callable[[], bool]) -> None:
        while not done():
            self._run(WindowKind.WARMUP, self._chunk_steps)

    def _run(self, kind: WindowKind, steps: int) -> Window:
        return self._loop.run(WindowPlan(kind=kind, steps=steps))


@contextmanager
def experiment(bench: BenchConfig, hz: float) -> Iterator[Experiment]:
    """Build the configured training; a sidecar at `hz` is tried first, because a compilation may take minutes.

    Raises UserError if the device, the sidecar or the workload is not available.
    """
    device, uuids = choose_device(bench)
    if bench.telemetry.source == "nvml" and not uuids:
        raise UserError("telemetry=nvml samples a GPU, and this training uses none; set telemetry=replay")
    with _scratch_folder(bench.out) as name:
        sidecars = Sidecars(bench, uuids, Path(name))
        try:
            trial = sidecars.start("trial", hz, tracked=bench.track.module is not None).result()
            sidecars.stop(trial).result()
            sampled = ", ".join(str(gpu.name) for gpu in trial.client.devices)
            if device.type == "cuda":
                torch.cuda.set_device(device)
            workload = workloads.load(bench, device)
            try:
                rows = StepRows()
                loop = Loop(workload, device, Windows(Path(name), device), rows, rows.note_progress)
                yield Experiment(bench, loop, rows, sidecars, sampled)
            finally:
                workload.close()
        finally:
            sidecars.close()


def _scratch_folder(out: str) -> TemporaryDirectory[str]:
    # Below `out`, so that the sidecar's writes cost what they cost in a run.
    try:
        Path(out).mkdir(parents=True, exist_ok=True)
        return TemporaryDirectory(prefix=".overhead-", dir=out)
    except OSError as error:
        raise UserError(f"out={out}: {error.strerror}; the sidecar needs a folder to write to") from None


@dataclass(frozen=True, kw_only=True)
class StartedSidecar:
    """A sidecar that has taken its first sample."""

    client: SidecarClient
    run_dir: Path
    pid: int
    ready_s: float  # after its start
    cpu_s: float  # until then
    files: BlockFiles | None  # if trackers are measured

    def used_cpu_s(self) -> float:
        """Return the CPU time of the process until now, in steps of 10 ms."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # utime and stime


class Sidecars:
    """Starts and stops sidecars and trackers in a thread, while the caller trains; none outlives `close`."""

    def __init__(self, bench: BenchConfig, uuids: list[str], folder: Path) -> None:
        self._bench, self._uuids, self._folder = bench, uuids, folder
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._last: SidecarClient | None = None
        self._files: BlockFiles | None = None

    def start(self, name: str, hz: float, *, tracked: bool = False) -> Future[StartedSidecar]:
        """Start a sidecar, and with `tracked` a tracker."""
        return self._thread.submit(self._start, self._folder / name.replace(" ", ""), hz, tracked)

    def stop(self, started: StartedSidecar) -> Future[tuple[TelemetryReport, str | None]]:
        """Stop both, and return the sidecar's report and why the tracker failed, if it did."""
        return self._thread.submit(self._stop, started)

    def close(self) -> None:
        """Stop the last sidecar."""
        self._thread.shutdown()  # waits for a start that is under way
        if self._files:
            self._files.close()
        if self._last:
            self._last.stop()

    def _stop(self, started: StartedSidecar) -> tuple[TelemetryReport, str | None]:
        report, self._files = started.client.stop(), None
        return report, started.files.close() if started.files else None

    def _start(self, run_dir: Path, hz: float, tracked: bool) -> StartedSidecar:
        capture = self._bench.telemetry.capture or self._bench.gpu.capture
        settings = replace(self._bench.telemetry, fast_hz=hz, capture=capture)
        run_id = f"overhead-{run_dir.name}"
        start_ns = time.monotonic_ns()
        try:
            client = SidecarClient(run_dir, run_id, self._uuids, settings)
        except SidecarError as error:
            raise UserError(str(error)) from None
        self._last, ready_ns = client, time.monotonic_ns()
        report = read_record(run_dir / TELEMETRY, TelemetryReport)  # written just before it was ready
        assert report is not None
        assert report.pid is not None
        if self._bench.track.module:
            self._files = BlockFiles(self._bench, run_dir, self._folder / WINDOWS, run_id, tracked=tracked)
        return StartedSidecar(
            client=client,
            run_dir=run_dir,
            pid=report.pid,
            ready_s=(ready_ns - start_ns) / 1e9,
            cpu_s=report.cpu_s or 0.0,
            files=self._files,
        )


class StepRows:
    """Stands in for `PartWriter`: keeps the rows of a window in memory, and gives them to the files of a block."""

    def __init__(self) -> None:
        self._rows: list[dict[str, Any]] = []
        self.files: BlockFiles | None = None

    def append(self, **row: Any) -> None:
        """Add a row."""
        self._rows.append(row)
        if self.files:
            self.files.append(**row)

    def note_progress(self, step: int, steps_total: int | None, images_per_s: float | None) -> None:
        """Note the progress."""
        if self.files:
            self.files.progress(step, steps_total, images_per_s)

    def close(self) -> None:
        """Do nothing: there is no file."""

    def take(self) -> list[dict[str, Any]]:
        """Return and forget the rows."""
        rows, self._rows = self._rows, []
        return rows


def _seconds(window: Window) -> float:
    assert window.seconds is not None  # it is closed
    return window.seconds


def _sidecar_block(started: StartedSidecar, report: TelemetryReport, window: Window, cpu_s: float) -> SidecarBlock:
    streams = report.streams.values()
    reads = {stream: _reads(started.run_dir / f"samples_{stream}", window) for stream in STREAMS}
    times_ns = sorted({row["tick_seq"]: row["t_mono_ns"] for row in reads["fast"]}.values())
    several = len(times_ns) > 1
    return SidecarBlock(
        problems=report.problems,
        ready_s=started.ready_s,
        start_cpu_s=started.cpu_s,
        cpu_s=cpu_s,
        seconds=_seconds(window),
        rate_hz=(len(times_ns) - 1) * 1e9 / (times_ns[-1] - times_ns[0]) if several else None,
        max_rss_mib=report.max_rss_mib or 0.0,
        ticks_due=sum(stream.ticks_due for stream in streams),
        ticks_skipped=sum(stream.ticks_skipped for stream in streams),
        read_us={stream: [row["read_us"] for row in rows] for stream, rows in reads.items()},
    )


def _reads(folder: Path, window: Window) -> list[dict[str, Any]]:
    """Return the stream's reads within the window: their ticks, their times, and how long they took in us."""
    if not folder.is_dir():
        return []
    end_ns = window.t_end_mono_ns or window.t_start_mono_ns
    rows = pq.read_table(folder, columns=["tick_seq", "t_mono_ns", "read_us"]).to_pylist()
    return [row for row in rows if window.t_start_mono_ns <= row["t_mono_ns"] <= end_ns]
