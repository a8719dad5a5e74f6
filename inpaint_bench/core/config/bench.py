"""Typed configuration: one dataclass per Hydra group, one line per field with its range, unit and meaning.

Hydra refuses unknown keys and wrong types by these dataclasses; validation.py refuses values out of range. Both happen
for every point of a sweep before anything is submitted.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar

from .levers import FIELDS, RecipeConfig, capabilities
from .site import SiteConfig
from .validation import file_path, matching, one_of, regular_expression, time_limit, within


@dataclass(kw_only=True)
class GpuConfig:
    """One GPU model. Peaks are the vendor's dense figures, never the sparse ones."""

    name: str  # the name of its file, and of gpu=
    title: str  # as tables and figures show it
    nvml_name: str | None = regular_expression()  # must match NVML's device name; null: no GPU
    architecture: str = ""  # the vendor's name of it, such as Hopper
    memory_gb: float = within(0, 1024, 0.0)  # GB, the vendor's figure; 0: no GPU
    memory_type: str = ""  # such as HBM2e
    bandwidth_gb_s: float = within(0, 20000, 0.0)  # GB/s of the memory, the vendor's figure
    bf16_dense_tflops: float = within(0, 20000, 0.0)  # TFLOP/s in bf16 without sparsity
    fp32_tflops: float = within(0, 20000, 0.0)  # TFLOP/s in fp32 without tensor cores; 0: not known
    tf32_dense_tflops: float = within(0, 20000, 0.0)  # TFLOP/s in TF32 without sparsity; 0: not known
    power_limit_w: float = within(0, 5000, 0.0)  # board default; the enforced limit is in the manifest
    max_sm_clock_mhz: int = within(0, 10000, 0)  # as NVML reports it; 0: not known
    home_site: str | None = None  # site that `site=auto` prefers; null: none
    capture: str | None = None  # recording that telemetry=replay plays for this GPU
    source: str = ""  # where the figures are from, with dates
    verified: bool = True  # false: no run on such a card is known, so its name and figures are those of documents


@dataclass(kw_only=True)
class ModelConfig:
    """A diffusion model: what predicts the noise, and the VAE and the text encoders around it."""

    name: str  # as manifest and report show it
    weights: str | None = file_path()  # a diffusers folder; null: random weights of these shapes
    unet: dict[str, Any] = field(default_factory=dict)  # diffusers configuration of the UNet
    # in the UNet's place: `architecture`, a module of models/architectures, and its diffusers configuration
    transformer: dict[str, Any] = field(default_factory=dict)
    vae: dict[str, Any] = field(default_factory=dict)  # diffusers configuration of the VAE
    text_encoder: dict[str, Any] = field(default_factory=dict)  # transformers configuration of the text encoder
    # transformers: the second text encoder of SDXL, FLUX or SD 3
    text_encoder_2: dict[str, Any] = field(default_factory=dict)
    text_encoder_3: dict[str, Any] = field(default_factory=dict)  # transformers: the third text encoder of SD 3
    scheduler: dict[str, Any] = field(default_factory=dict)  # diffusers configuration of the noise schedule
    dtype: str = one_of("fp32", "bf16", default="fp32")  # dtype in which the networks are built and trained
    guidance: float = within(0, 100, 1.0)  # that FLUX is trained with, an input of its transformer
    location_tokens: int = within(0, 64, 4)  # latitude and longitude as this many tokens after the text's

    @property
    def architecture(self) -> str:
        """Return the name of its module in models/architectures."""
        if self.transformer:
            return str(self.transformer.get("architecture"))
        return "sdxl" if self.text_encoder_2 else "unet"

    @property
    def network(self) -> dict[str, Any]:
        """Return the configuration of the UNet, or of the transformer in its place."""
        return self.transformer or self.unet

    @property
    def text_to_image(self) -> bool:
        """Return whether the configured network makes images of texts, and does not inpaint."""
        if self.transformer:
            # Some take the masked image as further tokens, and have as many channels: `inpaints` says so.
            more = self.transformer.get("in_channels") != self.transformer.get("out_channels")
            return not self.transformer.get("inpaints", more)
        return bool(self.unet.get("in_channels") == 4)

    @property
    def multiple_px(self) -> int:
        """Return what the side of an image must be a multiple of: VAE and UNet halve it, transformers pair latents."""
        halvings = 1 if self.transformer else len(self.unet.get("block_out_channels", range(4))) - 1
        return int(2 ** (halvings + len(self.vae.get("block_out_channels", range(1))) - 1))

    @property
    def random_only(self) -> bool:
        """Return whether weights of the architecture can be neither loaded nor saved: SDXL's."""
        return bool(self.text_encoder_2 and not self.transformer)

    @property
    def byte_tokenized(self) -> bool:
        """Return whether random weights can be saved: with a tokenizer of bytes, which is CLIP's."""
        return not self.transformer and not self.text_encoder_2

    @property
    def samplers(self) -> tuple[str, ...]:
        """Return the samplers of its noise schedule."""
        return ("euler",) if self.transformer else ("plms", "ddim", "dpmpp")

    def input_channels(self, saved: int | None) -> int | None:
        """Return the input channels of a run's UNet; `saved` are those of its weights, None for random ones.

        Four, of a text-to-image model, are widened to nine unless the model itself has four. Transformers count as
        having four or nine.
        """
        if self.transformer:
            return saved or (4 if self.text_to_image else 9)
        configured: int | None = self.unet.get("in_channels")
        return 9 if saved == 4 and configured != 4 else saved or configured


