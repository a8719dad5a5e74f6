"""DRUNet, UNet and DnCNN with the published channel plans, random weights, and how an image is passed to them in parts.

Parameters with the published plans, RGB: DRUNet 32,640,960, UNet 8,564,163, DnCNN 668,227. Input and output are NCHW.
Sources: Zhang et al., Plug-and-Play Image Restoration with Deep Denoiser Prior (DRUNet), and Beyond a Gaussian Denoiser
(DnCNN); shape rules as in deepinv 0.5.0.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inpaint_bench.core.workloads._denoisers import CHANNELS

IMAGE_CHANNELS = 3
DNCNN_LAYERS = 20
RESIDUAL_BLOCKS = 4  # per level of a DRUNet
MULTIPLE = 8  # sides are multiples of this for DRUNet and UNet, with their three downsamplings
_SPLIT_MULTIPLE, _MIN_SPLIT_PX, _SMALL_MULTIPLE = 64, 64, 16  # for DRUNet's own split


class _ResidualBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(_conv(channels, channels), nn.ReLU(), _conv(channels, channels))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


def _conv(inputs: int, outputs: int, *, bias: bool = False) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, padding=1, bias=bias)


def _residual_blocks(channels: int) -> list[nn.Module]:
    return [_ResidualBlock(channels) for _ in range(RESIDUAL_BLOCKS)]


class Denoiser(nn.Module):
    """A network that removes noise from images."""

    def prepare(self, image: Tensor, sigma: float) -> Tensor:
        """Return the network's input. Unless overridden it is not told the noise."""
        return image


class DRUNet(Denoiser):
    """A U-Net of residual blocks without bias, told the noise by a fourth channel; skips are added."""

    def __init__(self, channels: tuple[int, ...] = CHANNELS) -> None:
        super().__init__()
        levels = list(itertools.pairwise(channels))
        self.head = _conv(IMAGE_CHANNELS + 1, channels[0])
        self.down = nn.ModuleList(
            nn.Sequential(*_residual_blocks(a), nn.Conv2d(a, b, 2, stride=2, bias=False)) for a, b in levels
        )
        self.body = nn.Sequential(*_residual_blocks(channels[-1]))
        self.up = nn.ModuleList(
            nn.Sequential(nn.ConvTranspose2d(b, a, 2, stride=2, bias=False), *_residual_blocks(a))
            for a, b in reversed(levels)
        )
        self.tail = _conv(channels[0], IMAGE_CHANNELS)

    def prepare(self, image: Tensor, sigma: float) -> Tensor:
        """Return the image with a channel of the noise's standard deviation."""
        return torch.cat((image, image.new_full((len(image), 1, *image.shape[2:]), sigma)), dim=1)

    def forward(self, x: Tensor) -> Tensor:
        skips = [self.head(x)]
        for down in self.down:
            skips.append(down(skips[-1]))
        x = self.body(skips[-1])
        # The skips are kept to the end, as in the published network: they are part of its memory.
        for up, skip in zip(self.up, reversed(skips), strict=False):
            x = up(x + skip)
        return self.tail(x + skips[0])


class _DoubleConv(nn.Sequential):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(*_conv_norm(inputs, outputs), *_conv_norm(outputs, outputs))


def _conv_norm(inputs: int, outputs: int) -> list[nn.Module]:
    return [_conv(inputs, outputs, bias=True), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]


class UNet(Denoiser):
    """A U-Net of four scales with batch norm; skips are concatenated, the input is added to the output."""

    def __init__(self, channels: tuple[int, ...] = CHANNELS) -> None:
        super().__init__()
        levels = list(itertools.pairwise(channels))
        self.first = _DoubleConv(IMAGE_CHANNELS, channels[0])
        self.down = nn.ModuleList(_DoubleConv(a, b) for a, b in levels)
        self.pool = nn.MaxPool2d(2)
        self.up = nn.ModuleList(nn.Sequential(nn.Upsample(scale_factor=2), *_conv_norm(b, a)) for a, b in levels[::-1])
        self.merge = nn.ModuleList(_DoubleConv(2 * a, a) for a, _ in levels[::-1])
        self.last = nn.Conv2d(channels[0], IMAGE_CHANNELS, 1)

    def forward(self, image: Tensor) -> Tensor:
        skips = [self.first(image)]
        for down in self.down:
            skips.append(down(self.pool(skips[-1])))
        x = skips[-1]
        for up, merge, skip in zip(self.up, self.merge, skips[-2::-1], strict=True):
            x = torch.cat((skip, up(x)), dim=1)
            x = merge(x)
        return self.last(x) + image


class DnCNN(Denoiser):
    """Twenty convolutions with ReLU and without batch norm; the input is added to the output. Any sides."""

    def __init__(self, channels: tuple[int, ...] = CHANNELS) -> None:
        super().__init__()
        width = channels[0]
        inner = [layer for _ in range(DNCNN_LAYERS - 2) for layer in (_conv(width, width, bias=True), nn.ReLU(True))]
        first, last = _conv(IMAGE_CHANNELS, width, bias=True), _conv(width, IMAGE_CHANNELS, bias=True)
        self.layers = nn.Sequential(first, nn.ReLU(inplace=True), *inner, last)

    def forward(self, image: Tensor) -> Tensor:
        return self.layers(image) + image


