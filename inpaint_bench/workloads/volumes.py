"""What `volume3d_train` and `volume3d_sample` share: diffusion of volumes, conditioned on their segmentation.

Protocol of Med-DDPM: noise of 250 steps by a cosine schedule, mean absolute error of the predicted noise, Adam; no
average of the weights, which it starts at step 2000. Volumes stay on the device, so that no loader is measured. Every
recipe starts from the same weights, volumes and noise, and is compared with fp32 (IEEE), contiguous, eager.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from inpaint_bench import levers
from inpaint_bench.core.config.bench import BenchConfig, RecipeConfig
from inpaint_bench.core.records import LeverReport, Parity
from inpaint_bench.core.workloads._volumes import VolumeConfig
from inpaint_bench.data import volumes as data
from inpaint_bench.levers.execution import read_compiler, reset_compiler
from inpaint_bench.models.architectures.volume_unet import Diffusion, VolumeUNet
from inpaint_bench.models.networks import DTYPES, FROZEN_SEED, set_fp32_precision, set_switches
from inpaint_bench.profiling.record import synchronize
from inpaint_bench.quality import volumes as quality

from . import Call, MeasuringWorkload, parity, recipe_facts

SLICES = "slices.png"


class VolumeDiffusion(MeasuringWorkload):
    """The network, its levers, its inputs, and the comparison of a recipe with the baseline."""

    config: VolumeConfig
    uniform_steps = True

    def __init__(self, bench: BenchConfig, device: torch.device) -> None:
        config, recipe = bench.workload, bench.recipe
        assert isinstance(config, VolumeConfig)
        self.bench, self.config, self.device = bench, config, device
        self.shape, self.sides = config.shape, config.sides
        self.images_per_step = int(bench.batch)
        levers.require(bench, device)
        self.at_once = self.images_per_step // recipe.accumulate  # volumes in a micro-batch
        # The baseline first, from whose results the recipe's differences are measured.
        set_switches(RecipeConfig())
        torch.manual_seed(FROZEN_SEED)
        self.network = VolumeUNet(self.shape).to(device)
        self.diffusion = Diffusion(config.diffusion_steps, device)
        self.forward: Callable[..., Any] = self.network  # what a step calls: compiled perhaps
        self.autocast_dtype: torch.dtype | None = None
        self.memory_format = torch.contiguous_format
        self.flop = _forward_flop(config)
        self.source = data.open_volumes(bench.data, *config.volumes_needed(bench))
        self.facts: dict[str, Any] = {
            **recipe_facts(recipe),
            "weights": None,
            "network": config.network,
            "volume": list(self.sides),
            "diffusion_steps": config.diffusion_steps,
            "parameters": sum(p.numel() for p in self.network.parameters()),
            "cudnn": torch.backends.cudnn.version(),
        }

    def predict(self, volumes: Tensor, labels: Tensor, steps: Tensor) -> Tensor:
        """Return the noise that the network predicts in noisy volumes."""
        inputs = torch.cat([volumes, labels], dim=1).contiguous(memory_format=self.memory_format)
        dtype = self.autocast_dtype
        with torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None):
            predicted: Tensor = self.forward(inputs, steps)
        return predicted.float()

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

    def apply(self) -> None:
        """Change the baseline's network and switches into the recipe's."""
        recipe = self.bench.recipe
        self.facts["fp32_precision"] = set_switches(recipe)
        self.autocast_dtype = None if recipe.precision == "fp32" else DTYPES[recipe.precision]
        if recipe.channels_last:
            self.memory_format = torch.channels_last_3d
            self.network.to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]
        if recipe.compile != "none":
            reset_compiler(self.device)
            self.forward = torch.compile(self.network, mode=recipe.compile, dynamic=False)

    def compare(self, results: Callable[[], dict[str, Tensor]]) -> None:
        """Apply the recipe, and measure how far what it computes is from the baseline."""
        try:
            baseline: dict[str, Tensor] | None = results()
        except torch.cuda.OutOfMemoryError:  # the recipe may need less
            baseline = None
        self._clear()
        self.apply()
        start_s = time.monotonic()
        computed = results()
        synchronize(self.device)
        self.facts["compile_s"] = round(time.monotonic() - start_s, 3)
        if baseline is None:
            self.parity = Parity(unavailable=f"the baseline does not fit on this GPU at {self.images_per_step} volumes")
        else:
            errors = {name: parity.relative_error(value, computed[name]) for name, value in baseline.items()}
            self.parity = parity.judge("fp32 ieee, eager", errors)
        self._clear()

    def _clear(self) -> None:
        self.network.zero_grad(set_to_none=True)
        if self.device.type == "cuda":  # the recipe's peaks are not to hold the baseline's memory
            gc.collect()
            torch.cuda.empty_cache()

    # --- measuring -------------------------------------------------------------------------------

    def row(self, call: Call) -> dict[str, Any]:
        """Return the columns that both results have."""
        depth, height, width = self.sides
        sizes = {"network": self.config.network, "depth": depth, "height": height, "width": width}
        return {"window_id": call.window_id, "step": call.step, **sizes}

    # --- levers ----------------------------------------------------------------------------------

    def verify_levers(self) -> list[LeverReport]:
        return [msgspec.structs.replace(r, **self._read_back(r.field)) for r in levers.requested(self.bench)]

    def _read_back(self, field: str) -> dict[str, Any]:
        recipe = self.bench.recipe
        effective: Any = getattr(recipe, field)
        active: bool | None = True
        evidence = "in the loop of the workload"
        if field == "precision":
            effective = "fp32" if self.autocast_dtype is None else recipe.precision
            active, evidence = effective == recipe.precision, "autocast around every call, or none for fp32"
        elif field == "tf32":
            matmul, conv = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
            effective, active, evidence = matmul and conv, matmul and conv, f"matmul {matmul}, convolution {conv}"
        elif field in ("cudnn_benchmark", "cudnn_benchmark_limit"):
            effective = getattr(torch.backends.cudnn, field.removeprefix("cudnn_"))
            active, evidence = effective == getattr(recipe, field), "PyTorch's switch read back"
        elif field == "channels_last":
            count, total = self._channels_last_inputs()
            effective, active = round(count / total, 3), count > total / 2
            evidence = f"{count} of {total} convolution inputs are channels_last_3d in the eager network"
        elif field == "compile":
            effective, active, evidence = read_compiler()
        return {"effective": effective, "active": active, "evidence": evidence}

    def _channels_last_inputs(self) -> tuple[int, int]:
        layouts: list[bool] = []

        def look(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            layouts.append(inputs[0].is_contiguous(memory_format=torch.channels_last_3d))

        hooks = [m.register_forward_pre_hook(look) for m in self.network.modules() if isinstance(m, nn.Conv3d)]
        forward, self.forward = self.forward, self.network
        try:
            volumes = self.noise(self.at_once, self.generator(0))  # layouts may depend on how many there are
            labels = volumes.new_zeros(self.at_once, self.shape.label_channels, *self.sides)
            with torch.no_grad():
                self.predict(volumes, labels, torch.zeros(self.at_once, dtype=torch.long, device=self.device))
        finally:
            self.forward = forward
            for hook in hooks:
                hook.remove()
        return sum(layouts), len(layouts)


def label_slices(labels: Tensor) -> Tensor:
    """Return one-hot labels [N, L, D, H, W] as grey values [N, D, H, W] in -1..1."""
    numbers = torch.arange(1, labels.shape[1] + 1, device=labels.device, dtype=labels.dtype)
    grey: Tensor = (labels * numbers[None, :, None, None, None]).sum(1) * 2 / labels.shape[1] - 1
    return grey


def ieee_ms_ssim(bench: BenchConfig, volumes: Tensor, reference: Tensor) -> float:
    """Return MS-SSIM whose own convolutions do not use TF32."""
    set_fp32_precision(tf32=False)
    try:
        return quality.ms_ssim(volumes, reference)
    finally:
        set_fp32_precision(tf32=bench.recipe.tf32)


def _forward_flop(config: VolumeConfig) -> int:
    """Count the operations of the network for one volume, on shapes alone."""
    shape = config.shape
    with torch.device("meta"), FlopCounterMode(display=False) as counter, torch.no_grad():
        inputs = torch.empty(1, shape.image_channels + shape.label_channels, *config.sides)
        VolumeUNet(shape)(inputs, torch.zeros(1, dtype=torch.long))
    return int(counter.get_total_flops())