PREPARED = "prepared.json"  # manifest of a dataset that `prepare` wrote
NEEDS_ROOT = {
    "folder": "a folder of images",
    "parquet": "a folder of Parquet files with images",
    "prepared": "a dataset that `prepare` wrote",
    "nifti": "a folder with images/ and labels/",
}


@dataclass(kw_only=True)
class DataConfig:
    """Images, their train/validation split, and the masks."""

    # where images come from: the generator, a folder, Parquet files, what `prepare` wrote, or volumes in NIfTI files
    kind: str = one_of("synthetic", "folder", "parquet", "prepared", "nifti")
    # folder: images with EXIF positions or a metadata file; parquet: files as Hugging Face datasets has them; prepared:
    # a dataset; nifti: images/ and labels/
    root: str | None = None
    num_images: int | None = within(1, 10_000_000, None)  # synthetic: exactly; folder, parquet, nifti: at most
    resolution_px: int = within(32, 4096, 512)  # side of the square images in pixels, a multiple of 8
    seed: int = within(0, 2**31 - 1, 0)  # seed of the generator, the split, the masks and the captions
    masks: str = one_of("sd", "disaster", default="sd")  # sd: strokes and boxes; disaster: debris, water, smoke, walls
    full_mask_share: float = within(0, 1, 0.25)  # share of the masks that repaint the whole image
    validation_share: float = within(0, 0.9, 0.1)  # share of the images, held out by whole geographic blocks
    block_m: float = within(1, 1e6, 200.0)  # side of a geographic block
    # JSON file of captions as COCO has them, drawn by data.seed for the prompts of sd_inference and fid_clip; null: the
    # texts of the images
    captions: str | None = file_path()


@dataclass(kw_only=True)
class PrepareConfig:
    """What the `prepare` command writes. Jobs do not read this."""

    out: str | None = None  # folder of the new dataset
    # copies to write: files, memmap, hdf5, webdataset
    formats: list[str] = field(default_factory=lambda: ["files", "memmap"])
    jpeg_quality: int = within(50, 100, 95)  # quality of images that are written as JPEG
    shard_images: int = within(1, 1_000_000, 256)  # webdataset: images per tar file
    caches: bool = False  # also run the VAE and the text encoder once and store their outputs
    kernels: bool = False  # also run warm-up steps of the recipe, so that its kernels are compiled for this GPU


SHORT_WINDOW_S, SHORT_WINDOW_HZ = 30.0, 10.0  # the energy counter is read so often in shorter windows


