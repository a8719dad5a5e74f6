"""Keys and results of the workload `volume3d_train`."""

from dataclasses import dataclass

from inpaint_bench.core.config.bench import BenchConfig
from inpaint_bench.core.config.validation import within

from . import Relation
from ._volumes import VolumeConfig, VolumeResult


@dataclass(kw_only=True)
class Config(VolumeConfig):
    """Training on volumes that stay on the device. All recipes start from the same weights and see the same volumes."""

    not_in_variant = (*VolumeConfig.not_in_variant, "save_weights")
    capabilities = (*VolumeConfig.capabilities, "backward")
    warmup_steps: int = within(0, 1_000_000, 5)
    measure_steps: int = within(1, 100_000_000, 20)
    min_measure_s: float = within(0, 1e6, 10.0)
    volumes: int = within(1, 10_000, 4)  # to train on
    validation_volumes: int = within(1, 10_000, 2)  # held out
    learning_rate: float = within(1e-12, 1, 1e-5)  # learning rate of the optimizer, constant
    save_weights: bool = False  # as weights.safetensors in the run directory

    def volumes_needed(self, bench: BenchConfig) -> tuple[int, int]:
        return self.volumes, self.validation_volumes


class Result(VolumeResult, kw_only=True):
    """One training step. What is validated is the network after warmup_steps + measure_steps, however long it ran."""

    bounds = {
        # Networks begin with the mean absolute value of the noise, 0.8.
        **dict.fromkeys(("loss", "validation_l1"), (0, 10)),
        "validation_ms_ssim": (-1, 1),
        "ms_ssim_scales": (0, 5),
    }
    repeated = (*VolumeResult.repeated, "parameters")
    null_if_not_finite = ("loss",)
    relations = (
        *VolumeResult.relations,
        Relation("forward_tflop", lambda flop_per_image: flop_per_image / 3e12),
        Relation("trained_steps", lambda step: step + 1),
    )

    parameters: int
    forward_tflop: float  # forward pass of one volume
    loss: float | None  # mean absolute error of the noise; None: not finite
    trained_steps: int | None = None  # where it was validated
    validation_l1: float | None = None  # error of the noise in held-out volumes
    validation_ms_ssim: float | None = None  # MS-SSIM of the volumes without the predicted noise
    ms_ssim_scales: int | None = None
