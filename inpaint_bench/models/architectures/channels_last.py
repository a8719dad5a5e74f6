"""diffusers' UNet and VAE such that a channels-last map stays so from the first convolution to the last.

As they are, 7 of the 98 convolutions of SD 1.5's UNet read such a map in training on a GPU: PyTorch's GroupNorm returns
a contiguous one there, and three kinds of blocks call `contiguous`. `keep_layout` changes the classes of these layers
and no weight. They compute the same to rounding, in the same types.
"""

from typing import Any

import torch
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from diffusers.models.upsampling import Upsample2D
from torch import Tensor, nn

from inpaint_bench.kernels.dispatch import use_triton
from inpaint_bench.kernels.group_norm import group_norm


class _GroupNorm(nn.GroupNorm):
    def forward(self, x: Tensor) -> Tensor:
        # torch.compile lays out the map as the convolution behind it wants, and on a CPU PyTorch keeps the layout.
        if torch.compiler.is_compiling() or not use_triton(x) or not (pixels := x.movedim(1, -1)).is_contiguous():
            return super().forward(x)
        if torch.is_autocast_enabled(x.device.type):
            pixels = pixels.float()  # as autocast does before PyTorch's
        (y,) = group_norm(pixels, self.weight, self.bias, groups=self.num_groups, eps=self.eps, silu=False)
        return y.movedim(-1, 1)


class _Resnet(ResnetBlock2D):
    training: bool

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        # In training it makes the shortcut's input contiguous; its dropout has a flag of its own.
        training = self.training
        self.training = False
        try:
            return super().forward(*args, **kwargs)
        finally:
            self.training = training


class _Transformer(Transformer2DModel):
    def _get_output_for_continuous_inputs(
        self, hidden_states: Tensor, residual: Tensor, batch_size: int, height: int, width: int, inner_dim: int
    ) -> Tensor:
        shape = batch_size, height, width, inner_dim
        if not residual.is_contiguous(memory_format=torch.channels_last):
            return super()._get_output_for_continuous_inputs(hidden_states, residual, *shape)
        if self.use_linear_projection:
            hidden_states = self.proj_out(hidden_states)
        y = hidden_states.reshape(shape).permute(0, 3, 1, 2)
        return (y if self.use_linear_projection else self.proj_out(y)) + residual


class _Upsample(Upsample2D):
    def forward(self, hidden_states: Tensor, output_size: Any = None, *args: Any, **kwargs: Any) -> Tensor:
        # It makes 64 images or more contiguous, since older versions of PyTorch failed there: fewer stay as they are.
        parts = [super(_Upsample, self).forward(x, output_size, *args, **kwargs) for x in hidden_states.split(32)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


_KEEPING = {nn.GroupNorm: _GroupNorm, ResnetBlock2D: _Resnet, Transformer2DModel: _Transformer, Upsample2D: _Upsample}


def keep_layout(network: nn.Module) -> None:
    """Let the layers of a network that undo channels_last keep it."""
    for module in network.modules():
        module.__class__ = _KEEPING.get(type(module), type(module))
