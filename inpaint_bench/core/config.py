"""The typed shape of a composed configuration, and the checks that Hydra's types cannot express.

Hydra refuses unknown keys and wrong types by these dataclasses; `check` refuses impossible values. Both
happen for every point of a sweep before anything is submitted.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from .errors import UserError
from .site import SiteConfig
from .validation import check, http_address, one_of, regular_expression, within


@dataclass(kw_only=True)
class GpuConfig:
    """One GPU model. Peaks are the vendor's dense figures, never the sparse ones."""

    name: str
    title: str
    nvml_name: str | None = regular_expression()  # that NVML's device name must match; null: no GPU
    architecture: str = ""
    memory_gb: float = within(0, 1024, 0.0)
    memory_type: str = ""
    bandwidth_gb_s: float = within(0, 20000, 0.0)
    bf16_dense_tflops: float = within(0, 20000, 0.0)
    power_limit_w: float = within(0, 5000, 0.0)  # board default; the measured limit is in the manifest
    home_site: str | None = None  # where `site=auto` sends it; null: nowhere unless a site is named
    capture: str | None = None  # telemetry capture that replays this card
    source: str = ""


@dataclass(kw_only=True)
class ModelConfig:
    """Stable Diffusion inpainting: a 9-channel UNet, the VAE and the text encoder around it."""

    name: str
    weights: str | None = None  # a diffusers folder; null: random weights of these shapes
    unet: dict[str, Any] = field(default_factory=dict)
    vae: dict[str, Any] = field(default_factory=dict)
    text_encoder: dict[str, Any] = field(default_factory=dict)
    scheduler: dict[str, Any] = field(default_factory=dict)
    location_tokens: int = within(0, 64, 4)  # latitude and longitude as this many tokens beside the text


NEEDS_ROOT = {"folder": "a folder of images", "prepared": "what `prepare` wrote"}


@dataclass(kw_only=True)
class DataConfig:
    """Which images, how they are split, and what hides them."""

    kind: str = one_of("synthetic", "folder", "prepared")
    root: str | None = None  # folder: images, with EXIF positions or a metadata file; prepared: what `prepare` wrote
    num_images: int | None = within(1, 10_000_000, None)  # synthetic: how many; folder: at most so many
    resolution_px: int = within(32, 4096, 512)
    seed: int = within(0, 2**31 - 1, 0)
    masks: str = one_of("sd", "disaster", default="sd")  # sd: strokes and boxes; disaster: debris, water, smoke, walls
    full_share: float = within(0, 1, 0.25)  # masks that repaint everything
    validation_share: float = within(0, 0.9, 0.1)  # of the images, held out by whole blocks of ground
    block_m: float = within(1, 1e6, 200.0)  # side of such a block
    out: str | None = None  # where `prepare` writes; a job does not read this


@dataclass(kw_only=True)
class PrepareConfig:
    """What `prepare` writes into `data.out`; a job does not read this."""

    formats: list[str] = field(default_factory=lambda: ["files", "memmap"])
    jpeg_quality: int = within(50, 100, 95)
    shard_images: int = within(1, 1_000_000, 256)  # webdataset: images in one tar
    caches: bool = False  # also encode images, masked images and texts with the model's frozen networks


@dataclass(kw_only=True)
class RecipeConfig:
    """How the workload is executed. The defaults are the baseline: what a plain diffusers loop does."""

    name: str = ""  # empty: made of the levers that differ from the baseline, see recipe.py
    device: str = one_of("cuda", "cpu", default="cuda")
    precision: str = one_of("bf16", "fp16", "fp32", default="bf16")  # autocast
    tf32: bool = False  # what stays fp32 may use TF32; pinned either way, PyTorch's own default is mixed
    weights: str = one_of("fp32", "bf16_master", "bf16_stochastic", default="fp32")  # of the trained networks
    channels_last: bool = False
    cudnn_benchmark: bool = False
    attention: str = one_of("default", "math", "efficient", "flash", "cudnn", default="default")
    compile: str = one_of(
        "none", "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs", default="none"
    )
    cuda_graph: bool = False  # the whole step as one CUDA graph
    optimizer: str = one_of("adamw", "adamw_loop", "adamw_fused", "adamw_8bit", default="adamw")
    grad_checkpoint: bool = False
    accumulate: int = within(1, 1024, 1)  # micro-batches per step; `batch` is their sum
    ema: bool = False
    num_workers: int = within(0, 256, 4)
    prefetch_factor: int = within(1, 64, 2)
    pin_memory: bool = False
    non_blocking: bool = False
    format: str = one_of(
        "files", "memmap", "hdf5", "webdataset", default="files"
    )  # which copy of prepared data is read
    stage: str = one_of("none", "tmp", "shm", default="none")  # copied to the node's disk or memory first
    decode: str = one_of("pillow", "dali", default="pillow")
    cache_image: bool = False  # moments of the images' latents
    cache_masked: bool = False  # moments of the masked images' latents, for a pool of masks per image
    cache_text: bool = False
    cache_place: str = one_of("disk", "gpu", default="disk")
    mask_pool: int = within(1, 1024, 8)  # masks per image in the pool


