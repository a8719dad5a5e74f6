"""Compare gradients of divided blocks with those of whole ones: `python -m tests.run.tensor_gradients RANK STORE`."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from diffusers.models.attention import JointTransformerBlock
from diffusers.models.transformers.transformer_flux import FluxSingleTransformerBlock, FluxTransformerBlock
from diffusers.models.transformers.transformer_flux2 import Flux2SingleTransformerBlock, Flux2TransformerBlock
from torch import nn

from inpaint_bench.models.parallel.sharding import divide_blocks, sum_over_ranks, whole
from inpaint_bench.ranks.group import join_group


def main() -> None:
    rank, device = int(sys.argv[1]), torch.device("cpu")
    join_group(device, store=dist.FileStore(sys.argv[2], 2), rank=rank, world_size=2)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    joint = JointTransformerBlock(32, 4, 8, qk_norm="rms_norm", use_dual_attention=True)
    flux2 = [Flux2TransformerBlock(32, 4, 8), Flux2SingleTransformerBlock(32, 4, 8)]
    blocks = nn.ModuleList([FluxTransformerBlock(32, 4, 8), FluxSingleTransformerBlock(32, 4, 8), joint, *flux2])
    image, text, times = torch.randn(2, 5, 32), torch.randn(2, 3, 32), torch.randn(2, 32)
    scales = torch.randn(2, 6 * 32)

    def run(block: nn.Module, rows: slice) -> tuple[torch.Tensor, ...]:
        if isinstance(block, Flux2TransformerBlock):
            states: tuple[torch.Tensor, ...] = block(image[rows], text[rows], scales[rows], scales[rows])
            return states
        if isinstance(block, Flux2SingleTransformerBlock):
            return (block(image[rows], None, scales[rows, : 3 * 32]),)
        return tuple(block(image[rows], text[rows], times[rows]))

    def gradients(rows: slice) -> dict[str, torch.Tensor]:
        blocks.zero_grad()
        for block in blocks:
            sum((states**3).mean() for states in run(block, rows)).backward()
        return {name: parameter.grad for name, parameter in blocks.named_parameters()}

    expected = gradients(slice(None))
    divided = divide_blocks(blocks, device)
    for name, gradient in gradients(slice(rank, rank + 1)).items():
        if name not in divided:
            sum_over_ranks([gradient], divisor=2)  # as DDP does
        torch.testing.assert_close(whole(gradient), expected[name], rtol=1e-9, atol=1e-14, msg=name)
    dist.destroy_process_group()  # else a thread of gloo may abort the process at its end


if __name__ == "__main__":
    main()
