"""The loop that fills windows with training steps.

The host never waits for the device inside a window: CUDA events mark the steps, losses stay on the device, and both
are read when the window closes. Windows of a training may last for hours, and a kill must not cost their rows: there,
every loss is copied to page-locked host memory behind its step, and its row is written once the copy has completed.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from inpaint_bench.core.errors import UserError
from inpaint_bench.core.records import Window
from inpaint_bench.core.schema import WindowKind
from inpaint_bench.core.stages import stage
from inpaint_bench.telemetry.storage.parts import PartWriter
from inpaint_bench.workloads import TrainingWorkload

from .windows import Windows

PROGRESS_INTERVAL_S = 0.5
LOSS_SLOTS = 4096  # losses that may be on their way to the host: more steps than a CUDA stream queues


@dataclass(frozen=True, kw_only=True)
class WindowPlan:
    """A window of steps: what it counts as, and when it ends.

    It lasts at least `steps` steps and `min_s` seconds. At a step boundary it ends earlier if `should_stop` is
    true after at least one step (a checkpoint is due), and if `stop_signal` names a signal: then it is marked as
    interrupted, and nothing is raised.
    """

    kind: WindowKind
    steps: int
    min_s: float = 0.0
    steps_total: int | None = None  # steps of the whole run, for the progress; None: estimated from this window
    steps_after: int = 0  # at least so many follow in later windows, for that estimate
    stream_rows: bool = False  # write rows while the window is open, not only when it closes
    should_stop: Callable[[], bool] = lambda: False
    stop_signal: Callable[[], str | None] = lambda: None

    def is_done(self, done: int, elapsed_s: float) -> bool:
        """Tell whether the window ends here, after `done` steps."""
        complete = done >= self.steps and elapsed_s >= self.min_s
        return complete or self.stop_signal() is not None or (done > 0 and self.should_stop())

    def expected_total(self, steps_before: int, done: int, elapsed_s: float) -> int | None:
        """Estimate the steps of the whole run; None while that is not possible."""
        if self.steps_total is not None:
            return self.steps_total
        outside = steps_before + self.steps_after
        if not self.min_s:
            return outside + self.steps
        if done < 2 or elapsed_s <= 0:
            return None
        return outside + max(self.steps, math.ceil(self.min_s * done / elapsed_s))


class DeviceTimer:
    """Times the device from this point of its queue on, between two CUDA events; the host waits for neither."""

    def __init__(self, device: torch.device) -> None:
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if device.type == "cuda" else []
        for event in self._events[:1]:
            event.record()

    def stop(self) -> None:
        """Mark the end."""
        for event in self._events[1:]:
            event.record()

    def has_passed(self) -> bool:
        """Return whether the device has passed the end, without waiting for it."""
        return all(event.query() for event in self._events[1:])

    def ms(self, until: DeviceTimer | None = None) -> float | None:
        """Return the time to the end, or to that of a later timer, once the device has passed it; None without CUDA."""
        return self._events[0].elapsed_time((until or self)._events[1]) if self._events else None


@dataclass(kw_only=True, slots=True)
class _Step:
    """One step whose device work may still be queued."""

    row: dict[str, Any]  # row of the step table, without what the device still computes
    loss: Tensor
    timer: DeviceTimer  # timer of its device work
    loss_copy: tuple[Tensor, torch.cuda.Event] | None  # slot in host memory, and when the loss has arrived there


@dataclass
class _Completed:
    """Counts the steps of a window that the device has completed; waits for none."""

    steps: int = 0
    elapsed_s: float = 0.0  # from the start of the window to the end of the last of them
    _first: _Step | None = None
    _queued: deque[_Step] = field(default_factory=deque)

    def add(self, step: _Step) -> None:
        self._first = self._first or step
        self._queued.append(step)

    def update(self, window: Window) -> None:
        last = None
        while self._queued and self._queued[0].timer.has_passed():
            last = self._queued.popleft()
            self.steps += 1
        if last and (first := self._first):
            ms, end_ns = first.timer.ms(last.timer), last.row["t_end_mono_ns"]
            if ms is not None:  # the device was idle when the first step was queued
                end_ns = first.row["t_start_mono_ns"] + first.row["data_wait_ns"] + 1e6 * ms
            self.elapsed_s = (end_ns - window.t_start_mono_ns) / 1e9


@dataclass
class Loop:
    """Runs a workload's steps in windows and writes a row per step. Reports progress at most twice a second."""

    workload: TrainingWorkload
    device: torch.device
    windows: Windows
    rows: PartWriter
    on_progress: Callable[[int, int | None, float | None], None]
    step: int = 0  # steps begun, over all windows
    not_finite: int = 0  # losses that were NaN or infinite
    warmup_s: float = 0.0  # seconds of the warm-up windows
    _pending: deque[_Step] = field(default_factory=deque)  # steps of the window whose rows are not written yet
    _loss_slots: Tensor | None = None  # page-locked host memory
    _progress_s: float = 0.0  # when progress was last reported
    _began: bool = False  # the first step of this start was done

    def run(self, plan: WindowPlan) -> Window:
        """Run the steps of one window. Window and rows are also written if a step fails or is interrupted."""
        # Before the window opens: page-locking memory is slow.
        if plan.stream_rows and self.device.type == "cuda" and self._loss_slots is None:
            self._loss_slots = torch.empty(LOSS_SLOTS, pin_memory=True)
        if plan.kind is WindowKind.MEASURE:
            # The peak of a measured window is its own: building the workload and warming up may need more.
            self.windows.reset_peaks()
        steps_before, elapsed_s, completed = self.step, 0.0, _Completed()
        with self.window(plan.kind) as window:
            while not plan.is_done(window.steps, elapsed_s):
                step = self._run_step(plan.stream_rows)
                self._pending.append(step)
                completed.add(step)
                window.steps += 1
                window.images += self.workload.images_per_step
                elapsed_s = (time.monotonic_ns() - window.t_start_mono_ns) / 1e9
                if plan.stream_rows:
                    self._write_rows(window, take_completed(self._pending))
                # The host may be many steps ahead of the device: steps count once the device has completed them.
                if time.monotonic() - self._progress_s >= PROGRESS_INTERVAL_S:
                    completed.update(window)
                    self._report_progress(plan, steps_before, completed.steps, completed.elapsed_s)
            window.reason = plan.stop_signal()
        if plan.kind is WindowKind.WARMUP:
            self.warmup_s += window.seconds or 0.0
        self._report_progress(plan, steps_before, window.steps, window.seconds or 0.0)
        return window

    def check_losses(self) -> None:
        """Raise UserError if no loss was finite: nothing was learnt."""
        if self.not_finite and self.not_finite == self.step:
            raise UserError(f"none of the {self.step} losses is finite; lower workload.learning_rate or check the data")

    def window(self, kind: WindowKind) -> AbstractContextManager[Window]:
        """Record the block as a window. A reason set in it marks it as interrupted."""
        self._pending.clear()
        return self.windows.record(kind, self._finish_window)

    def _finish_window(self, window: Window) -> None:
        # A warm-up counts only if the run ended in it, because its peak includes building the workload.
        if window.kind is WindowKind.MEASURE or (window.kind is WindowKind.WARMUP and window.reason):
            self.windows.keep_peaks(self.windows.peaks())
        try:
            self._write_rows(window, list(self._pending))
        finally:
            self.rows.close()

    def _run_step(self, stream_rows: bool) -> _Step:
        number = self.step
        # The first step waits for the loader, and compiles what the first pass did not need.
        part, self._began = nullcontext if self._began else stage, True
        t_start = time.monotonic_ns()
        with part("data"):
            batch = self.workload.next_batch()
        t_data = time.monotonic_ns()
        timer = DeviceTimer(self.device)  # after next_batch: its time excludes the wait for data
        lr = self.workload.learning_rate()
        with part("compilation"):
            loss = self.workload.step(batch)
        timer.stop()
        self.step += 1
        row = {
            "step": number,
            "t_start_mono_ns": t_start,
            "t_end_mono_ns": time.monotonic_ns(),
            "data_wait_ns": t_data - t_start,
            "images": self.workload.images_per_step,
            "lr": lr,
        }
        loss_copy = self._copy_loss_async(number, loss) if stream_rows else None
        return _Step(row=row, loss=loss, timer=timer, loss_copy=loss_copy)

    def _copy_loss_async(self, number: int, loss: Tensor) -> tuple[Tensor, torch.cuda.Event] | None:
        """Queue a copy of the loss to the host behind its step; None on the CPU."""
        if self._loss_slots is None:
            return None
        # This slot is free: take_completed leaves fewer than LOSS_SLOTS steps pending, numbered consecutively.
        slot, event = self._loss_slots[number % LOSS_SLOTS], torch.cuda.Event()
        slot.copy_(loss, non_blocking=True)
        event.record()
        return slot, event

    def _write_rows(self, window: Window, steps: list[_Step]) -> None:
        """Append rows of completed steps; losses that are still on the device are read in one transfer."""
        if not steps:
            return
        # Either every step of a window has a slot or none has: on the CPU, and if rows are not streamed.
        slots = [step.loss_copy[0] for step in steps if step.loss_copy]
        losses: list[float] = torch.stack(slots or [step.loss for step in steps]).float().tolist()
        for step, loss in zip(steps, losses, strict=True):
            self.rows.append(window_id=window.window_id, **step.row, device_ms=step.timer.ms(), loss=loss)
        self.not_finite += sum(not math.isfinite(loss) for loss in losses)

    def _report_progress(self, plan: WindowPlan, steps_before: int, done: int, elapsed_s: float) -> None:
        self._progress_s = time.monotonic()
        rate = done * self.workload.images_per_step / elapsed_s if elapsed_s > 0 else None
        step, total = steps_before + done, plan.expected_total(steps_before, done, elapsed_s)
        self.on_progress(step, None if total is None else max(total, step), rate)


def take_completed(pending: deque[_Step]) -> list[_Step]:
    """Remove and return the oldest steps whose loss can be read without waiting for the device.

    Waits only if all slots are in use: the next loss would overwrite the oldest.
    """
    completed = []
    while pending:
        # Copies complete in the order of the steps: if the oldest has not arrived, none has.
        copy = pending[0].loss_copy
        if copy and not copy[1].query():
            if len(pending) < LOSS_SLOTS:
                break
            copy[1].synchronize()
        completed.append(pending.popleft())
    return completed
