"""Transformers that match a flow, as FLUX and SD 3 are trained (arXiv 2403.03206).

x_s = (1 - s) x_0 + s noise, and the network predicts noise - x_0. A timestep is 1,000 s.
"""

import math
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.models import activations
from torch import Generator, Tensor, nn

from inpaint_bench.core.config.bench import ModelConfig
from inpaint_bench.core.errors import UserError
from inpaint_bench.models.execution import DTYPES
from inpaint_bench.models.weights_folder import check_channels, numbered

from .base import Architecture, known_keys, own_blocks, refusing, settings, special_ids
from .location import LocationEncoder

STEPS = 1000  # timesteps for s from 0 to 1
SHIFT_TOKENS, SHIFT = (256, 4096), (0.5, 1.15)  # tokens of an image, and the shift of FLUX's times at these


class FlowArchitecture(Architecture):
    """A transformer of diffusers, and text encoders of which the last reads texts of a length of its own.

    The network has `blocks`; sides of latents are a `multiple` of a token's.
    """

    texts: Any  # joins the text encoders; has the `rows` of its states, and the `length` of the last one's texts
    role, scheduler, index = "transformer", FlowMatchEulerDiscreteScheduler, {}
    sampler, whole_timesteps, pooled_rows = "euler", False, 1
    autocast, by_block, large = False, True, True

    def dtype(self, config: ModelConfig) -> torch.dtype:
        return DTYPES[config.dtype]

    def build(self, config: ModelConfig, device: torch.device) -> tuple[Any, Any, Any, Any]:
        default = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype(config))
        try:
            with refusing(config), torch.device(device):
                unet, vae = self.network(**settings(config)), self.vae(**config.vae)
                encoders = []
                for part, given in zip(self.text_encoders, text_configs(config), strict=False):
                    keys = {**(special_ids(config) if part is not self.text_encoders[-1] else {}), **given}
                    keys.pop("length", None)  # `join` reads the length of the texts
                    encoders.append(part(part.config_class(**keys)))
        finally:
            torch.set_default_dtype(default)
        with refusing(config):
            return unet, vae, self.join(config, encoders), self.scheduler(**config.scheduler)

    def join(self, config: ModelConfig, encoders: list[Any]) -> Any:
        given = (int(keys["length"]) for keys in text_configs(config) if "length" in keys)
        return self.texts(*encoders, next(given, self.texts.length))

    def tokenized(self, text_encoder: Any) -> list[tuple[Any, int]]:
        *first, last = text_encoder.children()
        return [*((clip, clip.config.max_position_embeddings) for clip in first), (last, text_encoder.length)]

    def check(
        self, config: ModelConfig, unet: Any, vae: Any, text_encoder: Any, scheduler: Any, inputs: Collection[int]
    ) -> None:
        needed = unet.config.joint_attention_dim, unet.config.get("pooled_projection_dim", 0)
        if needed != (have := (text_encoder.config.hidden_size, text_encoder.config.pooled_size)):
            raise UserError(
                f"model {config.name}: its transformer reads texts of widths {needed}, the encoders give {have}"
            )
        if scheduler.config.num_train_timesteps != STEPS:
            raise UserError(f"model {config.name}: scheduler.num_train_timesteps is not {STEPS}")
        latents, channels = vae.config.latent_channels, self.input_channels(unet)
        readable = {latents, latents + self.condition_channels(vae)}
        per_token = getattr(unet, "patch", 1) ** 2
        if channels not in readable or unet.out_channels != latents * per_token:
            widths = " or ".join(str(count * per_token) for count in sorted(readable))
            fitting = f"transformer.out_channels is {latents * per_token}, and in_channels {widths}"
            raise UserError(f"model {config.name}: with this VAE {fitting}")
        check_channels(config.name, 9 if channels > latents else 4, inputs)

    def condition_channels(self, vae: Any) -> int:
        """Return the channels of mask and masked latents; 0 if the network cannot inpaint."""
        return 0

    def configure(self, config: ModelConfig, unet: Any) -> None:
        unet.guidance = config.guidance

    def add_location(self, unet: Any, encoder: LocationEncoder) -> None:
        """Do nothing: its tokens are attended to as text is."""

    def loaded(self, config: ModelConfig, networks: Any) -> ModelConfig:
        encoders = list(networks.text_encoder.children())
        names = numbered("text_encoder", len(encoders))
        texts = {name: encoder.config.to_dict() for name, encoder in zip(names, encoders, strict=True)}
        texts[names[-1]]["length"] = networks.text_encoder.length
        network = {**config.transformer, **known_keys(self.network, networks.unet)}
        return replace(config, transformer=network, vae=known_keys(self.vae, networks.vae), **texts)

    def state_width(self, unet: Any) -> int:
        return int(unet.config.joint_attention_dim)

    def context_length(self, text_encoder: Any) -> int:
        return int(text_encoder.rows)

    def sample_side(self, networks: Any) -> Any:
        # diffusers saves none for FLUX. The VAE has it, in pixels.
        return networks.vae.config.sample_size // networks.downscale

    def noise_schedule(self, config: ModelConfig, scheduler: Any) -> tuple[Tensor, Tensor]:
        times = torch.arange(STEPS + 1, dtype=torch.float32) / STEPS
        return 1 - times, times

    def time_shift(self, networks: Any, side: int) -> float:
        """Return how far times are shifted towards noise for latents of this side."""
        config = networks.scheduler.config
        if not config.use_dynamic_shifting:
            return math.log(config.shift)
        tokens, (few, many), (low, high) = (side // self.multiple(networks.unet)) ** 2, SHIFT_TOKENS, SHIFT
        return low + (high - low) * (tokens - few) / (many - few)

    def draw_timesteps(self, networks: Any, count: int, side: int, generator: Generator) -> Tensor:
        """Draw timesteps of 1 to STEPS: s is logit-normal, then shifted towards noise."""
        s = torch.randn(count, device=networks.device, generator=generator).sigmoid()
        scale = math.exp(self.time_shift(networks, side))
        return (STEPS * scale * s / (1 + (scale - 1) * s)).round().clamp(1, STEPS).long()

    def target(self, networks: Any, latents: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        return noise - latents

    def sampler_settings(self, networks: Any, steps: int, side: int) -> dict[str, Any]:
        if not networks.scheduler.config.use_dynamic_shifting:
            return super().sampler_settings(networks, steps, side)
        # As diffusers' pipelines of FLUX: equal steps down to 1 / steps, then shifted.
        return {"sigmas": np.linspace(1.0, 1 / steps, steps).tolist(), "mu": self.time_shift(networks, side)}

    def saved_scheduler(self, scheduler: Any) -> Any:
        return scheduler

    def last_layer(self, unet: Any) -> nn.Module:
        layer: nn.Module = next(own_blocks(unet)[-1].children())  # checkpointing is within the block
        return layer

    def check_adaptable(self, unet: Any) -> None:
        """Raise nothing: the layer that reads the mask came with the weights."""


def rounded(value: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Round as a network of that type does, which multiplies by 1000: in bf16 a guidance of 30 is 29,952, then."""
    return value if dtype is None else (value.to(dtype) * STEPS).to(dtype).float() / STEPS


def text_configs(config: ModelConfig) -> tuple[dict[str, Any], ...]:
    return config.text_encoder, config.text_encoder_2, config.text_encoder_3


# --- layers in a form of which inductor makes faster kernels; they compute the same --------------


def rewrite(block: nn.Module) -> None:
    """Change the layers of a block that is about to be compiled."""
    module: Any
    for module in block.modules():
        if type(module) in _FASTER and module.approximate == "tanh":
            module.__class__ = _FASTER[type(module)]
        elif hasattr(module, "lora_A"):
            for adapter in module.lora_A:
                module.lora_variant.setdefault(adapter, _ScaledFirst)


def gelu(x: Tensor) -> Tensor:
    """Return GELU in its approximation with a hyperbolic tangent, by the logistic function of twice the argument.

    For a tangent inductor calls CUDA's own, which takes longer than reading and writing the map.
    """
    wide = x.float()
    return (wide * torch.sigmoid(1.5957691216057308 * wide * (1 + 0.044715 * wide * wide))).to(x.dtype)


class _Gelu(nn.GELU):
    def forward(self, x: Tensor) -> Tensor:
        return gelu(x)


class _ProjectedGelu(activations.GELU):
    def gelu(self, gate: Tensor) -> Tensor:
        return gelu(gate)


_FASTER: dict[type[nn.Module], type[nn.Module]] = {nn.GELU: _Gelu, activations.GELU: _ProjectedGelu}


class _ScaledFirst:
    """An adapter that multiplies the narrow tensor by alpha / rank. peft multiplies the wide one, even by 1.

    A variant as peft calls it, for training alone: it cannot be merged into the weights.
    """

    @staticmethod
    def forward(module: Any, active_adapter: str, x: Tensor, result: Tensor, **_: Any) -> Tensor:
        narrow = module.lora_A[active_adapter](module.lora_dropout[active_adapter](x)) * module.scaling[active_adapter]
        wide: Tensor = module.lora_B[active_adapter](narrow)
        return result + wide