@dataclass(kw_only=True)
class TelemetryConfig:
    """What the NVML sidecar samples, and how often it writes."""

    name: str  # the name of its file, and of telemetry=
    # nvml: this machine's GPUs; replay: a recording; none: no sidecar
    source: str = one_of("nvml", "replay", "none", default="nvml")
    capture: str | None = None  # replay: file or name of a recording; null: the one of the GPU model
    fast_hz: float = within(0.1, 20, 10.0)  # above 20 Hz NVML gives spurious errors and zeros
    # readings of the energy counter per second, at most fast_hz, and at least 10 if min_measure_s is below 30; one
    # takes 3 ms of a core on an H200
    energy_hz: float = within(0.5, 20, 1.0)
    slow_hz: float = within(0.1, 10, 1.0)  # samples per second of clocks, temperatures and memory
    part_s: float = within(1, 3600, 60.0)  # seconds of samples in one Parquet file
    journal_s: float = within(0.1, 600, 5.0)  # seconds of samples that a killed sidecar may lose
    ready_timeout_s: float = within(1, 600, 10.0)  # seconds to wait until the sidecar has its first sample
    # power limit of the run's GPUs, set back at its end; needs root; null: as it is
    power_limit_w: float | None = within(1, 10_000, None)


TRACKER_KEYS = {"uri": "mlflow", "online": "wandb"}  # keys of TrackConfig that one of our trackers reads


@dataclass(kw_only=True)
class TrackConfig:
    """Curves and pictures of a run for an experiment tracker, written by a process beside the run."""

    name: str = "none"  # the name of its file, and of track=
    module: str | None = None  # writes them, as inpaint_bench/tracking/api.py describes; null: nothing is tracked
    package: str | None = None  # library that the module imports
    # project in W&B, experiment in MLflow; null: $WANDB_PROJECT or $MLFLOW_EXPERIMENT_NAME, else inpaint_bench
    project: str | None = field(default=None, metadata=matching(r"[^/\\#?%:\x00-\x1f]+", "a name without / \\ # ? % :"))
    # mlflow: address of a server or a folder; null: $MLFLOW_TRACKING_URI, else mlruns/ in the sweep directory
    uri: str | None = field(
        default=None,
        metadata=matching(
            r"(?![\w+.-]+://[^/]*@)\S[\s\S]*",
            "a path or an address without user and password, which MLFLOW_TRACKING_USERNAME and _PASSWORD give",
        ),
    )
    # wandb: send to its server, which needs a network and a key; false: as $WANDB_MODE says, else `wandb sync` later
    online: bool = False
    every_s: float = within(0.5, 3600, 5.0)  # seconds between two readings of the run's files


@dataclass(kw_only=True)
class QualityConfig:
    """Weight files of the networks for LPIPS, FID and CLIP score. Without one its metric is unavailable, not zero."""

    lpips_weights: str | None = file_path()  # file with the weights of LPIPS
    inception_weights: str | None = file_path()  # file with the weights of Inception, for FID
    clip_model: str | None = file_path()  # a folder in the format of transformers, with its tokenizer


@dataclass(kw_only=True)
class StudyConfig:
    """What to compare in one sweep: recipes, which core/config/recipe.py expands, or the points of a grid."""

    name: str = "none"  # one_at_a_time, ladder, leave_one_out, none, or the name of a grid
    base: str = "baseline"  # recipe that the levers are compared with
    levers: list[str] = field(default_factory=list)  # names of levers, or num_workers=8; a+b is one step of two
    # lines of overrides as after launch -m, such as gpu=a40,a100 batch=8,16; a sweep has the combinations of each line
    grid: list[str] = field(default_factory=list)


