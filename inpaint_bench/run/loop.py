"""Windows of a run, and the loop that fills them with steps.

The loop never waits for the device inside a window: CUDA events mark the steps, losses stay on the device,
and both are read when the window ends. Windows of training may last for hours, and a kill must not take their
rows along: there, losses travel to the host behind their steps and are read once they have landed. A window
begins and ends with the device idle, so `images / (t_end - t_start)` is what was really done in that time.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from inpaint_bench.core.files import read_json, replace_json
from inpaint_bench.core.schema import WINDOWS, WindowKind, WindowStatus

if TYPE_CHECKING:
    from inpaint_bench.workloads import Workload

PROGRESS_STEP_S = 0.5  # how often the loop itself bothers to note progress
LANDING = 4096  # losses that may be under way to the host: more steps than a device's queue holds


@dataclass(kw_only=True)
class Window:
    """A stretch of a run. An end that nobody saw stays null."""

    window_id: str
    kind: str
    status: str
    t_start_mono_ns: int
    t_start_unix_ns: int
    t_end_mono_ns: int | None = None
    t_end_unix_ns: int | None = None
    steps: int = 0
    images: int = 0
    reason: str | None = None

    @property
    def seconds(self) -> float | None:
        return None if self.t_end_mono_ns is None else (self.t_end_mono_ns - self.t_start_mono_ns) / 1e9


class Windows:
    """windows.json: rewritten whole when a window opens and when it closes.

    In a directory where an attempt was cut off before, its windows stay: an open one becomes interrupted,
    without an end, and ids go on counting.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / WINDOWS
        self._all: list[dict[str, Any]] = read_json(self._path) or []
        for record in self._all:
            if record["status"] == WindowStatus.RUNNING:
                record.update(status=WindowStatus.INTERRUPTED.value, reason="the process ended without a word")

    def open(self, kind: WindowKind) -> Window:
        window = Window(
            window_id=f"{kind.value}-{len(self._all)}",
            kind=kind.value,
            status=WindowStatus.RUNNING.value,
            t_start_mono_ns=0,
            t_start_unix_ns=0,
        )
        self._stamp(window, "start")
        self._all.append(asdict(window))
        replace_json(self._path, self._all)
        self._stamp(window, "start")  # again: a disk that is slow to sync is no part of the window
        return window

    def close(self, window: Window, status: WindowStatus, reason: str | None = None) -> None:
        """The window ends now."""
        self._stamp(window, "end")
        window.status, window.reason = status.value, reason
        place = next(i for i, record in enumerate(self._all) if record["window_id"] == window.window_id)
        self._all[place] = asdict(window)
        replace_json(self._path, self._all)

    @staticmethod
    def _stamp(window: Window, edge: str) -> None:
        setattr(window, f"t_{edge}_mono_ns", time.monotonic_ns())
        setattr(window, f"t_{edge}_unix_ns", time.time_ns())


class StepWriter(Protocol):
    """What the loop needs of a `PartWriter`."""

    def append(self, **row: Any) -> None: ...

    def close(self) -> None: ...


@dataclass(kw_only=True, slots=True)
class _Step:
    """One step while its device work may still be under way."""

    number: int
    t_start_mono_ns: int
    t_end_mono_ns: int
    data_wait_ns: int
    lr: float
    loss: Tensor
    marks: tuple[torch.cuda.Event, torch.cuda.Event] | None
    landing: tuple[Tensor, torch.cuda.Event] | None  # where on the host the loss comes to lie, and when it does


