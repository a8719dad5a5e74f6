"""Typed configuration: one dataclass per Hydra group, one line per field with its range, unit and meaning.

Hydra refuses unknown keys and wrong types by these dataclasses; validation.py refuses values out of range. Both happen
for every point of a sweep before anything is submitted.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Container, Iterable
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from inpaint_bench.core.errors import UserError
from inpaint_bench.core.workloads import WorkloadConfig
from inpaint_bench.core.workloads.finetune_inpaint import Config as FinetuneConfig

from .levers import RecipeConfig
from .site import SiteConfig
from .validation import check, file_path, matching, one_of, regular_expression, time_limit, within


@dataclass(kw_only=True)
class GpuConfig:
    """One GPU model. Peaks are the vendor's dense figures, never the sparse ones."""

    name: str  # the name of its file, and of gpu=
    title: str  # as tables and figures show it
    nvml_name: str | None = regular_expression()  # must match NVML's device name; null: no GPU
    architecture: str = ""  # the vendor's name of it, such as Hopper
    memory_gb: float = within(0, 1024, 0.0)  # GB, the vendor's figure
    memory_type: str = ""  # such as HBM2e
    bandwidth_gb_s: float = within(0, 20000, 0.0)  # GB/s of the memory, the vendor's figure
    bf16_dense_tflops: float = within(0, 20000, 0.0)  # TFLOP/s in bf16 without sparsity
    power_limit_w: float = within(0, 5000, 0.0)  # board default; the enforced limit is in the manifest
    max_sm_clock_mhz: int = within(0, 10000, 0)  # as NVML reports it; 0: not known
    home_site: str | None = None  # site that `site=auto` prefers; null: only a named site
    capture: str | None = None  # recording that telemetry=replay plays for this GPU
    source: str = ""  # where the figures are from, with dates


@dataclass(kw_only=True)
class ModelConfig:
    """Stable Diffusion inpainting: a 9-channel UNet, the VAE and the text encoder around it, two of them in SDXL."""

    name: str  # as manifest and report show it
    weights: str | None = file_path()  # a diffusers folder; null: random weights of these shapes
    unet: dict[str, Any] = field(default_factory=dict)  # diffusers configuration of the UNet
    vae: dict[str, Any] = field(default_factory=dict)  # diffusers configuration of the VAE
    text_encoder: dict[str, Any] = field(default_factory=dict)  # transformers configuration of the text encoder
    text_encoder_2: dict[str, Any] = field(default_factory=dict)  # transformers: SDXL's second text encoder
    scheduler: dict[str, Any] = field(default_factory=dict)  # diffusers configuration of the noise schedule
    location_tokens: int = within(0, 64, 4)  # latitude and longitude as this many tokens after the text's


NEEDS_ROOT = {
    "folder": "a folder of images",
    "prepared": "a dataset that `prepare` wrote",
    "nifti": "a folder with images/ and labels/",
}


@dataclass(kw_only=True)
class DataConfig:
    """Images, their train/validation split, and the masks."""

    # where images come from: the generator, a folder, what `prepare` wrote, or volumes in NIfTI files
    kind: str = one_of("synthetic", "folder", "prepared", "nifti")
    # folder: images with EXIF positions or a metadata file; prepared: a dataset; nifti: images/ and labels/
    root: str | None = None
    num_images: int | None = within(1, 10_000_000, None)  # synthetic: exactly; folder, nifti: at most
    resolution_px: int = within(32, 4096, 512)  # side of the square images in pixels, a multiple of 8
    seed: int = within(0, 2**31 - 1, 0)  # of the generator, the split and the masks
    masks: str = one_of("sd", "disaster", default="sd")  # sd: strokes and boxes; disaster: debris, water, smoke, walls
    full_mask_share: float = within(0, 1, 0.25)  # share of the masks that repaint the whole image
    validation_share: float = within(0, 0.9, 0.1)  # share of the images, held out by whole geographic blocks
    block_m: float = within(1, 1e6, 200.0)  # side of a geographic block


@dataclass(kw_only=True)
class PrepareConfig:
    """What the `prepare` command writes. Jobs do not read this."""

    out: str | None = None  # folder of the new dataset
    # copies to write: files, memmap, hdf5, webdataset
    formats: list[str] = field(default_factory=lambda: ["files", "memmap"])
    jpeg_quality: int = within(50, 100, 95)  # of images that are written as JPEG
    shard_images: int = within(1, 1_000_000, 256)  # webdataset: images per tar file
    caches: bool = False  # also run the VAE and the text encoder once and store their outputs


