"""Keys and results of the workload `denoise_patch`: an image as patches, over their size and how many are a batch."""

import math
import re
from dataclasses import dataclass, field
from typing import ClassVar

from inpaint_bench.core.config.bench import BenchConfig
from inpaint_bench.core.config.validation import one_of, within
from inpaint_bench.core.errors import UserError

from . import Relation
from ._denoisers import CALLS, CaseResult, DenoiserConfig, among

CASE_NAME = "{} patches of {} px by {}"  # model, patch, and patches at once, in profiles and the log


@dataclass(kw_only=True)
class Config(DenoiserConfig):
    """An image, all of whose patches are one step. They are divided among the GPUs, and not put together."""

    capabilities: ClassVar[tuple[str, ...]] = ("ranks",)
    divides_images: ClassVar[bool] = True
    counts_each_call: ClassVar[bool] = True

    warmup_steps: int = within(0, 1000, 2)
    image_px: int = within(16, 16384, 2048)  # height of the image in pixels
    image_width_px: int = within(0, 16384, 0)  # its width; 0: as its height
    # sides of the square patches in pixels, with what they share; the image's longer side: the whole image
    patches_px: list[int] = field(default_factory=lambda: [128, 256, 512])
    patch_overlap_px: int = within(0, 1024, 0)  # neighbouring patches share twice as much
    patch_batches: list[int] = field(default_factory=lambda: [1, 2, 4, 8, 16])  # patches that are denoised at once
    # host_random, as published: drawn on the CPU and copied within the timed call
    input_mode: str = one_of("device_resident", "host_random", "pinned", default="host_random")

    def check(self, bench: BenchConfig) -> None:
        super().check(bench)
        if bench.batch != 1:
            raise UserError(f"batch={bench.batch}: a step is one image; patches of a batch are workload.patch_batches")
        if not self.patch_batches or min(self.patch_batches) < 1:
            raise UserError(f"workload.patch_batches={list(self.patch_batches)}: give at least one, of 1 or more")
        least, most = 16 + 2 * self.patch_overlap_px, max(self.image_size)
        if not self.patches_px or any(not least <= patch <= most for patch in self.patches_px):
            text = f"must be between {least} (16 and twice patch_overlap_px) and {most}, the longer side of the image"
            raise UserError(f"workload.patches_px={list(self.patches_px)}: {text}")

    @property
    def image_size(self) -> tuple[int, int]:
        """Return height and width of the image in pixels."""
        return self.image_px, self.image_width_px or self.image_px


def count_patches(
    image_px: int, patch_px: int, image_width_px: int | None = None, patch_overlap_px: int | None = None
) -> int:
    """Return the patches of an image. The last one of a row or column may reach beyond the image, which is padded."""
    sides, own_px = (image_px, image_width_px or image_px), patch_px - 2 * (patch_overlap_px or 0)
    return math.prod(1 if patch_px >= side else -(-side // own_px) for side in sides)


def _calls(branch: str, num_patches: int, batch: int, run_gpus: int) -> int:
    each, more = divmod(num_patches, run_gpus)  # so many ranks have one patch more
    return CALLS[branch] * (more * -(-(each + 1) // batch) + (run_gpus - more) * -(-each // batch))


def numbers(by_rank: str) -> list[float]:
    """Return the figures of the ranks in a column `..._by_rank...`."""
    return [float(text) for text in re.findall(r"\d+\.\d+", by_rank)]


def _most(by_rank: str) -> float:
    return max(numbers(by_rank), default=math.nan)


class Result(CaseResult, kw_only=True):
    """One image, passed to the network as batches of patches."""

    relations = (
        *CaseResult.relations,
        Relation("num_patches", count_patches),
        Relation("height_px", lambda image_px: image_px),
        Relation("width_px", lambda image_width_px: image_width_px),
        Relation("patch_px", lambda patch_px, patches_px: among(patch_px, patches_px)),
        Relation("batch", lambda batch, patch_batches: among(batch, patch_batches)),
        Relation("calls", _calls),
        Relation("images_per_s", lambda time_ms: 1000 / time_ms),
        Relation("patches_per_s", lambda num_patches, time_ms: 1000 * num_patches / time_ms),
        Relation("time_ms", lambda times_by_rank_ms: _most(times_by_rank_ms), limit="least"),
        Relation("allocated_peak_mib", lambda peaks_by_rank_mib: _most(peaks_by_rank_mib), limit="least"),
    )

    patch_px: int
    num_patches: int  # patches of the image
    # A version without these had square images and one GPU.
    height_px: int | None = None  # height of the image
    width_px: int | None = None
    times_by_rank_ms: str | None = None  # time of each rank alone, in rank order; null: one rank
    peaks_by_rank_mib: str | None = None  # allocated by each; null also without CUDA
    patches_per_s: float | None = None
    images_per_s: float | None = None