class Loop:
    """Runs a workload's steps in windows and writes a row per step.

    `on_progress(step, steps_total, images_per_s)` is called at most twice a second; `steps_total` is None
    until it can be told. `losses` holds the last window's losses, in order.
    """

    def __init__(
        self,
        workload: Workload,
        device: torch.device,
        windows: Windows,
        rows: StepWriter,
        on_progress: Callable[[int, int | None, float | None], None],
    ) -> None:
        self.workload, self.device, self.windows = workload, device, windows
        self.step = 0  # steps begun, over all windows
        self.losses: list[float] = []
        self.not_finite = 0  # losses that were NaN or infinite
        self.memory: dict[str, float] | None = None
        self._rows, self._on_progress = rows, on_progress
        self._pinned: Tensor | None = None  # where losses land; page-locked once, that is slow
        self._said = 0.0

    def warmup(self, steps: int, steps_after: int) -> None:
        """A window that is not counted. `steps_after`: how many follow at least, for the progress."""
        if steps:
            self._run(WindowKind.WARMUP, lambda done, _: done >= steps, lambda _, __: steps + steps_after)

    def measure(self, steps: int, min_s: float) -> Window:
        """A window of at least `steps` steps and at least `min_s` seconds. Peak memory counts from here."""
        before = self.step
        self._forget_peak()

        def total(done: int, elapsed_s: float) -> int | None:
            if done >= 2 and elapsed_s > 0:
                return before + max(steps, math.ceil(min_s * done / elapsed_s))
            return None if min_s else before + steps

        return self._run(WindowKind.MEASURE, lambda done, s: done >= steps and s >= min_s, total)

    def train(
        self,
        kind: WindowKind,
        until: int,
        steps_total: int,
        leave: Callable[[], bool],
        stopped: Callable[[], str | None],
    ) -> Window:
        """A window of steps up to step number `until`, ended earlier at the step boundary where `leave` says so.

        Where `stopped` gives a reason it ends too, as interrupted for that reason; nothing is raised. Peak
        memory is that of the measure windows alone. Rows are written as their steps are done.
        """
        if self.device.type == "cuda" and self._pinned is None:
            self._pinned = torch.empty(LANDING, pin_memory=True)
        if kind is WindowKind.MEASURE:
            self._forget_peak()

        def enough(done: int, _: float) -> bool:
            return self.step >= until or stopped() is not None or (done > 0 and leave())

        return self._run(kind, enough, lambda _, __: steps_total, stopped, early=True)

    @contextmanager
    def aside(self, kind: WindowKind) -> Iterator[None]:
        """A window without steps around the block; the device is idle at its edges."""
        self._synchronize()
        window = self.windows.open(kind)
        try:
            yield
            self._synchronize()
        except BaseException as error:
            self.losses = []
            self._cut(window, deque(), error)
            raise
        self.windows.close(window, WindowStatus.COMPLETED)

    def _run(
        self,
        kind: WindowKind,
        enough: Callable[[int, float], bool],
        total: Callable[[int, float], int | None],
        stopped: Callable[[], str | None] = lambda: None,
        *,
        early: bool = False,
    ) -> Window:
        """`early`: rows are written within the window, as soon as they are known."""
        self._synchronize()
        window = self.windows.open(kind)
        steps: deque[_Step] = deque()  # those not yet written; the losses are those of the written ones
        self.losses = []
        try:
            done, elapsed_s = 0, 0.0
            while not enough(done, elapsed_s):
                steps.append(self._one(early))
                done += 1
                elapsed_s = (time.monotonic_ns() - window.t_start_mono_ns) / 1e9
                if early:
                    self._write(window, _landed(steps))
                self._say(done, elapsed_s, total, finished=False)
            self._synchronize()
        except BaseException as error:
            self._cut(window, steps, error)
            with suppress(RuntimeError):
                self._note_peak()
            raise
        self._count(window, steps)
        reason = stopped()
        self.windows.close(window, WindowStatus.INTERRUPTED if reason else WindowStatus.COMPLETED, reason)
        self._write(window, list(steps))
        self._rows.close()
        if kind is WindowKind.MEASURE:
            self._note_peak()
        self._say(done, window.seconds or 0.0, total, finished=True)
        return window

    def _one(self, early: bool) -> _Step:
        number = self.step
        start = time.monotonic_ns()
        batch = self.workload.next_batch()
        ready = time.monotonic_ns()
        marks = None
        if self.device.type == "cuda":
            marks = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            marks[0].record()
        lr = self.workload.learning_rate()
        loss = self.workload.step(batch)
        if marks:
            marks[1].record()
        self.step += 1
        return _Step(
            number=number,
            t_start_mono_ns=start,
            t_end_mono_ns=time.monotonic_ns(),
            data_wait_ns=ready - start,
            lr=lr,
            loss=loss,
            marks=marks,
            landing=self._land(number, loss) if early else None,
        )

    def _land(self, number: int, loss: Tensor) -> tuple[Tensor, torch.cuda.Event] | None:
        """Send the loss to the host behind its step; None where it is there already."""
        if self._pinned is None:
            return None
        place, event = self._pinned[number % LANDING], torch.cuda.Event()
        place.copy_(loss, non_blocking=True)
        event.record()
        return place, event

    def _cut(self, window: Window, steps: deque[_Step], error: BaseException) -> None:
        """Keep what a failing or interrupted window did, and mark it."""
        stopped = isinstance(error, KeyboardInterrupt | SystemExit)
        status = WindowStatus.INTERRUPTED if stopped else WindowStatus.FAILED
        with suppress(RuntimeError):  # a device in error cannot finish what was queued
            self._synchronize()
        self._count(window, steps)
        self.windows.close(window, status, reason=type(error).__name__)
        with suppress(RuntimeError):
            self._write(window, list(steps))
        self._rows.close()

    def _count(self, window: Window, steps: deque[_Step]) -> None:
        window.steps = len(self.losses) + len(steps)
        window.images = window.steps * self.workload.images_per_step

    def _write(self, window: Window, steps: list[_Step]) -> None:
        """Rows of steps that are done, into memory; losses still on the device come in one transfer."""
        if not steps:
            return
        places = [step.landing[0] for step in steps if step.landing]
        losses: list[float] = torch.stack(places or [step.loss for step in steps]).float().tolist()
        for step, loss in zip(steps, losses, strict=True):
            self._rows.append(
                window_id=window.window_id,
                step=step.number,
                t_start_mono_ns=step.t_start_mono_ns,
                t_end_mono_ns=step.t_end_mono_ns,
                data_wait_ns=step.data_wait_ns,
                device_ms=step.marks[0].elapsed_time(step.marks[1]) if step.marks else None,
                images=self.workload.images_per_step,
                loss=loss,
                lr=step.lr,
            )
        self.losses += losses
        self.not_finite += sum(not math.isfinite(loss) for loss in losses)

    def _say(
        self,
        done: int,
        elapsed_s: float,
        total: Callable[[int, float], int | None],
        *,
        finished: bool,
    ) -> None:
        """Without a device sync: the host may be a step or so ahead of what is done."""
        now = time.monotonic()
        if not finished and now - self._said < PROGRESS_STEP_S:
            return
        self._said = now
        rate = done * self.workload.images_per_step / elapsed_s if elapsed_s > 0 else None
        in_all = total(done, elapsed_s)
        self._on_progress(self.step, None if in_all is None else max(in_all, self.step), rate)

    def _forget_peak(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)

    def _note_peak(self) -> None:
        """The largest peak of several windows stays."""
        before = self.memory or {}
        if peak := peak_memory(self.device):
            self.memory = {name: max(value, before.get(name, 0.0)) for name, value in peak.items()}

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _landed(steps: deque[_Step]) -> list[_Step]:
    """Taken out: the steps, oldest first, that can be read without waiting for the device, or whose place is needed."""
    found = []
    while steps:
        landing = steps[0].landing
        if landing and not landing[1].query():
            if len(steps) < LANDING:
                break
            landing[1].synchronize()  # the next loss would land on this one
        found.append(steps.popleft())
    return found


def peak_memory(device: torch.device) -> dict[str, float] | None:
    """Peaks of PyTorch's own allocator since the last reset, in MiB; None without a GPU."""
    if device.type != "cuda":
        return None
    mib = 2**20
    return {
        "allocated_peak_mib": round(torch.cuda.max_memory_allocated(device) / mib, 1),
        "reserved_peak_mib": round(torch.cuda.max_memory_reserved(device) / mib, 1),
    }
