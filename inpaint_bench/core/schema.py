"""Contract between writers (worker, sidecar, launcher) and readers (status, rerun, analysis): names of files and
tables, status and reason codes. The columns are in tables.py: they load pyarrow, which most commands do not need.
"""

import re
from enum import StrEnum
from typing import Final

from . import __version__
from .workloads import results

SCHEMA_VERSION: Final = 2
PRODUCER: Final = f"inpaint_bench {__version__}"  # stored in every file we write
UNKNOWN: Final = "unknown"  # in place of a site, a GPU type or a boot that is not known

# --- a run directory, of one attempt -------------------------------------------------------------
MANIFEST: Final = "manifest.json"
WINDOWS: Final = "windows.json"
TELEMETRY: Final = "telemetry.json"  # the sidecar's report on itself
TRACKING: Final = "tracking.json"  # the tracker's report on itself
TRACKING_FILES: Final = "tracking"  # folder of what a tracker keeps in the run directory
SCHEDULER: Final = "scheduler.json"  # the last state that Slurm reported; Slurm purges old jobs
RESULTS: Final = "results_"  # begins the name of the table of a workload's own results
SAMPLES: Final = ("samples_fast", "samples_slow", "samples_gpm", "samples_cpu")
NODE_TABLES: Final = (*SAMPLES, "events")  # tables of a sidecar
RUN_TABLES: Final = (*SAMPLES, "steps", "events")  # tables of a run of any workload
KERNEL_TIMES: Final = "kernel_times"  # table of a run with a profile
KERNEL_COUNTERS: Final = "kernel_counters"  # table of a run with profile=ncu, in which nothing is timed
POWERS: Final = ("power_instant_w", "power_avg1s_w")  # columns of power, of which the first known one tells its shape
KERNEL_RULES: Final = "kernel_rules"  # table of what Nsight Compute's rules say of those launches
PROFILE_TABLES: Final = (KERNEL_TIMES, KERNEL_COUNTERS, KERNEL_RULES)  # no figure of a run depends on them
TRACES: Final = "traces"  # traces of its profile, for Perfetto: <call>.json.gz; not merged
TABLES: Final = (*RUN_TABLES, *PROFILE_TABLES, *(f"{RESULTS}{name}" for name in results()))  # one folder of parts each
PART_PATTERN: Final = "part-{:06d}.parquet"
# Earlier versions wrote the events as part-000000.sidecar.parquet.
PART_NAME: Final = re.compile(r"part-(\d{6,})(\.[\w-]+)?\.parquet", re.ASCII)
CHECKPOINTS: Final = "checkpoints"  # holds step-<steps> folders; only of training
CHECKPOINT: Final = "checkpoint.json"  # in each step folder: step, identity, checksums
NODE: Final = "node-{}"  # folder of the telemetry of a further node: telemetry.json and tables of its GPUs
ATTEMPT_NAME: Final = re.compile(r"attempt-(\d+)", re.ASCII)  # name of a run directory in a sweep
NODE_NAME: Final = re.compile(r"node-[1-9]\d{0,3}", re.ASCII)
JOURNAL: Final = ".journal.arrows"  # Arrow IPC stream of the open part; hidden from readers
JOURNAL_NAME: Final = re.compile(r"\.journal(\.[\w-]+)?\.arrows", re.ASCII)  # also of earlier versions

COMMAND: Final = "command"  # workload of a run of `watch`: an external program; its steps are unknown

# --- a sweep directory ---------------------------------------------------------------------------
SWEEP: Final = "sweep.json"
MULTIRUN: Final = "multirun.yaml"  # Hydra's own record of a sweep
LEDGER: Final = "ledger.jsonl"  # append-only: planned, submitted, refused, cancelled
JOBS: Final = "jobs"  # sbatch scripts and logs, a folder per array
POINTS: Final = "points"  # the configuration of each point, as its job reads it
CODE: Final = "code"  # snapshot of the code at submission
SNAPSHOT: Final = "snapshot.json"  # in the snapshot: its hash and git state
PLAN_PATTERN: Final = "plan.{site}.yaml"

# --- a merged dataset ----------------------------------------------------------------------------
DATASET: Final = "dataset.json"
RUNS: Final = "runs.parquet"
RUN_WINDOWS: Final = "windows.parquet"
SAMPLE_GRIDS: Final = "quality"  # folder of images, one per run
SKIPPED: Final = "skipped_files.parquet"


class Status(StrEnum):
    """State of an attempt or a window according to its own record."""

    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    INTERRUPTED = "interrupted"


class PointState(StrEnum):
    """State of a point, resolved from Slurm, the manifest and the Parquet parts."""

    PLANNED = "planned"  # recorded but not submitted here
    QUEUED = "queued"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    UNKNOWN = "unknown"  # a source is missing and the others do not decide


class Reason(StrEnum):
    """Reason why a point is not complete."""

    OOM_GPU = "oom_gpu"  # out of GPU memory
    OOM_HOST = "oom_host"  # out of the job's memory
    TIMEOUT = "timeout"  # the job reached its time limit
    PREEMPTED = "preempted"  # Slurm preempted the job, and it was not requeued
    NODE_FAIL = "node_fail"  # the node failed
    CANCELLED = "cancelled"  # somebody cancelled the job
    APP_ERROR = "app_error"  # an error of the program or of its configuration
    NEVER_STARTED = "never_started"  # it was not submitted, Slurm refused it, or it ended before its first line
    LOST = "lost"  # Slurm and the files say nothing of it
    TELEMETRY_INCOMPLETE = "telemetry_incomplete"  # the sidecar did not record all of the run
    UNAVAILABLE = "unavailable"  # a lever, counter or library that the point needs is not there


class WindowKind(StrEnum):
    """Kind of a timed part of a run."""

    WARMUP = "warmup"
    MEASURE = "measure"
    VALIDATION = "validation"
    CHECKPOINT = "checkpoint"


class Null(StrEnum):
    """Why a telemetry value is null."""

    NOT_SUPPORTED = "not_supported"  # the card has no such sensor
    NO_PERMISSION = "no_permission"  # site policy
    DRIVER_TOO_OLD = "driver_too_old"  # binding knows a function that the driver does not
    GPU_LOST = "gpu_lost"
    ERROR = "error"  # any other return code; counted in telemetry.json
    OUT_OF_RANGE = "out_of_range"  # no card gives such a value
    NOT_DUE = "not_due"  # read less often than the other columns of its table
    NOT_IN_CAPTURE = "not_in_capture"  # replay only
    NO_RAPL = "no_rapl"  # the kernel lists no energy counter of the processor
    VIRTUAL_MACHINE = "virtual_machine"  # the same, and the hypervisor keeps the counter


def file_metadata(run_id: str) -> dict[str, str]:
    """Return the metadata that every part of a run's tables carries."""
    return {"schema_version": str(SCHEMA_VERSION), "run_id": run_id, "producer": PRODUCER}


def item(workload: str | None) -> str:
    """Return what a workload is counted in: images, or volumes."""
    return "volume" if str(workload).startswith("volume3d_") else "image"


def results_table(workload: str) -> str:
    """Return the name of the table with a workload's own results."""
    return f"{RESULTS}{workload}"


def version_problem(version: object) -> str | None:
    """Return why files of this schema version cannot be read, None if they can."""
    if version == SCHEMA_VERSION and type(version) is int:
        return None
    reads = f"this code reads version {SCHEMA_VERSION}"
    if isinstance(version, int) and version > SCHEMA_VERSION:
        return f"schema version {version} is newer, {reads}: merge with the inpaint_bench that wrote it"
    return f"schema version {version}; {reads}"
