"""What is done in an attempt: device, sidecar, workload, windows, profile. How it ends is for worker.py.

Importing this module imports torch.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import torch

from inpaint_bench import levers, workloads
from inpaint_bench.core import environment
from inpaint_bench.core.config.bench import SHORT_WINDOW_HZ, SHORT_WINDOW_S, BenchConfig
from inpaint_bench.core.config.recipe import check_telemetry
from inpaint_bench.core.records import Device, Quality, to_record
from inpaint_bench.core.schema import Reason, Status, WindowKind, file_metadata
from inpaint_bench.core.signals import StopSignal
from inpaint_bench.core.stages import stage
from inpaint_bench.core.tables import STEPS
from inpaint_bench.core.workloads.finetune_inpaint import finetune_keys
from inpaint_bench.models.parallel.data_parallel import Command, announce
from inpaint_bench.profiling import ncu, nsys
from inpaint_bench.profiling.count import count_kernels, warm_up
from inpaint_bench.profiling.profile import keep_profiler_attached, profile_calls
from inpaint_bench.ranks import group
from inpaint_bench.ranks.group import choose_device
from inpaint_bench.telemetry.client import SidecarClient
from inpaint_bench.telemetry.storage.background import saving_in_background
from inpaint_bench.telemetry.storage.parts import PartWriter
from inpaint_bench.workloads import MeasuringWorkload, TrainingWorkload, Workload

from .loop import Loop, WindowPlan
from .manifest import ManifestFile
from .recorder import RunRecorder
from .tracked import RunTracker
from .trainer import Trainer
from .windows import Windows


class Attempt:
    """One attempt between its first manifest and its last, on rank 0 if there are several."""

    def __init__(self, bench: BenchConfig, manifest: ManifestFile, stop_signal: StopSignal) -> None:
        self._bench, self._manifest, self._stop_signal = bench, manifest, stop_signal
        self._run_dir, self._run_id = manifest.run_dir, manifest.record.run_id

    def execute(self, tracker: RunTracker) -> None:
        """Build the workload and do all that the configuration asks for."""
        bench, manifest, others = self._bench, self._manifest, list[Device]()
        if bench.profiler in ("torch", "ncu"):
            # Before the levers are read back, which profiles a step too: graphs are replayed once more after it.
            keep_profiler_attached()
        with stage("device"):
            manifest.update(
                environment=environment.fingerprint(),
                boot_id=environment.boot_id(),
                slurm=environment.slurm(),
            )
            # Not before the environment is recorded: a run that finds no GPU names its node and its job all the same.
            device, uuids = choose_device(bench)
            if bench.profiler in ncu.TOOLS:
                ncu.find(bench.profiler)  # before anything is built
            if bench.ranks > 1:
                facts, others = group.meet(device, uuids)
                manifest.update(ranks=facts)
                uuids = [rank.gpu_uuid for rank in facts[: bench.gpus] if rank.gpu_uuid]
        with self._sidecar(uuids, others):
            with stage("model"):
                workload = workloads.load(bench, device)
            try:
                with stage("data"):
                    data = workload.data
                manifest.update(
                    # As found, for batch=auto.
                    batch=workload.images_per_step // (1 if bench.workload.divides_images else bench.ranks),
                    workload_facts=msgspec.to_builtins(workload.facts),
                    data=data,
                    levers=levers.requested(bench),
                    parity=workload.parity,
                )
                tracker.note_link()
                if bench.profiler == "ncu":
                    self._warm_up(workload, device)
                elif isinstance(workload, MeasuringWorkload):
                    self._measure(workload, device)
                else:
                    self._run_windows(workload, device)
                if bench.profiler in ("torch", "ncu"):
                    with stage("profile"):
                        calls = workload.profiled_calls()
                        manifest.update(profile=profile_calls(bench, self._run_dir, self._run_id, calls, device))
            finally:
                with stage("closing"):
                    workload.close()
                    del workload
            # After the workload was closed: destroying NCCL's communicator waits for the CUDA graphs that use it.
            if bench.ranks > 1:
                with stage("closing"):
                    self._leave()
        with stage("profile"):
            if bench.profiler == "ncu":
                self._count()
            elif bench.profiler == "nsys":
                manifest.update(profile=nsys.record_timeline(self._bench_again(), self._run_dir, build))

    def _leave(self) -> None:
        """Let the other ranks end, and record what they have done."""
        announce(Command.END)
        done = zip(self._manifest.record.ranks or [], group.leave_group(None, self._give_up), strict=True)
        others = [
            msgspec.structs.replace(rank, steps=did[0], data_wait_s=did[1], allocated_peak_mib=did[2]) if did else rank
            for rank, did in done
        ]
        self._manifest.update(ranks=others)

    def _give_up(self) -> None:
        message = f"torch's process group did not end within {group.LEAVING_S:g} s"
        self._manifest.finish(Status.FAILED, Reason.APP_ERROR, message)
        os._exit(1)

    def _measure(self, workload: MeasuringWorkload, device: torch.device) -> None:
        workload.facts.uniform_steps = workload.uniform_steps
        self._manifest.update(workload_facts=msgspec.to_builtins(workload.facts))
        with RunRecorder(self._bench, self._manifest, workload, device) as recorder:
            workload.measure(recorder)
        self._manifest.update(memory=recorder.windows.memory, workload_facts=msgspec.to_builtins(workload.facts))
        self._read_levers_back(workload)
        with stage("closing"):
            if written := workload.finish(self._run_dir):
                self._manifest.update(quality=to_record(written, Quality))

    def _run_windows(self, workload: TrainingWorkload, device: torch.device) -> None:
        settings, config = self._bench.telemetry, finetune_keys(self._bench)
        rows = PartWriter(self._run_dir / "steps", STEPS, file_metadata(self._run_id), settings.part_s)
        loop = Loop(workload, device, Windows(self._run_dir, device), rows, self._manifest.progress)
        try:
            # A benchmark is one window after its warm-up; a training has many, whose rows must survive a kill.
            if config.train_steps is None:
                # Two windows: the first steps compile and capture, which is no load and must not count as such.
                for steps, min_s in ((config.warmup_steps, 0.0), (0, config.min_warmup_s)):
                    if steps or min_s:
                        after = config.measure_steps
                        loop.run(WindowPlan(kind=WindowKind.WARMUP, steps=steps, min_s=min_s, steps_after=after))
                loop.run(WindowPlan(kind=WindowKind.MEASURE, steps=config.measure_steps, min_s=config.min_measure_s))
                loop.check_losses()
            else:
                with saving_in_background(rows, settings.journal_s):
                    Trainer(self._bench, self._manifest, workload, loop, self._stop_signal).run(config.train_steps)
        finally:
            with stage("closing"):
                rows.close()
                self._record_results(workload, loop)
        self._read_levers_back(workload)

    def _record_results(self, workload: TrainingWorkload, loop: Loop) -> None:
        """Record what is known only after the last window, also after one that failed."""
        facts = workload.facts
        try:
            facts.skipped_steps = workload.skipped_steps()
        except RuntimeError:  # a device in an error state does not answer
            facts.skipped_steps = None
        facts.losses_not_finite, facts.warmup_s = loop.not_finite, round(loop.warmup_s, 3)
        self._manifest.update(workload_facts=msgspec.to_builtins(facts), memory=loop.windows.memory)

    def _warm_up(self, workload: Workload, device: torch.device) -> None:
        """Prepare a profile without windows, which tells which kernels to count."""
        if self._bench.searches_batch:
            self._bench.batch = workload.images_per_step  # found: the process under ncu does not search again
        warm_up(workload.profiled_calls(), device)
        self._read_levers_back(workload)

    def _read_levers_back(self, workload: Workload) -> None:
        """Only after windows that succeeded: it takes two more steps."""
        with stage("profile"):
            self._manifest.update(levers=levers.verify(workload.execution, workload.probe))

    def _count(self) -> None:
        """Count kernels in a process of its own; by now the workload and the sidecar have ended."""
        facts = self._manifest.record.profile
        assert facts is not None
        problems = count_kernels(self._bench_again(), self._run_dir, self._run_id, build)
        self._manifest.update(profile=msgspec.structs.replace(facts, problems=[*facts.problems, *problems]))

    def _bench_again(self) -> BenchConfig:
        """Return the configuration for the process under ncu or nsys, with the batch that was found."""
        return replace(self._bench, batch=self._manifest.record.batch or self._bench.batch)

    @contextmanager
    def _sidecar(self, uuids: list[str], others: list[Device]) -> Iterator[None]:
        """Run the telemetry process around the block, and record how it ended; those of other nodes sample `others`."""
        with stage("telemetry"):
            sidecar = start_sidecar(self._bench, self._run_dir, self._run_id, uuids)
        try:
            self._manifest.note_sidecar(sidecar, [*sidecar.devices, *others], self._bench.gpus)
            yield
        finally:
            with stage("closing"):
                self._manifest.update(telemetry=sidecar.end())


def build(bench: BenchConfig) -> tuple[Workload, torch.device]:
    """Build the workload in the process under ncu or nsys."""
    device, _ = choose_device(bench)
    return workloads.load(bench, device), device


def start_sidecar(bench: BenchConfig, folder: Path, run_id: str, uuids: list[str], node: int = 0) -> SidecarClient:
    """Start the telemetry process of a node. Raises UserError if it has nothing to sample."""
    check_telemetry(bench)
    settings = replace(bench.telemetry, capture=bench.telemetry.capture or bench.gpu.capture)
    # A second between two readings is some percent of a short window. The windows of a training have other lengths.
    if bench.workload.min_measure_s < SHORT_WINDOW_S and not getattr(bench.workload, "train_steps", None):
        settings.energy_hz = max(settings.energy_hz, SHORT_WINDOW_HZ)
    if settings.source == "replay" and not uuids:
        uuids = ["replay"] * bench.gpus  # only their number counts
    agent = os.getppid() if bench.ranks > 1 else None  # has started every rank of this node
    return SidecarClient(folder, run_id, uuids, settings, first=node * bench.gpus, worker=agent)