@dataclass(kw_only=True)
class WorkloadConfig:
    """What is executed and measured: the keys that every workload has.

    Every other key is part of `variant`: only runs that agree in it are averaged. `not_in_variant` of a subclass lists
    more keys that do not change the work of a step, or that `model` tells.
    """

    not_in_variant: ClassVar[tuple[str, ...]] = ()
    data_kinds: ClassVar[tuple[str, ...]] = ("synthetic", "folder", "parquet", "prepared")  # that it can read
    capabilities: ClassVar[tuple[str, ...]] = ()  # a subset of CAPABILITIES: levers that need others are refused
    unread: ClassVar[tuple[str, ...]] = ()  # what keys begin with that it never reads: overrides of them are refused
    divides_images: ClassVar[bool] = False  # several GPUs work on the same images, not each on a batch of its own
    counts_each_call: ClassVar[bool] = False  # profile=ncu counts every call that is profiled, not the heaviest alone
    unet_channels: ClassVar[tuple[int, ...]] = ()  # inputs that its Stable Diffusion UNet may have; none: has no such

    name: str  # the name of its file, and of workload=
    module: str  # Python module with the workload
    warmup_steps: int = within(0, 1_000_000, 10)  # steps before measuring begins
    measure_steps: int = within(1, 100_000_000, 50)  # steps that are measured, at least
    min_measure_s: float = within(0, 1e6, 20.0)  # measuring goes on until both are reached

    @property
    def resumes(self) -> bool:
        """Return whether a job that is stopped continues where it was: it may requeue itself at its time limit."""
        return False

    @property
    def validates(self) -> bool:
        """Return whether images have to be held out."""
        return False

    @classmethod
    def levers(cls) -> list[str]:
        """Return the fields of a recipe that this workload has a use for."""
        return [field for field in FIELDS if {*capabilities(field)} <= {*cls.capabilities}]

    def check(self, bench: BenchConfig) -> None:
        """Raise UserError for keys of the whole configuration that this workload cannot use. Before submission."""

    def num_prompts(self, bench: BenchConfig) -> int:
        """Return how many different prompts a run takes from data.captions; 0: it makes no images of prompts."""
        return 0

    def model(self, bench: BenchConfig) -> str:
        """Return the name of the model in manifest and report."""
        return bench.model.name

    def variant(self) -> str | None:
        """Return the keys that differ from their defaults and change what is executed, e.g. `tiling=off`."""
        same = {*(spec.name for spec in fields(WorkloadConfig)), *self.not_in_variant}
        changed = []
        for spec in fields(self):
            default = spec.default if spec.default_factory is MISSING else spec.default_factory()
            if spec.name not in same and (value := getattr(self, spec.name)) != default:
                text = f"[{','.join(map(str, value))}]" if isinstance(value, list) else str(value)
                changed.append(f"{spec.name}={text}")
        return ", ".join(changed) or None


@dataclass(kw_only=True)
class RerunPolicy:
    """What `rerun` does with points of one failure reason."""

    send: bool = True  # false: only if --only names the reason


@dataclass(kw_only=True)
class TimeoutPolicy(RerunPolicy):
    """Rerun with a longer limit. `requeues` and `warn_s` concern training jobs only."""

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

    send: bool = False  # false: only if --only names the reason
    relief: list[str] = field(
        default_factory=lambda: ["recipe.grad_checkpoint=true", "recipe.accumulate=2", "recipe.accumulate=4"]
    )  # each attempt adds the next one


@dataclass(kw_only=True)
class OomHostPolicy(RerunPolicy):
    """Rerun with more host memory."""

    send: bool = False  # false: only if --only names the reason
    mem_factor: float = within(1, 100, 2.0)  # the next host memory over the last one, up to the node's


