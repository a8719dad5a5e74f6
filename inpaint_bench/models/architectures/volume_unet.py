"""A 3-D UNet for diffusion of volumes that are conditioned on their segmentation, and its diffusion process.

Structure of OpenAI's guided diffusion (MIT) with 3-D convolutions, in the shapes of two published models: residual
blocks to which the time is added, one attention head, strided convolutions down, trilinear interpolation up.
B volumes of D x H x W voxels; C channels.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.embeddings import get_timestep_embedding
from torch import Tensor, nn

from inpaint_bench.core.workloads._volumes import VolumeShape
from inpaint_bench.kernels.group_norm import compiled_group_norm

GROUPS = 32


class GroupNorm(nn.GroupNorm):
    """PyTorch's, but channels-last volumes stay as they are: PyTorch would make them contiguous first.

    A `shift` [B, C] is added before, a SiLU follows if `silu` says so. `fused`: all of it in one operator.
    """

    fused = False  # see VolumeUNet.fuse

    def __init__(self, channels: int, *, silu: bool = True) -> None:
        super().__init__(GROUPS, channels)
        self.silu = silu

    def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        if self.fused:
            settings: dict[str, Any] = {"groups": GROUPS, "eps": self.eps, "silu": self.silu, "shift": shift}
            pixels = x.permute(0, 2, 3, 4, 1)
            y = compiled_group_norm(pixels.flatten(1, 3), self.weight, self.bias, **settings)
            return y.view(pixels.shape).permute(0, 4, 1, 2, 3)
        y = self._normalise(x if shift is None else x + shift[..., None, None, None])
        return F.silu(y) if self.silu else y

    def _normalise(self, x: Tensor) -> Tensor:
        if x.is_contiguous() or not x.is_contiguous(memory_format=torch.channels_last_3d):
            return super().forward(x)
        x = x.float()  # as autocast does before PyTorch's
        grouped = x.permute(0, 2, 3, 4, 1).reshape(len(x), -1, GROUPS, x.shape[1] // GROUPS)  # a view
        variance, mean = torch.var_mean(grouped, dim=(1, 3), correction=0)
        scale = self.weight.view(GROUPS, -1) * (variance + self.eps).rsqrt()[..., None]
        shift = self.bias.view(GROUPS, -1) - mean[..., None] * scale
        size = (len(x), x.shape[1], 1, 1, 1)
        return torch.addcmul(shift.view(size), x, scale.view(size))


class OuterConv(nn.Conv3d):
    """The first or last convolution. `fused`: channels are padded with zeros to a multiple of 8.

    cuDNN 9.19 guesses a kernel for the weights' gradient of few channels that took 32 ms of a step on an H200 with 3
    channels, 153 ms with 8. With 8 it has a fast one too, which it finds where it measures (cudnn_benchmark).
    """

    fused = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.fused:
            return super().forward(x)
        inputs, outputs = -self.in_channels % 8, -self.out_channels % 8
        assert self.bias is not None
        weight = F.pad(self.weight, (0,) * 6 + (0, inputs, 0, outputs))
        y = F.conv3d(F.pad(x, (0,) * 6 + (0, inputs)), weight, F.pad(self.bias, (0, outputs)), padding=1)
        return y[:, : self.out_channels]


def double_sides(x: Tensor) -> Tensor:
    """Return what trilinear interpolation to twice the sides returns; its gradient needs no atomic additions."""
    for dim in (2, 3, 4):
        last = x.shape[dim] - 1
        before = torch.cat([x.narrow(dim, 0, 1), x.narrow(dim, 0, last)], dim)
        after = torch.cat([x.narrow(dim, 1, last), x.narrow(dim, last, 1)], dim)
        x = torch.stack([0.75 * x + 0.25 * before, 0.75 * x + 0.25 * after], dim + 1).flatten(dim, dim + 1)
    return x.contiguous(memory_format=torch.channels_last_3d)


class ResidualBlock(nn.Module):
    """[B, C, D, H, W] and the time [B, E] -> [B, out, D, H, W]."""

    def __init__(self, channels: int, out: int, time_channels: int) -> None:
        super().__init__()
        self.norm_in = GroupNorm(channels)
        self.conv_in = nn.Conv3d(channels, out, 3, padding=1)
        self.time = nn.Linear(time_channels, out)
        self.norm_out = GroupNorm(out)
        self.conv_out = nn.Conv3d(out, out, 3, padding=1)
        self.skip = nn.Conv3d(channels, out, 1) if channels != out else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        shift = self.time(F.silu(time))
        if self.norm_out.fused:  # it adds the bias too
            hidden = F.conv3d(self.norm_in(x), self.conv_in.weight, padding=1)
            shift = shift + self.conv_in.bias
        else:
            hidden = self.conv_in(self.norm_in(x))
        # The first operand decides the layout of a sum; that of a 1x1x1 convolution depends on the CPU's threads.
        return self.conv_out(self.norm_out(hidden, shift)) + self.skip(x)


class Attention(nn.Module):
    """One head over all voxels. Its linear maps read channels-last volumes without a copy."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = GroupNorm(channels, silu=False)
        self.qkv = nn.Linear(channels, 3 * channels)
        self.out = nn.Linear(channels, channels)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        tokens = self.norm(x).flatten(2).transpose(1, 2)
        query, key, value = self.qkv(tokens).unsqueeze(1).chunk(3, dim=-1)
        attended = F.scaled_dot_product_attention(query, key, value).squeeze(1)
        return x + self.out(attended).transpose(1, 2).reshape(x.shape)


