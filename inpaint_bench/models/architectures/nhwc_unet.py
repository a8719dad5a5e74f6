"""The UNet of Stable Diffusion 1 and 2 for training on GPUs: channels-last throughout, with fused kernels.

It computes what diffusers' UNet2DConditionModel computes and holds the same numbers: `NhwcUNet.from_diffusers` packs
its weights, `unpack` returns them by diffusers' names. Differences in execution:

- Maps are [N, H, W, C] in memory from the first convolution to the last, so that no kernel re-lays out anything.
  1x1 convolutions are linear layers.
- GroupNorm and SiLU, residual addition and LayerNorm, GEGLU, biases: one fused kernel each (inpaint_bench.kernels).
- What shares an input is one matrix product: queries, keys and values of self-attention; keys and values of all
  cross-attentions; the time projections of all residual blocks.
- Skip connections are never concatenated: the norm and the shortcut read both maps where they lie.
- 9 input and 4 output channels are padded with zeros to 16 and 8, which convolution kernels want. Padding stays zero:
  its gradient is zero, and AdamW moves no zero by weight decay.

Shapes: N images, H x W latents, C channels, P = H * W, S text tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import UNet2DConditionModel
from torch import Tensor, nn

from inpaint_bench.core.errors import UserError
from inpaint_bench.kernels.cross_attention import cross_attention
from inpaint_bench.kernels.group_norm import group_norm
from inpaint_bench.kernels.layer_norm import add_layer_norm
from inpaint_bench.kernels.pointwise import add_bias, geglu
from inpaint_bench.kernels.self_attention import self_attention
from inpaint_bench.kernels.upsample import upsample_conv

# What this network assumes of diffusers' configuration. `attention_head_dim` is the number of heads there, of all
# levels or of each.
SUPPORTED: dict[str, Any] = {
    "act_fn": "silu",
    "center_input_sample": False,
    "conv_in_kernel": 3,
    "conv_out_kernel": 3,
    "downsample_padding": 1,
    "dropout": 0.0,
    "dual_cross_attention": False,
    "flip_sin_to_cos": True,
    "freq_shift": 0,
    "mid_block_scale_factor": 1,
    "mid_block_type": "UNetMidBlock2DCrossAttn",
    "only_cross_attention": False,
    "resnet_time_scale_shift": "default",
    "time_embedding_type": "positional",
    "transformer_layers_per_block": 1,
    "upcast_attention": False,
}
_BLOCK = "transformer_blocks.0"
# Layers of our blocks, and those of diffusers that each joins.
RESNET_LAYERS = {"norm1": "norm1", "norm2": "norm2", "conv1": "conv1", "conv2": "conv2", "shortcut": "conv_shortcut"}
TRANSFORMER_LAYERS = {
    **{name: (name,) for name in ("norm", "proj_in", "proj_out")},
    **{name: (f"{_BLOCK}.{name}",) for name in ("norm1", "norm2", "norm3")},
    "qkv": tuple(f"{_BLOCK}.attn1.to_{kind}" for kind in "qkv"),
    "out1": (f"{_BLOCK}.attn1.to_out.0",),
    "query": (f"{_BLOCK}.attn2.to_q",),
    "out2": (f"{_BLOCK}.attn2.to_out.0",),
    "up": (f"{_BLOCK}.ff.net.0.proj",),
    "down": (f"{_BLOCK}.ff.net.2",),
}
PAD_IN, PAD_OUT = 16, 8  # channels of the first convolution's input and of the last one's output, at least
TRANSFORMER_NORM_EPS = 1e-6  # fixed in diffusers' Transformer2DModel


def conv3x3(x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: int = 1) -> Tensor:
    """Convolve [N, H, W, I] by [O, I, 3, 3] with padding 1 -> [N, H / stride, W / stride, O]."""
    return F.conv2d(x.permute(0, 3, 1, 2), weight, bias, stride, 1).permute(0, 2, 3, 1)


def _conv_weight(inputs: int, outputs: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(outputs, inputs, 3, 3, memory_format=torch.channels_last))


def _vector(size: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(size))


def _matrix(inputs: int, outputs: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(outputs, inputs))


class Norm(nn.Module):
    """Scale and offset of a norm."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight, self.bias = _vector(channels), _vector(channels)