NETWORKS: dict[str, Callable[..., Denoiser]] = {"drunet": DRUNet, "unet": UNet, "dncnn": DnCNN}


@dataclass(frozen=True, kw_only=True)
class TilePlan:
    """How an image is passed to a network: one after another, tiles of one size, of a padded image.

    branch: direct | pad (to a multiple) | onesplit4 (DRUNet's own four overlapping tiles) | tiles (ours)
    """

    branch: str
    pad_to: tuple[int, int]  # height and width after padding
    tile: tuple[int, int]
    tops: tuple[int, ...]
    lefts: tuple[int, ...]

    @property
    def calls(self) -> int:
        return len(self.tops) * len(self.lefts)


def plan(model: str, tiling: str, height: int, width: int, tile_px: int = 512, overlap_px: int = 32) -> TilePlan:
    """Return how an image of this size is passed to the network.

    tiling: library (the rule of deepinv's networks), off (one pass, padded if the network needs it), explicit (tiles
    of `tile_px` that share at least twice `overlap_px`, all of one size).
    """
    size = height, width
    if tiling == "explicit":
        tile = min(tile_px, _ceil(height, MULTIPLE)), min(tile_px, _ceil(width, MULTIPLE))
        padded = max(height, tile[0]), max(width, tile[1])
        starts = [_starts(side, length, overlap_px) for side, length in zip(padded, tile, strict=True)]
        return TilePlan(branch="tiles", pad_to=padded, tile=tile, tops=starts[0], lefts=starts[1])
    multiple = 1 if model == "dncnn" else MULTIPLE
    fits = all(side % multiple == 0 for side in size)
    if model == "drunet" and tiling == "library":
        fits = fits and min(size) > 31
        if not fits and min(size) >= _MIN_SPLIT_PX:
            tile_h, tile_w = (_SPLIT_MULTIPLE * (side // 2 // _SPLIT_MULTIPLE + 1) for side in size)
            tops, lefts = (0, height - tile_h), (0, width - tile_w)
            return TilePlan(branch="onesplit4", pad_to=size, tile=(tile_h, tile_w), tops=tops, lefts=lefts)
        multiple = MULTIPLE if fits else _SMALL_MULTIPLE
    padded = _ceil(height, multiple), _ceil(width, multiple)
    branch = "direct" if fits else "pad"
    return TilePlan(branch=branch, pad_to=padded, tile=padded, tops=(0,), lefts=(0,))


def denoise(network: Denoiser, image: Tensor, sigma: float, tiles: TilePlan) -> Tensor:
    """Return the denoised image (N, 3, H, W). Each output pixel comes from the tile whose middle is nearest to it."""
    x = network.prepare(image, sigma)
    height, width = image.shape[2:]
    if tiles.pad_to != (height, width):
        x = F.pad(x, (0, tiles.pad_to[1] - width, 0, tiles.pad_to[0] - height), mode="replicate")
    if tiles.calls == 1:
        single: Tensor = network(x)
        return single[..., :height, :width]
    tile_h, tile_w = tiles.tile
    # All tiles before they are put together, as deepinv does: their outputs are small.
    outputs = [network(x[..., top : top + tile_h, left : left + tile_w]) for top in tiles.tops for left in tiles.lefts]
    result = image.new_empty((len(image), IMAGE_CHANNELS, *tiles.pad_to))
    rows, columns = _borders(tiles.tops, tile_h, tiles.pad_to[0]), _borders(tiles.lefts, tile_w, tiles.pad_to[1])
    for index, output in enumerate(outputs):
        row, column = divmod(index, len(tiles.lefts))
        (top, bottom), (left, right) = rows[row], columns[column]
        y, x_ = tiles.tops[row], tiles.lefts[column]
        result[..., top:bottom, left:right] = output[..., top - y : bottom - y, left - x_ : right - x_]
    return result[..., :height, :width]


def _ceil(side: int, multiple: int) -> int:
    return math.ceil(side / multiple) * multiple


def _starts(side: int, tile: int, overlap: int) -> tuple[int, ...]:
    """Return where tiles begin that cover a side; the last one ends with it."""
    count = 1 if side <= tile else math.ceil((side - 2 * overlap) / (tile - 2 * overlap))
    return tuple(round(index * (side - tile) / max(1, count - 1)) for index in range(count))


def _borders(starts: tuple[int, ...], tile: int, side: int) -> list[tuple[int, int]]:
    """Return the part of a side that each tile gives: borders lie in the middle of what two tiles share."""
    middles = [(start + tile + after) // 2 for start, after in itertools.pairwise(starts)]
    edges = [0, *middles, side]
    return list(itertools.pairwise(edges))
