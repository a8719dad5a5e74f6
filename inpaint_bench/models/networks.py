"""The networks of a model: what a training step uses, built with random or loaded weights."""

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inpaint_bench.core.config.bench import BenchConfig, ModelConfig
from inpaint_bench.core.errors import UserError
from inpaint_bench.kernels.linear import FrozenFp8Linear, FrozenLinear

from . import architectures, pipeline_folder
from .architectures import nhwc_vae
from .architectures.base import Architecture
from .architectures.location import LocationEncoder
from .architectures.nhwc_unet import NhwcUNet
from .weights_folder import check_side, numbered, weights_path

LATENT_CHANNELS = nhwc_vae.LATENT_CHANNELS
INPUT_CHANNELS = 9  # noisy latents 4, mask 1, masked-image latents 4: the checkpoint's order
FROZEN_SEED = 0  # seed of random weights, whatever the run's seed: caches of the frozen networks stay valid


@dataclass(kw_only=True)
class Networks:
    """fp32 networks on one device. The UNet and the location encoder are trained, the others frozen.

    With LoRA adapters (adapters.py) these are trained in the place of the UNet.
    """

    architecture: Architecture
    unet: Any
    vae: Any
    text_encoder: Any
    location: LocationEncoder | None
    signal_weights: Tensor  # [T]: weight of the latents at each timestep
    noise_weights: Tensor  # [T]: weight of the noise
    tokenize: pipeline_folder.Tokenize
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
        return self.architecture.input_channels(self.unet)

    @property
    def state_rows(self) -> int:
        """Rows of the text states: one for each token, and the pooled embedding of SDXL and of transformers."""
        return self.context_length + self.architecture.pooled_rows

    @property
    def state_width(self) -> int:
        return self.architecture.state_width(self.unet)

    @property
    def guidance_input(self) -> bool:
        """Return whether the guidance is an input of the network, which then predicts every image once."""
        return bool(self.unet.config.get("guidance_embeds"))

    def weights(self, timesteps: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights of latents and noise in noisy latents, [B, 1, 1, 1] each."""
        return self.signal_weights[timesteps, None, None, None], self.noise_weights[timesteps, None, None, None]

    def mask_channels(self, mask: Tensor) -> Tensor:
        """[B, 1, R, R] -> the mask as the network reads it: [B, 1, r, r]; of FLUX a channel for each pixel."""
        return self.architecture.mask_channels(mask, self.downscale)

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
    4 is widened to 9 unless `config.unet` says 4. Transformers that inpaint count as 9.
    Weights saved with a location encoder bring it, with their own centre, unless `config.location_tokens` is 0.
    Raises UserError for a configuration or a folder that does not describe the model's architecture.
    """
    architecture = architectures.of_model(config)
    folder = weights_path(config.weights) if config.weights else None
    if folder:
        unet, vae, encoders, scheduler = pipeline_folder.load_networks(config, folder, architecture)
        text_encoder = architecture.join(config, encoders)
        if config.input_channels(unet.config.in_channels) != unet.config.in_channels:
            widen_input(unet)
    else:
        unet, vae, text_encoder, scheduler = architecture.build(config, device)
    architecture.configure(config, unet)
    architecture.check(config, unet, vae, text_encoder, scheduler, inputs)
    tokenized = architecture.tokenized(text_encoder)
    folders = [folder / name for name in numbered("tokenizer", len(tokenized))] if folder else []
    tokenizers = _tokenizers(architecture, folder, folders, tokenized)
    encoder, width = None, architecture.state_width(unet)
    if config.location_tokens:
        encoder = pipeline_folder.load_location(folder, config.location_tokens, width) if folder else None
        with torch.device(device):
            encoder = (encoder or LocationEncoder(config.location_tokens, width, centre)).to(device)
        architecture.add_location(unet, encoder)
    for network in (unet, vae, text_encoder):
        network.to(device)
    unet.train()
    for network in (vae, text_encoder):
        network.requires_grad_(False).eval()
    signal_weights, noise_weights = architecture.noise_schedule(config, scheduler)
    return Networks(
        architecture=architecture,
        unet=unet,
        vae=vae,
        text_encoder=text_encoder,
        location=encoder,
        signal_weights=signal_weights.to(device),
        noise_weights=noise_weights.to(device),
        tokenize=lambda texts: torch.cat([tokenize(texts) for tokenize in tokenizers], dim=1),
        context_length=architecture.context_length(text_encoder),
        scheduler=scheduler,
        tokenizer_folders=folders,
    )


def build_run_networks(bench: BenchConfig, device: torch.device, centre: tuple[float, float]) -> Networks:
    """Build the networks of a run; random weights are the same for every recipe and seed."""
    torch.manual_seed(FROZEN_SEED)
    networks = build_networks(bench.model, device, centre, inputs=bench.workload.unet_channels)
    multiple_px = networks.downscale * networks.architecture.multiple(networks.unet)  # both halve sides
    check_side(bench.model.name, bench.data.resolution_px, multiple_px)
    return networks


def _tokenizers(
    architecture: Architecture, folder: Path | None, folders: Sequence[Path], tokenized: Sequence[tuple[Any, int]]
) -> list[pipeline_folder.Tokenize]:
    """Return a tokenizer for each text encoder, given with the tokens that it reads."""
    if not folder:
        return [pipeline_folder.hash_tokenizer(encoder.config.vocab_size, size) for encoder, size in tokenized]
    try:
        return [
            pipeline_folder.load_tokenizer(path, encoder.config, size, kind=kind, encode=architecture.encode)
            for path, (encoder, size), kind in zip(folders, tokenized, architecture.tokenizers, strict=True)
        ]
    except ValueError as error:
        raise UserError(f"model.weights={folder}: {error}") from None


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
    configured, loaded = bench.model.network, networks.unet.config
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
