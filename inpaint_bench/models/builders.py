"""The networks of Stable Diffusion inpainting: random weights of given shapes, or a diffusers folder.

Random weights are made on the device itself (0.86 B numbers are slow to draw on a processor and to copy).
"""

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
from .networks import INPUT_CHANNELS, LATENT_CHANNELS, Models

FROZEN_SEED = 0  # of random weights, whatever the run's seed: caches of the frozen networks stay valid


def build(config: ModelConfig, device: torch.device, centre: tuple[float, float] = (0.0, 0.0)) -> Models:
    """The networks of `config` on `device` (also `meta`), locations counted from `centre`.

    Weights that were saved with a location encoder bring it, with their own centre, unless
    `config.location_tokens` is 0: then it stays unused. Raises UserError for a configuration or a folder that
    does not describe SD inpainting.
    """
    folder = Path(config.weights) if config.weights else None
    if folder:
        unet, vae, text, scheduler = pipeline_folder.load_networks(folder)
    else:
        unet, vae, text, scheduler = _random(config, device)
    if unet.config.in_channels == LATENT_CHANNELS and folder:
        widen_input(unet)
    _check(config.name, unet.config, vae.config, text.config, scheduler.config)
    encoder = _location(config, unet.config.cross_attention_dim, device, centre, folder)
    if encoder:
        location.install(unet, encoder)
    for network in (unet, vae, text):
        network.to(device)
    for frozen in (vae, text):
        frozen.requires_grad_(False).eval()
    unet.train()
    alphas = scheduler.alphas_cumprod.double()
    length = text.config.max_position_embeddings
    return Models(
        unet=unet,
        vae=vae,
        text_encoder=text,
        location=encoder,
        signal=alphas.sqrt().float().to(device),
        noise=(1 - alphas).sqrt().float().to(device),
        tokenize=pipeline_folder.load_tokenizer(folder, text)
        if folder
        else tokenizer.hash_tokenizer(text.config.vocab_size, length),
        context_length=length,
        scheduler=scheduler,
        tokenizer_folder=folder / "tokenizer" if folder else None,
    )


def _check(name: str, unet: Any, vae: Any, text: Any, scheduler: Any) -> None:
    wanted = {
        "unet.in_channels": (unet.in_channels, INPUT_CHANNELS),
        "unet.out_channels": (unet.out_channels, LATENT_CHANNELS),
        "unet.cross_attention_dim": (unet.cross_attention_dim, text.hidden_size),  # the text encoder's
        "unet.addition_embed_type": (unet.addition_embed_type, None),
        "unet.class_embed_type": (unet.class_embed_type, None),
        "unet.num_class_embeds": (unet.num_class_embeds, None),
        "vae.latent_channels": (vae.latent_channels, LATENT_CHANNELS),
        "scheduler.prediction_type": (scheduler.prediction_type, "epsilon"),
    }
    for what, (found, right) in wanted.items():
        if found != right:
            words = ("none" if value is None else value for value in (found, right))
            raise UserError("model {}: {} is {}, SD 1.5 inpainting needs {}".format(name, what, *words))


def _location(
    config: ModelConfig, width: int, device: torch.device, centre: tuple[float, float], folder: Path | None
) -> LocationEncoder | None:
    if not config.location_tokens:
        return None
    if folder and (saved := pipeline_folder.load_location(folder, config.location_tokens, width)):
        return saved.to(device)
    with torch.device(device):
        return LocationEncoder(config.location_tokens, width, centre)


def _random(config: ModelConfig, device: torch.device) -> tuple[Any, Any, Any, Any]:
    vocabulary = config.text_encoder.get("vocab_size", 49408)
    marks = {"bos_token_id": vocabulary - 2, "eos_token_id": vocabulary - 1, "pad_token_id": vocabulary - 1}
    try:
        with torch.device(device):
            return (
                UNet2DConditionModel(**config.unet),
                AutoencoderKL(**config.vae),
                CLIPTextModel(CLIPTextConfig(**{**marks, **config.text_encoder})),
                _scheduler(config.scheduler),
            )
    except (TypeError, ValueError) as error:
        raise UserError(
            f"model {config.name}: not a valid description ({pipeline_folder.first_line(error)})"
        ) from error


def _scheduler(settings: dict[str, Any]) -> Any:
    with torch.device("cpu"):  # a table of a thousand numbers, wanted with values also beside meta networks
        return DDPMScheduler(**settings)


def widen_input(unet: Any) -> None:
    """Four input channels become nine: the old weights copied, the new ones zero, so they start unheard.

    `from_pretrained(in_channels=9, ignore_mismatched_sizes=True)` would draw the whole layer anew.
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
