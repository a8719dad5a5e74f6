"""Keys and results of the workload `denoise_patch`: an image as patches, over their size and how many are a batch."""

from __future__ import annotations

from dataclasses import dataclass, field

from inpaint_bench.core.config.bench import BenchConfig
from inpaint_bench.core.config.validation import one_of, within
from inpaint_bench.core.errors import UserError

from . import Relation
from ._denoisers import CALLS, CaseResult, DenoiserConfig, among


@dataclass(kw_only=True)
class Config(DenoiserConfig):
    """A square image, all of whose patches are one step. They do not overlap and are not put together."""

    warmup_steps: int = within(0, 1000, 2)
    image_px: int = within(16, 16384, 2048)  # side of the square image in pixels
    patches_px: list[int] = field(default_factory=lambda: [128, 256, 512])  # sides of the square patches in pixels
    patch_batches: list[int] = field(default_factory=lambda: [1, 2, 4, 8, 16])  # patches that are denoised at once
    # host_random, as published: drawn on the CPU and copied within the timed call
    input_mode: str = one_of("device_resident", "host_random", "pinned", default="host_random")

    def check(self, bench: BenchConfig) -> None:
        super().check(bench)
        if bench.batch != 1:
            raise UserError(f"batch={bench.batch}: a step is one image; patches of a batch are workload.patch_batches")
        if not self.patch_batches or min(self.patch_batches) < 1:
            raise UserError(f"workload.patch_batches={list(self.patch_batches)}: give at least one, of 1 or more")
        if not self.patches_px or any(patch < 16 or self.image_px % patch for patch in self.patches_px):
            text = f"must be divisors of image_px={self.image_px}, of 16 or more"
            raise UserError(f"workload.patches_px={list(self.patches_px)}: {text}")


def _calls(branch: str, num_patches: int, batch: int) -> int | None:
    return CALLS[branch] * -(-num_patches // batch) if branch in CALLS else None


class Result(CaseResult, kw_only=True):
    """One image, passed to the network as batches of patches."""

    relations = (
        *CaseResult.relations,
        Relation("num_patches", lambda image_px, patch_px: (image_px / patch_px) ** 2),
        Relation("batch", lambda batch, patch_batches: among(batch, patch_batches)),
        Relation("calls", _calls),
        Relation("images_per_s", lambda time_ms: 1000 / time_ms),
        Relation("patches_per_s", lambda num_patches, time_ms: 1000 * num_patches / time_ms),
    )

    patch_px: int
    num_patches: int
    patches_per_s: float | None = None
    images_per_s: float | None = None
