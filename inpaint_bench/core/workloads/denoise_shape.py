"""Keys and results of the workload `denoise_shape`: memory and time over the width of an image."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from inpaint_bench.core.errors import UserError
from inpaint_bench.core.validation import within

from . import Result as BaseResult
from ._denoisers import DenoiserConfig

if TYPE_CHECKING:
    from inpaint_bench.core.config import BenchConfig


@dataclass(kw_only=True)
class Config(DenoiserConfig):
    """Images of one height and many widths."""

    height_px: int = within(16, 16384, 2048)  # height of the image in pixels
    width_min_px: int = within(16, 16384, 1024)  # smallest width in pixels
    width_max_px: int = within(16, 16384, 2048)  # largest width in pixels
    width_steps_px: list[int] = field(default_factory=lambda: [64, 68])  # a series of widths for each

    def check(self, bench: BenchConfig) -> None:
        super().check(bench)
        if self.width_max_px < self.width_min_px:
            raise UserError(f"workload.width_max_px={self.width_max_px}: is less than width_min_px={self.width_min_px}")
        if not self.width_steps_px or min(self.width_steps_px) < 1:
            raise UserError(f"workload.width_steps_px={list(self.width_steps_px)}: give at least one, of 1 or more")


class Result(BaseResult, kw_only=True):
    """One denoised batch of images. Memory without CUDA is null."""

    model: str
    series_px: int  # the step of its series of widths
    height_px: int
    width_px: int
    batch: int
    published_plan: bool  # its channels are the published ones
    tiling: str
    input_mode: str
    branch: str
    calls: int  # of the network
    tile_h_px: int
    tile_w_px: int
    time_ms: float | None = None
    mpx_per_s: float | None = None
    weights_mib: float | None = None  # all that is allocated between two cases
    allocated_peak_mib: float | None = None
    reserved_peak_mib: float | None = None
    nvml_used_mib: float | None = None
    out_of_memory: str | None = None  # what was asked for; time and peaks are null