@dataclass(kw_only=True)
class TelemetryConfig:
    """What the NVML sidecar samples, and how often it writes."""

    name: str  # the name of its file, and of telemetry=
    # nvml: this machine's GPUs; replay: a recording; none: no sidecar
    source: str = one_of("nvml", "replay", "none", default="nvml")
    capture: str | None = None  # replay: file or name of a recording; null: the one of the GPU model
    fast_hz: float = within(0.1, 20, 10.0)  # above 20 Hz NVML gives spurious errors and zeros
    # readings of the energy counter per second, at most fast_hz; one takes 3 ms of a core on an H200
    energy_hz: float = within(0.5, 20, 1.0)
    slow_hz: float = within(0.1, 10, 1.0)  # samples per second of clocks, temperatures and memory
    part_s: float = within(1, 3600, 60.0)  # seconds of samples in one Parquet file
    journal_s: float = within(0.1, 600, 5.0)  # seconds of samples that a killed sidecar may lose
    ready_timeout_s: float = within(1, 600, 10.0)  # seconds to wait until the sidecar has its first sample


TRACKER_KEYS = {"uri": "mlflow", "online": "wandb"}  # keys of TrackConfig that one of our trackers reads


@dataclass(kw_only=True)
class TrackConfig:
    """Curves and pictures of a run for an experiment tracker, written by a process beside the run."""

    name: str = "none"  # the name of its file, and of track=
    module: str | None = None  # writes them, as inpaint_bench/tracking/api.py describes; null: nothing is tracked
    package: str | None = None  # library that the module imports
    project: str = field(
        default="inpaint_bench",
        metadata=matching(r"[^/\\#?%:\x00-\x1f]+", "a name without / \\ # ? % :"),
    )  # the run's project in W&B, its experiment in MLflow
    # mlflow: address of a server or a folder; null: $MLFLOW_TRACKING_URI, else mlruns/ in the sweep directory
    uri: str | None = field(
        default=None,
        metadata=matching(
            r"(?![\w+.-]+://[^/]*@)\S[\s\S]*",
            "a path or an address without user and password, which MLFLOW_TRACKING_USERNAME and _PASSWORD give",
        ),
    )
    online: bool = False  # wandb: send to its server, which needs a network and a key; false: `wandb sync` does later
    every_s: float = within(0.5, 3600, 5.0)  # seconds between two readings of the run's files


@dataclass(kw_only=True)
class QualityConfig:
    """Weight files of the networks for LPIPS, FID and CLIP score. Without one its metric is unavailable, not zero."""

    lpips_weights: str | None = file_path()  # file with the weights of LPIPS
    inception_weights: str | None = file_path()  # file with the weights of Inception, for FID
    clip_model: str | None = file_path()  # a folder in the format of transformers, with its tokenizer


@dataclass(kw_only=True)
class StudyConfig:
    """Recipes to compare in one sweep; core/config/recipe.py expands them."""

    name: str = "none"  # one_at_a_time, ladder, leave_one_out or none
    base: str = "baseline"  # recipe that the levers are compared with
    levers: list[str] = field(default_factory=list)  # names of levers, or num_workers=8; a+b is one step of two


@dataclass(kw_only=True)
class RerunPolicy:
    """What `rerun` does with points of one failure reason."""

    send: bool = True  # false: only where --only names the reason


@dataclass(kw_only=True)
class TimeoutPolicy(RerunPolicy):
    """Rerun with a longer limit. `requeues` and `warn_s` concern training jobs only; see time_limit.py."""

    time_factor: float = within(1, 100, 1.5)  # the next time limit over the last one, up to the partition's
    requeues: int = within(0, 1000, 3)  # how many times a job may requeue itself, if the site allows that
    warn_s: int = within(0, 86400, 120)  # seconds before the limit at which Slurm sends a warning; 0: no warning


@dataclass(kw_only=True)
class NodeFailPolicy(RerunPolicy):
    """Rerun on other nodes."""

    exclude_node: bool = True  # ask Slurm not to use the node that failed


@dataclass(kw_only=True)
class OomGpuPolicy(RerunPolicy):
    """Rerun with a recipe that needs less memory, reported under that recipe's name."""

    send: bool = False  # false: only where --only names the reason
    relief: list[str] = field(
        default_factory=lambda: ["recipe.grad_checkpoint=true", "recipe.accumulate=2", "recipe.accumulate=4"]
    )  # each attempt adds the next one


@dataclass(kw_only=True)
class OomHostPolicy(RerunPolicy):
    """Rerun with more host memory."""

    send: bool = False  # false: only where --only names the reason
    mem_factor: float = within(1, 100, 2.0)  # the next host memory over the last one, up to the node's


