"""Memory layout, and how cuDNN chooses its algorithms."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from inpaint_bench.models.training_step import StepComponents

from .base import Lever, Machine, Verification
from .observe import channels_last_inputs

if TYPE_CHECKING:
    from .observe import StepObservation


class ChannelsLast(Lever):
    """NHWC. diffusers' UNet makes some inputs contiguous again in training: the remaining share is reported."""

    field = "channels_last"

    def apply(self, components: StepComponents) -> None:
        components.memory_format = torch.channels_last
        components.networks.unet.to(memory_format=torch.channels_last)
        components.networks.vae.to(memory_format=torch.channels_last)

    def verify(self, observed: StepObservation) -> Verification:
        count, total = channels_last_inputs(observed.components)
        share = round(count / total, 3) if total else None
        text = f"{count} of {total} convolution inputs are channels_last in the eager UNet"
        if observed.kernels:
            text += f"; {observed.count('nchwToNhwc|nhwcToNchw')} layout conversions by cuDNN in a step"
        return Verification(share, share is not None and share > 0.5, text)


class CudnnBenchmark(Lever):
    """cuDNN measures its algorithms for every new shape and takes the fastest."""

    field = "cudnn_benchmark"

    def available(self, machine: Machine) -> str | None:
        return None if machine.cuda else "cuDNN needs a GPU"

    def apply(self, components: StepComponents) -> None:
        torch.backends.cudnn.benchmark = True

    def verify(self, observed: StepObservation) -> Verification:
        enabled = bool(torch.backends.cudnn.benchmark)
        return Verification(enabled, enabled, "torch.backends.cudnn.benchmark read back")
