"""FLUX.1's transformer and text encoders, called like the UNet and the text encoder of SD 1.5.

The rest of this package sees maps of latents. Here 2x2 of them become a token, and the pooled embedding of CLIP travels
as the first row of the text states, as with SDXL. Location tokens stand behind the text and are attended to as text is.

FLUX.1 matches a flow (arXiv 2403.03206): x_s = (1 - s) x_0 + s noise, and the network predicts noise - x_0. A timestep
is 1,000 s. Guidance is an input of the network, not a second prediction.

Shapes: B images, latents of r x r with C channels, L text tokens and P location tokens of width D.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import FluxTransformer2DModel
from torch import Generator, Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

STEPS = 1000  # timesteps for s from 0 to 1
PATCH = 2  # latents of a token, along a side
SHIFT_TOKENS, SHIFT = (256, 4096), (0.5, 1.15)  # tokens of an image, and the shift of its times at these


class FluxDenoiser(FluxTransformer2DModel):
    """The transformer of FLUX.1 or FLUX.1 Fill."""

    guidance = 1.0  # an input of the network, see ModelConfig

    @property
    def map_channels(self) -> int:
        """Channels of the map that is read."""
        config: Any = self.config
        return int(config.in_channels) // PATCH**2

    def forward(
        self, sample: Tensor, timestep: Tensor, encoder_hidden_states: Tensor, return_dict: bool = False
    ) -> tuple[Tensor]:
        """[B, C, r, r], [B] or [1] timesteps, [B, 1 + L + P, D] with the pooled text first -> ([B, C, r, r],)."""
        assert not return_dict
        config: Any = self.config
        count, _, height, width = sample.shape
        tokens = F.pixel_unshuffle(sample, PATCH).flatten(2).transpose(1, 2)  # [B, r r / 4, 4 C]
        rows, columns = height // PATCH, width // PATCH
        places = torch.zeros(rows, columns, 3, device=sample.device)
        places[..., 1] = torch.arange(rows, device=sample.device)[:, None]
        places[..., 2] = torch.arange(columns, device=sample.device)
        states = encoder_hidden_states[:, 1:]
        guidance = None
        if config.guidance_embeds:
            guidance = torch.full((count,), self.guidance, device=sample.device)
        velocity = super().forward(
            hidden_states=tokens,
            encoder_hidden_states=states,
            pooled_projections=encoder_hidden_states[:, 0, : config.pooled_projection_dim],
            timestep=(timestep / STEPS).expand(count),
            img_ids=places.flatten(0, 1),
            txt_ids=torch.zeros(states.shape[1], 3, device=sample.device),
            guidance=guidance,
            return_dict=False,
        )[0]
        return (F.pixel_shuffle(velocity.transpose(1, 2).unflatten(2, (rows, columns)), PATCH),)


class FluxTextEncoder(nn.Module):
    """CLIP ViT-L, of which the pooled embedding is used, and T5's encoder, side by side."""

    def __init__(self, clip: dict[str, Any], t5: dict[str, Any]) -> None:
        super().__init__()
        t5 = dict(t5)
        self.rows = int(t5.pop("length"))  # tokens of a text for T5, which has no largest one
        self.clip, self.t5 = CLIPTextModel(CLIPTextConfig(**clip)), T5EncoderModel(T5Config(**t5))
        first = self.clip.config
        self.tokens = (first.vocab_size, first.max_position_embeddings), (self.t5.config.vocab_size, self.rows)
        self.config = SimpleNamespace(hidden_size=self.t5.config.d_model)

    def forward(self, tokens: Tensor) -> SimpleNamespace:
        """[B, 77 + L] ids of CLIP and T5 -> last_hidden_state [B, 1 + L, D]: the pooled embedding, padded, and T5's."""
        first = self.clip.config.max_position_embeddings
        states = self.t5(tokens[:, first:]).last_hidden_state
        pooled = self.clip(tokens[:, :first]).pooler_output
        pooled = F.pad(pooled, (0, states.shape[2] - pooled.shape[1]))
        return SimpleNamespace(last_hidden_state=torch.cat([pooled[:, None].to(states.dtype), states], dim=1))

    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())


def shift_of_times(tokens: int) -> float:
    """Return by how much times are shifted towards noise for an image of so many tokens, linear in them."""
    (few, many), (low, high) = SHIFT_TOKENS, SHIFT
    return low + (high - low) * (tokens - few) / (many - few)


def draw_timesteps(count: int, shift: float, device: torch.device, generator: Generator) -> Tensor:
    """Draw [count] int64 timesteps of 1 to STEPS: s is logit-normal, then shifted towards noise."""
    s = torch.randn(count, device=device, generator=generator).sigmoid()
    scale = math.exp(shift)
    return (STEPS * scale * s / (1 + (scale - 1) * s)).round().clamp(1, STEPS).long()


def blocks(transformer: Any) -> list[nn.Module]:
    """Return the transformer blocks of FLUX or SD 3, in order."""
    return [*transformer.transformer_blocks, *getattr(transformer, "single_transformer_blocks", [])]