class GroupNorm(Norm):
    """A norm of groups of channels, with a SiLU behind it or without."""

    def __init__(self, channels: int, groups: int, eps: float, *, silu: bool = True) -> None:
        super().__init__(channels)
        self.settings: dict[str, Any] = {"groups": groups, "eps": eps, "silu": silu}

    def normalise(self, x: Tensor, **more: Any) -> tuple[Tensor, ...]:
        """[N, H, W, C] -> what kernels.group_norm returns; `more` are its other arguments."""
        return group_norm(x, self.weight, self.bias, **self.settings, **more)


class ResnetBlock(nn.Module):
    """Two normed convolutions around the time embedding, and a residual."""

    def __init__(self, channels: int, skip_channels: int, outputs: int, groups: int, eps: float) -> None:
        super().__init__()
        inputs = channels + skip_channels
        self.split = [channels, skip_channels] if skip_channels else [channels]
        self.outputs = outputs
        self.norm1, self.norm2 = GroupNorm(inputs, groups, eps), GroupNorm(outputs, groups, eps)
        self.conv1, self.conv2 = _conv_weight(inputs, outputs), _conv_weight(outputs, outputs)
        self.conv2_bias = _vector(outputs)
        self.shortcut = _matrix(inputs, outputs) if inputs != outputs else None
        self.shortcut_bias = _vector(outputs) if inputs != outputs else None

    def forward(
        self, x: Tensor, shift: Tensor, skip: Tensor | None = None, uses: int = 1
    ) -> tuple[Tensor, Tensor | None]:
        """[N, H, W, C], time shift [N, O] with conv1's bias -> [N, H, W, O], and an alias of `x` if `uses` is 2."""
        # No view stands between a sum with a bias and the norm behind it: a view has not what either leaves.
        y, *aliases = self.norm1.normalise(x, joined=skip, uses=uses)
        y = conv3x3(y, self.conv1)
        (y,) = self.norm2.normalise(y, shift=shift)
        y = conv3x3(y, self.conv2)
        residual: Tensor = aliases[0]
        bias: Tensor = self.conv2_bias
        if self.shortcut is not None and self.shortcut_bias is not None:
            weights = self.shortcut.split(self.split, dim=1)
            residual = F.linear(aliases[0], weights[0])
            if skip is not None:  # accumulated onto the first product, inside the second one's kernel
                rows = torch.addmm(residual.flatten(0, 2), aliases[-1].flatten(0, 2), weights[1].t())
                residual = rows.view_as(residual)
            bias = bias + self.shortcut_bias
        further = aliases[1] if skip is None and uses == 2 else None
        return add_bias(y, bias, residual), further


class TransformerBlock(nn.Module):
    """Self-attention, cross-attention and a gated feed-forward layer over the pixels of a map."""

    def __init__(self, channels: int, heads: int, groups: int) -> None:
        super().__init__()
        self.heads, self.channels = heads, channels
        self.norm = GroupNorm(channels, groups, TRANSFORMER_NORM_EPS, silu=False)
        self.norm1, self.norm2, self.norm3 = Norm(channels), Norm(channels), Norm(channels)
        self.proj_in, self.proj_in_bias = _matrix(channels, channels), _vector(channels)
        self.qkv = _matrix(channels, 3 * channels)
        self.out1, self.out1_bias = _matrix(channels, channels), _vector(channels)
        self.query = _matrix(channels, channels)
        self.out2, self.out2_bias = _matrix(channels, channels), _vector(channels)
        self.up, self.up_bias = _matrix(channels, 8 * channels), _vector(8 * channels)
        self.down, self.down_bias = _matrix(4 * channels, channels), _vector(channels)
        self.proj_out, self.proj_out_bias = _matrix(channels, channels), _vector(channels)

    def forward(self, x: Tensor, kv: Tensor, gate: Tensor, text: int, flash4: bool) -> Tensor:
        """[N, H, W, C], keys and values [N, S, 2C] of which the first `text` are text -> [N, H, W, C]."""
        y, residual = self.norm.normalise(x, uses=1)
        y = F.linear(y.flatten(1, 2), self.proj_in)
        y, stream = add_layer_norm(y, None, self.proj_in_bias, self.norm1.weight, self.norm1.bias)
        y = F.linear(self_attention(F.linear(y, self.qkv), self.heads, flash4=flash4), self.out1)
        y, stream = add_layer_norm(y, stream, self.out1_bias, self.norm2.weight, self.norm2.bias)
        y = F.linear(cross_attention(F.linear(y, self.query), kv, gate, self.heads, text), self.out2)
        y, stream = add_layer_norm(y, stream, self.out2_bias, self.norm3.weight, self.norm3.bias)
        y = F.linear(geglu(F.linear(y, self.up), self.up_bias), self.down)
        y = F.linear(add_bias(y, self.down_bias, stream), self.proj_out)
        return add_bias(y.view_as(x), self.proj_out_bias, residual)


