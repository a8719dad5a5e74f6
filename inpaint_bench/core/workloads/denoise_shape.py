"""Keys and results of the workload `denoise_shape`: memory and time over the width of an image."""

from dataclasses import dataclass, field

from inpaint_bench.core.config.bench import BenchConfig
from inpaint_bench.core.config.validation import within
from inpaint_bench.core.errors import UserError

from . import Relation
from ._denoisers import CALLS, CaseResult, DenoiserConfig


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


class Result(CaseResult, kw_only=True):
    """One denoised batch of images."""

    relations = (
        *CaseResult.relations,
        Relation("batch", lambda run_batch: run_batch),
        Relation("calls", lambda branch: CALLS.get(branch)),
        Relation("mpx_per_s", lambda batch, height_px, width_px, time_ms: batch * height_px * width_px / time_ms / 1e3),
    )

    series_px: int  # the step of its series of widths
    height_px: int
    width_px: int
    mpx_per_s: float | None = None
