"""FLUX.1's transformer and text encoders, called like the UNet and the text encoder of SD 1.5.

The rest of this package sees maps of latents. Here 2x2 of them become a token, and the pooled embedding of CLIP travels
as the first row of the text states, as with SDXL. Location tokens stand behind the text and are attended to as text is.

It matches a flow (flow.py). Guidance is an input of the network, not a second prediction.

Shapes: B images, latents of r x r with C channels, L text tokens and P location tokens of width D.
"""

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import FluxTransformer2DModel
from torch import Tensor, nn
from transformers import CLIPTextModel, T5EncoderModel

from . import flow
from .flow import FlowArchitecture


class FluxDenoiser(FluxTransformer2DModel):
    """The transformer of FLUX.1 or FLUX.1 Fill."""

    patch = 2  # latents of a token, along a side
    guidance = 1.0  # an input of the network, see ModelConfig
    conditions_dtype: torch.dtype | None = None  # in which time and guidance are rounded; None: in that of the network

    @property
    def blocks(self) -> list[nn.Module]:
        """Transformer blocks, in order."""
        return [*self.transformer_blocks, *self.single_transformer_blocks]

    def forward(
        self, sample: Tensor, timestep: Tensor, encoder_hidden_states: Tensor, return_dict: bool = False
    ) -> tuple[Tensor]:
        """[B, C, r, r], [B] or [1] timesteps, [B, 1 + L + P, D] with the pooled text first -> ([B, C, r, r],)."""
        assert not return_dict
        config: Any = self.config
        count, _, height, width = sample.shape
        tokens = F.pixel_unshuffle(sample, self.patch).flatten(2).transpose(1, 2)  # [B, r r / 4, 4 C]
        rows, columns = height // self.patch, width // self.patch
        places = torch.zeros(rows, columns, 3, device=sample.device)
        places[..., 1] = torch.arange(rows, device=sample.device)[:, None]
        places[..., 2] = torch.arange(columns, device=sample.device)
        states = encoder_hidden_states[:, 1:]
        guidance = None
        if config.guidance_embeds:
            guidance = flow.rounded(torch.full((count,), self.guidance, device=sample.device), self.conditions_dtype)
        velocity = super().forward(
            hidden_states=tokens,
            encoder_hidden_states=states,
            # From a frozen encoder. Else every block would compute its gradient, as the location's tokens need theirs.
            pooled_projections=encoder_hidden_states[:, 0, : config.pooled_projection_dim].detach(),
            timestep=flow.rounded(timestep / flow.STEPS, self.conditions_dtype).expand(count),
            img_ids=places.flatten(0, 1),
            txt_ids=torch.zeros(states.shape[1], 3, device=sample.device),
            guidance=guidance,
            return_dict=False,
        )[0]
        return (F.pixel_shuffle(velocity.transpose(1, 2).unflatten(2, (rows, columns)), self.patch),)


class FluxTextEncoder(nn.Module):
    """CLIP ViT-L, of which the pooled embedding is used, and T5's encoder, side by side. T5 reads `length` tokens."""

    length = 512  # length of the texts of FLUX.1 dev and Fill

    def __init__(self, clip: CLIPTextModel, t5: T5EncoderModel, length: int) -> None:
        super().__init__()
        self.clip, self.t5 = clip, t5
        self.rows = self.length = length
        self.config = SimpleNamespace(hidden_size=t5.config.d_model, pooled_size=clip.config.hidden_size)

    def forward(self, tokens: Tensor) -> SimpleNamespace:
        """[B, 77 + L] ids of CLIP and T5 -> last_hidden_state [B, 1 + L, D]: the pooled embedding, padded, and T5's."""
        first = self.clip.config.max_position_embeddings
        states = self.t5(tokens[:, first:]).last_hidden_state
        pooled = self.clip(tokens[:, :first]).pooler_output
        pooled = F.pad(pooled, (0, states.shape[2] - pooled.shape[1]))
        return SimpleNamespace(last_hidden_state=torch.cat([pooled[:, None].to(states.dtype), states], dim=1))


class Flux(FlowArchitecture):
    """FLUX.1 and FLUX.1 Fill: the latter reads masked latents and the mask of every pixel too."""

    network, texts = FluxDenoiser, FluxTextEncoder
    text_encoders, tokenizers = (CLIPTextModel, T5EncoderModel), ("CLIPTokenizer", "T5TokenizerFast")
    pipelines = "FluxFillPipeline", "FluxPipeline"
    lora_mixin = "FluxLoraLoaderMixin"
    cudnn_attention = False  # it fails in the backward pass (seen with torch 2.11 on an H200)
    restoring_guidance = 30.0  # as in diffusers' pipeline of FLUX.1 Fill

    def input_channels(self, unet: Any) -> int:
        return super().input_channels(unet) // unet.patch**2

    def multiple(self, unet: Any) -> int:
        return int(unet.patch)

    def condition_channels(self, vae: Any) -> int:
        return int(vae.config.latent_channels + 4 ** (len(vae.config.block_out_channels) - 1))

    def mask_channels(self, mask: Tensor, downscale: int) -> Tensor:
        """Return [B, C, r, r], a channel for each pixel."""
        return F.pixel_unshuffle(mask, downscale)

    def conditions(self, mask: Tensor, masked: Tensor) -> Tensor:
        return torch.cat([masked, mask], dim=1)


ARCHITECTURE = Flux()
