"""FLUX.2 klein's transformer and text encoder, called like the UNet and the text encoder of SD 1.5.

The rest of this package sees maps of latents with 32 channels. Here 2x2 of them become a token, normalised by the
statistics of the VAE's batch norm. To inpaint, the masked image is appended as further tokens, which have another first
coordinate and as many channels: the mask itself is not read. Location tokens stand behind the text and are attended to
as text is.

It matches a flow (flow.py). The base models have no guidance as an input.

Shapes: B images, latents of r x r with C channels, L text tokens and P location tokens of width D.
"""

from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLFlux2, Flux2Transformer2DModel
from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu
from torch import Tensor, nn
from transformers import Qwen3ForCausalLM

from inpaint_bench.core.config.bench import ModelConfig
from inpaint_bench.core.errors import UserError

from . import flow
from .flow import FlowArchitecture

REFERENCE = 10  # first coordinate of a reference image's tokens; that of noisy latents is 0
_PROJECTIONS = ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj", "to_qkv_mlp_proj")


class Flux2Denoiser(Flux2Transformer2DModel):
    """The transformer of FLUX.2 klein."""

    patch = 2  # latents of a token, along a side
    inpaints = False  # reads the tokens of a masked image too
    conditions_dtype: torch.dtype | None = None  # in which the time is rounded; None: in that of the network

    @property
    def blocks(self) -> list[nn.Module]:
        """Transformer blocks, in order."""
        return [*self.transformer_blocks, *self.single_transformer_blocks]

    def forward(
        self, sample: Tensor, timestep: Tensor, encoder_hidden_states: Tensor, return_dict: bool = False
    ) -> tuple[Tensor]:
        """[B, C or 2 C, r, r], [B] or [1] timesteps, [B, L + P, D] -> ([B, C, r, r],)."""
        assert not return_dict
        config: Any = self.config
        packed = F.pixel_unshuffle(sample, self.patch).unflatten(1, (-1, config.in_channels))
        _, images, _, rows, columns = packed.shape
        device, length = sample.device, encoder_hidden_states.shape[1]
        places = torch.zeros(images, rows, columns, 4, device=device)
        places[..., 0] = REFERENCE * torch.arange(images, device=device)[:, None, None]
        places[..., 1] = torch.arange(rows, device=device)[:, None]
        places[..., 2] = torch.arange(columns, device=device)
        text_places = torch.zeros(length, 4, device=device)
        text_places[:, 3] = torch.arange(length, device=device)
        velocity = super().forward(
            hidden_states=packed.permute(0, 1, 3, 4, 2).flatten(1, 3),  # [B, r r / 4 of each image, 4 C]
            encoder_hidden_states=encoder_hidden_states,
            timestep=flow.rounded(timestep / flow.STEPS, self.conditions_dtype).expand(len(sample)),
            img_ids=places.flatten(0, 2),
            txt_ids=text_places,
            return_dict=False,
        )[0][:, : rows * columns]
        return (F.pixel_shuffle(velocity.transpose(1, 2).unflatten(2, (rows, columns)), self.patch),)


