"""Memory layout, and how cuDNN chooses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from inpaint_bench.models.assembly import Assembly

from .base import Effective, Lever, Machine
from .observe import channels_last_inputs

if TYPE_CHECKING:
    from .observation import Running, Seen


class ChannelsLast(Lever):
    """diffusers' UNet makes some inputs contiguous again while training: the share that is left is told."""

    field = "channels_last"

    def apply(self, assembly: Assembly) -> None:
        assembly.layout = torch.channels_last
        assembly.nets.unet.to(memory_format=torch.channels_last)
        assembly.nets.vae.to(memory_format=torch.channels_last)

    def verify(self, workload: Running, seen: Seen) -> Effective:
        there, every = channels_last_inputs(workload)
        share = round(there / every, 3) if every else None
        text = f"{there} of {every} convolution inputs are channels_last in the eager UNet"
        if seen.kernels:
            text += f"; {seen.count('nchwToNhwc|nhwcToNchw')} layout conversions by cuDNN in a step"
        return Effective(effective=share, active=share is not None and share > 0.5, evidence=text)


class CudnnBenchmark(Lever):
    field = "cudnn_benchmark"

    def available(self, machine: Machine) -> str | None:
        return None if machine.cuda else "cuDNN needs a GPU"

    def apply(self, assembly: Assembly) -> None:
        torch.backends.cudnn.benchmark = True

    def verify(self, workload: Running, seen: Seen) -> Effective:
        on = bool(torch.backends.cudnn.benchmark)
        return Effective(effective=on, active=on, evidence="torch.backends.cudnn.benchmark read back")