@dataclass(kw_only=True)
class RerunConfig:
    """Policies of `rerun`, one for each reason of a failure."""

    max_attempts: int = within(1, 1000, 5)  # of one point, not counting arrays that sbatch refused
    timeout: TimeoutPolicy = field(default_factory=TimeoutPolicy)
    node_fail: NodeFailPolicy = field(default_factory=NodeFailPolicy)
    preempted: RerunPolicy = field(default_factory=RerunPolicy)
    cancelled: RerunPolicy = field(default_factory=RerunPolicy)
    lost: RerunPolicy = field(default_factory=RerunPolicy)
    never_started: RerunPolicy = field(default_factory=RerunPolicy)
    telemetry_incomplete: RerunPolicy = field(default_factory=RerunPolicy)
    oom_gpu: OomGpuPolicy = field(default_factory=OomGpuPolicy)
    oom_host: OomHostPolicy = field(default_factory=OomHostPolicy)
    # Only on request: these would most likely fail in the same way again.
    app_error: RerunPolicy = field(default_factory=lambda: RerunPolicy(send=False))
    unavailable: RerunPolicy = field(default_factory=lambda: RerunPolicy(send=False))


@dataclass(kw_only=True, unsafe_hash=True)
class NotifyConfig:
    """Whom Slurm tells that the jobs of a sweep have ended. Runs do not record it."""

    # address, or a user of the site: Slurm sends a mail when an array has ended, and when tasks of it have failed
    mail: str | None = field(default=None, metadata=matching(r"[\w.%+-]+(@[\w.-]+)?", "one address of mail"))


@dataclass(kw_only=True)
class Identity:
    """Which attempt of which sweep a run is. The launcher fills it in; a single run draws its own."""

    run_id: str | None = None  # unique id of the attempt
    sweep_id: str | None = None  # id of the sweep
    point: int | None = None  # number of the point in the sweep
    attempt: int = 1  # number of the attempt of this point
    code: str | None = None  # code snapshot that its job must run; null: whatever is imported


@dataclass(kw_only=True)
class BenchConfig:
    """The root of the configuration: one point of a sweep."""

    gpu: GpuConfig
    site: SiteConfig
    model: ModelConfig
    data: DataConfig
    recipe: RecipeConfig
    telemetry: TelemetryConfig
    workload: WorkloadConfig
    prepare: PrepareConfig = field(default_factory=PrepareConfig)
    quality: QualityConfig = field(default_factory=QualityConfig)
    track: TrackConfig = field(default_factory=TrackConfig)
    study: StudyConfig = field(default_factory=StudyConfig)
    # overrides of site files by site name
    sites: dict[str, Any] = field(default_factory=dict, metadata={"values": SiteConfig})
    identity: Identity = field(default_factory=Identity)
    batch: int | str = within(1, 1_000_000, 16)  # images per step and GPU; auto: as many as fit
    gpus: int = within(1, 64, 1)  # per node, with a process each
    nodes: int = within(1, 64, 1)  # per job
    seed: int = within(0, 2**31 - 1, 0)  # of the first replicate
    repeats: int | str = within(1, 1000, 1)  # runs of each configuration, with other seeds; auto: see repeats_target
    repeats_target: float = within(0.0001, 1, 0.02)  # auto: half width of the 95 % interval of images/s over its mean
    repeats_max: int = within(2, 1000, 10)  # auto: at most this many replicates
    order_seed: int | None = within(0, 2**31 - 1, None)  # shuffles the points; null: drawn where repeats > 1
    time_min: int | str = time_limit(1, 60 * 24 * 366, 60)  # time limit of a job; auto: from earlier runs below `out`
    mem_gb: int | None = within(1, 65536, None)  # host memory of a job in Slurm's G; null: the GPU's share of the node
    rerun: RerunConfig = field(default_factory=RerunConfig)
    notify: NotifyConfig = field(default_factory=NotifyConfig)
    max_points: int = within(1, 10**9, 1000)  # a launch of more asks at a terminal, and is refused elsewhere
    budget: float | None = within(0, 1e12, None)  # service units; a sweep that could cost more is refused
    # end of the sweep directory's name
    name: str = field(default="inpaint", metadata=matching(r"[^/\x00]+", "a name without /"))
    out: str = "runs"  # parent of all sweep directories
    wait: bool = False  # return when all points have finished
    dry_run: bool = False  # print the plan and write the scripts, submit nothing
    # torch: profile a step after the measured windows, by classes of kernels; never part of a measurement. ncu: count
    # the heaviest kernels with Nsight Compute, and measure nothing
    profiler: str = one_of("none", "torch", "ncu", default="none")
    profiler_launches: int = within(1, 100_000, 300)  # ncu: of a call; kernels are left out that have more
    profiler_limit_s: float = within(10, 1e6, 300)  # ncu: after this time no further launch is counted
    demonstration: bool = False  # tables and figures of such a run are marked as a demonstration

    @property
    def searches_batch(self) -> bool:
        return self.batch == "auto"

    @property
    def batch_size(self) -> int:
        """Return the images per step and GPU; of batch=auto only once the search has set it."""
        assert isinstance(self.batch, int)
        return self.batch

    @property
    def ranks(self) -> int:
        return self.gpus * self.nodes

    @property
    def finetune(self) -> FinetuneConfig:
        assert isinstance(self.workload, FinetuneConfig)
        return self.workload


