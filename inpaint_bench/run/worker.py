"""The life of one attempt: manifest, device, sidecar, workload, windows, end.

However it ends, the manifest says so, the sidecar is closed, and a failure is raised again, so that the
process exits non-zero and the scheduler knows too.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from inpaint_bench.core import environment, time_limit
from inpaint_bench.core.config import BenchConfig, parse_config
from inpaint_bench.core.errors import UnavailableError, UserError
from inpaint_bench.core.recipe import name as recipe_name
from inpaint_bench.core.schema import PRODUCER, SCHEMA_VERSION, STEPS, Reason, Status
from inpaint_bench.core.signals import Ending, Terminated, terminable

from . import slurm_job
from .manifest import Manifest

if TYPE_CHECKING:
    import torch

    from inpaint_bench.workloads import Workload

    from .loop import Loop

END_OF_TIME_S = 90  # a SIGTERM this close to the job's time limit is that limit (Slurm's KillWait is 30 s)

log = logging.getLogger(__name__)


def run(config: DictConfig, run_dir: Path, overrides: list[str]) -> dict[str, Any]:
    """Execute one point in `run_dir` and return its manifest. Whatever ends it early is raised again."""
    bench = parse_config(config)
    run_dir.mkdir(parents=True, exist_ok=True)
    manifest = Manifest.start(run_dir, bench, config, overrides)
    with terminable() as ending:
        try:
            _attempt(bench, run_dir, manifest, ending)
            manifest.finish(Status.COMPLETED)
        except BaseException as error:
            status, reason, message = diagnose(error, bench)
            if _goes_on(bench, manifest, reason, error):
                _requeue(manifest, reason, message)
            else:
                again = "; `rerun` sends it again" if reason is Reason.PREEMPTED else ""
                manifest.finish(status, reason, message + again)
            raise
    return manifest.as_dict()


def _goes_on(bench: BenchConfig, manifest: Manifest, reason: Reason, error: BaseException) -> bool:
    """Whether Slurm is to start it again: pre-empted, or at a limit that it used to get on, and not too often."""
    if reason is Reason.PREEMPTED:
        return bench.site.requeue.request
    cut = _interruption(error)
    if reason is not Reason.TIMEOUT or not isinstance(cut, Terminated) or not cut.further:
        return False
    before = sum(one.get("reason") == Reason.TIMEOUT for one in manifest.earlier())
    return before < time_limit.requeues(bench, bench.site)


def _requeue(manifest: Manifest, reason: Reason, message: str) -> None:
    """Back into the queue, and marked so. All is closed before Slurm is asked to end this."""
    slurm = manifest.as_dict()["slurm"] or {}
    manifest.update(slurm={**slurm, "requeued": True})
    manifest.finish(Status.INTERRUPTED, reason, f"{message}; it was requeued")
    if refused := slurm_job.requeue():
        manifest.update(slurm={**slurm, "requeued": False})
        why = f"{message}; it could not be requeued ({refused}), `rerun` sends it again"
        manifest.finish(Status.INTERRUPTED, reason, why)


def _attempt(bench: BenchConfig, run_dir: Path, manifest: Manifest, ending: Ending) -> None:
    import torch

    from inpaint_bench import workloads

    manifest.update(environment=environment.fingerprint(), boot_id=environment.boot_id(), slurm=environment.slurm())
    device, uuids = choose_device(bench)
    with _sidecar(bench, run_dir, manifest, uuids):
        if device.type == "cuda":
            torch.cuda.set_device(device)
        workload = workloads.load(bench, device)
        try:
            manifest.update(
                batch=workload.images_per_step,  # what batch=auto became
                workload_facts=workload.facts,
                data=workload.data,
                levers=workload.requested(),
                parity=workload.parity,
            )
            _measure(bench, run_dir, manifest, workload, device, ending)
        finally:
            workload.close()


def _measure(
    bench: BenchConfig,
    run_dir: Path,
    manifest: Manifest,
    workload: Workload,
    device: torch.device,
    ending: Ending,
) -> None:
    from inpaint_bench.telemetry.storage.parts import PartWriter, ticking

    from .loop import Loop, Windows
    from .trainer import Training

    metadata = {
        "schema_version": str(SCHEMA_VERSION),
        "run_id": manifest.run_id,
        "producer": PRODUCER,
    }
    settings = bench.telemetry
    tick_s = 0.1 * settings.journal_s  # the journal is never older than journal_s
    rows = PartWriter(run_dir / "steps", STEPS, metadata, settings.part_s, settings.journal_s - tick_s)
    loop = Loop(workload, device, Windows(run_dir), rows, manifest.progress)
    wanted = bench.workload
    try:
        if wanted.train_steps is None:
            loop.warmup(wanted.warmup_steps, wanted.measure_steps)
            loop.measure(wanted.measure_steps, wanted.min_measure_s)
        else:
            with ticking(rows, tick_s):
                Training(bench, run_dir, manifest, workload, loop, ending).run(wanted.train_steps)
    finally:
        rows.close()
        _keep(manifest, workload, loop)
    manifest.update(levers=workload.verify())


def _keep(manifest: Manifest, workload: Workload, loop: Loop) -> None:
    """What is known after the last window, also after one that was cut."""
    try:
        skipped: int | None = workload.skipped_steps()
    except RuntimeError:  # a device in error does not answer
        skipped = None
    facts = {**workload.facts, "skipped_steps": skipped, "losses_not_finite": loop.not_finite}
    manifest.update(workload_facts=facts, memory=loop.memory)


def choose_device(bench: BenchConfig) -> tuple[torch.device, list[str]]:
    """The recipe's device and the UUIDs to watch. Raises UserError: there is no fallback to the processor."""
    import torch

    gpu, recipe = bench.gpu, bench.recipe
    label = recipe_name(recipe)
    if recipe.device == "cpu":
        if gpu.nvml_name and not bench.demonstration:
            raise UserError(
                f"recipe {label} runs on the processor, which would be recorded as gpu={gpu.name}: "
                "take gpu=cpu, or demonstration=true"
            )
        return torch.device("cpu"), []
    if not gpu.nvml_name:
        raise UserError(f"recipe {label} needs a GPU, gpu={gpu.name} names none: take recipe=cpu")
    if not torch.cuda.is_available():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "not set") or "empty"
        raise UserError(
            f"recipe {label} needs CUDA, which PyTorch {torch.__version__} cannot use here "
            f"(CUDA_VISIBLE_DEVICES {visible}); recipe=cpu runs on the processor"
        )
    device = torch.device("cuda", 0)
    properties = torch.cuda.get_device_properties(device)
    uuid = str(properties.uuid)  # CUDA's own, whether CUDA_VISIBLE_DEVICES holds numbers or UUIDs
    # CUDA ends the name of a slice with its profile, "MIG 1g.18gb"; its UUID may come without the prefix.
    if re.search(r"\bMIG\b", properties.name) or uuid.startswith("MIG-"):
        raise UserError(
            f"this run was given a MIG slice ({properties.name}), whose power and utilisation belong to no single "
            "job: ask for a whole GPU"
        )
    if not re.match(gpu.nvml_name, properties.name):
        raise UserError(f"gpu={gpu.name} expects a device named {gpu.nvml_name!r}, this one is {properties.name!r}")
    return device, [uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"]


@contextmanager
def _sidecar(bench: BenchConfig, run_dir: Path, manifest: Manifest, uuids: list[str]) -> Iterator[None]:
    """The telemetry process around the run. Its account goes into the manifest, however the run ends."""
    from inpaint_bench.telemetry.client import Sidecar

    settings = bench.telemetry
    if settings.source == "nvml" and not uuids:
        raise UserError("telemetry=nvml watches a GPU, and this run uses none: take telemetry=none")
    if settings.source == "replay" and not (settings.capture or bench.gpu.capture):
        raise UserError(
            "telemetry=replay needs telemetry.capture=<name or file of a recording>, or take telemetry=none"
        )
    sidecar = Sidecar.start(run_dir, manifest.run_id, uuids, settings, bench.gpu.capture)
    hz = None if settings.source == "none" else settings.fast_hz
    about: dict[str, Any] = {"source": sidecar.source, "hz": hz, "status": "running"}
    try:
        devices = [{**device, "index_visible": place} for place, device in enumerate(sidecar.devices)]
        found = dict(manifest.as_dict()["environment"] or {})
        # A replayed card's driver says nothing about this machine.
        if settings.source == "nvml":
            found["driver"] = sidecar.driver or found.get("driver")
        manifest.update(devices=devices, environment=found, telemetry=about)
        yield
    finally:
        about = {**about, **_stopped(sidecar)}
        manifest.update(telemetry=about)


def _stopped(sidecar: Any) -> dict[str, Any]:
    """How the sidecar ended. A failure here must not hide what ended the run."""
    try:
        account = sidecar.stop()
    except Exception as error:
        log.exception("the telemetry sidecar could not be stopped")
        return {"status": "failed", "message": str(error)}
    status, problems = account.get("status"), account.get("problems") or []
    if status not in ("complete", "none"):
        log.warning("the telemetry sidecar ended as %s: %s", status, "; ".join(map(str, problems)) or "?")
    return {"status": status, "problems": problems}


def diagnose(error: BaseException, bench: BenchConfig) -> tuple[Status, Reason, str]:
    """Status, reason code and one sentence for what ended an attempt.

    Of an outside interruption only Slurm knows the cause for certain; this is what can be told from inside.
    """
    from inpaint_bench.workloads.batch_search import is_cuda_oom

    error = _interruption(error) or error
    name, text = type(error).__name__, " ".join(str(error).split())
    sentence = text if isinstance(error, UserError | Terminated) else f"{name}: {text}" if text else name
    if isinstance(error, KeyboardInterrupt):
        return Status.INTERRUPTED, Reason.CANCELLED, "interrupted from the keyboard (SIGINT)"
    if isinstance(error, Terminated):
        return Status.INTERRUPTED, *_why_terminated(error, bench, sentence)
    if is_cuda_oom(error):
        return Status.FAILED, Reason.OOM_GPU, sentence
    if isinstance(error, UnavailableError):
        return Status.FAILED, Reason.UNAVAILABLE, sentence
    if isinstance(error, MemoryError) or _is_host_oom(text):
        return Status.FAILED, Reason.OOM_HOST, sentence
    if name == "SidecarError":
        return Status.FAILED, Reason.TELEMETRY_INCOMPLETE, sentence
    return Status.FAILED, Reason.APP_ERROR, sentence


def _interruption(error: BaseException | None) -> BaseException | None:
    """The interruption during whose handling `error` came up, if any: what was closing then failed."""
    while error is not None and not isinstance(error, KeyboardInterrupt | Terminated):
        error = error.__context__
    return error


def _is_host_oom(text: str) -> bool:
    """A loader process that the kernel killed (no other SIGKILL is likely), or a refused allocation."""
    return "killed by signal: Killed" in text or "DefaultCPUAllocator: can't allocate memory" in text


def _why_terminated(error: Terminated, bench: BenchConfig, sentence: str) -> tuple[Reason, str]:
    """As slurmctld has it. Where that does not tell: near the end of its time that was it; else it was told to stop."""
    word = slurm_job.ask()
    if word and word.reason:
        return word.reason, sentence
    end = os.environ.get("INPAINT_BENCH_END_UNIX", "")
    near = end.isdigit() and time.time() > int(end) - END_OF_TIME_S
    if near or error.signum == signal.SIGUSR2:
        return Reason.TIMEOUT, sentence
    preempt = bench.site.preempt
    if word is None and "SLURM_JOB_ID" in os.environ and preempt.grace_s and preempt.signal == error.name:
        # Slurm's own word on a job that was cancelled is CANCELLED, and goes before this one
        return Reason.PREEMPTED, f"{sentence}; slurmctld could not be asked whether it was pre-empted or cancelled"
    return Reason.CANCELLED, sentence