class Flux2TextEncoder(nn.Module):
    """Qwen3, of which the states after three layers are used, side by side. It reads `length` tokens."""

    length = 512  # length of the texts in diffusers' pipelines
    layers = 9, 18, 27

    def __init__(self, qwen: Qwen3ForCausalLM, length: int) -> None:
        super().__init__()
        self.qwen = qwen
        self.rows = self.length = length
        self.config = SimpleNamespace(hidden_size=len(self.layers) * qwen.config.hidden_size, pooled_size=0)

    def forward(self, tokens: Tensor) -> SimpleNamespace:
        """[B, L] ids, of padding the complement -> last_hidden_state [B, L, D]. Padding has states, but is not read."""
        earlier = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool, device=tokens.device).tril()
        read = earlier & (tokens >= 0)[:, None, None]  # made here: transformers would wait for the device
        ids = torch.where(tokens < 0, ~tokens, tokens)
        states: list[Tensor] = []  # transformers would keep those of all layers
        used = [self.qwen.model.layers[number - 1] for number in self.layers]
        hooks = [layer.register_forward_hook(lambda *call: states.append(call[2])) for layer in used]
        try:
            self.qwen.model(ids, attention_mask={"full_attention": read}, use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
        return SimpleNamespace(last_hidden_state=torch.cat(states, dim=2))


class Flux2(FlowArchitecture):
    """FLUX.2 klein, base and distilled. The same weights inpaint and make images of texts."""

    title = "FLUX.2 klein"
    network, vae, texts = Flux2Denoiser, AutoencoderKLFlux2, Flux2TextEncoder
    text_encoders, tokenizers = (Qwen3ForCausalLM,), ("Qwen2TokenizerFast",)
    pipelines = "Flux2KleinInpaintPipeline", "Flux2KleinPipeline"
    index: dict[str, Any] = {"is_distilled": False}
    lora_mixin = "Flux2LoraLoaderMixin"
    lora_targets = dict.fromkeys(("attention", "transformer", "all"), _PROJECTIONS)
    pooled_rows = 0
    cudnn_attention = False  # see flux.py

    def check(
        self, config: ModelConfig, unet: Any, vae: Any, text_encoder: Any, scheduler: Any, inputs: Collection[int]
    ) -> None:
        width = vae.config.latent_channels * unet.patch**2
        given = unet.config.in_channels, unet.out_channels, vae.bn.num_features
        if given != (width, width, width):
            raise UserError(
                f"model {config.name}: transformer.in_channels, its out_channels and the width of the VAE's batch norm "
                f"are {given}; with {vae.config.latent_channels} latent channels all of them are {width}"
            )
        if (deepest := max(text_encoder.layers)) >= (count := text_encoder.qwen.config.num_hidden_layers):
            raise UserError(f"model {config.name}: text_encoder has {count} layers, layer {deepest + 1} is needed")
        super().check(config, unet, vae, text_encoder, scheduler, inputs)

    def configure(self, config: ModelConfig, unet: Any) -> None:
        super().configure(config, unet)
        unet.inpaints = not config.text_to_image

    def encode(self, tokenizer: Any, texts: list[str], length: int) -> list[list[int]]:
        """Return the ids of texts as a user's words in a chat; of padding the complement, which tells it from them."""
        chats = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True, enable_thinking=False
            )
            for text in texts
        ]
        result = tokenizer(chats, padding="max_length", truncation=True, max_length=length)
        rows = zip(result["input_ids"], result["attention_mask"], strict=True)
        return [[token if read else ~token for token, read in zip(*row, strict=True)] for row in rows]

    def input_channels(self, unet: Any) -> int:
        return int(unet.config.in_channels) // unet.patch**2 * (2 if unet.inpaints else 1)

    def multiple(self, unet: Any) -> int:
        return int(unet.patch)

    def condition_channels(self, vae: Any) -> int:
        return int(vae.config.latent_channels)

    def conditions(self, mask: Tensor, masked: Tensor) -> Tensor:
        """Return the masked latents alone."""
        return masked

    def sampler_settings(self, networks: Any, steps: int, side: int) -> dict[str, Any]:
        settings = super().sampler_settings(networks, steps, side)
        if "mu" in settings:
            settings["mu"] = compute_empirical_mu((side // self.multiple(networks.unet)) ** 2, steps)
        return settings

    def scaled(self, vae: Any, latents: Tensor) -> Tensor:
        mean, deviation = _statistics(vae, latents)
        return F.pixel_shuffle((F.pixel_unshuffle(latents, 2) - mean) / deviation, 2)

    def unscaled(self, vae: Any, latents: Tensor) -> Tensor:
        mean, deviation = _statistics(vae, latents)
        return F.pixel_shuffle(F.pixel_unshuffle(latents, 2) * deviation + mean, 2)


def _statistics(vae: Any, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of each channel of a token, [4 C, 1, 1] each."""
    mean, variance = (values.to(like)[:, None, None] for values in (vae.bn.running_mean, vae.bn.running_var))
    return mean, torch.sqrt(variance + vae.config.batch_norm_eps)


ARCHITECTURE = Flux2()
