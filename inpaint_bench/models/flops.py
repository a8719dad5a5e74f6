"""Floating-point operations of one image, counted on shapes alone (no memory, under two seconds).

One multiply-add is two operations. A forward pass is counted operation by operation; a training step is
three forward passes by convention (the backward pass costs two), which is 0.1 % above the exact count
because the first layer needs no gradient of its input. Norms and elementwise work are not counted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from inpaint_bench.core.config import ModelConfig

from . import builders, networks


def count(config: ModelConfig, resolution_px: int, described: Any | None = None) -> dict[str, int]:
    """Operations for one image of `resolution_px`: `unet_forward`, `vae_encode`, `text_encode`.

    `described`: networks whose shapes rule, where a weights folder overrides the configuration.
    """
    if described is not None:
        config = replace(
            config,
            unet=dict(described.unet.config),
            vae=dict(described.vae.config),
            text_encoder=described.text_encoder.config.to_dict(),
        )
    meta = torch.device("meta")
    nets = builders.build(replace(config, weights=None), meta)
    width = nets.unet.config.cross_attention_dim
    length = nets.context_length + config.location_tokens
    side = resolution_px // 2 ** (len(nets.vae.config.block_out_channels) - 1)
    with torch.no_grad(), meta:
        return {
            "unet_forward": _counted(
                lambda: nets.unet(
                    torch.empty(1, networks.INPUT_CHANNELS, side, side),
                    torch.zeros(1, dtype=torch.long),
                    torch.empty(1, length, width),
                )
            ),
            "vae_encode": _counted(
                lambda: nets.vae.quant_conv(nets.vae.encoder(torch.empty(1, 3, resolution_px, resolution_px)))
            ),
            "text_encode": _counted(lambda: nets.text_encoder(torch.zeros(1, nets.context_length, dtype=torch.long))),
        }


def training(parts: dict[str, int], *, encodes: int, text: bool) -> int:
    """Operations of one training step per image, with so many VAE encodes and the text encoder in the step."""
    return 3 * parts["unet_forward"] + encodes * parts["vae_encode"] + text * parts["text_encode"]


def _counted(run: Callable[[], Any]) -> int:
    counter = FlopCounterMode(display=False)
    with counter:
        run()
    return int(counter.get_total_flops())
