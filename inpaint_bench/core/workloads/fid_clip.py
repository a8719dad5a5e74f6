"""Keys and results of the workload `fid_clip`."""

from dataclasses import dataclass

from inpaint_bench.core.config.bench import BenchConfig
from inpaint_bench.core.config.validation import one_of, within
from inpaint_bench.core.errors import UserError

from . import Relation, sd_inference
from . import Result as BaseResult

Facts = sd_inference.Facts

LENGTHS = ("warmup_steps", "measure_steps", "min_measure_s")


@dataclass(kw_only=True)
class Config(sd_inference.Config):
    """FID and CLIP score of so many images at one guidance; sweep workload.guidance for the curve."""

    not_in_variant = (*sd_inference.Config.not_in_variant, "images")
    unet_channels = (4,)
    unread = ("quality.lpips_weights",)

    warmup_steps: int = within(0, 1_000_000, 0)
    images: int = within(32, 10_000_000, 30_000)  # what ends a run, instead of measure_steps and min_measure_s
    judges: str = one_of("files", "tiny", default="files")  # tiny: seeded random networks, for tests

    def check(self, bench: BenchConfig) -> None:
        super().check(bench)
        if bench.repeats == "auto":
            raise UserError(f"repeats=auto: workload={self.name} has no images/s to judge by; give a number")
        if self.images % bench.batch_size:
            raise UserError(f"workload.images={self.images}: must be a multiple of batch={bench.batch}")
        for name in LENGTHS:
            # The profiles of demonstrations set the lengths of any workload.
            if (value := getattr(self, name)) != getattr(Config, name) and not bench.demonstration:
                raise UserError(f"workload.{name}={value}: workload={self.name} ends after workload.images alone")
        if self.judges == "files" and not bench.model.weights:
            raise UserError(
                "model.weights is empty: FID and CLIP score of random weights say nothing. Name a diffusers folder, or "
                "set workload.judges=tiny to try the workload"
            )
        paths = {f"quality.{name}": getattr(bench.quality, name) for name in ("inception_weights", "clip_model")}
        if self.judges == "files" and (empty := [name for name, path in paths.items() if not path]):
            raise UserError(f"{' and '.join(empty)}: empty, and nothing is downloaded; workload={self.name} needs both")
        if self.judges == "tiny" and (unused := [f"{name}={path}" for name, path in paths.items() if path]):
            raise UserError(f"{' and '.join(unused)}: workload.judges=tiny reads no file")

    def num_prompts(self, bench: BenchConfig) -> int:
        return self.images


class Result(BaseResult, kw_only=True):
    """One guidance."""

    each_step = False
    bounds = {"fid": (-1, 1e4), "clip_mean": (-1, 1), "clip_std": (0, 1)}
    repeated = ("sampler", "sampler_steps", "guidance")
    relations = (
        Relation("images", lambda window_images: window_images),
        Relation("real_images", lambda num_images: num_images),
    )

    guidance: float
    sampler: str
    sampler_steps: int
    fid: float
    clip_mean: float  # cosine, not times 100
    clip_std: float  # over the images
    images: int
    real_images: int  # images of the reference set
    reference: str  # kind of the data and digest of its content
    judges: str
    prompts_sha256: str  # hash of the prompts in order, one per line; prompts of data.captions follow their ids
