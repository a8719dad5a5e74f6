"""What SDXL has beside SD 1.5: two text encoders, a pooled embedding of the text, and the sizes of the image.

The rest of this package sees a UNet and a text encoder as SD 1.5 has them: the pooled embedding travels as the first
row of the text states, so that caches, location tokens and comparisons of recipes hold for both models. The sizes are
those of a square image that was not cropped, which follow from the latents.

Random weights only. Both encoders read the same token ids; SDXL's second tokenizer differs from the first in its
padding, which random embeddings make irrelevant.
"""

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import UNet2DConditionModel
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

from inpaint_bench.core.config.bench import ModelConfig

from .base import Architecture, special_ids

DOWNSCALE = 8  # pixels per latent, of SDXL's VAE
NUM_SIZES = 6  # height and width of the original, top and left of the crop, height and width of the target


class SdxlUNet(UNet2DConditionModel):
    """SDXL's UNet, called like that of SD 1.5."""

    def forward(
        self, sample: Tensor, timestep: Any, encoder_hidden_states: Tensor, return_dict: bool = True, **settings: Any
    ) -> Any:
        """Predict noise from latents [B, 9, r, r], timesteps [B] and states [B, 1 + L + P, D], the first row pooled."""
        config: Any = self.config
        width = config.projection_class_embeddings_input_dim - NUM_SIZES * config.addition_time_embed_dim
        height_width = sample.new_full((len(sample), 2), DOWNSCALE * sample.shape[-1])
        sizes = torch.cat([height_width, torch.zeros_like(height_width), height_width], dim=1)
        conditions = {"text_embeds": encoder_hidden_states[:, 0, :width], "time_ids": sizes}
        states = encoder_hidden_states[:, 1:]
        return super().forward(
            sample, timestep, states, added_cond_kwargs=conditions, return_dict=return_dict, **settings
        )


class SdxlTextEncoder(nn.Module):
    """CLIP ViT-L and OpenCLIP ViT-bigG side by side, of these configurations."""

    def __init__(self, first: dict[str, Any], second: dict[str, Any]) -> None:
        super().__init__()
        self.first = CLIPTextModel(CLIPTextConfig(**first))
        self.second = CLIPTextModelWithProjection(CLIPTextConfig(**second))
        first_config, second_config = self.first.config, self.second.config
        self.config = SimpleNamespace(
            hidden_size=first_config.hidden_size + second_config.hidden_size,
            max_position_embeddings=first_config.max_position_embeddings,
            vocab_size=first_config.vocab_size,
            to_dict=first_config.to_dict,
        )

    def forward(self, tokens: Tensor) -> SimpleNamespace:
        """[B, L] ids -> last_hidden_state [B, 1 + L, D]: the pooled embedding, padded, and the last but one states."""
        first = self.first(tokens, output_hidden_states=True)
        second = self.second(tokens, output_hidden_states=True)
        states = torch.cat([first.hidden_states[-2], second.hidden_states[-2]], dim=2)
        pooled = F.pad(second.text_embeds, (0, states.shape[2] - second.text_embeds.shape[1]))
        return SimpleNamespace(last_hidden_state=torch.cat([pooled[:, None].to(states.dtype), states], dim=1))


class Sdxl(Architecture):
    """SDXL with random weights."""

    title, embeds, pooled_rows = "SDXL", "text_time", 1
    network, text_encoders = SdxlUNet, (CLIPTextModel, CLIPTextModelWithProjection)

    def build_text_encoder(self, config: ModelConfig) -> SdxlTextEncoder:
        ids = special_ids(config)
        return SdxlTextEncoder({**ids, **config.text_encoder}, {**ids, **config.text_encoder_2})


ARCHITECTURE = Sdxl()
