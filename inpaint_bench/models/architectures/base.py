"""What the rest of the package asks of a model's architecture; by default the answers for the UNet of SD 1 and 2."""

import inspect
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, DDIMScheduler, DDPMScheduler, UNet2DConditionModel
from torch import Generator, Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel

from inpaint_bench.core.config.bench import ModelConfig
from inpaint_bench.core.errors import UserError, first_line
from inpaint_bench.models.weights_folder import check_channels

from .location import LocationEncoder, install
from .nhwc_vae import LATENT_CHANNELS

# The ends of the names of layers. The first are those of diffusers' examples.
_ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
_TRANSFORMER = (*_ATTENTION, "proj_in", "proj_out", "ff.net.0.proj", "ff.net.2")
PREDICTIONS = "epsilon", "v_prediction"  # prediction types of a scheduler
# DDIM over the noise schedule of a scheduler's configuration, for latents: nothing clipped, steps as SD's own.
ddim_scheduler = partial(DDIMScheduler.from_config, clip_sample=False, set_alpha_to_one=False, steps_offset=1)


class Architecture:
    """One kind of model: its classes, what it predicts, and the parts of it that levers change.

    Its network is called as the UNet of SD 1.5 is: a map of latents, timesteps and text states give a map.
    """

    # Classes, and names in a diffusers folder.
    title = "SD 1 and 2"  # in messages
    embeds: str | None = None  # what the UNet embeds beside text and time, its addition_embed_type
    role = "unet"  # name of the network's folder and of its adapters
    network: Any = UNet2DConditionModel
    vae: Any = AutoencoderKL
    text_encoders: tuple[Any, ...] = (CLIPTextModel,)
    tokenizers: tuple[str, ...] = ("CLIPTokenizer",)  # classes of transformers
    scheduler: Any = DDPMScheduler
    pipelines = "StableDiffusionInpaintPipeline", "StableDiffusionPipeline"  # to inpaint, and to make images of texts
    # What the index of a folder says besides its parts. [None, None]: a part that the pipeline lacks.
    index: dict[str, Any] = {
        **{name: [None, None] for name in ("feature_extractor", "image_encoder", "safety_checker")},
        "requires_safety_checker": False,
    }
    lora_mixin = "StableDiffusionLoraLoaderMixin"  # class of diffusers.loaders that writes adapters
    lora_targets: dict[str, tuple[str, ...]] = {
        "attention": _ATTENTION,
        "transformer": _TRANSFORMER,
        "all": (*_TRANSFORMER, "conv1", "conv2", "conv_shortcut", "time_emb_proj"),
    }

    # How it is executed.
    sampler = "ddim"  # restores images
    whole_timesteps = True  # a sampler names timesteps of the schedule
    pooled_rows = 0  # rows of the pooled text, before the other text states
    autocast = True  # even with 16-bit frozen weights beneath LoRA: without it norms return fp32
    cudnn_attention = True  # PyTorch may choose it
    by_block = False  # blocks are compiled, checkpointed and stored one by one; else diffusers does it
    large = False  # neither unused text encoders nor second copies of gradients fit beside it
    restoring_guidance = 1.0  # if it is an input of the network

    # --- building --------------------------------------------------------------------------------

    def dtype(self, config: ModelConfig) -> torch.dtype:
        """Return the type in which weights are loaded."""
        return torch.float32

    def build(self, config: ModelConfig, device: torch.device) -> tuple[Any, Any, Any, Any]:
        """Return network, VAE, text encoder and scheduler with random weights.

        They are drawn on the device itself: 0.86 B numbers are slow to draw on a CPU and to copy.
        """
        with refusing(config):
            with torch.device("cpu"):  # a table of a thousand numbers, needed with values beside meta networks too
                scheduler = self.scheduler(**config.scheduler)
            with torch.device(device):
                unet, text_encoder = self.network(**settings(config)), self.build_text_encoder(config)
                return unet, self.vae(**config.vae), text_encoder, scheduler

    def build_text_encoder(self, config: ModelConfig) -> Any:
        return CLIPTextModel(CLIPTextConfig(**{**special_ids(config), **config.text_encoder}))

    def join(self, config: ModelConfig, encoders: list[Any]) -> Any:
        """Return the text encoders of a folder as one network."""
        (encoder,) = encoders
        return encoder

    def tokenized(self, text_encoder: Any) -> list[tuple[Any, int]]:
        """Return the text encoders in the order of a folder, with the tokens that each of them reads."""
        return [(text_encoder, text_encoder.config.max_position_embeddings)]

    def encode(self, tokenizer: Any, texts: list[str], length: int) -> Any:
        """Return the ids of texts by a tokenizer of transformers, padded to a length."""
        return tokenizer(texts, padding="max_length", truncation=True, max_length=length)["input_ids"]

    def check(
        self, config: ModelConfig, unet: Any, vae: Any, text_encoder: Any, scheduler: Any, inputs: Collection[int]
    ) -> None:
        """Raise UserError for parts that do not fit each other, or other than the allowed numbers of input channels."""
        check_channels(config.name, unet.config.in_channels, inputs)
        needed = {
            "unet.out_channels": (unet.config.out_channels, LATENT_CHANNELS),
            "unet.cross_attention_dim": (unet.config.cross_attention_dim, text_encoder.config.hidden_size),
            # UNets with other such embeddings need inputs that the training step does not have.
            "unet.addition_embed_type": (unet.config.addition_embed_type, self.embeds),
            "unet.class_embed_type": (unet.config.class_embed_type, None),
            "unet.num_class_embeds": (unet.config.num_class_embeds, None),
            "vae.latent_channels": (vae.config.latent_channels, LATENT_CHANNELS),
            "scheduler.rescale_betas_zero_snr": (bool(scheduler.config.rescale_betas_zero_snr), False),
        }
        for key, values in needed.items():
            if values[0] != values[1]:
                actual, expected = ("none" if value is None else value for value in values)
                raise UserError(f"model {config.name}: {key} is {actual}, in {self.title} it is {expected}")
        if scheduler.config.prediction_type not in PREDICTIONS:
            given = f"scheduler.prediction_type is {scheduler.config.prediction_type}"
            raise UserError(f"model {config.name}: {given}, in {self.title} it is {' or '.join(PREDICTIONS)}")

    def configure(self, config: ModelConfig, unet: Any) -> None:
        """Tell the network what no folder says, such as its guidance."""

    def add_location(self, unet: Any, encoder: LocationEncoder) -> None:
        """Tell the network of location tokens behind the text."""
        install(unet, encoder)

    def loaded(self, config: ModelConfig, networks: Any) -> ModelConfig:
        """Return the configuration with the shapes of networks of a folder."""
        unet, vae = known_keys(self.network, networks.unet), known_keys(self.vae, networks.vae)
        return replace(config, unet=unet, vae=vae, text_encoder=networks.text_encoder.config.to_dict())

    # --- shapes ----------------------------------------------------------------------------------

    def input_channels(self, unet: Any) -> int:
        """Return the channels of the map that is read: noisy latents, and to inpaint mask and masked latents."""
        return int(unet.config.in_channels)

    def state_width(self, unet: Any) -> int:
        """Return the width of the text states."""
        return int(unet.config.cross_attention_dim)

    def context_length(self, text_encoder: Any) -> int:
        """Return the text tokens whose states are read."""
        return int(text_encoder.config.max_position_embeddings)

    def multiple(self, unet: Any) -> int:
        """Return what sides of latents are multiples of: they are halved at every level but one."""
        return int(2 ** (len(unet.config.block_out_channels) - 1))

    def sample_side(self, networks: Any) -> Any:
        """Return the side of the latents on which a folder's network was trained, as its configuration says."""
        return networks.unet.config.sample_size

    # --- diffusion -------------------------------------------------------------------------------

    def noise_schedule(self, config: ModelConfig, scheduler: Any) -> tuple[Tensor, Tensor]:
        """Return the weights of latents and noise at each timestep, [T] and [T]."""
        alphas_cumprod = scheduler.alphas_cumprod.double()
        if not (alphas_cumprod > 0).all():
            raise UserError(f"model {config.name}: the noise schedule of its scheduler leaves no signal, or is not one")
        return alphas_cumprod.sqrt().float(), (1 - alphas_cumprod).sqrt().float()

    def draw_timesteps(self, networks: Any, count: int, side: int, generator: Generator) -> Tensor:
        """Draw [count] int64 timesteps of a training step, with latents of this side."""
        return torch.randint(len(networks.signal_weights), (count,), device=networks.device, generator=generator)

    def target(self, networks: Any, latents: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """Return what the network is to predict."""
        if networks.scheduler.config.prediction_type == "epsilon":
            return noise
        signal_weight, noise_weight = networks.weights(timesteps)
        return signal_weight * noise - noise_weight * latents

    def sampler_settings(self, networks: Any, steps: int, side: int) -> dict[str, Any]:
        """Return what a sampler is told of its timesteps."""
        return {"num_inference_steps": steps}

    def saved_scheduler(self, scheduler: Any) -> Any:
        """Return the scheduler that is saved: DDIM over the training schedule."""
        return ddim_scheduler(scheduler.config)

    def scaled(self, vae: Any, latents: Tensor) -> Tensor:
        """Return latents of the VAE as the network takes them."""
        return (latents - (vae.config.get("shift_factor") or 0.0)) * vae.config.scaling_factor

    def unscaled(self, vae: Any, latents: Tensor) -> Tensor:
        """Return latents of the network as the VAE takes them."""
        return latents / vae.config.scaling_factor + (vae.config.get("shift_factor") or 0.0)

    def mask_channels(self, mask: Tensor, downscale: int) -> Tensor:
        """[B, 1, R, R] -> the mask as the network reads it, here [B, 1, r, r]."""
        side = mask.shape[-1] // downscale
        return F.interpolate(mask, size=(side, side), mode="nearest")

    def conditions(self, mask: Tensor, masked: Tensor) -> Tensor:
        """Join mask channels and masked latents in the order of the checkpoint, behind the noisy latents."""
        return torch.cat([mask, masked], dim=1)

    # --- parts of the network --------------------------------------------------------------------

    def blocks(self, unet: Any) -> list[Any]:
        """Return the blocks that are compiled, checkpointed and stored one by one."""
        return list(unet.blocks) if self.by_block else []

    def sharded(self, unet: Any) -> list[Any]:
        """Return the blocks that gather their weights one after the other."""
        return self.blocks(unet) or [*unet.down_blocks, unet.mid_block, *unet.up_blocks]

    def last_layer(self, unet: Any) -> nn.Module:
        """Return a layer that runs once in each pass, and once more if activations are computed again."""
        layers: Any = unet.resnets if hasattr(unet, "resnets") else unet.up_blocks[-1].resnets  # NhwcUNet has a list
        return layers[-1]

    def check_adaptable(self, unet: Any) -> None:
        """Raise UserError if adapters alone cannot learn the task."""
        weight = unet.conv_in.weight
        if not weight.is_meta and not weight[:, -1].any():
            raise UserError(
                "LoRA leaves the UNet's first layer as it is, and these weights have no inpainting channels there: "
                "they would never see the mask. Set model.weights to those of an inpainting model, or "
                "recipe.lora_rank=0"
            )


def own_blocks(network: Any) -> list[Any]:
    """Return the transformer blocks that this rank computes: all but those of other ranks of a pipeline."""
    return [block for block in network.blocks if not next(block.parameters()).is_meta]


def special_ids(config: ModelConfig) -> dict[str, int]:
    """Return CLIP's last two ids: transformers' defaults, 49406 and 49407, lie outside of a smaller vocabulary."""
    size = config.text_encoder.get("vocab_size", 49408)
    return {"bos_token_id": size - 2, "eos_token_id": size - 1, "pad_token_id": size - 1}


def settings(config: ModelConfig) -> dict[str, Any]:
    """Return what the class of the network is built with: what is configured but for keys of ours."""
    return {name: value for name, value in config.network.items() if name not in ("architecture", "inpaints")}


def known_keys(kind: Any, network: Any) -> dict[str, Any]:
    """Return a network's configuration without keys that its class does not take: diffusers passes them by too."""
    parameters = inspect.signature(kind).parameters
    return {name: value for name, value in network.config.items() if name in parameters}


@contextmanager
def refusing(config: ModelConfig) -> Iterator[None]:
    """Raise UserError for what the libraries raise of a configuration."""
    try:
        yield
    except (TypeError, ValueError, KeyError) as error:
        raise UserError(f"model {config.name}: not a valid configuration ({first_line(error)})") from error