@dataclass(kw_only=True)
class TelemetryConfig:
    name: str
    source: str = one_of("nvml", "replay", "none", default="nvml")
    capture: str | None = None  # replay: file or name of a capture; null: the GPU's own
    fast_hz: float = within(0.1, 20, 10.0)  # NVML answers falsely below 50 ms
    slow_hz: float = within(0.1, 10, 1.0)
    part_s: float = within(1, 3600, 60.0)
    journal_s: float = within(0.1, 600, 5.0)
    dcgm_url: str | None = http_address()  # a dcgm-exporter to ask about GPUs without GPM; null: the site's, if any
    dcgm_every_s: float = within(0.5, 600, 5.0)  # the exporter renews its values every 30 s unless the site says less
    ready_timeout_s: float = within(1, 600, 10.0)


@dataclass(kw_only=True)
class WorkloadConfig:
    name: str
    module: str  # Python module with the workload
    warmup_steps: int = within(0, 1_000_000, 10)
    measure_steps: int = within(1, 100_000_000, 50)
    min_measure_s: float = within(0, 1e6, 20.0)  # the window goes on until both are reached
    epochs: int = within(1, 100_000, 16)  # what "runtime" stands for
    dataset_images: int = within(1, 1_000_000_000, 6500)  # images in one such epoch
    learning_rate: float = within(0, 10, 1.0e-5)
    train_steps: int | None = within(1, 1_000_000_000, None)  # null: only warm-up and one measured stretch
    validate_every: int = within(0, 1_000_000_000, 0)  # steps; 0: never. Also before the first and after the last
    validation_images: int = within(1, 1_000_000, 64)  # at most so many of those held out
    sample_images: int = within(0, 64, 0)  # held-out images restored at the end, for metrics and a grid
    sample_steps: int = within(1, 1000, 20)
    checkpoint_every_s: float = within(0, 1e7, 0.0)  # 0: only on a signal and at the end of training
    keep_checkpoints: int = within(1, 1000, 2)
    save_weights: bool = False  # a diffusers pipeline folder when training ends
    resume: bool = True  # from the last good checkpoint of this point


TRAINING_ONLY = (
    "validate_every",
    "validation_images",
    "sample_images",
    "sample_steps",
    "checkpoint_every_s",
    "keep_checkpoints",
    "save_weights",
    "resume",
)  # keys of a workload that mean nothing without train_steps


@dataclass(kw_only=True)
class QualityConfig:
    """Weight files of the networks that judge pictures. Without one its metric is unavailable, not zero."""

    lpips_weights: str | None = None
    inception_weights: str | None = None


@dataclass(kw_only=True)
class StudyConfig:
    """Recipes to compare, one sweep: see recipe.py for how a name becomes a list of recipes."""

    name: str = "none"
    base: str = "baseline"
    levers: list[str] = field(default_factory=list)  # `a+b` is one step of two levers


@dataclass(kw_only=True)
class Cause:
    """What `rerun` does with the points that ended for one reason."""

    send: bool = True  # false: only where --only names the reason


@dataclass(kw_only=True)
class TimeoutCause(Cause):
    """The last two are for trainings, which go on from a checkpoint, and happen without a `rerun`: time_limit.py."""

    time_factor: float = within(1, 100, 1.5)  # the next time limit over the last one, up to the partition's
    requeues: int = within(0, 1000, 3)  # so often a job goes back into the queue by itself, where the site requeues
    warn_s: int = within(0, 86400, 120)  # Slurm says so long before the limit that it comes; 0: it does not


@dataclass(kw_only=True)
class NodeFailCause(Cause):
    exclude_node: bool = True


@dataclass(kw_only=True)
class OomGpuCause(Cause):
    """Another recipe is another label: the point then says what it really ran."""

    send: bool = False
    relief: list[str] = field(
        default_factory=lambda: ["recipe.grad_checkpoint=true", "recipe.accumulate=2", "recipe.accumulate=4"]
    )  # one more per attempt, in this order


@dataclass(kw_only=True)
class OomHostCause(Cause):
    send: bool = False
    mem_factor: float = within(1, 100, 2.0)  # the next host memory over the last one, up to the node's


@dataclass(kw_only=True)
class AskedCause(Cause):
    """Sent again, it would most likely end the same way."""

    send: bool = False


@dataclass(kw_only=True)
class RerunConfig:
    """What `rerun` does by itself, reason by reason; the fields below max_attempts are the words of `Reason`."""

    max_attempts: int = within(1, 1000, 5)  # of one point, not counting what sbatch refused
    timeout: TimeoutCause = field(default_factory=TimeoutCause)
    node_fail: NodeFailCause = field(default_factory=NodeFailCause)
    preempted: Cause = field(default_factory=Cause)
    cancelled: Cause = field(default_factory=Cause)
    lost: Cause = field(default_factory=Cause)
    never_started: Cause = field(default_factory=Cause)
    telemetry_incomplete: Cause = field(default_factory=Cause)
    oom_gpu: OomGpuCause = field(default_factory=OomGpuCause)
    oom_host: OomHostCause = field(default_factory=OomHostCause)
    app_error: AskedCause = field(default_factory=AskedCause)
    unavailable: AskedCause = field(default_factory=AskedCause)


