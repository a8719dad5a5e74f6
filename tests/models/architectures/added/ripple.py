"""An architecture that the package does not have: two convolutions and the mean of the text predict the image."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from torch import Tensor, nn

from inpaint_bench.core.config.bench import ModelConfig
from inpaint_bench.models.architectures.base import Architecture
from inpaint_bench.models.architectures.location import LocationEncoder
from inpaint_bench.models.weights_folder import check_channels


class RippleNetwork(ModelMixin, ConfigMixin):  # type: ignore[misc]
    _supports_gradient_checkpointing = True

    @register_to_config  # type: ignore[untyped-decorator]
    def __init__(self, in_channels: int, out_channels: int, width: int, cross_attention_dim: int) -> None:
        super().__init__()
        self.gradient_checkpointing = False
        self.first = nn.Conv2d(in_channels, width, 3, padding=1)
        self.text = nn.Linear(cross_attention_dim, width)
        self.last = nn.Conv2d(width, out_channels, 3, padding=1)

    def forward(self, sample: Tensor, timestep: Tensor, states: Tensor, return_dict: bool = False) -> tuple[Tensor]:
        hidden = self.first(sample) + self.text(states.mean(1))[:, :, None, None]
        return (self.last(torch.sin(hidden + timestep[:, None, None, None] / 1000)),)


class Ripple(Architecture):
    role, network = "ripple", RippleNetwork

    def check(
        self, config: ModelConfig, unet: Any, vae: Any, text_encoder: Any, scheduler: Any, inputs: Collection[int]
    ) -> None:
        check_channels(config.name, unet.config.in_channels, inputs)

    def add_location(self, unet: Any, encoder: LocationEncoder) -> None:
        """Do nothing: the mean of the states has the location's tokens too."""

    def multiple(self, unet: Any) -> int:
        return 1

    def draw_timesteps(self, networks: Any, count: int, side: int, generator: torch.Generator) -> Tensor:
        return torch.full((count,), 500, device=networks.device)

    def target(self, networks: Any, latents: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        return latents

    def conditions(self, mask: Tensor, masked: Tensor) -> Tensor:
        return torch.cat([masked, 1 - mask], dim=1)

    def last_layer(self, unet: Any) -> nn.Module:
        layer: nn.Module = unet.last
        return layer


ARCHITECTURE = Ripple()