class Resample(nn.Module):
    """A convolution that halves the sides of a map, or one after doubling them."""

    def __init__(self, channels: int, up: bool) -> None:
        super().__init__()
        self.up, self.conv, self.conv_bias = up, _conv_weight(channels, channels), _vector(channels)

    def forward(self, x: Tensor) -> Tensor:
        """[N, H, W, C] -> [N, 2H, 2W, C] or [N, H / 2, W / 2, C]."""
        y = upsample_conv(x, self.conv) if self.up else conv3x3(x, self.conv, stride=2)
        return add_bias(y, self.conv_bias)


class NhwcUNet(nn.Module):
    """See the module. `location` brings the gate of its tokens, which stand behind the text; None: text alone."""

    def __init__(self, config: Any, location: Any = None) -> None:
        super().__init__()
        check_supported(config)
        self.config = config
        self.location: Any = [location]  # in a list: its parameters belong to the location encoder alone
        self.flash4 = False  # FlashAttention-4 in self-attention
        channels, groups, eps = list(config.block_out_channels), config.norm_num_groups, config.norm_eps
        layers, heads = config.layers_per_block, config.attention_head_dim
        heads = [heads] * len(channels) if isinstance(heads, int) else list(heads)
        self.pad_in = max(PAD_IN, config.in_channels) - config.in_channels
        self.pad_out = max(PAD_OUT, config.out_channels) - config.out_channels
        self.conv_in = _conv_weight(config.in_channels + self.pad_in, channels[0])
        self.conv_in_bias = _vector(channels[0])
        # For each layer of ours, those of diffusers: joined along the first dimension, padded with zeros.
        self.layers: dict[str, tuple[str, ...]] = {
            "conv_in": ("conv_in",),
            "conv_out": ("conv_out",),
            "norm_out": ("conv_norm_out",),
            "time1": ("time_embedding.linear_1",),
            "time2": ("time_embedding.linear_2",),
        }
        self.resnets, self.transformers, self.resamples = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        # In order: operation, number of the module, and whether its input is a skip connection too.
        self.program: list[tuple[str, int, bool]] = []
        resnet_names: list[str] = []
        attention_names: list[str] = []

        def resnet(x: int, skip: int, out: int, name: str, *, kept: bool = False) -> None:
            number = len(self.resnets)
            self.program.append(("join" if skip else "resnet", number, kept))
            self.layers |= {f"resnets.{number}.{own}": (f"{name}.{layer}",) for own, layer in RESNET_LAYERS.items()}
            self.resnets.append(ResnetBlock(x, skip, out, groups, eps))
            resnet_names.append(name)

        def transformer(c: int, heads: int, name: str) -> None:
            number = len(self.transformers)
            self.program.append(("transformer", number, False))
            for own, layers in TRANSFORMER_LAYERS.items():
                self.layers[f"transformers.{number}.{own}"] = tuple(f"{name}.{layer}" for layer in layers)
            self.transformers.append(TransformerBlock(c, heads, groups))
            attention_names.append(name)

        def resample(c: int, up: bool, name: str) -> None:
            self.program.append(("resample", len(self.resamples), not up))
            self.layers[f"resamples.{len(self.resamples)}.conv"] = (name,)
            self.resamples.append(Resample(c, up))

        skips, current = [channels[0]], channels[0]
        for level, width in enumerate(channels):
            attends = config.down_block_types[level] == "CrossAttnDownBlock2D"
            for layer in range(layers):
                resnet(current, 0, width, f"down_blocks.{level}.resnets.{layer}", kept=True)
                current = width
                if attends:
                    transformer(width, heads[level], f"down_blocks.{level}.attentions.{layer}")
                skips.append(width)
            if level < len(channels) - 1:
                resample(width, False, f"down_blocks.{level}.downsamplers.0.conv")
                skips.append(width)
        resnet(current, 0, current, "mid_block.resnets.0", kept=True)
        transformer(current, heads[-1], "mid_block.attentions.0")
        resnet(current, 0, current, "mid_block.resnets.1")
        for level, width in enumerate(reversed(channels)):
            attends = config.up_block_types[level] == "CrossAttnUpBlock2D"
            for layer in range(layers + 1):
                resnet(current, skips.pop(), width, f"up_blocks.{level}.resnets.{layer}")
                current = width
                if attends:
                    transformer(width, heads[-1 - level], f"up_blocks.{level}.attentions.{layer}")
            if level < len(channels) - 1:
                resample(width, True, f"up_blocks.{level}.upsamplers.0.conv")
        self.norm_out = GroupNorm(channels[0], groups, eps)
        self.conv_out = _conv_weight(channels[0], config.out_channels + self.pad_out)
        self.conv_out_bias = _vector(config.out_channels + self.pad_out)

        embedding = 4 * channels[0]
        self.time1, self.time1_bias = _matrix(channels[0], embedding), _vector(embedding)
        self.time2, self.time2_bias = _matrix(embedding, embedding), _vector(embedding)
        self.shift_sizes: list[int] = [block.outputs for block in self.resnets]  # type: ignore[misc]
        self.shift = _matrix(embedding, sum(self.shift_sizes))
        self.shift_bias, self.conv1_bias = _vector(sum(self.shift_sizes)), _vector(sum(self.shift_sizes))
        self.kv_sizes: list[int] = [2 * block.channels for block in self.transformers]  # type: ignore[misc, operator]
        self.kv = _matrix(config.cross_attention_dim, sum(self.kv_sizes))
        self.layers["shift"] = tuple(f"{name}.time_emb_proj" for name in resnet_names)
        self.layers["conv1"] = tuple(f"{name}.conv1" for name in resnet_names)  # their biases alone
        self.layers["kv"] = tuple(f"{name}.{_BLOCK}.attn2.to_{kind}" for name in attention_names for kind in "kv")
        self.register_buffer("no_gate", torch.zeros(()), persistent=False)

    # --- forward ---------------------------------------------------------------------------------

    def forward(
        self, sample: Tensor, timestep: Tensor, encoder_hidden_states: Tensor, return_dict: bool = False
    ) -> tuple[Tensor]:
        """[N, in, H, W] noisy latents, mask and masked latents, [N] steps, [N, S, D] text -> ([N, out, H, W],)."""
        assert not return_dict
        return (self.predict(sample, self.shifts(timestep), self.keys_values(encoder_hidden_states)),)

    def keys_values(self, encoder_hidden_states: Tensor) -> tuple[Tensor, ...]:
        """Project [N, S, D] text -> per transformer block [N, S, 2C]: the same for every step of a sampling loop."""
        return F.linear(encoder_hidden_states, self.kv).split(self.kv_sizes, dim=2)

    def predict(self, sample: Tensor, shifts: Sequence[Tensor], keys_values: Sequence[Tensor]) -> Tensor:
        """Predict noise: [N, in, H, W], what `shifts` and `keys_values` return -> [N, out, H, W]."""
        location = self.location[0]
        text = keys_values[0].shape[1] - (location.tokens if location else 0)
        gate = location.gate if location else self.no_gate
        x = F.pad(sample.permute(0, 2, 3, 1), (0, self.pad_in))
        x = add_bias(conv3x3(x, self.conv_in), self.conv_in_bias)
        skips: list[Tensor] = []
        for operation, number, kept in self.program:
            if operation == "transformer":
                x = self.transformers[number](x, keys_values[number], gate, text, self.flash4)
            elif operation == "resample":
                if kept:
                    skips.append(x)
                x = self.resamples[number](x)
            else:
                skip = skips.pop() if operation == "join" else None
                # The first norm of the block hands its input out again.
                x, further = self.resnets[number](x, shifts[number], skip, uses=2 if kept else 1)
                if further is not None:
                    skips.append(further)
        (y,) = self.norm_out.normalise(x)
        y = conv3x3(y, self.conv_out, self.conv_out_bias)
        return y[..., : self.config.out_channels].permute(0, 3, 1, 2)

    def shifts(self, timestep: Tensor) -> tuple[Tensor, ...]:
        """Project [N] steps -> per residual block [N, C]: its time embedding, and its first convolution's bias."""
        waves = time_waves(timestep, self.config.block_out_channels[0]).to(self.time1.dtype)
        embedding = F.linear(F.silu(F.linear(waves, self.time1, self.time1_bias)), self.time2, self.time2_bias)
        return F.linear(F.silu(embedding), self.shift, self.shift_bias + self.conv1_bias).split(self.shift_sizes, dim=1)

    # --- weights ---------------------------------------------------------------------------------

    @classmethod
    def from_diffusers(cls, unet: Any, location: Any = None) -> NhwcUNet:
        """Make one of a UNet2DConditionModel, on its device and in its type. Raises UserError as `check_supported`."""
        with torch.device("meta"):
            network = cls(unet.config, location)
        first = next(unet.parameters())
        network.to_empty(device=first.device).to(first.dtype)
        network.no_gate = torch.zeros((), device=first.device)
        network.load_diffusers(unet.state_dict())
        network.train(unet.training)
        return network

    def _parts(self, name: str) -> list[str]:
        """Return diffusers' names of the parameters in one of ours."""
        layer, kind = name.removesuffix(".weight"), "weight"
        if name.endswith("bias"):
            layer, kind = name.removesuffix("_bias").removesuffix(".bias"), "bias"
        return [f"{part}.{kind}" for part in self.layers[layer]]

    @torch.no_grad()
    def load_diffusers(self, state: dict[str, Tensor]) -> None:
        """Copy weights by diffusers' names into our packed parameters."""
        if unknown := set(state) - {part for name, _ in self.named_parameters() for part in self._parts(name)}:
            raise UserError(f"the UNet holds weights that SD 1 and 2 do not have: {', '.join(sorted(unknown)[:3])}")
        self.shapes = {name: value.shape for name, value in state.items()}
        for name, parameter in self.named_parameters():
            values = torch.cat([state[part] for part in self._parts(name)])
            if parameter.ndim == 2:  # also of a 1x1 convolution
                values = values.flatten(1)
            parameter.zero_()
            parameter[tuple(slice(size) for size in values.shape)] = values.to(parameter)

    @torch.no_grad()
    def unpack(self, of: Callable[[nn.Parameter], Tensor] = torch.Tensor.detach) -> dict[str, Tensor]:
        """Return the weights, or what `of` returns of each parameter in its shape, by diffusers' names and shapes."""
        unpacked = {}
        for name, parameter in self.named_parameters():
            values, first = of(parameter), 0
            for part in self._parts(name):
                shape = self.shapes[part]
                rows = values[first : first + shape[0]]
                first += shape[0]
                if rows.ndim > 1:
                    rows = rows[:, : shape[1]]
                unpacked[part] = rows.reshape(shape)
        return unpacked

    def num_parameters(self) -> int:
        """Return the number of diffusers' parameters: without the padding."""
        return sum(shape.numel() for shape in self.shapes.values())

    def save_pretrained(self, folder: Path) -> None:
        """Write the weights as diffusers' UNet2DConditionModel does."""
        with torch.device("meta"):
            unet = UNet2DConditionModel.from_config(self.config)
        unet.load_state_dict({name: value.cpu() for name, value in self.unpack().items()}, assign=True)
        unet.save_pretrained(folder)


def check_supported(config: Any) -> None:
    """Raise UserError if a configuration of diffusers' UNet differs in kind from SD 1's and 2's."""
    for name, needed in SUPPORTED.items():
        if (value := getattr(config, name, needed)) != needed:
            raise UserError(f"the channels-last UNet needs {name}={needed}, this model has {value}")
    if not isinstance(config.layers_per_block, int):
        raise UserError("the channels-last UNet needs one number of layers for all levels")
    kinds = {*config.down_block_types, *config.up_block_types}
    if other := kinds - {"CrossAttnDownBlock2D", "DownBlock2D", "UpBlock2D", "CrossAttnUpBlock2D"}:
        raise UserError(f"the channels-last UNet has no {', '.join(sorted(other))}")


def time_waves(timestep: Tensor, channels: int) -> Tensor:
    """[N] steps -> [N, channels] float32: cosines, then sines, at angular frequencies from 1 down to 1/10,000."""
    half = channels // 2
    exponents = torch.arange(half, dtype=torch.float32, device=timestep.device) / half
    angles = timestep.float()[:, None] * torch.exp(-math.log(10000.0) * exponents)
    return torch.cat([angles.cos(), angles.sin()], dim=1)
