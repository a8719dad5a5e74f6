"""Keys and results of the workload `sd_inference`."""

from dataclasses import dataclass
from typing import ClassVar

from inpaint_bench.core.config.bench import BenchConfig
from inpaint_bench.core.config.recipe import check_levers, check_network
from inpaint_bench.core.config.validation import one_of, within
from inpaint_bench.core.errors import UserError

from . import Relation, StableDiffusionFacts, WorkloadConfig
from . import Result as BaseResult


@dataclass(kw_only=True)
class Config(WorkloadConfig):
    """From prompts to decoded images, `batch` at once. The model's UNet decides: text to image, or inpainting."""

    not_in_variant: ClassVar[tuple[str, ...]] = ("sampler", "steps", "guidance")  # the model's name tells them
    unet_channels: ClassVar[tuple[int, ...]] = (4, 9)
    capabilities: ClassVar[tuple[str, ...]] = ("unet", "one_shape", "graph")
    unread: ClassVar[tuple[str, ...]] = ("quality",)

    warmup_steps: int = within(0, 1_000_000, 2)
    measure_steps: int = within(1, 100_000_000, 10)
    min_measure_s: float = within(0, 1e6, 5.0)
    # PLMS, DDIM or DPM-Solver++; of transformers euler
    sampler: str = one_of("plms", "ddim", "dpmpp", "euler", default="plms")
    steps: int = within(1, 500, 50)  # steps of the sampler; PLMS evaluates the UNet once more
    guidance: float = within(1, 50, 7.5)  # 1: none, and half the work

    def check(self, bench: BenchConfig) -> None:
        if bench.searches_batch:
            raise UserError(f"batch={bench.batch} searches the largest batch of a training; set a number")
        check_levers(bench)
        check_network(bench)
        if self.sampler not in bench.model.samplers:
            raise UserError(
                f"workload.sampler={self.sampler}: models with a UNet take plms, ddim or dpmpp, transformers take euler"
            )
        if bench.recipe.weights not in ("fp32", "half"):
            raise UserError(f"recipe.weights={bench.recipe.weights} trains; workload=sd_inference takes fp32 or half")

    def num_prompts(self, bench: BenchConfig) -> int:
        return bench.batch_size

    def model(self, bench: BenchConfig) -> str:
        # Another sampler, number of steps or guidance is another amount of work: never in one cell.
        return f"{bench.model.name}, {self.sampler} {self.steps}, guidance {self.guidance:g}"


def _flop_per_image(
    flop_parts: dict[str, float], evaluations: int, guidance: float, task: str, guidance_input: bool = False
) -> float:
    texts = 2 if guidance > 1 and not guidance_input else 1
    image = flop_parts.get("vae_encode", 0) if task == "inpainting" else 0
    sampling = evaluations * flop_parts["unet_forward"] + flop_parts["vae_decode"]
    return sampling + texts * flop_parts.get("text_encode", 0) + image


class Facts(StableDiffusionFacts, kw_only=True):
    """What is made of what, and how much work one image is."""

    relations: ClassVar[tuple[Relation, ...]] = (
        *StableDiffusionFacts.relations,
        Relation("flop_per_image", _flop_per_image),
    )

    task: str
    sampler: str
    sampler_steps: int
    guidance: float
    guidance_input: bool  # guidance is an input of the network (FLUX): one forward pass per image
    evaluations: int
    psnr_db: float | None


def count_evaluations(sampler: str, sampler_steps: int, guidance: float, guidance_input: bool = False) -> int:
    """Return how often the UNet is evaluated for one image."""
    return (sampler_steps + (sampler == "plms")) * (2 if guidance > 1 and not guidance_input else 1)


class Result(BaseResult, kw_only=True):
    """One batch of images: between CUDA events, on a CPU by the host's clock."""

    bounds: ClassVar[dict[str, tuple[float, float]]] = {"psnr_db": (20, 100), "finite": (True, True)}
    repeated: ClassVar[tuple[str, ...]] = ("sampler", "sampler_steps", "guidance", "evaluations", "psnr_db")
    relations: ClassVar[tuple[Relation, ...]] = (
        Relation("evaluations", count_evaluations),
        Relation("inpaints", lambda task: task == "inpainting"),
        Relation(
            "total_ms",
            lambda text_ms, sampling_ms, decode_ms, image_ms=0.0: text_ms + (image_ms or 0.0) + sampling_ms + decode_ms,
        ),
        Relation("total_ms", lambda device_ms: device_ms, 0.01),
        Relation("total_ms", lambda host_ms: host_ms, 0.01, "most"),
    )

    sampler: str
    sampler_steps: int
    guidance: float
    evaluations: int  # UNet evaluations for one image; guidance doubles what the sampler asks for
    inpaints: bool
    text_ms: float
    image_ms: float | None  # encoding of the masked image; None if there is none
    sampling_ms: float
    decode_ms: float
    total_ms: float
    psnr_db: float | None  # lowest PSNR of the run's first batch against the baseline's; None for the baseline
    finite: bool  # no pixel is NaN or infinite