@dataclass(kw_only=True)
class Identity:
    """Which attempt this is. The launcher fills it in; a single run makes its own."""

    run_id: str | None = None
    sweep_id: str | None = None
    point: int | None = None
    attempt: int = 1


@dataclass(kw_only=True)
class BenchConfig:
    gpu: GpuConfig
    site: SiteConfig
    model: ModelConfig
    data: DataConfig
    recipe: RecipeConfig
    telemetry: TelemetryConfig
    workload: WorkloadConfig
    prepare: PrepareConfig = field(default_factory=PrepareConfig)
    quality: QualityConfig = field(default_factory=QualityConfig)
    study: StudyConfig = field(default_factory=StudyConfig)
    sites: dict[str, Any] = field(default_factory=dict)  # overrides of site files, by site
    identity: Identity = field(default_factory=Identity)
    batch: int | str = within(1, 1_000_000, 16)  # images per step and GPU; auto: as many as fit
    gpus: int = within(1, 1, 1)  # per job; no workload spreads over several yet
    seed: int = within(0, 2**31 - 1, 0)  # of the first repetition
    repeats: int | str = within(1, 1000, 1)  # runs of each cell, with seeds of their own; auto: as the target needs
    repeats_target: float = within(0.0001, 1, 0.02)  # half width of the 95 % interval of images/s, over its mean
    repeats_max: int = within(2, 1000, 10)  # auto: at most so many runs of a cell
    order_seed: int | None = within(0, 2**31 - 1, None)  # shuffles the cells; null: drawn where they repeat
    time_min: int | str = within(1, 60 * 24 * 366, 60)  # time limit of a job; auto: as earlier runs in `out` took
    mem_gb: int | None = within(1, 65536, None)  # host memory of a job, in Slurm's G; null: the GPUs' share of a node
    rerun: RerunConfig = field(default_factory=RerunConfig)
    budget: float | None = within(0, 1e12, None)  # service units; a sweep that may cost more is refused
    name: str = "inpaint"
    out: str = "runs"
    wait: bool = False
    dry_run: bool = False
    demonstration: bool = False  # every table and figure of such a run says so


def typed(config: DictConfig) -> BenchConfig:
    """A composed configuration as objects, checked; Hydra's own node, if there, is left out. Raises UserError."""
    return checked(unchecked(config))


def unchecked(config: DictConfig) -> BenchConfig:
    """As objects, which may be impossible ones."""
    result = OmegaConf.to_object(without_hydra(config))
    assert isinstance(result, BenchConfig)
    return result


def typed_like(config: DictConfig, like: BenchConfig, keys: Iterable[str]) -> BenchConfig:
    """`typed` of a configuration that may differ below these keys from the one that `like` was made of."""

    def value(key: str) -> Any:
        node = config[key]
        return OmegaConf.to_object(node) if OmegaConf.is_config(node) else node

    return checked(replace(like, **{key: value(key) for key in keys}))


def checked(result: BenchConfig) -> BenchConfig:
    """As it came. Raises UserError for what cannot be."""
    check(result)
    if result.data.kind in NEEDS_ROOT and not result.data.root:
        raise UserError(f"data.root is empty: data={result.data.kind} needs data.root=<{NEEDS_ROOT[result.data.kind]}>")
    if result.data.resolution_px % 8:
        raise UserError(f"data.resolution_px={result.data.resolution_px}: must be a multiple of 8")
    _check_training(result.workload)
    return result


def without_hydra(config: DictConfig) -> DictConfig:
    """A copy, where there is something to leave out: parts of Hydra's own node are known only in a job."""
    if "hydra" not in config:
        return config
    own = config.copy()
    with read_write(own), open_dict(own):
        own.pop("hydra", None)
    return own


def _check_training(wanted: WorkloadConfig) -> None:
    """Refuse what only training can do where nothing is trained: it would be left out without a word."""
    if wanted.train_steps is not None:
        return
    for spec in fields(wanted):
        value = getattr(wanted, spec.name)
        if spec.name in TRAINING_ONLY and value != spec.default:
            shown = str(value).lower() if isinstance(value, bool) else value
            raise UserError(
                f"workload.{spec.name}={shown}: only training does that, and a benchmark is one measured stretch. "
                "Set workload.train_steps to train."
            )


def config_hash(config: DictConfig) -> str:
    """12 hex digits over what is executed. Where it is sent stays out, and the seed: that makes replicates."""
    content = OmegaConf.to_container(without_hydra(config), resolve=True)
    assert isinstance(content, dict)
    elsewhere = ("site", "sites", "out", "name", "wait", "dry_run", "budget", "time_min", "mem_gb", "rerun")
    repetition = ("seed", "repeats", "repeats_target", "repeats_max", "order_seed")
    for key in ("identity", "study", "prepare", *elsewhere, *repetition):
        content.pop(key, None)
    content["data"].pop("out", None)
    for key in ("dcgm_url", "dcgm_every_s"):
        content["telemetry"].pop(key, None)
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]
