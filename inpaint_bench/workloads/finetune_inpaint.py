"""Fine-tuning the Stable Diffusion 1.5 UNet for location-aware inpainting.

Everything is computed in the step, as the common training scripts do: both VAE encodes (image and masked
image), the text encoder, the noise. That is the baseline which cached inputs are to be compared with.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..config import BenchConfig
from ..data.loader import Batch, Batches, Samples
from ..data.opened import open_source
from ..data.source import Source
from ..errors import UserError
from . import flops, models
from .location import DROP
from .precision import autocast, pin_fp32

# torch.optim.AdamW's own defaults, written out: they are part of what is measured.
ADAMW: dict[str, Any] = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}


class FinetuneInpaint:
    """The workload `finetune_inpaint`; see `inpaint_bench.workloads.Workload`."""

    def __init__(self, config: BenchConfig, device: torch.device, source: Source, nets: models.Models) -> None:
        recipe = config.recipe
        self.device, self.recipe, self.nets = device, recipe, nets
        self.images_per_step = config.batch
        self.fp32 = pin_fp32(recipe.tf32)
        torch.backends.cudnn.benchmark = False
        self._layout = torch.channels_last if recipe.channels_last else torch.contiguous_format
        if recipe.channels_last:
            nets.unet.to(memory_format=self._layout)
            nets.vae.to(memory_format=self._layout)
        self.parameters = nets.trained()
        # PyTorch picks `foreach` by itself on a GPU, the loop elsewhere; said here, so that it stays.
        self.foreach = device.type == "cuda"
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=config.workload.learning_rate, foreach=self.foreach, fused=False, **ADAMW
        )
        self.scaler = torch.amp.GradScaler(device.type) if recipe.precision == "fp16" else None
        self.random = torch.Generator(device).manual_seed(config.seed)
        self.attempted = 0
        self.batches = Batches(Samples(source, nets.tokenize, config.seed), config.batch, recipe, config.seed)
        self.data: dict[str, Any] = {
            **source.account.as_dict(),
            "root": config.data.root,
            "loader": self.batches.settings,
        }
        self.facts = self._facts(config, source)

    def next_batch(self) -> Batch:
        return next(self.batches)

    def learning_rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def step(self, batch: Batch) -> Tensor:
        """Forward, backward and update. Returns the mean squared error, a scalar on the device."""
        batch = self.to_device(batch)
        self.attempted += 1
        with autocast(self.device, self.recipe.precision):
            loss = self.loss(batch)
        if self.scaler:
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            loss.backward()
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def loss(self, batch: Batch) -> Tensor:
        """Mean squared error of the predicted noise, over all latents (masked or not, as SD trains)."""
        nets = self.nets
        with torch.no_grad():
            latents = self.encode(batch["image"])
            masked = self.encode(batch["masked_image"])
            mask = F.interpolate(batch["mask"], size=latents.shape[-2:], mode="nearest")
            text = nets.text_encoder(batch["tokens"]).last_hidden_state
            noise = torch.randn(latents.shape, device=self.device, generator=self.random)
            times = torch.randint(len(nets.signal), (len(latents),), device=self.device, generator=self.random)
            kept, added = nets.signal[times, None, None, None], nets.noise[times, None, None, None]
            # Order of the checkpoint's input: noisy latents 4, mask 1, masked-image latents 4.
            state = torch.cat([kept * latents + added * noise, mask, masked], dim=1)
            state = state.contiguous(memory_format=self._layout)
        if nets.location:
            absent = torch.rand(len(latents), device=self.device, generator=self.random) < DROP
            place = nets.location(batch["latitude"], batch["longitude"], absent)
            text = torch.cat([text, place.to(text.dtype)], dim=1)
        predicted = nets.unet(state, times, text, return_dict=False)[0]
        return F.mse_loss(predicted.float(), noise)

    def encode(self, image: Tensor) -> Tensor:
        """[B, 3, R, R] in -1..1 -> [B, 4, R/8, R/8] float32: a sample of the latent, scaled."""
        image = image.contiguous(memory_format=self._layout)
        latent = self.nets.vae.encode(image).latent_dist.sample(self.random)
        scaled: Tensor = latent.float() * self.nets.vae.config.scaling_factor
        return scaled

    def to_device(self, batch: Batch) -> Batch:
        wait = not self.batches.settings["non_blocking"]["effective"]
        return {name: value.to(self.device, non_blocking=not wait) for name, value in batch.items()}

    def skipped_steps(self) -> int:
        """Suppressed updates: the optimiser's own count stays behind that of the steps attempted."""
        if not self.scaler:
            return 0
        state = self.optimizer.state.get(self.parameters[0], {})
        return self.attempted - int(state.get("step", 0))

    def close(self) -> None:
        self.batches.close()

    def _facts(self, config: BenchConfig, source: Source) -> dict[str, Any]:
        """What the analysis must know to make rates comparable. FLOP of one image, all parts of a step."""
        counts = self.nets.counts()
        counted = flops.count(config.model, config.data.resolution_px, self.nets)
        return {
            "resolution_px": config.data.resolution_px,
            "precision": config.recipe.precision,
            "tf32": config.recipe.tf32,
            "fp32_precision": self.fp32,
            "channels_last": config.recipe.channels_last,
            "cudnn_benchmark": torch.backends.cudnn.benchmark,
            "weights": config.model.weights,
            "parameters": counts["unet"],  # without the location encoder
            "parameters_trained": sum(p.numel() for p in self.parameters),
            "parameters_by_network": counts,
            "flop_per_image": counted["total"],
            "flop_parts": counted,
            "encodes_online": flops.ENCODES_ONLINE,
            "text_online": True,
            "location_tokens": config.model.location_tokens,
            "optimizer": {
                "class": type(self.optimizer).__name__,
                "foreach": self.foreach,
                "fused": False,
                "lr": config.workload.learning_rate,
                "betas": list(ADAMW["betas"]),
                "eps": ADAMW["eps"],
                "weight_decay": ADAMW["weight_decay"],
                "grad_scaler": self.scaler is not None,
            },
            "skipped_steps": 0,
            "epochs": config.workload.epochs,
            "dataset_images": config.workload.dataset_images,
            "num_images": len(source),
        }


def build(config: BenchConfig, device: torch.device) -> FinetuneInpaint:
    """Data, networks and optimiser on `device`. Raises UserError for data or weights that cannot be used."""
    source = open_source(config.data)
    torch.manual_seed(config.seed)
    centre = np.median(source.positions, axis=0)
    nets = models.build(config.model, device, (float(centre[0]), float(centre[1])))
    downscale = 2 ** (len(nets.vae.config.block_out_channels) - 1)
    levels = 2 ** (len(nets.unet.config.block_out_channels) - 1)
    if config.data.resolution_px % (downscale * levels):
        raise UserError(
            f"data.resolution_px={config.data.resolution_px}: model {config.model.name} needs a multiple "
            f"of {downscale * levels}"
        )
    return FinetuneInpaint(config, device, source, nets)
