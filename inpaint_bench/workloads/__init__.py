"""What is executed. A workload is a module with `build(config, device)`, which returns one of the classes here.

A `TrainingWorkload` does one step after another in the windows of run/loop.py; a `MeasuringWorkload` has a protocol of
its own. Its configuration keys, and the columns of its results, are declared in core/workloads/<name>.py.
"""

import importlib
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from inpaint_bench.core import environment
from inpaint_bench.core.config.bench import BenchConfig
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.records import DataFacts, Parity
from inpaint_bench.core.schema import WindowKind
from inpaint_bench.core.stages import stage
from inpaint_bench.core.workloads import Facts, Result, WorkloadConfig
from inpaint_bench.kernels import cache as kernel_cache
from inpaint_bench.models.execution import Execution
from inpaint_bench.profiling.profile import ProfiledCall as ProfiledCall

MIB = 2**20


class Workload:
    """What the worker asks of every workload."""

    images_per_step: int
    facts: Facts
    parity: Parity | None = None
    execution: Execution | None = None  # what levers change; None: it obeys none

    def probe(self) -> Callable[[], object]:
        """Return another step or call, for levers to observe. Only after the last measured one."""
        assert self.execution is not None
        return self.execution.eager_pass

    def profiled_calls(self) -> Iterator[ProfiledCall]:
        """Yield what a profile shows. Each is used before the next one is asked for, all after the last window."""
        yield from ()

    def finish(self, run_dir: Path) -> dict[str, Any]:
        """Write what the run leaves beside its tables; return it as fields of records.Quality, empty for nothing."""
        return {}

    def close(self) -> None:
        """Release what `build` opened, and end worker processes."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """A timed call: a row of the step table. Sizes are MiB; without CUDA all but the host's time is None."""

    window_id: str
    step: int
    host_ms: float  # the device is idle before and after it
    device_ms: float | None  # between CUDA events
    allocated_peak_mib: float | None
    reserved_peak_mib: float | None
    nvml_used_mib: float | None  # memory of the whole GPU, right after the call; None also if NVML does not answer


def used_mib(device: torch.device) -> float | None:
    """Return the memory in use on the whole GPU, by NVML."""
    if device.type != "cuda":
        return None
    try:
        return torch.cuda.device_memory_used(device) / MIB
    except Exception:  # NVML has errors of its own; the call was measured all the same
        return None


class Recorder(ABC):
    """Where a `MeasuringWorkload` writes what it measures: windows, steps and results. See run/recorder.py."""

    @abstractmethod
    def window(self, kind: WindowKind) -> AbstractContextManager[str]:
        """Record the block as a window and give its id. All calls are made inside one, also those of a warm-up."""

    @abstractmethod
    def call(self, work: Callable[[], Any], *, empty_cache: bool = False) -> Call:
        """Time one step. A single number that `work` returns is the loss of the step, for the step table and a tracker.

        `empty_cache`: return unused memory to the GPU first, so that the reserved peak is its own.
        """

    @abstractmethod
    def result(self, row: Result) -> None:
        """Write a row of results. It is on disk when the window closes."""


def measured_calls(config: WorkloadConfig) -> Iterator[tuple[int, float]]:
    """Yield how many calls were made in how many seconds, before each until both lengths to measure are reached."""
    start_s, done, elapsed_s = time.monotonic(), 0, 0.0
    while done < config.measure_steps or elapsed_s < config.min_measure_s:
        yield done, elapsed_s
        done, elapsed_s = done + 1, time.monotonic() - start_s


class MeasuringWorkload(Workload):
    """A workload that is no training: it makes timed calls of its own, and writes rows of results.

    With `uniform_steps` every step does the same work: then images/s, J/image and percentiles of the step time mean
    something, and are computed from the measure windows as for a training. Else they stay empty.
    """

    bench: BenchConfig
    uniform_steps: bool
    data: DataFacts | None = None
    calls_total: int | None = None  # calls of all windows, for the progress; None while it cannot be estimated

    def measure(self, recorder: Recorder) -> None:
        """Do all there is to measure: calls of `step`, in a window of warm-ups and a measured one.

        A signal raises Terminated in it; rows of closed windows are kept.
        """
        config = self.bench.workload
        self.calls_total = None if config.min_measure_s else config.warmup_steps + config.measure_steps
        if config.warmup_steps:
            with recorder.window(WindowKind.WARMUP):
                for _ in range(config.warmup_steps):
                    self.step(recorder)
        with recorder.window(WindowKind.MEASURE):
            for done, elapsed_s in measured_calls(config):
                if config.min_measure_s and done:
                    expected = math.ceil(config.min_measure_s * done / elapsed_s)
                    self.calls_total = config.warmup_steps + max(config.measure_steps, expected)
                self.step(recorder)

    def step(self, recorder: Recorder) -> None:
        """Make one timed call and write its row."""
        raise NotImplementedError

    def follow(self) -> None:
        """Do on another rank what rank 0 measures, to its last call. Only of a workload that can use several."""
        raise NotImplementedError


class TrainingWorkload(Workload, ABC):
    """One step after another on one device, over endless batches.

    `step` queues its work and returns: it neither synchronises with the device nor reads a value from it. With fp16 it
    does, once per step: PyTorch's gradient scaler checks whether the update is finite. With non_blocking it waits for
    the step before the last one.
    """

    @property
    @abstractmethod
    def data(self) -> DataFacts:
        """Return the images of this run, and the loader's settings."""

    @property
    def prefetched_batches(self) -> int:
        """Return the number of batches that the loader prepares while none is requested."""
        return 0

    @abstractmethod
    def next_batch(self) -> Any:
        """Wait for the loader; the time this takes is the step's `data_wait_ns`."""

    @abstractmethod
    def step(self, batch: Any) -> Tensor:
        """Train on one batch. Return the loss, a detached scalar that stays on the device."""

    @abstractmethod
    def learning_rate(self) -> float:
        """Return the learning rate of the next step."""

    @abstractmethod
    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return all that the next step depends on, at a step boundary: tensors by name, and plain JSON."""

    @abstractmethod
    def restore(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Continue from what `state` returned, as if never stopped. Raises UserError if it is another model's."""

    def validate(self) -> dict[str, float]:
        """Return metrics on held-out data, with fixed noise and masks; empty if nothing is held out."""
        return {}

    def skipped_steps(self) -> int:
        """Return the number of steps whose update fp16 overflow suppressed. Synchronises: at window edges only."""
        return 0


def load(config: BenchConfig, device: torch.device) -> TrainingWorkload | MeasuringWorkload:
    """Build the workload that the configuration names on `device`. Raises UserError if there is no such module."""
    name = config.workload.module
    try:
        with stage("imports"):
            module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise  # the module exists, something that it imports does not
        raise UserError(f"workload.module={name}: no such module") from None
    build = getattr(module, "build", None)
    if build is None:
        raise UserError(f"workload.module={name}: has no function build(config, device)")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        card = torch.cuda.get_device_properties(device)
        facts = f"{card.major}.{card.minor}", f"CUDA {torch.version.cuda}", f"driver {environment.machine().driver}"
        kernel_cache.use(kernel_cache.roots(config.site.storage), card.name, facts)
    return build(config, device)
