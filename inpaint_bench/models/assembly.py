"""The parts of a training step before it runs: as the baseline has them, then as the levers change them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from inpaint_bench.core.config import BenchConfig, RecipeConfig
from inpaint_bench.data.samples import Samples
from inpaint_bench.data.source import Source

from .networks import Models
from .precision import DTYPES, pin_fp32

if TYPE_CHECKING:
    from .latent_cache import Cache

# torch.optim.AdamW's own defaults, written out: they are part of what is measured.
ADAMW: dict[str, Any] = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}

MakeOptimizers = Callable[[list[nn.Parameter], float], list[torch.optim.Optimizer]]


def plain_adamw(parameters: list[nn.Parameter], lr: float) -> list[torch.optim.Optimizer]:
    """The baseline's. PyTorch picks foreach by itself on a GPU, the loop elsewhere; said here, so that it stays."""
    foreach = parameters[0].device.type == "cuda"
    return [torch.optim.AdamW(parameters, lr=lr, foreach=foreach, fused=False, **ADAMW)]


@dataclass(kw_only=True)
class Assembly:
    """What a step is made of. Levers change it before the first step; the step reads it.

    `unet(state, times, text)` predicts noise, `encoder(image)` and `text(tokens)` are the frozen networks;
    the networks themselves stay in `nets`, as they are saved.
    """

    bench: BenchConfig
    device: torch.device
    nets: Models
    source: Source
    unet: Callable[..., Any]
    encoder: Callable[[Tensor], Tensor]
    text: Callable[[Tensor], Tensor]
    optimizers: MakeOptimizers
    fp32: dict[str, str]  # what is in effect for operations that stay fp32
    layout: torch.memory_format = torch.contiguous_format
    attention: Callable[[], AbstractContextManager[Any]] = nullcontext
    autocast: torch.dtype | None = None  # None: off
    input_dtype: torch.dtype = torch.float32  # of the UNet's floating-point inputs
    micro_batches: int = 1
    ema_decay: float | None = None
    graph: bool = False
    cache: Cache | None = None  # what of the inputs is read instead of computed

    @classmethod
    def base(cls, bench: BenchConfig, device: torch.device, nets: Models, source: Source) -> Assembly:
        """The baseline of this device, whatever the recipe says. Resets PyTorch's global switches to it."""
        torch.backends.cudnn.benchmark = False
        vae, text_encoder = nets.vae, nets.text_encoder

        return cls(
            bench=bench,
            device=device,
            nets=nets,
            source=source,
            unet=nets.unet,
            encoder=vae.encoder,
            text=lambda tokens: text_encoder(tokens).last_hidden_state,
            optimizers=plain_adamw,
            fp32=pin_fp32(False),
            autocast=DTYPES["bf16"] if device.type == "cuda" else None,
        )

    @property
    def recipe(self) -> RecipeConfig:
        return self.bench.recipe

    @property
    def micro_batch(self) -> int:
        return int(self.bench.batch) // self.micro_batches

    def cast(self) -> AbstractContextManager[Any]:
        """Autocast as it stands. Inside a CUDA graph the cache of cast weights must not outlive the step."""
        return torch.autocast(
            self.device.type, dtype=self.autocast, enabled=self.autocast is not None, cache_enabled=not self.graph
        )

    def unet_cast(self) -> AbstractContextManager[Any]:
        """Around the UNet: off where its weights are 16 bit, else norms would give fp32 under autocast."""
        if self.input_dtype == torch.float32:
            return self.cast()
        return torch.autocast(self.device.type, enabled=False)

    def samples(self) -> Samples:
        """What the loader of a training hands out, as data and recipe ask for it."""
        data, recipe, cache = self.bench.data, self.recipe, self.cache
        return Samples(
            self.source,
            self.nets.tokenize,
            self.bench.seed,
            masks=data.masks,
            full_mask_share=data.full_mask_share,
            pixels=not (recipe.cache_image and recipe.cache_masked),
            mask_pool=recipe.mask_pool if recipe.cache_masked else None,
            cached=cache.rows if cache and cache.in_loader else None,
        )

    def moments(self, image: Tensor) -> Tensor:
        """[B, 3, R, R] in -1..1 -> [B, 8, R/8, R/8]: mean and log variance of the latent, not scaled."""
        hidden = self.encoder(image.contiguous(memory_format=self.layout))
        last = self.nets.vae.quant_conv
        moments: Tensor = hidden if last is None else last(hidden)
        return moments