class Resample(nn.Module):
    """Halve the sides, or double them."""

    fused = False

    def __init__(self, channels: int, *, up: bool) -> None:
        super().__init__()
        self.up = up
        self.conv = nn.Conv3d(channels, channels, 3, stride=1 if up else 2, padding=1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        if self.up:
            x = double_sides(x) if self.fused else F.interpolate(x, scale_factor=2.0, mode="trilinear")
        return self.conv(x)


class Stage(nn.ModuleList):
    """Blocks one after the other, all of which know the time."""

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        for block in self:
            x = block(x, time)
        return x


class VolumeUNet(nn.Module):
    """Predicts the noise in volumes: noisy volume and one-hot labels as channels, and the step -> noise."""

    def __init__(self, shape: VolumeShape) -> None:
        super().__init__()
        self.shape = shape
        time_channels = 4 * shape.channels
        self.time = nn.Sequential(
            nn.Linear(shape.channels, time_channels), nn.SiLU(), nn.Linear(time_channels, time_channels)
        )
        channels = shape.channels * shape.multipliers[0]
        self.conv_in = OuterConv(shape.image_channels + shape.label_channels, channels, 3, padding=1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        skips, factor = [channels], 1
        for level, multiplier in enumerate(shape.multipliers):
            for _ in range(shape.blocks):
                blocks: list[nn.Module] = [ResidualBlock(channels, multiplier * shape.channels, time_channels)]
                channels = multiplier * shape.channels
                blocks += [Attention(channels)] if factor in shape.attention_at else []
                self.down.append(Stage(blocks))
                skips.append(channels)
            if level < len(shape.multipliers) - 1:
                self.down.append(Stage([Resample(channels, up=False)]))
                skips.append(channels)
                factor *= 2
        self.middle = Stage(
            [
                ResidualBlock(channels, channels, time_channels),
                Attention(channels),
                ResidualBlock(channels, channels, time_channels),
            ]
        )
        for level, multiplier in reversed(list(enumerate(shape.multipliers))):
            for index in range(shape.blocks + 1):
                blocks = [ResidualBlock(channels + skips.pop(), multiplier * shape.channels, time_channels)]
                channels = multiplier * shape.channels
                blocks += [Attention(channels)] if factor in shape.attention_at else []
                if level and index == shape.blocks:
                    blocks.append(Resample(channels, up=True))
                    factor //= 2
                self.up.append(Stage(blocks))
        self.norm_out = GroupNorm(channels)
        self.conv_out = OuterConv(channels, shape.image_channels, 3, padding=1)

    def forward(self, x: Tensor, steps: Tensor) -> Tensor:
        """[B, image + label channels, D, H, W] and steps [B] -> [B, image channels, D, H, W]."""
        # Cosines, then sines, at angular frequencies from 1 down to 1/10,000.
        waves = get_timestep_embedding(steps, self.shape.channels, flip_sin_to_cos=True, downscale_freq_shift=0)
        time = self.time(waves)
        x = self.conv_in(x)
        skips = [x]
        for stage in self.down:
            x = stage(x, time)
            skips.append(x)
        x = self.middle(x, time)
        for stage in self.up:
            x = stage(torch.cat([x, skips.pop()], dim=1), time)
        return self.conv_out(self.norm_out(x))

    def fuse(self) -> None:
        """Compute the same on channels-last volumes with fewer passes over them."""
        for layer in self.modules():
            if isinstance(layer, (GroupNorm, OuterConv, Resample)):
                layer.fused = True

    @torch.no_grad()
    def zero_last_layers(self) -> None:
        """Start a training as published: each residual block and attention as the identity, the noise as zero."""
        layers: list[nn.Module] = [self.conv_out]
        for module in self.modules():
            if isinstance(module, ResidualBlock):
                layers.append(module.conv_out)
            elif isinstance(module, Attention):
                layers.append(module.out)
        for layer in layers:
            for parameter in layer.parameters():
                parameter.zero_()


class Diffusion:
    """The cosine schedule (s = 0.008): adding noise, and removing it step by step."""

    def __init__(self, steps: int, device: torch.device) -> None:
        times = torch.linspace(0, steps, steps + 1, dtype=torch.float64) / steps
        signal = ((times + 0.008) / 1.008 * math.pi / 2).cos().square()
        kept = (1 - (1 - signal[1:] / signal[:-1]).clamp(max=0.999)).cumprod(0)
        self.steps = steps
        self.device = device
        self.kept = kept  # share of the signal's variance after each step
        self._kept = kept.to(device, torch.float32)

    def add_noise(self, volumes: Tensor, noise: Tensor, steps: Tensor) -> Tensor:
        """Return the noisy volumes [B, C, D, H, W] at steps [B]."""
        kept = self._kept[steps][:, None, None, None, None]
        return volumes * kept.sqrt() + noise * (1 - kept).sqrt()

    def estimate(self, noisy: Tensor, noise: Tensor, steps: Tensor) -> Tensor:
        """Return the volumes without the predicted noise, in -1..1."""
        kept = self._kept[steps][:, None, None, None, None]
        return ((noisy - noise * (1 - kept).sqrt()) / kept.sqrt()).clamp(-1, 1)

    def subset(self, count: int) -> list[int]:
        """Return so many steps, evenly from the last to the first: fewer evaluations than the schedule has steps."""
        return [round(step) for step in torch.linspace(self.steps - 1, 0, count, dtype=torch.float64).tolist()]

    def denoise(self, noisy: Tensor, noise: Tensor, step: int, following: int | None, fresh: Tensor) -> Tensor:
        """Return the volumes at the following step; None: without noise. `fresh` is noise of their shape."""
        kept = float(self.kept[step])
        after = 1.0 if following is None else float(self.kept[following])
        ratio = kept / after
        volumes = ((noisy - noise * math.sqrt(1 - kept)) / math.sqrt(kept)).clamp(-1, 1)
        mean = volumes * (math.sqrt(after) * (1 - ratio) / (1 - kept)) + noisy * (
            math.sqrt(ratio) * (1 - after) / (1 - kept)
        )
        return mean + fresh * math.sqrt((1 - ratio) * (1 - after) / (1 - kept))
