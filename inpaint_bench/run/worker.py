"""One attempt from start to end: its manifest, what ends it, and whether its job goes back to the queue.

However it ends, the manifest records it and the sidecar is closed; a failure is raised again, so that the process
exits non-zero and the scheduler knows too.
"""

import logging
import os
import signal
import sys
import time
from itertools import dropwhile
from pathlib import Path

import msgspec
from omegaconf import DictConfig

from inpaint_bench.core import environment, stages
from inpaint_bench.core.config.bench import BenchConfig
from inpaint_bench.core.config.parse import parse_config
from inpaint_bench.core.errors import PointsFailedError, UnavailableError, UserError
from inpaint_bench.core.records import Manifest, SlurmJob, read_record
from inpaint_bench.core.schema import MANIFEST, Reason, Status
from inpaint_bench.core.signals import SIGNALS, Terminated, defer_signals, terminable
from inpaint_bench.kernels.cache import check_given
from inpaint_bench.ranks.engine import RankFailure, is_ending, record_failure, run_ranks

from . import slurm_job
from .manifest import ManifestFile
from .tracked import RunTracker

TIME_LIMIT_MARGIN_S = 90  # a SIGTERM so close to the job's end means the time limit (Slurm's KillWait is 30 s)
WATCH_S = 5.0  # until a failure is reported that another rank may explain: that one ends this process before

log = logging.getLogger(__name__)


def run(config: DictConfig, run_dir: Path, overrides: list[str], *, is_job: bool = False) -> Manifest:
    """Execute one point in `run_dir` and return its manifest. Whatever ends it early is raised again.

    No signal counts once the manifest is final; with `is_job` none does to the end of the process, so that its exit
    code says what the manifest says.
    """
    bench = parse_config(config)
    run_dir.mkdir(parents=True, exist_ok=True)
    manifest = ManifestFile.start(run_dir, bench, config, overrides)
    return run_attempt(bench, manifest, is_job=is_job) if bench.ranks == 1 else _run_ranks(bench, manifest)


def _run_ranks(bench: BenchConfig, manifest: ManifestFile) -> Manifest:
    """Execute one point in a process per rank, and write its end if rank 0 could not, or does not know the cause."""
    ended = run_ranks(bench, manifest.run_dir, run_rank)
    record = read_record(manifest.path, Manifest)
    assert record
    if record.status is Status.COMPLETED:
        if ended:
            log.warning("the run is complete; after its end: %s", getattr(ended, "message", f"exit code {ended}"))
        return record
    if isinstance(ended, RankFailure):
        if not (record.slurm and record.slurm.requeued):
            ManifestFile(manifest.path, record).finish(Status.FAILED, ended.reason, ended.message)
        raise PointsFailedError(ended.message)
    message = record.message or ""
    if ended > 128:
        raise Terminated(ended - 128, message.partition("; ")[2])
    if ended:
        raise (UserError if ended == UserError.exit_code else PointsFailedError)(message)
    return record


def run_rank(bench: BenchConfig, run_dir: Path) -> None:
    """Run the rank of this process, which ends with the process that started it."""
    import torch.multiprocessing

    torch.multiprocessing._prctl_pr_set_pdeathsig(signal.SIGKILL)  # type: ignore[attr-defined]
    os.setsid()  # Ctrl-C on the terminal comes through the process that started it, once
    rank = int(os.environ["RANK"])
    logging.basicConfig(level=logging.INFO, format=f"rank {rank}: %(message)s")
    record = read_record(run_dir / MANIFEST, Manifest)
    assert record
    try:
        if rank == 0:
            run_attempt(bench, ManifestFile(run_dir / MANIFEST, record), is_job=True)
        else:
            check_given()
            from .follower import follow

            follow(bench, run_dir, record.run_id)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except Exception as error:
        if rank or "peer" in str(error):
            time.sleep(WATCH_S)
        if not isinstance(error, UserError):
            log.exception("failed")
        if rank:
            _, reason, message = diagnose(error, bench)
            record_failure(run_dir, rank, os.getpid(), f": {message}", reason)
        sys.exit(getattr(error, "exit_code", 1))


