"""Typed records of the JSON files that cross processes, ssh and time: what is written, and what readers rely on.

Decoding checks types and tolerates unknown fields, so that a newer version may add some. A value that is not known
is null. Floats that are not finite are written as null: JSON has no such numbers.
"""

from __future__ import annotations

import threading
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, overload

import msgspec

from .files import read_plain, replace_bytes
from .schema import PRODUCER, Reason, Status, WindowKind, item

T = TypeVar("T")

_FIRST_USE = threading.Lock()


@cache
def _describe(kind: Any) -> None:
    """Let msgspec work out the fields of a record, in one thread.

    It does so at the first use of a class, and msgspec 0.22 crashes the interpreter if another thread uses the class
    in the meantime.
    """
    with _FIRST_USE:
        msgspec.json.Decoder(kind)


@overload
def decode_record(content: bytes | str, kind: type[T]) -> T: ...
@overload
def decode_record(content: bytes | str, kind: Any) -> Any: ...
def decode_record(content: bytes | str, kind: Any) -> Any:
    """Return the value in JSON text, from any thread. Raise msgspec.DecodeError if it is not of that type."""
    _describe(kind)
    return msgspec.json.decode(content, type=kind)


@overload
def to_record(value: Any, kind: type[T], *, strict: bool = True) -> T: ...
@overload
def to_record(value: Any, kind: Any, *, strict: bool = True) -> Any: ...
def to_record(value: Any, kind: Any, *, strict: bool = True) -> Any:
    """Return the record in dictionaries and lists, from any thread. Raise msgspec.ValidationError if it is another.

    Not `strict`: numbers may be text.
    """
    _describe(kind)
    return msgspec.convert(value, kind, strict=strict)


def read_record(path: Path, kind: type[T], *, follow_links: bool = True) -> T | None:
    """Return the record in a JSON file, None if there is none. Raises OSError, and ValueError naming the place."""
    try:
        content = read_plain(path, follow_links=follow_links)
    except FileNotFoundError:
        return None
    try:
        return decode_record(content, kind)
    # A missing field or a wrong type is a msgspec.ValidationError, which is a DecodeError.
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from None


def encode_record(record: Any) -> bytes:
    """Return the record as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n"


def write_record(path: Path, record: Any) -> None:
    """Write a record as indented JSON; the file is replaced atomically."""
    replace_bytes(path, encode_record(record))


# --- windows.json: a list of Window --------------------------------------------------------------


class Window(msgspec.Struct, kw_only=True):
    """A timed part of a run. The end is null while it is open, and for good if its process was killed."""

    window_id: str
    kind: WindowKind
    status: Status
    t_start_mono_ns: int
    t_start_unix_ns: int
    t_end_mono_ns: int | None = None
    t_end_unix_ns: int | None = None
    steps: int = 0
    images: int = 0
    reason: str | None = None  # why a window was interrupted or failed: a signal or an exception

    @property
    def seconds(self) -> float | None:
        return None if self.t_end_mono_ns is None else (self.t_end_mono_ns - self.t_start_mono_ns) / 1e9


class TableCounts(msgspec.Struct, kw_only=True):
    """Rows appended to a table, and parts closed."""

    rows: int
    parts: int


# --- manifest.json -------------------------------------------------------------------------------


class GpuFacts(msgspec.Struct, kw_only=True):
    """The vendor's figures for the GPU model, from conf/gpu."""

    architecture: str | None = None
    memory_gb: float | None = None
    memory_type: str | None = None
    bandwidth_gb_s: float | None = None
    bf16_dense_tflops: float | None = None
    power_limit_w: float | None = None


class Device(msgspec.Struct, kw_only=True):
    """A GPU as NVML describes it when the run begins. `nulls` gives the reason for every value that is null."""

    uuid: str
    name: str | None = None
    index_visible: int | None = None  # among the GPUs that the run may use
    pci_bus_id: str | None = None
    minor: int | None = None
    power_limit_w: float | None = None  # enforced
    memory_mib: float | None = None  # total, with what the driver reserves
    max_sm_clock_mhz: int | None = None
    persistence_mode: int | None = None
    ecc_mode: int | None = None
    mig_mode: int | None = None
    vbios: str | None = None
    energy_start_mj: int | None = None
    nulls: dict[str, str] = {}


