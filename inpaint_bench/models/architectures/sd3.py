"""Stable Diffusion 3's transformer and text encoders, called like the UNet and the text encoder of SD 1.5.

It matches a flow (flow.py), with times shifted by a constant, and takes maps of latents as they are. The
pooled embeddings of both CLIPs travel as the first row of the text states.

Shapes: B images, latents of r x r with 16 channels, L = 77 + T text rows of CLIP and T5, of width D.
"""

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import SD3Transformer2DModel
from torch import Tensor, nn
from transformers import CLIPTextModelWithProjection, T5EncoderModel

from .flow import FlowArchitecture


class Sd3Denoiser(SD3Transformer2DModel):
    """The transformer of SD 3 or SD 3.5."""

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
    """CLIP ViT-L, OpenCLIP ViT-bigG and T5's encoder side by side. T5 reads `length` tokens."""

    length = 256  # length of the texts in diffusers' pipeline

    def __init__(
        self, first: CLIPTextModelWithProjection, second: CLIPTextModelWithProjection, t5: T5EncoderModel, length: int
    ) -> None:
        super().__init__()
        self.first, self.second, self.t5 = first, second, t5
        self.length = length
        self.rows = first.config.max_position_embeddings + length
        pooled = first.config.projection_dim + second.config.projection_dim
        self.config = SimpleNamespace(hidden_size=t5.config.d_model, pooled_size=pooled)

    def forward(self, tokens: Tensor) -> SimpleNamespace:
        """[B, 2 * 77 + T] ids of both CLIPs and T5 -> last_hidden_state [B, 1 + L, D].

        Its rows: the pooled embeddings, padded; the states of both CLIPs side by side, padded; those of T5.
        """
        length = self.first.config.max_position_embeddings
        parts = tokens[:, :length], tokens[:, length : 2 * length], tokens[:, 2 * length :]
        clips = [
            clip(ids, output_hidden_states=True) for clip, ids in zip((self.first, self.second), parts, strict=False)
        ]
        pooled = torch.cat([clip.text_embeds for clip in clips], dim=1)[:, None]
        states = torch.cat([clip.hidden_states[-2] for clip in clips], dim=2)
        t5 = self.t5(parts[2]).last_hidden_state
        rows = [F.pad(part, (0, t5.shape[2] - part.shape[2])).to(t5.dtype) for part in (pooled, states)]
        return SimpleNamespace(last_hidden_state=torch.cat([*rows, t5], dim=1))


class Sd3(FlowArchitecture):
    """SD 3 and SD 3.5, which make images of texts."""

    network, texts = Sd3Denoiser, Sd3TextEncoder
    text_encoders = CLIPTextModelWithProjection, CLIPTextModelWithProjection, T5EncoderModel
    tokenizers = "CLIPTokenizer", "CLIPTokenizer", "T5TokenizerFast"
    pipelines = "StableDiffusion3Pipeline", "StableDiffusion3Pipeline"
    lora_mixin = "FluxLoraLoaderMixin"  # writes the files of SD 3's own, with the same names
    cudnn_attention = False  # see flux.py

    def multiple(self, unet: Any) -> int:
        return int(unet.config.patch_size)


ARCHITECTURE = Sd3()
