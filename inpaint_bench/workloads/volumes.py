"""What `volume3d_train` and `volume3d_sample` share: diffusion of volumes, conditioned on their segmentation.

Protocol of Med-DDPM: noise of 250 steps by a cosine schedule, mean absolute error of the predicted noise, Adam; no
average of the weights, which it starts at step 2000. Volumes stay on the device, so that no loader is measured. Every
recipe starts from the same weights, volumes and noise, and is compared with fp32 (IEEE), contiguous, eager.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from inpaint_bench import levers
from inpaint_bench.core.config.bench import BenchConfig
from inpaint_bench.core.workloads._volumes import VolumeConfig, VolumeFacts
from inpaint_bench.data.volumes import NiftiFolder, SyntheticVolumes
from inpaint_bench.models import flops
from inpaint_bench.models.architectures.volume_unet import Diffusion, VolumeUNet
from inpaint_bench.models.execution import Execution, in_fp32, set_fp32_precision
from inpaint_bench.models.networks import FROZEN_SEED
from inpaint_bench.profiling.profile import free_memory, synchronize
from inpaint_bench.quality import metrics

from . import Call, MeasuringWorkload, parity

SLICES = "slices.png"


class VolumeDiffusion(MeasuringWorkload):
    """The network, its levers, its inputs, and the comparison of a recipe with the baseline."""

    config: VolumeConfig
    execution: Execution
    facts: VolumeFacts
    uniform_steps = True

    def __init__(self, bench: BenchConfig, device: torch.device) -> None:
        config = bench.workload
        assert isinstance(config, VolumeConfig)
        self.bench, self.config, self.device = bench, config, device
        self.shape, self.sides = config.shape, config.sides
        self.images_per_step = bench.batch_size
        levers.require(bench, device)
        torch.manual_seed(FROZEN_SEED)
        self.network = VolumeUNet(self.shape).to(device)
        self.execution = Execution(
            bench=bench,
            device=device,
            networks={"network": self.network},
            calls={"network": self.network},
            eager_pass=self._eager_pass,
            channels_last=torch.channels_last_3d,
        )
        self.diffusion = Diffusion(config.diffusion_steps, device)
        self.flop = _forward_flop(config)
        kind = NiftiFolder if bench.data.kind == "nifti" else SyntheticVolumes
        self.source = kind(bench.data, *config.volumes_needed(bench))
        self.facts = VolumeFacts(
            **self.execution.facts(),
            weights=None,
            network=config.network,
            volume=list(self.sides),
            diffusion_steps=config.diffusion_steps,
            parameters=sum(p.numel() for p in self.network.parameters()),
            cudnn=torch.backends.cudnn.version(),
        )

    def predict(self, volumes: Tensor, labels: Tensor, steps: Tensor, *, eager: bool = False) -> Tensor:
        """Return the noise that the network predicts in noisy volumes; `eager`: not compiled, for another batch."""
        inputs = torch.cat([volumes, labels], dim=1).contiguous(memory_format=self.execution.memory_format)
        with self.execution.autocast():
            return (self.network if eager else self.execution.calls["network"])(inputs, steps).float()

    def _eager_pass(self) -> None:
        count = self.execution.compared_size  # layouts may depend on how many there are
        volumes = self.noise(count, self.generator(0))
        labels = volumes.new_zeros(count, self.shape.label_channels, *self.sides)
        with torch.no_grad():
            self.predict(volumes, labels, torch.zeros(count, dtype=torch.long, device=self.device), eager=True)

    def read(self, *, held_out: bool) -> tuple[Tensor, Tensor]:
        """Return images [N, C, D, H, W] and one-hot labels [N, L, D, H, W] in host memory."""
        images, labels = zip(*self.source.read(self.shape, self.sides, held_out=held_out), strict=True)
        return torch.from_numpy(np.stack(images)), torch.from_numpy(np.stack(labels))

    def generator(self, number: int) -> torch.Generator:
        """Return the source of noise of a call, on the device."""
        return torch.Generator(self.device).manual_seed(self.bench.seed * 1_000_003 + number)

    def noise(self, count: int, generator: torch.Generator) -> Tensor:
        """Return noise of the shape of so many volumes."""
        size = (count, self.shape.image_channels, *self.sides)
        return torch.randn(size, generator=generator, device=self.device)

    def compare(self, results: Callable[[], dict[str, Tensor]]) -> None:
        """Apply the recipe, and measure how far what it computes is from fp32."""
        with in_fp32(self.execution):
            reference = parity.attempt(results, self.device)  # the recipe may need less memory
        self._clear()
        levers.apply(self.execution)
        self.facts.fp32_precision = self.execution.fp32_precision
        start_s = time.monotonic()
        computed = parity.attempt(results, self.device)
        synchronize(self.device)
        self.facts.compile_s = round(time.monotonic() - start_s, 3)
        if reference is None or computed is None:
            self.parity = parity.ran_out(reference is None)
        else:
            self.parity = parity.judge(parity.FP32, parity.relative_errors(reference, computed))
        self._clear()

    def _clear(self) -> None:
        self.network.zero_grad(set_to_none=True)
        free_memory(self.device)  # the recipe's peaks are not to hold the baseline's memory

    # --- measuring -------------------------------------------------------------------------------

    def row(self, call: Call) -> dict[str, Any]:
        """Return the columns that both results have."""
        depth, height, width = self.sides
        sizes = {"network": self.config.network, "depth": depth, "height": height, "width": width}
        return {"window_id": call.window_id, "step": call.step, **sizes}


def label_slices(labels: Tensor) -> Tensor:
    """Return one-hot labels [N, L, D, H, W] as grey values [N, D, H, W] in -1..1."""
    numbers = torch.arange(1, labels.shape[1] + 1, device=labels.device, dtype=labels.dtype)
    return (labels * numbers[None, :, None, None, None]).sum(1) * 2 / labels.shape[1] - 1


def finite(value: float) -> float | None:
    """Return the number, None if it is NaN or infinite."""
    return value if math.isfinite(value) else None


def ieee_ms_ssim(volumes: Tensor, reference: Tensor) -> float | None:
    """Return MS-SSIM whose own convolutions do not use TF32; None if it is not finite."""
    before = torch.backends.cudnn.allow_tf32
    set_fp32_precision(tf32=False)
    try:
        return finite(metrics.volume_ms_ssim(volumes, reference))
    finally:
        set_fp32_precision(tf32=before)


def _forward_flop(config: VolumeConfig) -> int:
    """Count the operations of the network for one volume, on shapes alone."""
    shape = config.shape
    with torch.device("meta"), torch.no_grad():
        inputs = torch.empty(1, shape.image_channels + shape.label_channels, *config.sides)
        return flops.operations(lambda: VolumeUNet(shape)(inputs, torch.zeros(1, dtype=torch.long)))
