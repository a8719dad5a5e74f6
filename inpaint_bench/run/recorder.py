"""What a workload with a protocol of its own measures: timed calls in windows, and rows of results.

Each call begins and ends with the device idle, so its time is that of the host's clock too. Rows are in the journal
seconds after their call, and in a closed part when their window closes.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Self

import msgspec
import torch

from inpaint_bench.core.config.bench import BenchConfig
from inpaint_bench.core.records import Window
from inpaint_bench.core.schema import Status, WindowKind, file_metadata, results_table
from inpaint_bench.core.tables import SCHEMAS, STEPS
from inpaint_bench.core.workloads import Result
from inpaint_bench.telemetry.storage.background import saving_in_background
from inpaint_bench.telemetry.storage.parts import PartWriter
from inpaint_bench.workloads import Call, MeasuringWorkload, Recorder, used_mib

from .loop import DeviceTimer
from .manifest import ManifestFile
from .windows import Windows


class RunRecorder(Recorder):
    """The `workloads.Recorder` of a run directory. Closing it writes what is left."""

    def __init__(
        self, bench: BenchConfig, manifest: ManifestFile, workload: MeasuringWorkload, device: torch.device
    ) -> None:
        run_dir, metadata = manifest.run_dir, file_metadata(manifest.record.run_id)
        self._manifest, self._device, self._workload = manifest, device, workload
        self._images, self._uniform = workload.images_per_step, workload.uniform_steps
        self.windows = Windows(run_dir, device)
        self._steps = PartWriter(run_dir / "steps", STEPS, metadata, bench.telemetry.part_s)
        table = results_table(bench.workload.name)
        schema = SCHEMAS.get(table)
        # A run of a workload without results has no such table.
        self._results = PartWriter(run_dir / table, schema, metadata, bench.telemetry.part_s) if schema else None
        self._writers = [writer for writer in (self._steps, self._results) if writer]
        self._journal_s, self._saving = bench.telemetry.journal_s, ExitStack()
        self._window: Window | None = None
        self._step = 0

    def __enter__(self) -> Self:
        for writer in self._writers:
            self._saving.enter_context(saving_in_background(writer, self._journal_s))
        return self

    def __exit__(self, *_: object) -> None:
        self._saving.close()
        self._close_parts()

    @contextmanager
    def window(self, kind: WindowKind) -> Iterator[str]:
        """Record the block as a window, and give its id; the device is idle at its edges."""
        with self.windows.record(kind, self._finish_window) as self._window:
            yield self._window.window_id

    def _finish_window(self, window: Window) -> None:
        self._window = None
        if window.status is Status.COMPLETED:
            self._note_progress(window.images / window.seconds if self._uniform and window.seconds else None)
        self._close_parts()

    def call(self, work: Callable[[], Any], *, empty_cache: bool = False) -> Call:
        """Time one step of the open window."""
        window = self._window
        assert window is not None, "a call is made in a window"
        self.windows.synchronize()
        if empty_cache and self._device.type == "cuda":
            torch.cuda.empty_cache()
        self.windows.reset_peaks()
        start_ns = time.monotonic_ns()
        timer = DeviceTimer(self._device)
        result = work()
        timer.stop()
        self.windows.synchronize()
        end_ns = time.monotonic_ns()
        peaks = self.windows.peaks()
        loss = _loss(result)
        del result  # until here its memory counts
        call = Call(
            window_id=window.window_id,
            step=self._step,
            host_ms=(end_ns - start_ns) / 1e6,
            device_ms=timer.ms(),
            **msgspec.structs.asdict(peaks),
            nvml_used_mib=used_mib(self._device),
        )
        self._steps.append(
            window_id=window.window_id,
            step=self._step,
            t_start_mono_ns=start_ns,
            t_end_mono_ns=end_ns,
            data_wait_ns=0,
            device_ms=call.device_ms,
            images=self._images,
            loss=loss,
        )
        if window.kind is WindowKind.MEASURE:
            self.windows.keep_peaks(peaks)
        self._step += 1
        window.steps += 1
        window.images += self._images
        self._note_progress(None)
        return call

    def result(self, row: Result) -> None:
        """Write a row of results."""
        assert self._results is not None, "this workload declares no Result"
        self._results.append(**msgspec.structs.asdict(row))

    def _note_progress(self, rate: float | None) -> None:
        total = self._workload.calls_total
        # An estimate may turn out too low.
        self._manifest.progress(self._step, None if total is None else max(total, self._step), rate)

    def _close_parts(self) -> None:
        for writer in self._writers:
            writer.close()


def _loss(result: Any) -> float | None:
    """Return what a call gave back if that is one number, on any device."""
    if isinstance(result, torch.Tensor) and result.numel() == 1:
        return float(result.detach())
    return result if isinstance(result, float) else None
