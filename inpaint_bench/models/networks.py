"""The networks of Stable Diffusion inpainting as the step uses them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from . import tokenizer
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
    tokenize: tokenizer.Tokenize
    context_length: int
    scheduler: Any  # DDPMScheduler: the noise schedule in diffusers' words
    tokenizer_folder: Path | None = None  # files of `tokenize`; None: it hashes

    @property
    def downscale(self) -> int:
        """Pixels per latent, along a side."""
        return int(2 ** (len(self.vae.config.block_out_channels) - 1))

    def trained(self) -> list[nn.Parameter]:
        extra = list(self.location.parameters()) if self.location else []
        return [*self.unet.parameters(), *extra]

    def counts(self) -> dict[str, int]:
        """Parameters by network; `unet` is 859,535,364 for SD 1.5 with nine channels."""
        networks = {"unet": self.unet, "vae": self.vae, "text_encoder": self.text_encoder}
        if self.location:
            networks["location"] = self.location
        return {name: sum(p.numel() for p in one.parameters()) for name, one in networks.items()}
