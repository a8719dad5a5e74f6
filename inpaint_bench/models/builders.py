"""Build the networks of Stable Diffusion inpainting: random weights of given shapes, or a diffusers folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel

from inpaint_bench.core.config import ModelConfig
from inpaint_bench.core.errors import UserError

from . import location, pipeline_folder, tokenizer
from .location import LocationEncoder
from .networks import INPUT_CHANNELS, LATENT_CHANNELS, Networks

FROZEN_SEED = 0  # of random weights, whatever the run's seed: caches of the frozen networks stay valid


def build(config: ModelConfig, device: torch.device, centre: tuple[float, float] = (0.0, 0.0)) -> Networks:
    """Build the networks of `config` on `device` (also `meta`), with positions relative to `centre` (degrees).

    Weights saved with a location encoder bring it, with their own centre, unless `config.location_tokens` is 0.
    Raises UserError for a configuration or a folder that does not describe SD inpainting.
    """
    folder = Path(config.weights) if config.weights else None
    if folder:
        unet, vae, text_encoder, scheduler = pipeline_folder.load_networks(folder)
        if unet.config.in_channels == LATENT_CHANNELS:
            widen_input(unet)
    else:
        unet, vae, text_encoder, scheduler = _build_random(config, device)
    _check_shapes(config.name, unet.config, vae.config, text_encoder.config, scheduler.config)
    length = text_encoder.config.max_position_embeddings
    if folder:
        try:
            tokenize = tokenizer.load_tokenizer(folder / "tokenizer", text_encoder.config)
        except ValueError as error:
            raise UserError(f"model.weights={folder}: {error}") from None
    else:
        tokenize = tokenizer.hash_tokenizer(text_encoder.config.vocab_size, length)
    encoder = _build_location(config, unet.config.cross_attention_dim, device, centre, folder)
    if encoder:
        location.install(unet, encoder)
    for network in (unet, vae, text_encoder):
        network.to(device)
    for frozen in (vae, text_encoder):
        frozen.requires_grad_(False).eval()
    unet.train()
    alphas_cumprod = scheduler.alphas_cumprod.double()
    return Networks(
        unet=unet,
        vae=vae,
        text_encoder=text_encoder,
        location=encoder,
        sqrt_alphas_cumprod=alphas_cumprod.sqrt().float().to(device),
        sqrt_one_minus_alphas_cumprod=(1 - alphas_cumprod).sqrt().float().to(device),
        tokenize=tokenize,
        context_length=length,
        scheduler=scheduler,
        tokenizer_folder=folder / "tokenizer" if folder else None,
    )


def _check_shapes(name: str, unet: Any, vae: Any, text_encoder: Any, scheduler: Any) -> None:
    needed = {
        "unet.in_channels": (unet.in_channels, INPUT_CHANNELS),
        "unet.out_channels": (unet.out_channels, LATENT_CHANNELS),
        "unet.cross_attention_dim": (unet.cross_attention_dim, text_encoder.hidden_size),
        "unet.addition_embed_type": (unet.addition_embed_type, None),
        "unet.class_embed_type": (unet.class_embed_type, None),
        "unet.num_class_embeds": (unet.num_class_embeds, None),
        "vae.latent_channels": (vae.latent_channels, LATENT_CHANNELS),
        "scheduler.prediction_type": (scheduler.prediction_type, "epsilon"),
    }
    for key, values in needed.items():
        if values[0] != values[1]:
            found, right = ("none" if value is None else value for value in values)
            raise UserError(f"model {name}: {key} is {found}, SD 1.5 inpainting needs {right}")


def _build_location(
    config: ModelConfig, width: int, device: torch.device, centre: tuple[float, float], folder: Path | None
) -> LocationEncoder | None:
    if not config.location_tokens:
        return None
    if folder and (saved := pipeline_folder.load_location(folder, config.location_tokens, width)):
        return saved.to(device)
    with torch.device(device):
        return LocationEncoder(config.location_tokens, width, centre)


def _build_random(config: ModelConfig, device: torch.device) -> tuple[Any, Any, Any, Any]:
    """Build networks with random weights on the device itself: 0.86 B numbers are slow to draw on a CPU and to copy."""
    vocabulary = config.text_encoder.get("vocab_size", 49408)
    special_ids = {"bos_token_id": vocabulary - 2, "eos_token_id": vocabulary - 1, "pad_token_id": vocabulary - 1}
    try:
        with torch.device("cpu"):  # a table of a thousand numbers, needed with values beside meta networks too
            scheduler = DDPMScheduler(**config.scheduler)
        with torch.device(device):
            return (
                UNet2DConditionModel(**config.unet),
                AutoencoderKL(**config.vae),
                CLIPTextModel(CLIPTextConfig(**{**special_ids, **config.text_encoder})),
                scheduler,
            )
    except (TypeError, ValueError) as error:
        raise UserError(f"model {config.name}: not a valid configuration ({tokenizer.first_line(error)})") from error


def widen_input(unet: Any) -> None:
    """Widen four input channels to nine: old weights copied, new ones zero, so that the output does not change.

    `from_pretrained(in_channels=9, ignore_mismatched_sizes=True)` would initialise the whole layer at random.
    """
    old = unet.conv_in
    new = nn.Conv2d(
        INPUT_CHANNELS,
        old.out_channels,
        old.kernel_size,
        stride=old.stride,
        padding=old.padding,
        device=old.weight.device,
        dtype=old.weight.dtype,
    )
    with torch.no_grad():
        new.weight.zero_()
        new.weight[:, : old.in_channels] = old.weight
        new.bias.copy_(old.bias)  # type: ignore[union-attr]
    unet.conv_in = new
    unet.register_to_config(in_channels=INPUT_CHANNELS)