def parse_config(config: DictConfig) -> BenchConfig:
    """Return a composed configuration as checked objects, without Hydra's own node. Raises UserError."""
    bench = parse_unchecked(config)
    _check_config(bench)
    return bench


def parse_unchecked(config: DictConfig) -> BenchConfig:
    """Return a composed configuration as objects whose values may be out of range."""
    result = OmegaConf.to_object(without_hydra(config))
    assert isinstance(result, BenchConfig)
    return result


def parse_changed(config: DictConfig, base: BenchConfig, keys: Iterable[str], checked: set[str]) -> BenchConfig:
    """Return `parse_config(config)`, where `config` differs from that of `base` only below the top-level `keys`.

    `checked` are blocks of `base` that are known to be within their limits; those that are checked here are added.
    """
    # The conversion by OmegaConf is slow, so only what has changed is converted, and checked, again.
    keys = set(keys)
    nodes = {key: config[key] for key in keys}
    changes: dict[str, Any] = {
        key: OmegaConf.to_object(node) if OmegaConf.is_config(node) else node for key, node in nodes.items()
    }
    bench = replace(base, **changes)
    # Time limits in Slurm's formats become minutes in the object that is checked: blocks are shared with `base`.
    blocks = {name for name, value in vars(base).items() if is_dataclass(value)} - keys
    _check_config(bench, known=checked & blocks)
    checked |= blocks
    return bench


def _check_config(bench: BenchConfig, known: Container[str] = ()) -> None:
    """Raise UserError for values out of range, but in blocks `known` to be right, and for keys that contradict."""
    check(bench, known=known)
    if bench.data.kind in NEEDS_ROOT and not bench.data.root:
        raise UserError(f"data.root is empty: data={bench.data.kind} needs data.root=<{NEEDS_ROOT[bench.data.kind]}>")
    if bench.data.kind not in NEEDS_ROOT and bench.data.root:
        others = " or ".join(f"data={kind}" for kind in bench.workload.data_kinds if kind in NEEDS_ROOT)
        right = f"add {others}" if others else "leave data.root out"
        raise UserError(
            f"data.root={bench.data.root}: data={bench.data.kind} makes its data and reads no folder; {right}"
        )
    if bench.data.kind not in (kinds := bench.workload.data_kinds):
        raise UserError(f"data={bench.data.kind}: workload={bench.workload.name} takes {' or '.join(kinds)}")
    if bench.model.weights and bench.model.text_encoder_2:
        raise UserError(f"model.weights={bench.model.weights}: model {bench.model.name} has random weights only")
    if bench.data.resolution_px % 8:  # the VAE's downscaling factor
        raise UserError(f"data.resolution_px={bench.data.resolution_px}: must be a multiple of 8")
    if bench.ranks > 1 and not bench.workload.parallel:
        raise UserError(f"gpus={bench.gpus} nodes={bench.nodes}: workload {bench.workload.name} uses one GPU")
    if bench.ranks > 1 and bench.profiler == "ncu":
        raise UserError(f"gpus={bench.gpus} nodes={bench.nodes}: profile=ncu counts the kernels of one GPU")
    _check_module("workload.module", bench.workload.module)
    _check_tracker(bench.track)
    bench.workload.check(bench)


def _check_module(key: str, module: str) -> None:
    # Its package only: to look for a submodule would import it, and torch with it.
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        raise UserError(
            f"{key}={module}: no such module; install it in this environment, or name its folder in PYTHONPATH"
        )


def _check_tracker(track: TrackConfig) -> None:
    if track.module:
        _check_module("track.module", track.module)
    for key, reader in TRACKER_KEYS.items():
        # A tracker of the user's own may read any of them.
        others = {"none", "tensorboard", *TRACKER_KEYS.values()} - {reader}
        if getattr(track, key) and track.name in others:
            raise UserError(f"track.{key} is read by track={reader} only, and this is track={track.name}")


def require_tracker(track: TrackConfig) -> None:
    """Raise UserError where the library of the tracker is not installed in this environment."""
    if track.package and importlib.util.find_spec(track.package) is None:
        raise UserError(
            f"track={track.name} needs {track.package}, which is not installed: "
            f"pip install 'inpaint-bench[{track.name}]'"
        )


def without_hydra(config: DictConfig) -> DictConfig:
    """Return `config`, or a copy without the node `hydra`, parts of which can only be resolved inside a job."""
    if "hydra" not in config:
        return config
    copy = config.copy()
    # Hydra's own node is read-only, and struct mode forbids the removal of a key.
    with read_write(copy), open_dict(copy):
        copy.pop("hydra", None)
    return copy
