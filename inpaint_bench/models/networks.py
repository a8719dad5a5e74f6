"""The networks of Stable Diffusion: what a training step uses, built with random or loaded weights."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, DDPMScheduler, FlowMatchEulerDiscreteScheduler, UNet2DConditionModel
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel

from inpaint_bench.core.config.bench import BenchConfig, ModelConfig
from inpaint_bench.core.errors import UserError, first_line
from inpaint_bench.kernels.fp8 import FrozenFp8Linear
from inpaint_bench.kernels.frozen_linear import FrozenLinear

from . import pipeline_folder, tokenizer
from .architectures import flow, flux, location, nhwc_vae, sd3, sdxl
from .architectures.location import LocationEncoder
from .architectures.nhwc_unet import NhwcUNet
from .execution import DTYPES
from .weights_folder import check_channels, input_channels, numbered, weights_path

LATENT_CHANNELS = nhwc_vae.LATENT_CHANNELS
INPUT_CHANNELS = 9  # noisy latents 4, mask 1, masked-image latents 4: the checkpoint's order
# Transformers: the network, and the text encoders beside it.
ARCHITECTURES: dict[str, tuple[Any, Any]] = {
    "flux": (flux.FluxDenoiser, flux.FluxTextEncoder),
    "sd3": (sd3.Sd3Denoiser, sd3.Sd3TextEncoder),
}
FROZEN_SEED = 0  # seed of random weights, whatever the run's seed: caches of the frozen networks stay valid


@dataclass(kw_only=True)
class Networks:
    """fp32 networks on one device. The UNet and the location encoder are trained, the others frozen.

    With LoRA adapters (adapters.py) these are trained in the place of the UNet.
    """

    unet: Any
    vae: Any
    text_encoder: Any
    location: LocationEncoder | None
    signal_weights: Tensor  # [T]: weight of the latents at each timestep
    noise_weights: Tensor  # [T]: weight of the noise
    flow: bool = False  # the network predicts noise - latents (FLUX), and not the noise
    tokenize: tokenizer.Tokenize
    context_length: int  # text tokens whose states the network reads
    scheduler: Any  # the noise schedule as diffusers saves it
    tokenizer_folders: Sequence[Path] = ()  # files of `tokenize`; none: it hashes words

    @property
    def device(self) -> torch.device:
        return self.signal_weights.device

    @property
    def inpaints(self) -> bool:
        """Return whether images are repainted, and not made of texts alone."""
        return self.input_channels > self.latent_channels

    @property
    def latent_channels(self) -> int:
        return int(self.vae.config.latent_channels)

    @property
    def input_channels(self) -> int:
        """Channels of the map that the network reads: noisy latents, and to inpaint mask and masked latents."""
        return int(self.unet.map_channels if self.flow else self.unet.config.in_channels)

    @property
    def state_rows(self) -> int:
        """Rows of the text states: one for each token, and the pooled embedding of SDXL and of transformers."""
        return self.context_length + sdxl.POOLED_ROWS * (self.flow or isinstance(self.unet, sdxl.SdxlUNet))

    @property
    def state_width(self) -> int:
        config = self.unet.config
        return int(config.joint_attention_dim if self.flow else config.cross_attention_dim)

    @property
    def multiple_px(self) -> int:
        """The sides of an image are multiples of this: the VAE halves them, then the UNet at every level but one."""
        return self.downscale * (self.unet.patch if self.flow else 2 ** (len(self.unet.config.block_out_channels) - 1))

    @property
    def guidance_input(self) -> bool:
        """Return whether the guidance is an input of the network, which then predicts every image once."""
        return bool(self.unet.config.get("guidance_embeds"))

    def time_shift(self, side: int) -> float:
        """Return how far a flow's times are shifted towards noise for latents of this side, see flow.py."""
        config = self.scheduler.config
        if not config.use_dynamic_shifting:
            return math.log(config.shift)
        return flow.shift_of_times((side // self.unet.patch) ** 2)

    def scaled(self, latents: Tensor) -> Tensor:
        """Return latents as the network takes them, of those of the VAE."""
        config = self.vae.config
        return (latents - (config.get("shift_factor") or 0.0)) * config.scaling_factor

    def unscaled(self, latents: Tensor) -> Tensor:
        """Return latents as the VAE takes them."""
        config = self.vae.config
        return latents / config.scaling_factor + (config.get("shift_factor") or 0.0)

    def mask_channels(self, mask: Tensor) -> Tensor:
        """[B, 1, R, R] -> the mask as the network reads it: [B, 1, r, r]; of FLUX a channel for each pixel."""
        if self.flow:
            return F.pixel_unshuffle(mask, self.downscale)
        side = mask.shape[-1] // self.downscale
        return F.interpolate(mask, size=(side, side), mode="nearest")

    def conditions(self, mask: Tensor, masked: Tensor) -> Tensor:
        """Join mask channels and masked latents in the order of the checkpoint, behind the noisy latents."""
        return torch.cat([masked, mask] if self.flow else [mask, masked], dim=1)

    def target(self, latents: Tensor, noise: Tensor) -> Tensor:
        """Return what the network is to predict."""
        return noise - latents if self.flow else noise

    @property
    def downscale(self) -> int:
        """Pixels per latent, along a side."""
        return int(2 ** (len(self.vae.config.block_out_channels) - 1))

    def trainable_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of the UNet, or its adapters, of the location encoder, and adapters of the text's."""
        networks = [network for network in (self.unet, self.location, self.text_encoder) if network]
        return [p for network in networks for p in network.parameters() if p.requires_grad]

    def parameter_counts(self) -> dict[str, int]:
        """Return the number of parameters by network; `unet` is 859,535,364 for SD 1.5 with nine channels.

        Parameters of adapters are counted under `lora` only.
        """
        networks = {"unet": self.unet, "vae": self.vae, "text_encoder": self.text_encoder}
        added = {
            name: sum(p.numel() for key, p in network.named_parameters() if ".lora_" in key)
            for name, network in networks.items()
        }
        sizes = {name: sum(p.numel() for p in network.parameters()) for name, network in networks.items()}
        if isinstance(self.unet, NhwcUNet):
            sizes["unet"] = self.unet.num_parameters()  # without the padding
        # They have weights, but no parameters.
        stored = [m for m in self.unet.modules() if isinstance(m, FrozenLinear | FrozenFp8Linear)]
        sizes["unet"] += sum(layer.in_features * layer.out_features for layer in stored)
        counts = {name: size - added[name] for name, size in sizes.items()}
        if self.location:
            counts["location"] = sum(p.numel() for p in self.location.parameters())
        if lora := sum(added.values()):
            counts["lora"] = lora
        return counts

    def unet_gradients(self) -> dict[str, Tensor]:
        """Return the gradients of the UNet's trained parameters by diffusers' names, after a backward pass."""
        if isinstance(self.unet, NhwcUNet):
            return self.unet.unpack(attrgetter("grad"))
        return {name: p.grad for name, p in self.unet.named_parameters() if p.grad is not None}


def build_networks(
    config: ModelConfig,
    device: torch.device,
    centre: tuple[float, float] = (0.0, 0.0),
    *,
    inputs: Collection[int] = (INPUT_CHANNELS,),
) -> Networks:
    """Build the networks of `config` on `device` (also `meta`), with positions relative to `centre` (degrees).

    `inputs` are the allowed numbers of the UNet's input channels: 4 make images of texts, 9 inpaint. A folder's UNet of
    4 is widened to 9 unless `config.unet` says 4. Transformers have others, see `_build_transformer`.
    Weights saved with a location encoder bring it, with their own centre, unless `config.location_tokens` is 0.
    Raises UserError for a configuration or a folder that does not describe Stable Diffusion.
    """
    if config.transformer:
        return _build_transformer(config, device, centre, inputs)
    folder = weights_path(config.weights) if config.weights else None
    if folder:
        unet, vae, text_encoder, scheduler = pipeline_folder.load_networks(config, folder)
        if input_channels(config, unet.config.in_channels) != unet.config.in_channels:
            widen_input(unet)
    else:
        unet, vae, text_encoder, scheduler = _build_random(config, device)
    _check_shapes(config, unet.config, vae.config, text_encoder.config, scheduler.config, inputs)
    length = text_encoder.config.max_position_embeddings
    if folder:
        try:
            tokenize = tokenizer.load_tokenizer(folder / "tokenizer", text_encoder.config)
        except ValueError as error:
            raise UserError(f"model.weights={folder}: {error}") from None
    else:
        tokenize = tokenizer.hash_tokenizer(text_encoder.config.vocab_size, length)
    encoder = _build_location(config, unet.config.cross_attention_dim, device, centre, folder)
    if encoder:
        location.install(unet, encoder)
    for network in (unet, vae, text_encoder):
        network.to(device)
    _set_modes(unet, vae, text_encoder)
    alphas_cumprod = scheduler.alphas_cumprod.double()
    if not (alphas_cumprod > 0).all():
        raise UserError(f"model {config.name}: the noise schedule of its scheduler leaves no signal, or is not one")
    return Networks(
        unet=unet,
        vae=vae,
        text_encoder=text_encoder,
        location=encoder,
        signal_weights=alphas_cumprod.sqrt().float().to(device),
        noise_weights=(1 - alphas_cumprod).sqrt().float().to(device),
        tokenize=tokenize,
        context_length=length,
        scheduler=scheduler,
        tokenizer_folders=[folder / "tokenizer"] if folder else [],
    )


def build_run_networks(bench: BenchConfig, device: torch.device, centre: tuple[float, float]) -> Networks:
    """Build the networks of a run; random weights are the same for every recipe and seed."""
    torch.manual_seed(FROZEN_SEED)
    networks = build_networks(bench.model, device, centre, inputs=bench.workload.unet_channels)
    if bench.data.resolution_px % networks.multiple_px:
        given = f"data.resolution_px={bench.data.resolution_px}"
        raise UserError(f"{given}: model {bench.model.name} needs a multiple of {networks.multiple_px}")
    return networks


def _check_shapes(
    config: ModelConfig, unet: Any, vae: Any, text_encoder: Any, scheduler: Any, inputs: Collection[int]
) -> None:
    name, kind = config.name, "SDXL" if config.text_encoder_2 else "SD 1 and 2"
    check_channels(name, unet.in_channels, inputs)
    needed = {
        "unet.out_channels": (unet.out_channels, LATENT_CHANNELS),
        "unet.cross_attention_dim": (unet.cross_attention_dim, text_encoder.hidden_size),
        # UNets with other such embeddings need inputs that the training step does not have.
        "unet.addition_embed_type": (unet.addition_embed_type, "text_time" if config.text_encoder_2 else None),
        "unet.class_embed_type": (unet.class_embed_type, None),
        "unet.num_class_embeds": (unet.num_class_embeds, None),
        "vae.latent_channels": (vae.latent_channels, LATENT_CHANNELS),
        "scheduler.prediction_type": (scheduler.prediction_type, "epsilon"),
        "scheduler.rescale_betas_zero_snr": (bool(scheduler.rescale_betas_zero_snr), False),
    }
    for key, values in needed.items():
        if values[0] != values[1]:
            actual, expected = ("none" if value is None else value for value in values)
            raise UserError(f"model {name}: {key} is {actual}, in {kind} it is {expected}")


def _build_location(
    config: ModelConfig, width: int, device: torch.device, centre: tuple[float, float], folder: Path | None
) -> LocationEncoder | None:
    if not config.location_tokens:
        return None
    if folder and (saved := pipeline_folder.load_location(folder, config.location_tokens, width)):
        return saved.to(device)
    with torch.device(device):
        return LocationEncoder(config.location_tokens, width, centre)


def _build_random(config: ModelConfig, device: torch.device) -> tuple[Any, Any, Any, Any]:
    """Build networks with random weights on the device itself: 0.86 B numbers are slow to draw on a CPU and to copy."""
    ids = _special_ids(config)
    with _refusing(config):
        with torch.device("cpu"):  # a table of a thousand numbers, needed with values beside meta networks too
            scheduler = DDPMScheduler(**config.scheduler)
        text, second_text = ({**ids, **keys} for keys in (config.text_encoder, config.text_encoder_2))
        with torch.device(device):
            if config.text_encoder_2:
                unet, text_encoder = sdxl.SdxlUNet(**config.unet), sdxl.SdxlTextEncoder(text, second_text)
            else:
                unet, text_encoder = UNet2DConditionModel(**config.unet), CLIPTextModel(CLIPTextConfig(**text))
            return unet, AutoencoderKL(**config.vae), text_encoder, scheduler


def _build_transformer(
    config: ModelConfig, device: torch.device, centre: tuple[float, float], inputs: Collection[int]
) -> Networks:
    """Build FLUX or SD 3. FLUX inpaints if its transformer reads more than the latents."""
    settings = dict(config.transformer)
    kind = settings.pop("architecture", None)
    if kind not in ARCHITECTURES:
        raise UserError(f"model {config.name}: transformer.architecture is {kind}, not flux or sd3")
    denoiser, texts = ARCHITECTURES[kind]
    folder, dtype = weights_path(config.weights) if config.weights else None, DTYPES[config.dtype]
    unet: Any
    if folder:
        unet, vae, encoders, scheduler = pipeline_folder.load_transformer(config, folder, denoiser, texts.kinds)
    else:
        ids, default = _special_ids(config), torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with _refusing(config), torch.device(device):
                unet, vae = denoiser(**settings), AutoencoderKL(**config.vae)
                encoders = []
                for part, given in zip(texts.kinds, _text_configs(config), strict=False):
                    keys = {**(ids if part is not texts.kinds[-1] else {}), **given}
                    keys.pop("length", None)  # belongs to T5, see below
                    encoders.append(part(part.config_class(**keys)))
        finally:
            torch.set_default_dtype(default)
        with _refusing(config):
            scheduler = FlowMatchEulerDiscreteScheduler(**config.scheduler)
    length = next((int(keys["length"]) for keys in _text_configs(config) if "length" in keys), texts.length)
    text_encoder = texts(*encoders, length)
    needed = unet.config.joint_attention_dim, unet.config.pooled_projection_dim
    if needed != (have := (text_encoder.config.hidden_size, text_encoder.config.pooled_size)):
        raise UserError(
            f"model {config.name}: its transformer reads texts of widths {needed}, the encoders give {have}"
        )
    if scheduler.config.num_train_timesteps != flow.STEPS:
        raise UserError(f"model {config.name}: scheduler.num_train_timesteps is not {flow.STEPS}")
    if kind == "flux":
        unet.guidance = config.guidance
    times = torch.arange(flow.STEPS + 1, dtype=torch.float32) / flow.STEPS
    tokenizer_folders = [folder / name for name in numbered("tokenizer", len(encoders))] if folder else []
    tokenizers = _tokenizers(folder, tokenizer_folders, [encoder.config for encoder in encoders], length)
    for network in (unet, vae, text_encoder):
        network.to(device)
    networks = Networks(
        unet=unet,
        vae=vae,
        text_encoder=text_encoder,
        location=_build_location(config, unet.config.joint_attention_dim, device, centre, folder),
        signal_weights=(1 - times).to(device),
        noise_weights=times.to(device),
        flow=True,
        tokenize=lambda texts: torch.cat([tokenize(texts) for tokenize in tokenizers], dim=1),
        context_length=text_encoder.rows,
        scheduler=scheduler,
        tokenizer_folders=tokenizer_folders,
    )
    latents = networks.latent_channels
    read = {latents, *([latents + latents + networks.downscale**2] if kind == "flux" else [])}
    per_token = unet.config.in_channels // networks.input_channels
    if networks.input_channels not in read or unet.out_channels != latents * per_token:
        raise UserError(
            f"model {config.name}: with this VAE transformer.out_channels is {latents * per_token}, and in_channels "
            f"{' or '.join(str(channels * per_token) for channels in sorted(read))}"
        )
    check_channels(config.name, INPUT_CHANNELS if networks.inpaints else LATENT_CHANNELS, inputs)
    _set_modes(unet, vae, text_encoder)
    return networks


def _text_configs(config: ModelConfig) -> tuple[dict[str, Any], ...]:
    return config.text_encoder, config.text_encoder_2, config.text_encoder_3


def _tokenizers(
    folder: Path | None, folders: Sequence[Path], configs: Sequence[Any], length: int
) -> list[tokenizer.Tokenize]:
    """Return a tokenizer for each text encoder; the last, T5, reads `length` tokens."""
    lengths = [*(config.max_position_embeddings for config in configs[:-1]), length]
    pairs = list(zip(configs, lengths, strict=True))
    if not folder:
        return [tokenizer.hash_tokenizer(config.vocab_size, size) for config, size in pairs]
    try:
        return [tokenizer.load_tokenizer(path, *pair) for path, pair in zip(folders, pairs, strict=True)]
    except ValueError as error:
        raise UserError(f"model.weights={folder}: {error}") from None


def _set_modes(trained: nn.Module, *frozen: nn.Module) -> None:
    trained.train()
    for network in frozen:
        network.requires_grad_(False).eval()


def _special_ids(config: ModelConfig) -> dict[str, int]:
    """Return CLIP's last two ids: transformers' defaults, 49406 and 49407, lie outside of a smaller vocabulary."""
    size = config.text_encoder.get("vocab_size", 49408)
    return {"bos_token_id": size - 2, "eos_token_id": size - 1, "pad_token_id": size - 1}


@contextmanager
def _refusing(config: ModelConfig) -> Iterator[None]:
    """Raise UserError for what the libraries raise of a configuration."""
    try:
        yield
    except (TypeError, ValueError, KeyError) as error:
        raise UserError(f"model {config.name}: not a valid configuration ({first_line(error)})") from error


def widen_input(unet: Any) -> None:
    """Widen four input channels to nine: old weights copied, new ones zero, so that the output does not change.

    `from_pretrained(in_channels=9, ignore_mismatched_sizes=True)` would initialise the whole layer at random.
    """
    layer = unet.conv_in
    # The noisy latents are the first of the nine channels, see INPUT_CHANNELS.
    weight = F.pad(layer.weight.detach(), (0, 0, 0, 0, 0, INPUT_CHANNELS - layer.in_channels))
    layer.weight, layer.in_channels = nn.Parameter(weight), INPUT_CHANNELS
    unet.register_to_config(in_channels=INPUT_CHANNELS)


def network_facts(
    bench: BenchConfig, networks: Networks, parameters: dict[str, int], flop_parts: dict[str, int]
) -> dict[str, Any]:
    """Return the facts that all workloads with these networks have; `parameters` by network."""
    configured, loaded = bench.model.unet or bench.model.transformer, networks.unet.config
    names = ("block_out_channels", "layers_per_block", "cross_attention_dim", "num_layers", "num_single_layers")
    return {
        "resolution_px": bench.data.resolution_px,
        "weights": bench.model.weights,
        "own_shapes": any(json.dumps(loaded[n]) != json.dumps(configured[n]) for n in names if n in configured),
        "parameters": parameters["unet"],  # without the location encoder
        "parameters_by_network": parameters,
        "flop_parts": flop_parts,
        "location_tokens": bench.model.location_tokens,
    }
