"""One attempt from start to end: manifest, device, sidecar, workload, windows.

However it ends, the manifest records it and the sidecar is closed; a failure is raised again, so that the process
exits non-zero and the scheduler knows too.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from omegaconf import DictConfig

from inpaint_bench.core import environment
from inpaint_bench.core.config.bench import BenchConfig
from inpaint_bench.core.config.parse import parse_config
from inpaint_bench.core.errors import UnavailableError, UserError
from inpaint_bench.core.records import (
    Device,
    LeverReport,
    Manifest,
    Quality,
    SlurmJob,
    to_record,
)
from inpaint_bench.core.schema import Reason, Status, WindowKind, file_metadata
from inpaint_bench.core.signals import StopSignal, Terminated, defer_signals, terminable
from inpaint_bench.core.tables import STEPS
from inpaint_bench.core.workloads.finetune_inpaint import finetune_keys
from inpaint_bench.ranks.group import RankError, choose_device
from inpaint_bench.ranks.leader import Leader, leading

from . import slurm_job
from .manifest import ManifestFile
from .tracked import RunTracker

if TYPE_CHECKING:
    import torch

    from inpaint_bench.telemetry.client import SidecarClient
    from inpaint_bench.workloads import MeasuringWorkload, TrainingWorkload, Workload

    from .loop import Loop

TIME_LIMIT_MARGIN_S = 90  # a SIGTERM so close to the job's end means the time limit (Slurm's KillWait is 30 s)

log = logging.getLogger(__name__)


def run(config: DictConfig, run_dir: Path, overrides: list[str]) -> Manifest:
    """Execute one point in `run_dir` and return its manifest. Whatever ends it early is raised again."""
    bench = parse_config(config)
    run_dir.mkdir(parents=True, exist_ok=True)
    manifest = ManifestFile.start(run_dir, bench, config, overrides)
    run_id = manifest.record.run_id
    with terminable() as stop_signal, RunTracker(bench.track, run_dir, manifest) as tracker:
        try:
            with leading(bench, run_dir, run_id, manifest.update, manifest.finish) as leader:
                tracker.start()
                _run_attempt(bench, run_dir, manifest, stop_signal, leader, tracker)
            manifest.finish(Status.COMPLETED)
        except BaseException as error:
            status, reason, message = diagnose(error, bench)
            if _should_requeue(bench, manifest, reason, error):
                _requeue(manifest, reason, message)
            else:
                hint = "; resubmit it with `rerun`" if reason is Reason.PREEMPTED else ""
                manifest.finish(status, reason, message + hint)
            raise
    return manifest.record


def _should_requeue(bench: BenchConfig, manifest: ManifestFile, reason: Reason, error: BaseException) -> bool:
    """Tell whether the job requeues itself: when pre-empted, and at a time limit while training makes progress."""
    if reason is Reason.PREEMPTED:
        # A container has no scontrol.
        return bench.site.requeue.request and not bench.site.environment.container.image
    terminated = _interruption(error)
    # Without progress the next start would end at the same step again.
    if reason is not Reason.TIMEOUT or not isinstance(terminated, Terminated) or not terminated.progressed:
        return False
    # Every earlier start in this directory left its manifest; they count the requeues at the time limit.
    timeouts = sum(earlier.reason is Reason.TIMEOUT for earlier in manifest.earlier_starts())
    return timeouts < bench.max_requeues(bench.site)


def _requeue(manifest: ManifestFile, reason: Reason, message: str) -> None:
    """Record the requeue, then ask for it: Slurm ends the process soon after."""
    job = manifest.record.slurm or SlurmJob()
    manifest.update(slurm=msgspec.structs.replace(job, requeued=True))
    # Final before the request: once Slurm accepts it, the process may be killed before it can write.
    manifest.finish(Status.INTERRUPTED, reason, f"{message}; requeued")
    if refusal := slurm_job.requeue():
        manifest.update(slurm=msgspec.structs.replace(job, requeued=False))
        message = f"{message}; it could not be requeued ({refusal}), resubmit it with `rerun`"
        manifest.finish(Status.INTERRUPTED, reason, message)


def _run_attempt(
    bench: BenchConfig,
    run_dir: Path,
    manifest: ManifestFile,
    stop_signal: StopSignal,
    leader: Leader | None,
    tracker: RunTracker,
) -> None:
    if bench.identity.code is not None:
        environment.check_running(Path(bench.identity.code))
    with defer_signals():  # an interrupted import leaves half a library, and may crash the interpreter
        import torch

        from inpaint_bench import levers, workloads
        from inpaint_bench.profiling import ncu
        from inpaint_bench.profiling.profile import profile_calls
        from inpaint_bench.profiling.record import keep_profiler_attached

    if bench.profiler != "none":
        # Before the levers are read back, which profiles a step too: graphs are replayed once more after it.
        keep_profiler_attached()
    manifest.update(
        environment=environment.fingerprint(),
        boot_id=environment.boot_id(),
        slurm=environment.slurm(),
    )
    # Not before the environment is recorded: a run that finds no GPU names its node and its job all the same.
    device, uuids = choose_device(bench, leader.place.local_rank if leader else 0)
    if bench.profiler == "ncu":
        ncu.find()  # before anything is built
    if leader:
        uuids = leader.meet(device, uuids)
    with _sidecar(bench, run_dir, manifest, uuids, leader.devices if leader else []):
        if device.type == "cuda":
            torch.cuda.set_device(device)
        workload = workloads.load(bench, device)
        try:
            manifest.update(
                batch=workload.images_per_step // bench.ranks,  # as found, for batch=auto
                workload_facts=msgspec.to_builtins(workload.facts),
                data=workload.data,
                levers=levers.requested(bench),
                parity=workload.parity,
            )
            tracker.note_link()
            if bench.profiler == "ncu":
                _warm_up(bench, manifest, workload, device)
            elif isinstance(workload, workloads.MeasuringWorkload):
                _measure(bench, run_dir, manifest, workload, device)
            else:
                _run_windows(bench, run_dir, manifest, workload, device, stop_signal)
            if bench.profiler != "none":
                calls = workload.profiled_calls()
                manifest.update(profile=profile_calls(bench, run_dir, manifest.record.run_id, calls, device))
        finally:
            workload.close()
            del workload
        if leader:
            leader.finish()
    if bench.profiler == "ncu":
        _count(bench, run_dir, manifest)


def _measure(
    bench: BenchConfig, run_dir: Path, manifest: ManifestFile, workload: MeasuringWorkload, device: torch.device
) -> None:
    from .recorder import RunRecorder

    workload.facts.uniform_steps = workload.uniform_steps
    manifest.update(workload_facts=msgspec.to_builtins(workload.facts))
    with RunRecorder(bench, run_dir, manifest, workload, device) as recorder:
        workload.measure(recorder)
    manifest.update(levers=_read_levers_back(workload), memory=recorder.windows.memory)
    if written := workload.finish(run_dir):
        manifest.update(quality=to_record(written, Quality))


def _run_windows(
    bench: BenchConfig,
    run_dir: Path,
    manifest: ManifestFile,
    workload: TrainingWorkload,
    device: torch.device,
    stop_signal: StopSignal,
) -> None:
    from inpaint_bench.telemetry.storage.background import saving_in_background
    from inpaint_bench.telemetry.storage.parts import PartWriter

    from .loop import Loop, WindowPlan
    from .trainer import Trainer
    from .windows import Windows

    settings, config = bench.telemetry, finetune_keys(bench)
    rows = PartWriter(run_dir / "steps", STEPS, file_metadata(manifest.record.run_id), settings.part_s)
    loop = Loop(workload, device, Windows(run_dir, device), rows, manifest.progress)
    try:
        # A benchmark is one window after its warm-up; a training has many, whose rows must survive a kill.
        if config.train_steps is None:
            # Two windows: the first steps compile and capture, which is no load and must not count as such.
            for steps, min_s in ((config.warmup_steps, 0.0), (0, config.min_warmup_s)):
                if steps or min_s:
                    after = config.measure_steps
                    loop.run(WindowPlan(kind=WindowKind.WARMUP, steps=steps, min_s=min_s, steps_after=after))
            loop.run(WindowPlan(kind=WindowKind.MEASURE, steps=config.measure_steps, min_s=config.min_measure_s))
        else:
            with saving_in_background(rows, settings.journal_s):
                Trainer(bench, run_dir, manifest, workload, loop, stop_signal).run(config.train_steps)
    finally:
        rows.close()
        _record_results(manifest, workload, loop)
    # Only after windows that succeeded: reading the levers back takes two more steps.
    manifest.update(levers=_read_levers_back(workload))


def _read_levers_back(workload: Workload) -> list[LeverReport]:
    from inpaint_bench import levers

    return levers.verify(workload.execution, workload.probe)


def _warm_up(bench: BenchConfig, manifest: ManifestFile, workload: Workload, device: torch.device) -> None:
    """Prepare a profile without windows, which tells which kernels to count."""
    from inpaint_bench.profiling.count import warm_up

    if bench.searches_batch:
        bench.batch = workload.images_per_step  # found: the process under ncu does not search again
    warm_up(workload.profiled_calls(), device)
    manifest.update(levers=_read_levers_back(workload))


def _count(bench: BenchConfig, run_dir: Path, manifest: ManifestFile) -> None:
    """Count kernels in a process of its own; by now the workload and the sidecar have ended."""
    from inpaint_bench.profiling.count import count_kernels

    facts = manifest.record.profile
    assert facts is not None
    problems = count_kernels(bench, run_dir, manifest.record.run_id, partial(_build, bench))
    manifest.update(profile=msgspec.structs.replace(facts, problems=[*facts.problems, *problems]))


def _build(bench: BenchConfig) -> tuple[Workload, torch.device]:
    """Build the workload in the process under ncu."""
    import torch

    from inpaint_bench import workloads

    device, _ = choose_device(bench)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return workloads.load(bench, device), device


def _record_results(manifest: ManifestFile, workload: TrainingWorkload, loop: Loop) -> None:
    """Record what is known only after the last window, also after one that failed."""
    facts = workload.facts
    try:
        facts.skipped_steps = workload.skipped_steps()
    except RuntimeError:  # a device in an error state does not answer
        facts.skipped_steps = None
    facts.losses_not_finite, facts.warmup_s = loop.not_finite, round(loop.warmup_s, 3)
    manifest.update(workload_facts=msgspec.to_builtins(facts), memory=loop.windows.memory)


def start_sidecar(bench: BenchConfig, folder: Path, run_id: str, uuids: list[str], node: int = 0) -> SidecarClient:
    """Start the telemetry process of a node. Raises UserError where it has nothing to sample."""
    from inpaint_bench.telemetry.client import SidecarClient

    settings = replace(bench.telemetry, capture=bench.telemetry.capture or bench.gpu.capture)
    if settings.source == "replay" and not uuids:
        uuids = ["replay"] * bench.gpus  # only their number counts
    if settings.source == "nvml" and not uuids:
        raise UserError("telemetry=nvml samples a GPU, and this run uses none: set telemetry=none")
    if settings.source == "replay" and not settings.capture:
        raise UserError("telemetry=replay needs telemetry.capture=<name or file of a capture>, or set telemetry=none")
    return SidecarClient(folder, run_id, uuids, settings, first=node * bench.gpus)


@contextmanager
def _sidecar(
    bench: BenchConfig, run_dir: Path, manifest: ManifestFile, uuids: list[str], others: list[Device]
) -> Iterator[None]:
    """Run the telemetry process around the block, and record how it ended; those of other nodes sample `others`."""
    sidecar = start_sidecar(bench, run_dir, manifest.record.run_id, uuids)
    try:
        manifest.note_sidecar(sidecar, [*sidecar.devices, *others], bench.gpus)
        yield
    finally:
        manifest.update(telemetry=sidecar.end())


def diagnose(error: BaseException, bench: BenchConfig) -> tuple[Status, Reason, str]:
    """Return status, reason code and one sentence for what ended an attempt, as far as the job itself can know."""
    error = _interruption(error) or error
    name, text = type(error).__name__, " ".join(str(error).split())
    # Our own errors are sentences already; others need the name of their class.
    sentence = text if isinstance(error, UserError | Terminated | RankError) else f"{name}: {text}" if text else name
    if isinstance(error, KeyboardInterrupt):
        return Status.INTERRUPTED, Reason.CANCELLED, "interrupted from the keyboard (SIGINT)"
    if isinstance(error, Terminated):
        return Status.INTERRUPTED, *_termination_reason(error, bench, sentence)
    from inpaint_bench.telemetry.client import SidecarError
    from inpaint_bench.workloads.batch_search import is_cuda_oom  # imports torch: not after an interruption

    if isinstance(error, RankError):
        return Status.FAILED, error.reason, sentence
    if is_cuda_oom(error):
        return Status.FAILED, Reason.OOM_GPU, sentence
    if isinstance(error, UnavailableError):
        return Status.FAILED, Reason.UNAVAILABLE, sentence
    # A loader process that was killed (by the kernel, most likely), and a refused allocation.
    host_oom = "killed by signal: Killed" in text or "DefaultCPUAllocator: can't allocate memory" in text
    if isinstance(error, MemoryError) or host_oom:
        return Status.FAILED, Reason.OOM_HOST, sentence
    if isinstance(error, SidecarError):
        return Status.FAILED, Reason.TELEMETRY_INCOMPLETE, sentence
    return Status.FAILED, Reason.APP_ERROR, sentence


def _interruption(error: BaseException | None) -> BaseException | None:
    """Return the interruption behind `error`, if any: then it was the cleanup that failed."""
    while error is not None and not isinstance(error, KeyboardInterrupt | Terminated):
        error = error.__context__
    return error


def _termination_reason(error: Terminated, bench: BenchConfig, sentence: str) -> tuple[Reason, str]:
    """Return slurmctld's reason; where it gives none, infer one from the time left, the signal and the site."""
    cause = slurm_job.query()
    if cause and cause.reason:
        return cause.reason, sentence
    # A person's Ctrl-C; Slurm and the sites send other signals.
    if error.signum == signal.SIGINT:
        return Reason.CANCELLED, sentence
    # Not under Slurm, or Slurm does not say: the time left decides, or the signal of submitit's local executor.
    end = os.environ.get("INPAINT_BENCH_END_UNIX", "")
    near_limit = end.isdigit() and time.time() > int(end) - TIME_LIMIT_MARGIN_S
    if near_limit or error.signum == signal.SIGUSR2:
        return Reason.TIMEOUT, sentence
    # slurmctld did not respond: where jobs are pre-empted with this signal, that is assumed.
    preempt = bench.site.preempt
    if cause is None and "SLURM_JOB_ID" in os.environ and preempt.grace_s and preempt.signal == error.name:
        # Readers prefer Slurm's own state, which is CANCELLED for a job that was cancelled.
        return Reason.PREEMPTED, f"{sentence}; slurmctld could not be asked whether it was pre-empted or cancelled"
    return Reason.CANCELLED, sentence
