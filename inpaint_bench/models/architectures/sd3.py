"""Stable Diffusion 3's transformer and text encoders, called like the UNet and the text encoder of SD 1.5.

It matches a flow (flow.py), with times shifted by a constant, and takes maps of latents as they are. The
pooled embeddings of both CLIPs travel as the first row of the text states.

Shapes: B images, latents of r x r with 16 channels, L = 77 + T text rows of CLIP and T5, of width D.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import SD3Transformer2DModel
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, T5Config, T5EncoderModel


class Sd3Denoiser(SD3Transformer2DModel):
    """The transformer of SD 3 or SD 3.5."""

    @property
    def map_channels(self) -> int:
        config: Any = self.config
        return int(config.in_channels)

    @property
    def patch(self) -> int:
        """Latents of a token, along a side."""
        config: Any = self.config
        return int(config.patch_size)

    @property
    def blocks(self) -> list[nn.Module]:
        """Transformer blocks, in order."""
        return [*self.transformer_blocks]

    def forward(
        self, sample: Tensor, timestep: Tensor, encoder_hidden_states: Tensor, return_dict: bool = False
    ) -> tuple[Tensor]:
        """[B, 16, r, r], [B] or [1] timesteps, [B, 1 + L, D] with the pooled text first -> ([B, 16, r, r],)."""
        assert not return_dict
        config: Any = self.config
        velocity = super().forward(
            hidden_states=sample,
            encoder_hidden_states=encoder_hidden_states[:, 1:],
            pooled_projections=encoder_hidden_states[:, 0, : config.pooled_projection_dim],
            timestep=timestep.expand(len(sample)),
            return_dict=False,
        )[0]
        return (velocity,)


class Sd3TextEncoder(nn.Module):
    """CLIP ViT-L, OpenCLIP ViT-bigG and T5's encoder side by side."""

    def __init__(self, first: dict[str, Any], second: dict[str, Any], t5: dict[str, Any]) -> None:
        super().__init__()
        t5 = dict(t5)
        length = int(t5.pop("length"))  # tokens of a text for T5, which has no largest one
        self.first = CLIPTextModelWithProjection(CLIPTextConfig(**first))
        self.second = CLIPTextModelWithProjection(CLIPTextConfig(**second))
        self.t5 = T5EncoderModel(T5Config(**t5))
        clip = self.first.config
        self.tokens = (clip.vocab_size, clip.max_position_embeddings), (self.t5.config.vocab_size, length)
        self.rows = clip.max_position_embeddings + length
        self.config = SimpleNamespace(hidden_size=self.t5.config.d_model)

    def forward(self, tokens: Tensor) -> SimpleNamespace:
        """[B, 77 + T] ids of CLIP and T5 -> last_hidden_state [B, 1 + L, D]: pooled, padded; both CLIPs, padded; T5."""
        length = self.first.config.max_position_embeddings
        clips = [clip(tokens[:, :length], output_hidden_states=True) for clip in (self.first, self.second)]
        pooled = torch.cat([clip.text_embeds for clip in clips], dim=1)[:, None]
        states = torch.cat([clip.hidden_states[-2] for clip in clips], dim=2)
        t5 = self.t5(tokens[:, length:]).last_hidden_state
        rows = [F.pad(part, (0, t5.shape[2] - part.shape[2])).to(t5.dtype) for part in (pooled, states)]
        return SimpleNamespace(last_hidden_state=torch.cat([*rows, t5], dim=1))
