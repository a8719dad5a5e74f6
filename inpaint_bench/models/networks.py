"""The networks of Stable Diffusion inpainting as a training step uses them, and the precision of fp32 arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from . import tokenizer
from .location import LocationEncoder

LATENT_CHANNELS = 4
INPUT_CHANNELS = 9  # noisy latents 4, mask 1, masked-image latents 4: the checkpoint's order
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(kw_only=True)
class Networks:
    """fp32 networks on one device. The UNet and the location encoder are trained, the others frozen."""

    unet: Any
    vae: Any
    text_encoder: Any
    location: LocationEncoder | None
    sqrt_alphas_cumprod: Tensor  # [T]: weight of the latents at each timestep
    sqrt_one_minus_alphas_cumprod: Tensor  # [T]: weight of the noise
    tokenize: tokenizer.Tokenize
    context_length: int  # text tokens
    scheduler: Any  # DDPMScheduler: the noise schedule as diffusers saves it
    tokenizer_folder: Path | None = None  # files of `tokenize`; None: it hashes words

    @property
    def device(self) -> torch.device:
        """The device of the networks."""
        return self.sqrt_alphas_cumprod.device

    @property
    def downscale(self) -> int:
        """Pixels per latent, along a side."""
        return int(2 ** (len(self.vae.config.block_out_channels) - 1))

    def trainable_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of the UNet and the location encoder."""
        location = list(self.location.parameters()) if self.location else []
        return [*self.unet.parameters(), *location]

    def parameter_counts(self) -> dict[str, int]:
        """Return the number of parameters by network; `unet` is 859,535,364 for SD 1.5 with nine channels."""
        networks = {"unet": self.unet, "vae": self.vae, "text_encoder": self.text_encoder}
        if self.location:
            networks["location"] = self.location
        return {name: sum(p.numel() for p in network.parameters()) for name, network in networks.items()}


def set_fp32_precision(tf32: bool) -> dict[str, str]:
    """Let fp32 matmuls and convolutions use TF32, or not. Return what is now in effect for each.

    Always set explicitly: PyTorch's default is fp32 matmuls beside TF32 convolutions. Only the older `allow_tf32`
    switches: they exist in every PyTorch we support. After the newer `fp32_precision` (2.9 and later) was set to
    "ieee" for cuDNN, reading `cudnn.allow_tf32` raises (seen with 2.13), and inductor's convolution templates read it.
    """
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32
    return {
        "matmul": "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee",
        "conv": "tf32" if torch.backends.cudnn.allow_tf32 else "ieee",
    }