class GitState(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The code that ran: a commit, or the content of a snapshot."""

    commit: str | None = None
    dirty: bool | None = None  # untracked files count
    remote: str | None = None  # without credentials
    content_sha256: str | None = None  # hash of a sweep's code snapshot


class Environment(msgspec.Struct, kw_only=True):
    """Versions, machine and code of a run."""

    cores: int | None = None  # in the process's affinity mask
    node_cores: int | None = None  # cores of the machine
    cpu: str | None = None
    cuda: str | None = None  # that torch was built for
    cudnn: int | None = None
    diffusers: str | None = None
    driver: str | None = None
    git: GitState | None = None
    hostname: str | None = None
    hydra_core: str | None = None
    kernel: str | None = None
    numpy: str | None = None
    nvidia_ml_py: str | None = None
    pyarrow: str | None = None
    python: str | None = None
    torch: str | None = None
    transformers: str | None = None


class SlurmJob(msgspec.Struct, kw_only=True):
    """The job as Slurm's environment variables describe it."""

    array_job_id: str | None = None
    array_task_id: int | None = None
    cluster: str | None = None
    job_id: str | None = None
    node: str | None = None
    partition: str | None = None
    restart_count: int | None = None
    requeued: bool | None = None  # this start ended in the queue again; false if Slurm refused that


class SkippedImage(msgspec.Struct, kw_only=True):
    """An image of the data set that is not used, and why."""

    file: str
    reason: str


class DataFacts(msgspec.Struct, kw_only=True):
    """The images of a run. `found` is `used`, the skipped ones and those beyond data.num_images together."""

    kind: str | None = None
    found: int | None = None
    used: int | None = None
    beyond_limit: int = 0
    skipped: list[SkippedImage] = []
    root: str | None = None
    identity: str | None = None  # digest of images, positions, texts and masks
    train: int | None = None
    validation: int | None = None
    loader: dict[str, dict[str, Any]] = {}  # setting: {requested, effective, ...}


class Study(msgspec.Struct, kw_only=True):
    """The comparison of recipes to which the point belongs."""

    name: str | None = None
    base: str | None = None
    levers: list[str] = []


class LeverReport(msgspec.Struct, kw_only=True):
    """A requested lever and what was read back of it after the last step that counts."""

    name: str
    field: str  # field of RecipeConfig
    requested: Any
    effective: Any = None
    active: bool | None = None  # null: could not be determined
    evidence: str = ""


# From bf16 under autocast, recipes in bf16 were at most 0.022 away, FP8 0.065 and fp32 0.018; of gradients fp32 0.0074.
PARITY_TOLERANCE = 0.1  # beyond it something else is computed than fp32 does


class Parity(msgspec.Struct, kw_only=True):
    """Relative errors against a reference, on fixed inputs and equal weights, before the first step."""

    reference: str | None = None  # trainings: fp32; before 2026-11-28 `baseline`, bf16 under autocast
    prediction_rel: float | None = None
    loss_rel: float | None = None
    gradient_rel: float | None = None
    update_rel: float | None = None
    encoder_rel: float | None = None
    far: bool | None = None  # an error exceeds the tolerance
    not_finite: list[str] = []  # errors that are NaN or infinite, null above
    unavailable: str | None = None  # why no error is known


class Quality(msgspec.Struct, kw_only=True):
    """Validations of a training, and the judgement of its result."""

    validation: list[dict[str, Any]] = []  # {step, loss, ...}
    metrics: dict[str, dict[str, Any]] | None = None  # name: {value, n} or {unavailable}
    pictures: str | None = None  # relative to the run directory, like `weights`
    weights: str | None = None


class ResumeEvent(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A checkpoint that training continued from (step), one that was refused (reason), or a problem in writing one."""

    step: int | None = None
    checkpoint: str | None = None  # relative to the run directory
    reason: str | None = None
    problem: str | None = None


class MemoryPeaks(msgspec.Struct, kw_only=True):
    """Peaks of PyTorch's allocator over the measured windows."""

    allocated_peak_mib: float | None = None
    reserved_peak_mib: float | None = None


class Communication(msgspec.Struct, kw_only=True):
    """How long the GPUs of a profiled call exchanged data, with the time that they waited for each other in it."""

    ms: float
    exposed_ms: float | None = None  # no other kernel ran beside it; null on a CPU
    call_ms: float  # from the first kernel to the last


class Timeline(msgspec.Struct, kw_only=True):
    """Sums of the steps that Nsight Systems recorded. They ran slower than measured ones."""

    steps: int
    length_ms: float  # from the first kernel, copy or memset to the last
    kernels: int
    gaps: int  # in which none of them ran
    idle_ms: float  # length of all gaps
    longest_gap_ms: float
    wait_ms: float | None = None  # in which the host waited for the loader; null: the workload has none
    idle_in_waits_ms: float | None = None  # the part of idle_ms in these waits
    copied_ms: dict[str, float] = {}  # by direction
    copied_mib: dict[str, float] = {}

    # A part, and what it is a part of.
    parts: ClassVar = (("longest_gap_ms", "idle_ms"), ("idle_ms", "length_ms"), ("idle_in_waits_ms", "idle_ms"))


class ProfileFacts(msgspec.Struct, kw_only=True):
    """What was profiled after the measured windows; the kernels are in the tables `kernel_times`, `kernel_counters`."""

    profiler: str  # torch, nsys, or ncu: then there are no measured windows
    calls: list[str] = []
    traces: list[str] = []  # relative to the run directory
    problems: list[str] = []  # why a call, a trace or a kernel is missing
    communication: dict[str, Communication] = {}  # by call; only with several GPUs
    timeline: Timeline | None = None  # by nsys

    @property
    def counts(self) -> bool:
        """Return whether kernels were counted, and nothing was timed."""
        return self.profiler == "ncu"


class RankFacts(msgspec.Struct, kw_only=True):
    """A process of a run that uses several GPUs. Rank 0 wrote the steps and windows; the figures are the others'."""

    rank: int
    local_rank: int  # on its node
    node: str
    pid: int
    device: str  # cuda | cpu
    gpu_uuid: str | None = None  # null without CUDA
    steps: int | None = None
    data_wait_s: float | None = None  # over its steps
    allocated_peak_mib: float | None = None  # null without CUDA


class TelemetryState(msgspec.Struct, kw_only=True):
    """The sidecar as the worker knows it; its own report is telemetry.json."""

    source: str | None = None  # none | nvml | replay:<capture>
    hz: float | None = None  # rate of the fast samples
    energy_hz: float | None = None  # rate of the energy counter; null: read with every fast sample
    status: str | None = None  # running, then as the sidecar ended
    problems: list[str] = []
    message: str | None = None  # why it could not be stopped


class Tracking(msgspec.Struct, kw_only=True):
    """The tracker of a run; its own report is tracking.json."""

    name: str
    link: str | None = None  # address or folder of the run's curves; null until the tracker has given it
    problem: str | None = None  # why curves are missing


class Progress(msgspec.Struct, kw_only=True):
    """How far the run is; rewritten every few seconds."""

    step: int
    steps_total: int | None = None  # null until it can be estimated
    images_per_s: float | None = None
    t_unix_ns: int | None = None


if TYPE_CHECKING:
    MeasuredBatch = int
else:
    MeasuredBatch = int | str  # earlier manifests say auto


class ManifestHead(msgspec.Struct, kw_only=True):
    """The part of a manifest that `status` reads. Lenient: another version may have written it."""

    run_id: str | None = None
    status: Status
    workload: str | None = None
    reason: str | None = None  # a Reason, or one that only a later version knows
    message: str | None = None
    batch: MeasuredBatch | None = None  # images per step and GPU; null until batch=auto has found one
    batch_requested: int | str | None = None  # a number or auto
    started_unix_ns: int | None = None
    ended_unix_ns: int | None = None
    slurm: SlurmJob | None = None  # null outside of Slurm
    nodes: int = 1
    telemetry: TelemetryState | None = None
    tracking: Tracking | None = None  # null if none was asked for
    progress: Progress | None = None
    stages: dict[str, float] | None = None  # seconds by stage (core/stages.py); null until the end

    def __post_init__(self) -> None:
        if isinstance(self.batch, str):
            found = (getattr(self, "workload_facts", None) or {}).get("batch")
            self.batch, self.batch_requested = found if isinstance(found, int) else None, self.batch

    @property
    def pace(self) -> str:
        """Return `, 35.7 images/s`, for a sentence; empty if it is not known."""
        rate = self.progress.images_per_s if self.progress else None
        return f", {rate:.4g} {item(self.workload)}s/s" if rate else ""


class Manifest(ManifestHead, kw_only=True):
    """What an attempt is, what it did and how it ended. Every field is written, null if unknown."""

    schema_version: int
    producer: str | None = None
    run_id: str
    sweep_id: str | None = None
    point: int | None = None
    attempt: int | None = None
    reason: Reason | None = None
    recipe: str | None = None
    model: str | None = None
    variant: str | None = None  # the workload's keys that change what is executed, if they are not the defaults
    site: str | None = None
    gpu: str | None = None
    gpu_facts: GpuFacts | None = None
    gpus: int | None = None  # GPUs of the whole job
    ranks: list[RankFacts] | None = None  # null: one
    seed: int | None = None
    demonstration: bool | None = None
    config_hash: str | None = None
    overrides: list[str] = []
    boot_id: str | None = None
    devices: list[Device] = []
    environment: Environment | None = None
    workload_facts: dict[str, Any] | None = None  # shapes, precision, FLOPs, ...: the workload's own
    data: DataFacts | None = None
    study: Study | None = None
    levers: list[LeverReport] | None = None
    parity: Parity | None = None
    quality: Quality | None = None  # only for a training
    resumed: list[ResumeEvent] | None = None  # only for a training
    memory: MemoryPeaks | None = None  # null without CUDA
    profile: ProfileFacts | None = None  # null if none was asked for


# --- tracking.json -------------------------------------------------------------------------------


class TrackingReport(msgspec.Struct, kw_only=True):
    """What the tracker's process did; rewritten after each reading. A later start in the directory continues it."""

    status: str  # running | complete | failed
    producer: str = PRODUCER
    name: str
    link: str | None = None
    tracked_run: str | None = None  # the tracker's own id of the run
    problem: str | None = None
    pid: int | None = None
    values: int = 0  # points of curves, over all starts
    pictures: int = 0
    last_step: int = -1  # last step whose loss was logged
    last_validation: int = -1  # step of the last one that was logged
    last_unix_ns: int = 0  # time of the last progress that was logged
    cpu_s: float | None = None  # CPU time of this process and its children
