"""Outputs of the frozen networks, computed once per data set: moments of images and masked images, text states.

Moments (mean and log variance) are stored, not latents: every step samples from them, so training keeps the VAE's
noise. Masked images are stored for a pool of K masks per image, and once for the mask that repaints everything; not for
a model that makes images of texts.

Folder `<prepared data>/cache/<key>/`, N images, latents of r x r, T distinct texts of L states and width D (moments of
FLUX have 32 channels):

| file | shape | type |
|---|---|---|
| image.npy | N, 8, r, r | float16 |
| masked.npy | N, K, 8, r, r | float16 |
| masks.npy | N, K, r, r; of FLUX N, K, 64, r, r | uint8, 1 = repaint |
| full.npy | 8, r, r | float16 |
| text.npy | T, L, D | float16 |
| cache.json | | `CacheDescription` |
"""

import hashlib
import json
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from inpaint_bench.core.config.bench import BenchConfig
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.files import expand_path
from inpaint_bench.data.prepared import CACHES, data_inputs, describe_mismatch, read_description
from inpaint_bench.data.samples import FULL_MASK, Batch
from inpaint_bench.data.source import Source

from .networks import Networks

ARRAYS = {"cache_image": ("image",), "cache_masked": ("masked", "masks", "full"), "cache_text": ("text",)}  # by lever
LARGE_NETWORK, SAMPLED_VALUES = 10**9, 2**16  # parameters; values of each tensor
SAMPLED_TEXTS = 1000
# Values of a configuration that change what a network computes, and not its weights
_COMPUTES = (
    *("act_fn", "feed_forward_proj", "hidden_act", "layer_norm_eps", "layer_norm_epsilon", "norm_num_groups"),
    *("num_attention_heads", "rms_norm_eps", "rope_parameters", "rope_scaling", "rope_theta"),
)


def cache_inputs(bench: BenchConfig, networks: Networks, source: Source) -> dict[str, Any]:
    """Return everything that determines a cache: equal inputs give equal content but for rounding."""
    texts = sorted(set(source.texts))
    tokens = networks.tokenize(texts[:: -(-len(texts) // SAMPLED_TEXTS)])
    return {
        **data_inputs(bench, source.identity),
        "vae": weights_hash(networks.vae),
        "text_encoder": weights_hash(networks.text_encoder),
        "texts": hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16],
        "tokens": hashlib.sha256(tokens.numpy().tobytes()).hexdigest()[:16],
    }


def cache_key(inputs: dict[str, Any]) -> str:
    """Return the 16 hex digits that name the cache's folder."""
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:16]


def weights_hash(network: nn.Module) -> str:
    """Return 16 hex digits over names and values, as in fp32; of a large network over a sample of the values.

    What its configuration says of how it computes counts too.
    """
    digest, state = hashlib.sha256(), network.state_dict()
    configs = {id(part.config): part.config for part in network.modules() if hasattr(part, "config")}
    for config in configs.values():
        digest.update(str([getattr(config, name, None) for name in _COMPUTES]).encode())
    large = sum(tensor.numel() for tensor in state.values()) > LARGE_NETWORK
    for name, tensor in sorted(state.items()):
        if large:
            tensor = tensor.flatten()[:: max(1, tensor.numel() // SAMPLED_VALUES)]
        digest.update(name.encode())
        digest.update(tensor.detach().float().contiguous().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


class LatentCache:
    """A cache opened for training: in the GPU's memory, or read row by row by the loader."""

    def __init__(self, bench: BenchConfig, networks: Networks, source: Source, device: torch.device) -> None:
        """Open the cache that fits the run. Raises UserError if none does, with what differs from the nearest."""
        root = expand_path(bench.data.root or "") / CACHES
        inputs = cache_inputs(bench, networks, source)
        folder = root / cache_key(inputs)
        description = read_description(folder)
        if description is None:
            raise UserError(describe_mismatch(root, inputs))
        recipe = bench.recipe
        arrays = {name for key, names in ARRAYS.items() if getattr(recipe, key) for name in names}
        if not networks.inpaints:
            arrays -= {*ARRAYS["cache_masked"]}
        for name in arrays:
            path = folder / f"{name}.npy"
            # Sizes only: checksums of a large cache would delay the start of every run.
            size, expected = path.stat().st_size if path.is_file() else 0, description.bytes[name]
            if size != expected:
                raise UserError(f"{path}: {size} bytes instead of {expected}; remove the folder and prepare it again")
        self.folder, self._arrays = folder, arrays
        self._mapped: dict[str, np.ndarray[Any, Any]] = {}
        self._on_device: dict[str, Tensor] = {}
        if recipe.cache_storage == "gpu":
            for name in sorted(arrays):
                # Mapped copy-on-write, which PyTorch needs: it may be too large to be held in host memory as well.
                self._on_device[name] = torch.from_numpy(np.load(folder / f"{name}.npy", mmap_mode="c")).to(device)
        self.facts: dict[str, Any] = {
            "key": description.key,
            "inputs": description.inputs,
            "storage": "gpu" if self._on_device else "disk",
            "arrays": sorted(arrays),
            "bytes": sum(description.bytes[name] for name in arrays),
        }

    @property
    def in_loader(self) -> bool:
        return not self._on_device

    def rows(self, index: int, pool: int, text: int) -> Batch:
        """Return what the loader adds to a sample if the arrays are on disk."""
        rows: Batch = {}
        if "image" in self._arrays:
            rows["cached_image"] = self._row("image", index)
        if "masked" in self._arrays:
            # Under the mask that repaints everything all images are equal: one stored row serves them all.
            full = pool == FULL_MASK
            rows["cached_masked"] = self._row("full") if full else self._row("masked", index, pool)
            rows["cached_mask"] = (
                torch.ones_like(self._row("masks", index, 0)) if full else self._row("masks", index, pool)
            )
        if "text" in self._arrays:
            rows["cached_text"] = self._row("text", text)
        return rows

    def image_moments(self, batch: Batch) -> Tensor:
        """Return [B, 8, r, r] moments of the images."""
        return batch["cached_image"] if self.in_loader else self._on_device["image"][batch["index"]]

    def masked_moments(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return [B, 8, r, r] moments of the masked images and their masks, [B, 1, r, r] float32."""
        if self.in_loader:
            return batch["cached_masked"], _with_channels(batch["cached_mask"])
        # FULL_MASK is -1, no index: row 0 is read, then replaced. A branch would wait for the GPU.
        index, pool = batch["index"], batch["pool"].clamp(min=0)
        full = (batch["pool"] == FULL_MASK)[:, None, None, None]
        moments = torch.where(full, self._on_device["full"], self._on_device["masked"][index, pool])
        return moments, torch.where(full, 1.0, _with_channels(self._on_device["masks"][index, pool]))

    def text_states(self, batch: Batch) -> Tensor:
        """Return [B, L, D] float32 text states."""
        states = batch["cached_text"] if self.in_loader else self._on_device["text"][batch["text_id"]]
        return states.float()

    def _row(self, name: str, *index: int) -> Tensor:
        if name not in self._mapped:  # mapped on first use: every loader process has its own
            self._mapped[name] = np.load(self.folder / f"{name}.npy", mmap_mode="r")
        return torch.from_numpy(np.array(self._mapped[name][index]))


def _with_channels(mask: Tensor) -> Tensor:
    """[B, r, r] -> [B, 1, r, r]; masks of FLUX have their channels, [B, 64, r, r]. Both become float32."""
    return (mask if mask.ndim == 4 else mask[:, None]).float()
