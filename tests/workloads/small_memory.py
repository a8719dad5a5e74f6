"""The workload `denoise_patch` on a device that holds only so many pixels, for tests."""

import torch
from torch import Tensor

from inpaint_bench.core.config.bench import BenchConfig
from inpaint_bench.models.architectures.denoisers import Denoiser, TilePlan
from inpaint_bench.workloads.denoisers import DenoisePatch

PIXELS = 2 * 32 * 32


class SmallMemory(DenoisePatch):
    def _denoise(self, network: Denoiser, image: Tensor, tiles: TilePlan) -> Tensor:
        if image[:, 0].numel() > PIXELS:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has no more")
        return super()._denoise(network, image, tiles)


def build(config: BenchConfig, device: torch.device) -> SmallMemory:
    return SmallMemory(config, device)
