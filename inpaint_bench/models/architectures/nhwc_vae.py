"""Encoder and decoder of Stable Diffusion's VAE, channels-last with fused kernels.

They compute what those of diffusers' AutoencoderKL compute, and have no gradients: the VAE is frozen.
Maps are [N, H, W, C] in memory; 1x1 convolutions are linear layers.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from inpaint_bench.core.errors import UserError
from inpaint_bench.kernels.group_norm import group_norm
from inpaint_bench.kernels.pointwise import add_bias, add_bias_padded, softmax_rows
from inpaint_bench.kernels.upsample import upsample_conv

from .nhwc_unet import conv3x3

LATENT_CHANNELS = 4
EPS = 1e-6  # epsilon of every norm, fixed in diffusers' encoder
PADDED = 8  # channels of images and latents, with zeros behind the three or four


class NhwcBlocks:
    """Blocks that encoder and decoder share, with the weights of `network`, in `dtype` on its device."""

    def __init__(self, vae: Any, network: Any, dtype: torch.dtype) -> None:
        if vae.config.latent_channels != LATENT_CHANNELS or not vae.config.get("mid_block_add_attention", True):
            raise UserError("the channels-last VAE needs SD 1.x's: 4 latent channels and attention in the middle")
        self.groups = vae.config.norm_num_groups
        state = {name: value.detach().to(dtype) for name, value in network.state_dict().items()}
        self.weights = {name: _prepared(name, value) for name, value in state.items()}

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        """Return what diffusers' network returns of images or latents [N, C, H, W]."""
        # Every type is chosen here: autocast would make the softmax return fp32.
        with torch.autocast(x.device.type, enabled=False):
            return self._run(x)

    def _run(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def _norm(self, x: Tensor, name: str, silu: bool, bias: str | None = None) -> Tensor:
        """Normalise [N, H, W, C]; `bias` names that of the convolution before, which is added first."""
        weight, offset = self.weights[f"{name}.weight"], self.weights[f"{name}.bias"]
        shift = None if bias is None else self.weights[bias].expand(len(x), -1)
        return group_norm(x, weight, offset, groups=self.groups, eps=EPS, silu=silu, shift=shift)[0]

    def _resnet(self, x: Tensor, name: str, *, bias: str | None = None, padded: bool = False) -> Tensor:
        """Run a residual block on [N, H, W, C].

        `bias` names that of the convolution before, which `x` lacks: adding it would be a pass of its own.
        `padded` appends a row and a column of zeros.
        """
        w = self.weights
        y = conv3x3(self._norm(x, f"{name}.norm1", silu=True, bias=bias), w[f"{name}.conv1.weight"])
        y = conv3x3(self._norm(y, f"{name}.norm2", silu=True, bias=f"{name}.conv1.bias"), w[f"{name}.conv2.weight"])
        added = w[f"{name}.conv2.bias"]
        if f"{name}.conv_shortcut.weight" in w:
            shortcut = w[f"{name}.conv_shortcut.weight"]
            x, added = F.linear(x, shortcut), added + w[f"{name}.conv_shortcut.bias"]
            added = added if bias is None else added + shortcut @ w[bias]
        elif bias is not None:
            added = added + w[bias]
        return (add_bias_padded if padded else add_bias)(y, added, x)

    def _attention(self, x: Tensor, name: str) -> Tensor:
        """Attend over all pixels with one head, wider than any fused attention kernel: as matrix products."""
        w = self.weights
        y = self._norm(x, f"{name}.group_norm", silu=False).flatten(1, 2)
        q, k, v = (F.linear(y, w[f"{name}.to_{part}.weight"], w[f"{name}.to_{part}.bias"]) for part in "qkv")
        scores = softmax_rows((q * q.shape[2] ** -0.5) @ k.transpose(1, 2))
        y = F.linear(scores @ v, w[f"{name}.to_out.0.weight"]).unflatten(1, x.shape[1:3])
        return add_bias(y, w[f"{name}.to_out.0.bias"], x)


class NhwcEncoder(NhwcBlocks):
    """Encode images with the weights of a diffusers AutoencoderKL, in `dtype` on its device."""

    def __init__(self, vae: Any, dtype: torch.dtype) -> None:
        super().__init__(vae, vae.encoder, dtype)
        self.blocks = [(len(block.resnets), block.downsamplers is not None) for block in vae.encoder.down_blocks]

    def _run(self, image: Tensor) -> Tensor:
        """Encode [N, 3, R, R] in -1..1 -> [N, 8, R/8, R/8] hidden states."""
        w = self.weights
        x = image.to(w["conv_in.weight"].dtype).permute(0, 2, 3, 1)
        x = conv3x3(F.pad(x, (0, PADDED - x.shape[3])), w["conv_in.weight"])
        bias: str | None = "conv_in.bias"
        for level, (layers, halves) in enumerate(self.blocks):
            for layer in range(layers):
                padded = halves and layer == layers - 1  # diffusers pads below and to the right only, before it halves
                x, bias = self._resnet(x, f"down_blocks.{level}.resnets.{layer}", bias=bias, padded=padded), None
            if halves:
                name = f"down_blocks.{level}.downsamplers.0.conv"
                x = F.conv2d(x.permute(0, 3, 1, 2), w[f"{name}.weight"], None, 2).permute(0, 2, 3, 1)
                bias = f"{name}.bias"
        x = self._resnet(x, "mid_block.resnets.0", bias=bias)
        x = self._attention(x, "mid_block.attentions.0")
        x = self._resnet(x, "mid_block.resnets.1")
        x = conv3x3(self._norm(x, "conv_norm_out", silu=True), w["conv_out.weight"], w["conv_out.bias"])
        return x.permute(0, 3, 1, 2)


class NhwcDecoder(NhwcBlocks):
    """Decode latents with the weights of a diffusers AutoencoderKL, in `dtype` on its device."""

    def __init__(self, vae: Any, dtype: torch.dtype) -> None:
        super().__init__(vae, vae.decoder, dtype)
        self.colours = vae.config.out_channels
        for name in ("conv_out.weight", "conv_out.bias"):  # output channels too, as convolution kernels want
            value = self.weights[name]
            zeros = value.new_zeros(PADDED - self.colours, *value.shape[1:])
            self.weights[name] = _prepared(name, torch.cat([value, zeros]))
        self.blocks = [(len(block.resnets), block.upsamplers is not None) for block in vae.decoder.up_blocks]

    def _run(self, latents: Tensor) -> Tensor:
        """Decode [N, 4, R/8, R/8] -> images [N, 3, R, R]."""
        w = self.weights
        x = latents.to(w["conv_in.weight"].dtype).permute(0, 2, 3, 1)
        x = conv3x3(F.pad(x, (0, PADDED - x.shape[3])), w["conv_in.weight"])
        x = self._resnet(x, "mid_block.resnets.0", bias="conv_in.bias")
        x = self._attention(x, "mid_block.attentions.0")
        x = self._resnet(x, "mid_block.resnets.1")
        bias: str | None = None
        for level, (layers, doubles) in enumerate(self.blocks):
            for layer in range(layers):
                x, bias = self._resnet(x, f"up_blocks.{level}.resnets.{layer}", bias=bias), None
            if doubles:
                name = f"up_blocks.{level}.upsamplers.0.conv"
                x, bias = upsample_conv(x, w[f"{name}.weight"]), f"{name}.bias"
        x = conv3x3(self._norm(x, "conv_norm_out", silu=True), w["conv_out.weight"], w["conv_out.bias"])
        return x[..., : self.colours].permute(0, 3, 1, 2)


def _prepared(name: str, value: Tensor) -> Tensor:
    """Make a convolution's weight channels-last, that of a 1x1 convolution a matrix; pad the first one's input."""
    if value.ndim != 4:
        return value.contiguous()
    if name.endswith("conv_shortcut.weight"):
        return value.flatten(1).contiguous()
    if name == "conv_in.weight":
        value = F.pad(value, (0, 0, 0, 0, 0, PADDED - value.shape[1]))
    return value.contiguous(memory_format=torch.channels_last)
