"""The networks of Stable Diffusion inpainting: random weights of given shapes, or a diffusers folder.

Random weights are made on the device itself (0.86 B numbers are slow to draw on a processor and to copy).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel

from ..config import ModelConfig
from ..errors import UserError
from . import location, tokens
from .location import LocationEncoder

LATENT_CHANNELS = 4
INPUT_CHANNELS = 9  # noisy latents 4, mask 1, masked-image latents 4: the checkpoint's order


@dataclass(kw_only=True)
class Models:
    """fp32 networks on one device. The UNet and the location encoder are trained, the others frozen."""

    unet: Any
    vae: Any
    text_encoder: Any
    location: LocationEncoder | None
    signal: Tensor  # [T]: square root of the cumulated alphas
    noise: Tensor  # [T]: square root of one minus them
    tokenize: tokens.Tokenize
    context_length: int

    def trained(self) -> list[nn.Parameter]:
        extra = list(self.location.parameters()) if self.location else []
        return [*self.unet.parameters(), *extra]

    def counts(self) -> dict[str, int]:
        """Parameters by network; `unet` is 859,535,364 for SD 1.5 with nine channels."""
        networks = {"unet": self.unet, "vae": self.vae, "text_encoder": self.text_encoder}
        if self.location:
            networks["location"] = self.location
        return {name: sum(p.numel() for p in one.parameters()) for name, one in networks.items()}


def build(config: ModelConfig, device: torch.device, centre: tuple[float, float] = (0.0, 0.0)) -> Models:
    """The networks of `config` on `device` (also `meta`), locations counted from `centre`.

    Raises UserError for a configuration or a folder that does not describe SD inpainting.
    """
    if config.weights:
        unet, vae, text, scheduler = _from_folder(Path(config.weights))
    else:
        unet, vae, text, scheduler = _random(config, device)
    if unet.config.in_channels == LATENT_CHANNELS and config.weights:
        widen_input(unet)
    if unet.config.in_channels != INPUT_CHANNELS:
        raise UserError(f"model {config.name}: the UNet takes {unet.config.in_channels} channels, inpainting needs 9")
    if scheduler.config.prediction_type != "epsilon":
        raise UserError(
            f"model {config.name}: prediction_type={scheduler.config.prediction_type} is not supported, "
            "SD 1.5 inpainting predicts epsilon"
        )
    encoder = None
    if config.location_tokens:
        with torch.device(device):
            encoder = LocationEncoder(config.location_tokens, unet.config.cross_attention_dim, centre)
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
        tokenize=tokens.folder_tokenizer(Path(config.weights) / "tokenizer", length)
        if config.weights
        else tokens.hash_tokenizer(text.config.vocab_size, length),
        context_length=length,
    )


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
        raise UserError(f"model {config.name}: not a valid description ({_first_line(error)})") from error


def _scheduler(settings: dict[str, Any]) -> Any:
    with torch.device("cpu"):  # a table of a thousand numbers, wanted with values also beside meta networks
        return DDPMScheduler(**settings)


def _from_folder(folder: Path) -> tuple[Any, Any, Any, Any]:
    """Networks from a folder that diffusers' `save_pretrained` wrote. Nothing is downloaded."""
    if not folder.is_dir():
        raise UserError(f"model.weights={folder}: no such folder")
    needed = ("unet", "vae", "text_encoder", "tokenizer", "scheduler")
    if missing := [name for name in needed if not (folder / name).is_dir()]:
        raise UserError(
            f"model.weights={folder}: not a diffusers folder, {', '.join(missing)} missing in it "
            f"(it needs {', '.join(needed)})"
        )
    return (
        _load(folder, "unet", UNet2DConditionModel.from_pretrained),
        _load(folder, "vae", AutoencoderKL.from_pretrained),
        _load(folder, "text_encoder", CLIPTextModel.from_pretrained),
        _load(folder, "scheduler", DDPMScheduler.from_pretrained),
    )


def _load(folder: Path, name: str, from_pretrained: Callable[..., Any]) -> Any:
    try:
        result = from_pretrained(str(folder), subfolder=name, local_files_only=True)
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        raise UserError(f"model.weights={folder}: {name} cannot be loaded ({_first_line(error)})") from error
    # Half-precision files too: what is trained keeps fp32 weights.
    return result.float() if isinstance(result, nn.Module) else result


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


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
