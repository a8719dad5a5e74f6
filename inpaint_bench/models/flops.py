"""Floating-point operations of one image, counted on shapes alone (no memory, under two seconds).

One multiply-add is two operations. A forward pass is counted operation by operation; a training step is three
forward passes by convention (the backward pass costs two), which is 0.1 % above the exact count because the first
layer needs no gradient of its input. Norms and elementwise work are not counted.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from inpaint_bench.core.config.bench import ModelConfig
from inpaint_bench.core.config.levers import RecipeConfig

from . import adapters
from .execution import DTYPES
from .networks import INPUT_CHANNELS, LATENT_CHANNELS, Networks, build_networks


def count(
    config: ModelConfig,
    resolution_px: int,
    loaded: Networks | None = None,
    *,
    decode: bool = False,
    recipe: RecipeConfig | None = None,
) -> dict[str, int]:
    """Count the operations for one image: `unet_forward`, `vae_encode`, `text_encode`; with `decode` `vae_decode` too.

    `loaded`: networks whose shapes override the configuration's, as those of a weights folder may. A `recipe` with LoRA
    adds `unet_step`, and `text_step` if the text encoder is trained: forward and backward pass with the adapters,
    without the gradients of frozen weights.
    """
    networks, inputs = _on_meta(config, resolution_px, loaded)
    side, meta = resolution_px // networks.downscale, networks.device
    with torch.no_grad(), meta:
        dtype = DTYPES[config.dtype]
        latents = torch.empty(1, networks.latent_channels, side, side, dtype=dtype)
        image = torch.empty(1, 3, resolution_px, resolution_px, dtype=dtype)
        tokens = networks.tokenize([""]).to(meta)
        parts = {
            "unet_forward": operations(lambda: networks.unet(*inputs, return_dict=False)),
            "vae_encode": operations(lambda: networks.vae.encode(image)),
            "text_encode": operations(lambda: networks.text_encoder(tokens)),
        }
        if decode:
            parts["vae_decode"] = operations(lambda: networks.vae.decode(latents))
    if recipe and recipe.lora_rank:
        adapters.add(networks, recipe)
        with meta:
            inputs[-1].requires_grad_(recipe.lora_text_encoder or networks.location is not None)
            parts["unet_step"] = operations(lambda: networks.unet(*inputs, return_dict=False)[0].sum().backward())
            if recipe.lora_text_encoder:
                parts["text_step"] = operations(
                    lambda: networks.text_encoder(tokens).last_hidden_state.sum().backward()
                )
    return parts


def of_blocks(config: ModelConfig, resolution_px: int, loaded: Networks) -> list[int]:
    """Count the operations of each transformer block in a forward pass of one image."""
    networks, inputs = _on_meta(config, resolution_px, loaded)
    counter, counts = FlopCounterMode(display=False), list[int]()
    for block in networks.unet.blocks:
        block.register_forward_pre_hook(lambda *_: counts.append(-counter.get_total_flops()))
        block.register_forward_hook(lambda *_: counts.append(counts.pop() + counter.get_total_flops()))
    with torch.no_grad(), counter:
        networks.unet(*inputs, return_dict=False)
    return counts


def _on_meta(config: ModelConfig, resolution_px: int, loaded: Networks | None) -> tuple[Networks, list[torch.Tensor]]:
    """Return networks without memory, and what the UNet takes for one image: sample, timestep, states."""
    if loaded is not None and config.weights:
        config = loaded.architecture.loaded(config, loaded)
    # Without the folder's weights: only shapes count, and nothing is read from disk.
    weightless = replace(config, weights=None)
    networks = build_networks(weightless, torch.device("meta"), inputs=(LATENT_CHANNELS, INPUT_CHANNELS))
    side, dtype = resolution_px // networks.downscale, DTYPES[config.dtype]
    with networks.device:
        sample = torch.empty(1, networks.input_channels, side, side, dtype=dtype)
        timestep = torch.zeros(1, dtype=torch.long)
        length = networks.state_rows + config.location_tokens
        states = torch.empty(1, length, networks.state_width, dtype=dtype)
    return networks, [sample, timestep, states]


def training(parts: dict[str, int], *, encodes: int, text: bool) -> int:
    """Return the operations of a training step per image, with so many VAE encodes and the text encoder in the step."""
    unet, texts = parts.get("unet_step", 3 * parts["unet_forward"]), parts.get("text_step", parts["text_encode"])
    return unet + encodes * parts["vae_encode"] + text * texts


def generation(parts: dict[str, int], *, evaluations: int, texts: int, inpaints: bool) -> int:
    """Return the operations of making one image: so many UNet evaluations and texts, and the masked image's encode."""
    unet, text = evaluations * parts["unet_forward"], texts * parts["text_encode"]
    return unet + text + parts["vae_decode"] + inpaints * parts["vae_encode"]


def operations(run: Callable[[], Any]) -> int:
    """Count the operations of a call."""
    counter = FlopCounterMode(display=False)
    with counter:
        run()
    return int(counter.get_total_flops())
