"""What a run measures: its windows, and peaks of memory.

The steps of a training (loop.py), timed calls (recorder.py) and `watch` use it. A window opens and closes with the
device idle, so `images / (t_end - t_start)` is the true rate. Loads no torch if there is no GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inpaint_bench.core.records import MemoryPeaks, Window, read_record, write_record
from inpaint_bench.core.schema import WINDOWS, Status, WindowKind
from inpaint_bench.core.stages import stage

if TYPE_CHECKING:
    import torch

MIB = 2**20
STAGE = {WindowKind.WARMUP: "warm-up", WindowKind.CHECKPOINT: "closing"}  # of the others: window


class Windows:
    """windows.json, rewritten when a window opens and when it closes.

    Windows of an earlier start in the directory stay: one that it left open is marked as interrupted, without an
    end, and the numbering continues. Raises ValueError if the file of an earlier start is damaged.
    """

    def __init__(self, run_dir: Path, device: torch.device | None = None) -> None:
        self.memory: MemoryPeaks | None = None  # the largest peaks that were kept; None without CUDA
        self._path, self._device = run_dir / WINDOWS, device
        self._cuda: Any = None
        if device is not None and device.type == "cuda":
            import torch

            self._cuda = torch.cuda
        self._windows = read_record(self._path, list[Window]) or []
        for window in self._windows:
            if window.status is Status.RUNNING:
                window.status, window.reason = Status.INTERRUPTED, "the process ended without closing it"

    def open(self, kind: WindowKind) -> Window:
        """Begin a window. Its clock starts after the file is written: a slow disk is no part of it."""
        window = Window(
            window_id=f"{kind.value}-{len(self._windows)}",
            kind=kind,
            status=Status.RUNNING,
            t_start_mono_ns=time.monotonic_ns(),
            t_start_unix_ns=time.time_ns(),
        )
        self._windows.append(window)
        write_record(self._path, self._windows)
        window.t_start_mono_ns, window.t_start_unix_ns = time.monotonic_ns(), time.time_ns()
        return window

    def stop_clock(self, window: Window) -> None:
        """End the window now, before anything that takes time; `close` writes it."""
        window.t_end_mono_ns, window.t_end_unix_ns = time.monotonic_ns(), time.time_ns()

    def close(self, window: Window, status: Status) -> None:
        """Write a window with its end, which is now unless its clock was stopped."""
        if window.t_end_mono_ns is None:
            self.stop_clock(window)
        window.status = status
        write_record(self._path, self._windows)

    @contextmanager
    def record(self, kind: WindowKind, finish: Callable[[Window], None]) -> Iterator[Window]:
        """Record the block as a window; the device is idle at its edges. A reason set in it marks it as interrupted.

        `finish` runs after the end of the window, however it ends: reading losses and writing rows take time.
        """
        with stage(STAGE.get(kind, "window")):
            yield from self._recorded(kind, finish)

    def _recorded(self, kind: WindowKind, finish: Callable[[Window], None]) -> Iterator[Window]:
        self.synchronize()
        window = self.open(kind)
        try:
            yield window
            self.synchronize()
        except BaseException as error:
            interrupted = isinstance(error, KeyboardInterrupt | SystemExit)
            window.reason = type(error).__name__
            # A device in an error state can neither finish what was queued nor return losses.
            with suppress(RuntimeError):
                self.synchronize()
            with suppress(RuntimeError):
                self._end(window, Status.INTERRUPTED if interrupted else Status.FAILED, finish)
            raise
        self._end(window, Status.INTERRUPTED if window.reason else Status.COMPLETED, finish)

    def _end(self, window: Window, status: Status, finish: Callable[[Window], None]) -> None:
        self.stop_clock(window)
        try:
            self.close(window, status)
        finally:
            finish(window)

    # --- the device; without CUDA its peaks are None ---------------------------------------------

    def synchronize(self) -> None:
        """Wait until the device is idle."""
        if self._cuda:
            self._cuda.synchronize(self._device)

    def reset_peaks(self) -> None:
        """Let the peaks of memory begin here."""
        if self._cuda:
            self._cuda.reset_peak_memory_stats(self._device)

    def peaks(self) -> MemoryPeaks:
        """Return the peaks of PyTorch's allocator since they were reset."""
        if not self._cuda:
            return MemoryPeaks()
        return MemoryPeaks(
            allocated_peak_mib=self._cuda.max_memory_allocated(self._device) / MIB,
            reserved_peak_mib=self._cuda.max_memory_reserved(self._device) / MIB,
        )

    def keep_peaks(self, peaks: MemoryPeaks) -> None:
        """Keep the larger of each peak in `memory`, to a tenth of a MiB."""
        if not self._cuda:
            return
        known = self.memory or MemoryPeaks()
        self.memory = MemoryPeaks(
            allocated_peak_mib=max(known.allocated_peak_mib or 0.0, round(peaks.allocated_peak_mib or 0.0, 1)),
            reserved_peak_mib=max(known.reserved_peak_mib or 0.0, round(peaks.reserved_peak_mib or 0.0, 1)),
        )