@dataclass(kw_only=True)
class RerunConfig:
    """Policies of `rerun`, one for each reason of a failure."""

    max_attempts: int = within(1, 1000, 5)  # attempts of one point, not counting arrays that sbatch refused
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
    recipe: RecipeConfig = field(default_factory=RecipeConfig)
    telemetry: TelemetryConfig
    workload: WorkloadConfig
    prepare: PrepareConfig = field(default_factory=PrepareConfig)
    quality: QualityConfig = field(default_factory=QualityConfig)
    track: TrackConfig = field(default_factory=TrackConfig)
    study: StudyConfig = field(default_factory=StudyConfig)
    # overrides of site files by site name; those of "*" hold for every site, before its own
    sites: dict[str, Any] = field(default_factory=dict, metadata={"values": SiteConfig})
    identity: Identity = field(default_factory=Identity)
    batch: int | str = within(1, 1_000_000, 16)  # images per step and GPU; auto: as many as fit
    gpus: int = within(1, 64, 1)  # per node, with a process each
    nodes: int = within(1, 64, 1)  # per job
    seed: int = within(0, 2**31 - 1, 0)  # seed of the first replicate
    repeats: int | str = within(1, 1000, 1)  # runs of each configuration, with other seeds; auto: see repeats_target
    repeats_target: float = within(0.0001, 1, 0.02)  # auto: half width of the 95 % interval of images/s over its mean
    repeats_max: int = within(2, 1000, 10)  # auto: at most this many replicates
    order_seed: int | None = within(0, 2**31 - 1, None)  # shuffles the points; null: drawn if repeats > 1
    # points that a job runs one after another; auto: as many as likely fit into the time limit of one
    points_per_job: int | str = within(1, 1000, 1)
    time_min: int | str = time_limit(1, 60 * 24 * 366, 60)  # time limit of a job; auto: from earlier runs below `out`
    mem_gb: int | None = within(1, 65536, None)  # host memory of a job in Slurm's G; null: the GPU's share of the node
    rerun: RerunConfig = field(default_factory=RerunConfig)
    notify: NotifyConfig = field(default_factory=NotifyConfig)
    max_points: int = within(1, 10**9, 1000)  # a launch of more asks at a terminal, and is refused elsewhere
    budget: float | None = within(0, 1e12, None)  # service units; a sweep that could cost more is refused
    memory_check: bool = True  # leave out points whose predicted memory, less its error, exceeds the card's
    silence: list[str] = field(default_factory=list)  # names of warnings that are not printed, as they end with
    datasets: list[str] = field(default_factory=list)  # merged datasets of your own, from which rates are predicted too
    # end of the sweep directory's name
    name: str = field(default="inpaint", metadata=matching(r"[^/\x00]+", "a name without /"))
    out: str = "runs"  # parent of all sweep directories
    wait: bool = False  # return when all points have finished
    dry_run: bool = False  # print the plan and write the scripts, submit nothing
    # torch: profile a step after the measured windows, by classes of kernels; never part of a measurement. ncu: count
    # the heaviest kernels with Nsight Compute, and measure nothing. nsys: record a timeline of ten steps with Nsight
    # Systems, after the measured windows
    profiler: str = one_of("none", "torch", "ncu", "nsys", default="none")
    profiler_launches: int = within(1, 100_000, 300)  # ncu: most launches in a call; kernels beyond that are left out
    profiler_limit_s: float = within(10, 1e6, 300)  # after this time ncu counts no further launch, nsys no step
    demonstration: bool = False  # tables and figures of such a run are marked as a demonstration

    @property
    def searches_batch(self) -> bool:
        return self.batch == "auto"

    @property
    def batch_size(self) -> int:
        """Return the images per step and GPU; of batch=auto only once the search has set it."""
        assert isinstance(self.batch, int)
        return self.batch

    def max_requeues(self, site: SiteConfig) -> int:
        """Return how often a job at this site may requeue itself at its time limit.

        A training continues from its last checkpoint. Half of a benchmark is no measurement: it has no requeues.
        """
        # In a container there is no scontrol to ask for it.
        allowed = site.requeue.request and site.connection.has_slurm and not site.environment.container.image
        return self.rerun.timeout.requeues if allowed and self.workload.resumes else 0

    def warning_s(self, site: SiteConfig) -> int:
        """Return how long before its limit Slurm signals a job; 0: not at all. Only steps that srun started get it."""
        seconds = self.rerun.timeout.warn_s
        if not self.workload.resumes or not site.use_srun or not site.connection.has_slurm:
            return 0
        # Slurm checks every 30 s and signals up to a minute early: a limit not much longer would leave little time.
        return seconds if 60 * int(self.time_min) >= 10 * seconds else 0

    @property
    def ranks(self) -> int:
        return self.gpus * self.nodes
