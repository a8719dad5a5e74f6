"""Keys and results of the workload `volume3d_sample`."""

from dataclasses import dataclass

from inpaint_bench.core.config.bench import BenchConfig
from inpaint_bench.core.config.validation import file_path, within
from inpaint_bench.core.errors import UserError

from . import Relation
from ._volumes import VolumeConfig, VolumeResult


@dataclass(kw_only=True)
class Config(VolumeConfig):
    """From noise and segmentations to volumes, `batch` at once."""

    not_in_variant = (*VolumeConfig.not_in_variant, "steps")
    warmup_steps: int = within(0, 1_000_000, 1)
    measure_steps: int = within(1, 100_000_000, 3)
    min_measure_s: float = within(0, 1e6, 0.0)
    steps: int = within(2, 4000, 250)  # how many steps of the schedule are taken, evenly spread
    reference_steps: int = within(2, 4000, 10)  # steps of the sample that is compared with the baseline's
    weights: str | None = file_path()  # weights that volume3d_train saved; null: random
    compared_volumes: int = within(0, 64, 0)  # held-out volumes to compare as many samples with, as a set; 0: none
    other_weights: str | None = file_path()  # weights of another training, to compare their samples of the same noise

    def volumes_needed(self, bench: BenchConfig) -> tuple[int, int]:
        return 0, max(bench.batch_size, self.compared_volumes)

    def check(self, bench: BenchConfig) -> None:
        super().check(bench)
        for name in ("steps", "reference_steps"):
            if (steps := getattr(self, name)) > self.diffusion_steps:
                raise UserError(f"workload.{name}={steps}: must be at most diffusion_steps={self.diffusion_steps}")
        if (count := self.compared_volumes) == 1 or count % bench.batch_size:
            raise UserError(f"workload.compared_volumes={count}: must be 0, or 2 and more, a multiple of batch")
        if self.other_weights and not (self.weights and count):
            raise UserError("workload.other_weights needs workload.weights and workload.compared_volumes")

    def model(self, bench: BenchConfig) -> str:
        return f"{super().model(bench)}, {self.steps} steps"  # another number of steps is another amount of work


class Result(VolumeResult, kw_only=True):
    """One batch of volumes."""

    bounds = {
        "finite": (True, True),
        "ms_ssim": (-1, 1),
        "baseline_l1": (0, 0.25),
        "baseline_ms_ssim": (0.5, 1),
        "ms_ssim_scales": (0, 5),
        **{"mmd": (-2, 2), "pair_ms_ssim": (-1, 1), "real_pair_ms_ssim": (-1, 1)},
    }
    repeated = (*VolumeResult.repeated, "sampler_steps")
    relations = (
        *VolumeResult.relations,
        Relation("total_ms", lambda step_ms: step_ms),
    )

    sampler_steps: int
    total_ms: float
    finite: bool  # no voxel is NaN or infinite
    ms_ssim: float | None = None  # first batch against the volumes to which its segmentations belong
    baseline_l1: float | None = None  # a sample of reference_steps against the fp32 baseline's, with the same noise
    baseline_ms_ssim: float | None = None
    ms_ssim_scales: int
    trained_with: str | None = None  # recipe of the training, as the file of the weights states it
    compared_volumes: int | None = None  # how many samples, and how many real volumes, the following are of
    mmd: float | None = None  # squared maximum mean discrepancy between both sets
    pair_ms_ssim: float | None = None  # mean over all pairs of samples
    real_pair_ms_ssim: float | None = None
    other_weights_rel: float | None = None  # relative difference to the samples of other_weights from the same noise