def run_attempt(bench: BenchConfig, manifest: ManifestFile, *, is_job: bool) -> Manifest:
    """Execute one point, or rank 0 of it, in this process."""
    # The second name is Slurm's; the first is that of a step, in a job of several points.
    start = os.environ.get("INPAINT_BENCH_START_UNIX") or os.environ.get("SLURM_JOB_START_TIME", "")
    stages.begin("" if bench.site.connect.method == "local" else start)
    at_end = signal.SIG_IGN if is_job else None
    with terminable(at_end=at_end) as stop_signal, RunTracker(bench.track, manifest) as tracker:
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # blocked while a rank starts
            with stages.stage("telemetry"):
                tracker.start()
            with stages.stage("imports"):
                if bench.identity.code is not None:
                    environment.check_running(Path(bench.identity.code))
                check_given()
                with defer_signals():  # an interrupted import leaves half a library, and may crash the interpreter
                    from .attempt import Attempt
            Attempt(bench, manifest, stop_signal).execute(tracker)
            with defer_signals():
                manifest.finish(Status.COMPLETED)
                stop_signal.ignored = True
        except BaseException as error:
            stop_signal.ignored = True
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
    if is_ending(manifest.run_dir, manifest.record.ranks or []):
        return False  # the signal came from torch's agent
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


def diagnose(error: BaseException, bench: BenchConfig) -> tuple[Status, Reason, str]:
    """Return status, reason code and one sentence for what ended an attempt, as far as the job itself can know."""
    error = _interruption(error) or error
    name, text = type(error).__name__, _cause(error)
    # Our own errors are sentences already; others need the name of their class.
    is_sentence = isinstance(error, UserError | Terminated) or text.startswith(f"{name}: ")
    sentence = text if is_sentence else f"{name}: {text}" if text else name
    if isinstance(error, KeyboardInterrupt):
        return Status.INTERRUPTED, Reason.CANCELLED, "interrupted from the keyboard (SIGINT)"
    if isinstance(error, Terminated):
        return Status.INTERRUPTED, *_termination_reason(error, bench, sentence)
    if isinstance(error, UnavailableError):
        return Status.FAILED, Reason.UNAVAILABLE, sentence
    # A loader process that was killed (by the kernel, most likely), and a refused allocation.
    host_oom = "killed by signal: Killed" in text or "DefaultCPUAllocator: can't allocate memory" in text
    if isinstance(error, MemoryError) or host_oom:
        return Status.FAILED, Reason.OOM_HOST, sentence
    if isinstance(error, UserError):
        return Status.FAILED, Reason.APP_ERROR, sentence
    from inpaint_bench.telemetry.client import SidecarError
    from inpaint_bench.workloads.batch_search import is_cuda_oom  # imports torch: not after an interruption

    if is_cuda_oom(error):
        return Status.FAILED, Reason.OOM_GPU, sentence
    if isinstance(error, SidecarError):
        return Status.FAILED, Reason.TELEMETRY_INCOMPLETE, sentence
    return Status.FAILED, Reason.APP_ERROR, sentence


def _cause(error: BaseException) -> str:
    """Return the text of an error: of a traceback in it, which a worker process sends, only what follows the calls."""
    text = str(error)
    if "\n  File " in text:
        lines = text.rpartition("\n  File ")[2].splitlines()[1:]
        text = "\n".join(dropwhile(lambda line: line.startswith(" "), lines))
    # PyTorch says of a worker that was killed only that it is gone; what killed it is the cause.
    if isinstance(error.__cause__, RuntimeError) and "exited unexpectedly" in text:
        text = str(error.__cause__)
    return " ".join(text.split())


def _interruption(error: BaseException | None) -> BaseException | None:
    """Return the interruption behind `error`, if any: then it was the cleanup that failed."""
    while error is not None and not isinstance(error, KeyboardInterrupt | Terminated):
        error = error.__context__
    return error


def _termination_reason(error: Terminated, bench: BenchConfig, sentence: str) -> tuple[Reason, str]:
    """Return slurmctld's reason; if it gives none, infer one from the time left, the signal and the site."""
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
    # slurmctld did not respond: if jobs are pre-empted with this signal, that is assumed.
    preempt = bench.site.preempt
    if cause is None and "SLURM_JOB_ID" in os.environ and preempt.grace_s and preempt.signal == error.name:
        # Readers prefer Slurm's own state, which is CANCELLED for a job that was cancelled.
        return Reason.PREEMPTED, f"{sentence}; slurmctld could not be asked whether it was pre-empted or cancelled"
    return Reason.CANCELLED, sentence
