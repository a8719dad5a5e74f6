"""One training step of Stable Diffusion, inpainting or text to image, as diffusers' train_text_to_image.py has it.

Draw noise and timesteps, encode, add noise, predict, loss, backward, optimizer, EMA: read from top to bottom.
The step calls the parts in `StepComponents`, which levers may have replaced before the first step, and knows no lever.
Nothing here waits for the device or reads a value from it, except PyTorch's gradient scaler, with fp16, and a host that
is two steps ahead, with non_blocking.

Shapes: B images of R x R pixels, latents of r x r (r = R / 8), L text tokens and P location tokens of width D.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from inpaint_bench.core.errors import UserError
from inpaint_bench.core.workloads.finetune_inpaint import DDP_EAGER_STEPS, finetune_keys
from inpaint_bench.data.loader import Batches
from inpaint_bench.data.samples import Batch, Samples
from inpaint_bench.data.source import Source

from . import optimizers
from .execution import CudaGraph, Execution
from .latent_cache import LatentCache
from .networks import Networks
from .optimizers import EMA, baseline_adamw
from .parallel import sharding
from .parallel.data_parallel import DataParallel
from .parallel.sharding import for_checkpoint, own_optimizer, own_part
from .schedule import Schedule, make_optimizers


@dataclass(kw_only=True)
class StepComponents(Execution):
    """The parts of a training step: the baseline's, then as the levers of the recipe change them.

    `networks` are what is trained and saved. What the step calls are the same networks, compiled perhaps:
    `unet` (unet_input [B, C, r, r], timesteps [B], encoder_hidden_states [B, L + P, D]) -> noise [B, 4, r, r], where C
    is 9 to inpaint and 4 to make images of texts,
    `vae_encoder` [B, 3, R, R] -> hidden states, `text_encoder` [B, L] token ids -> [B, L, D].
    """

    networks: Networks
    source: Source
    calls: dict[str, Callable[..., Any]] = field(init=False)
    eager_pass: Callable[[], object] = field(init=False)
    make_optimizers: Callable[[list[nn.Parameter], float], list[torch.optim.Optimizer]] = baseline_adamw
    ema_decay: float | None = None
    train_text_encoder: bool = False  # its adapters, see adapters.py
    encoder_dtype: torch.dtype | None = None  # dtype of VAE and text encoder, which then run without autocast
    non_blocking: bool = False  # copies of batches to the device
    cache: LatentCache | None = None
    parallel: DataParallel | None = None  # None: one rank
    # The fields below belong to the step that is made of these parts.
    trained: list[nn.Parameter] = field(default_factory=list)
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    ema: EMA | None = None
    batches: Batches | None = None  # the loader, once it is open
    batch: Batch = field(default_factory=dict)  # that levers observe, as the loader returned it

    def __post_init__(self) -> None:
        super().__post_init__()
        text_encoder = self.networks.text_encoder
        self.calls = {
            "unet": self.networks.unet,
            "vae_encoder": self.networks.vae.encoder,
            "text_encoder": lambda tokens: text_encoder(tokens).last_hidden_state,
        }
        self.eager_pass = partial(unet_pass, self)

    def divide(self) -> None:
        """Make the step one over all ranks, if there are several. After the levers."""
        if self.bench.ranks > 1:
            self.parallel = DataParallel(self, self.networks)
            self.calls["unet"] = self.parallel.network
            make, kind = self.make_optimizers, self.parallel.sharding
            self.make_optimizers = lambda parameters, lr: sharding.divided(make(parameters, lr), kind)

    @property
    def encodes(self) -> int:
        """Encodings of an image in a step: of the image, and to inpaint of the masked one, unless caches have them."""
        return (not self.recipe.cache_image) + (self.networks.inpaints and not self.recipe.cache_masked)

    @property
    def encodes_texts(self) -> bool:
        """Whether the text encoder runs in a step."""
        return not self.recipe.cache_text

    def encoder_context(self) -> AbstractContextManager[Any]:
        """Return autocast as the frozen networks need it: off for 16-bit weights, where norms would return fp32."""
        return torch.autocast(self.device.type, enabled=False) if self.encoder_dtype else self.autocast()

    def facts(self) -> dict[str, Any]:
        trained_in_bf16 = self.recipe.weights not in ("fp32", "half")
        return super().facts() | ({"precision": "bf16"} if trained_in_bf16 else {})

    # --- outputs of the frozen networks for a batch, which a cache may replace -------------------

    def image_moments(self, batch: Batch) -> Tensor:
        """Return moments of the images, [B, 8, r, r]."""
        return self.vae_moments(batch["image"])

    def masked_moments(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return moments of the masked images, [B, 8, r, r], and masks as the network reads them, [B, 1, r, r]."""
        return self.vae_moments(batch["masked_image"]), self.networks.mask_channels(batch["mask"])

    def text_states(self, batch: Batch) -> Tensor:
        """Return text states, [B, L, D]."""
        return self.calls["text_encoder"](batch["tokens"])

    def vae_moments(self, image: Tensor) -> Tensor:
        """[B, 3, R, R] in -1..1 -> [B, 8, r, r]: mean and log variance of the latents, not scaled."""
        image = image.to(self.encoder_dtype or image.dtype).contiguous(memory_format=self.memory_format)
        hidden = self.calls["vae_encoder"](image)
        # diffusers keeps this convolution outside of the encoder, and some VAEs are configured without it.
        quant_conv = self.networks.vae.quant_conv
        return hidden if quant_conv is None else quant_conv(hidden)

    def samples(self) -> Samples:
        """Return the training samples, with what the recipe needs of each."""
        data, recipe, cache = self.bench.data, self.recipe, self.cache
        return Samples(
            self.source,
            self.networks.tokenize,
            self.bench.seed,
            masks=data.masks,
            full_mask_share=data.full_mask_share,
            pixels=self.encodes > 0,
            masked=self.networks.inpaints,
            mask_pool=recipe.mask_pool if recipe.cache_masked and self.networks.inpaints else None,
            cached=cache.rows if cache and cache.in_loader else None,
        )


def unet_inputs(execution: Execution, count: int, generator: Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Draw inputs of the UNet, on the CPU and so equal on every machine.

    Returns the UNet's input [B, C, r, r], timesteps [B] and encoder_hidden_states [B, L + P, D], in the types and
    layout that the execution needs.
    """
    networks, device, dtype = execution.networks, execution.device, execution.dtype
    bench = execution.bench
    side = bench.data.resolution_px // networks.downscale
    length = networks.state_rows + bench.model.location_tokens
    unet_input = torch.randn(count, networks.input_channels, side, side, generator=generator).to(device, dtype)
    encoder_hidden_states = torch.randn(count, length, networks.state_width, generator=generator)
    timesteps = torch.randint(len(networks.signal_weights), (count,), generator=generator)
    unet_input = unet_input.contiguous(memory_format=execution.memory_format)
    return unet_input, timesteps.to(device), encoder_hidden_states.to(device, dtype)


def unet_pass(execution: Execution) -> None:
    """Run one image through the eager UNet, in the mode that it is in."""
    inputs = unet_inputs(execution, 1, torch.Generator().manual_seed(0))
    with execution.network_context(), execution.attention_kernels():
        execution.networks.unet(*inputs, return_dict=False)


STEPS_AHEAD = 2  # that the host queues at most if copies do not block it
WARMUP_STEPS = 3  # eager steps before a CUDA graph is captured: autotuning, lazy state and allocations happen there
LOG_VARIANCE_RANGE = (-30.0, 20.0)  # to which diffusers clamps the VAE's
LOCATION_DROPOUT = 0.1  # share of samples trained without position, as text is dropped in SD's own recipe


# --- forward pass --------------------------------------------------------------------------------


class Draws(NamedTuple):
    """Everything random in a step, for B samples."""

    image_noise: Tensor  # [B, 4, r, r]: samples the image's latents from their moments; of FLUX 16 channels
    masked_noise: Tensor  # [B, 4, r, r]: likewise for the masked image
    noise: Tensor  # [B, 4, r, r]: what the UNet has to predict
    timesteps: Tensor  # [B] int64
    drop_location: Tensor  # [B] bool

    def rows(self, rows: slice) -> Draws:
        """Return the draws of a micro-batch."""
        return Draws(*(drawn[rows] for drawn in self))


def draw(components: StepComponents, count: int, generator: Generator) -> Draws:
    """Draw what is random in a step of `count` samples on each rank.

    Order and shapes are the same for every recipe, so that recipes can be compared on equal noise; and for every
    number of ranks with the same batch in total, because each rank draws for all of them and takes its own rows.
    """
    device, networks, parallel = components.device, components.networks, components.parallel
    side = components.bench.data.resolution_px // networks.downscale
    dtype = torch.promote_types(components.dtype, torch.float32)
    own_rows = parallel.own_rows(count) if parallel else slice(None)
    count *= parallel.ranks if parallel else 1

    def normal() -> Tensor:
        shape = (count, networks.latent_channels, side, side)
        return torch.randn(shape, device=device, generator=generator).to(dtype)

    draws = Draws(
        image_noise=normal(),
        masked_noise=normal(),
        noise=normal(),
        timesteps=networks.architecture.draw_timesteps(networks, count, side, generator),
        drop_location=torch.rand(count, device=device, generator=generator) < LOCATION_DROPOUT,
    )
    return draws.rows(own_rows)


def diffusion_loss(components: StepComponents, batch: Batch, draws: Draws) -> Tensor:
    """Return the mean squared error of what the network predicts, over all latents (masked or not, as SD trains)."""
    networks = components.networks
    # Encode: moments of the latents, then text states, of the frozen networks or from a cache.
    with torch.no_grad():
        with components.encoder_context():
            image_moments = components.image_moments(batch)  # [B, 8, r, r]
            if networks.inpaints:
                masked_moments, mask = components.masked_moments(batch)  # [B, 8, r, r], [B, 1, r, r]
        latents = networks.architecture.scaled(networks.vae, sample_latents(image_moments, draws.image_noise))
        # Add noise, by the weights of each sample's timestep.
        signal_weight, noise_weight = networks.weights(draws.timesteps)
        noisy_latents = signal_weight * latents + noise_weight * draws.noise
        unet_input = noisy_latents
        if networks.inpaints:
            masked = sample_latents(masked_moments, draws.masked_noise)
            conditions = networks.architecture.conditions(mask, networks.architecture.scaled(networks.vae, masked))
            unet_input = torch.cat([noisy_latents, conditions], dim=1)  # [B, 9, r, r]
        unet_input = unet_input.to(components.dtype).contiguous(memory_format=components.memory_format)
    with (
        torch.set_grad_enabled(components.train_text_encoder and torch.is_grad_enabled()),
        components.autocast() if components.train_text_encoder else components.encoder_context(),
    ):
        encoder_hidden_states = components.text_states(batch)  # [B, L, D]
    encoder_hidden_states = encoder_hidden_states.to(components.dtype)
    # Condition on the position. Outside of no_grad, because the location encoder is trained.
    if networks.location:
        with components.autocast():
            location = networks.location(batch["latitude"], batch["longitude"], draws.drop_location)
        location = location.to(components.dtype)
        encoder_hidden_states = torch.cat([encoder_hidden_states, location], dim=1)  # [B, L + P, D]
    # Predict the noise, [B, 4, r, r].
    with components.network_context(), components.attention_kernels():
        predicted = components.calls["unet"](unet_input, draws.timesteps, encoder_hidden_states, return_dict=False)[0]
    target = networks.architecture.target(networks, latents, draws.noise, draws.timesteps)
    return F.mse_loss(predicted.to(draws.noise.dtype), target)


def sample_latents(moments: Tensor, noise: Tensor) -> Tensor:
    """[B, 8, r, r] moments and [B, 4, r, r] noise -> [B, 4, r, r] like the noise: unscaled latents."""
    mean, log_variance = moments.to(noise.dtype).chunk(2, dim=1)
    return mean + torch.exp(0.5 * log_variance.clamp(*LOG_VARIANCE_RANGE)) * noise


# --- the step ------------------------------------------------------------------------------------


class TrainingStep:
    """Trains the networks, a batch at each call. `step(batch)` queues device work and returns."""

    def __init__(self, components: StepComponents, lr: float, seed: int) -> None:
        self.components, self.device = components, components.device
        self.parameters = components.networks.trainable_parameters()
        keys = finetune_keys(components.bench)
        self.optimizers = make_optimizers(components.make_optimizers, self.parameters, lr, keys)
        self.schedule = Schedule(self.optimizers, lr, keys)
        self.max_grad_norm = keys.max_grad_norm
        fp16 = components.autocast_dtype is torch.float16
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=fp16)  # does nothing unless enabled
        self.ema = EMA(self.parameters, components.ema_decay) if components.ema_decay else None
        self.generator = Generator(self.device).manual_seed(seed)
        self.steps = 0
        warmup = DDP_EAGER_STEPS if components.parallel else WARMUP_STEPS
        self.graph: CudaGraph | None = None
        if components.cuda_graph:
            self.graph = CudaGraph(lambda **batch: self._train(batch), warmup=warmup, generator=self.generator)
        components.trained, components.optimizers, components.ema = self.parameters, self.optimizers, self.ema
        components.graphs = [self.graph] if self.graph else []
        self._copies = torch.cuda.Stream() if components.non_blocking else None
        self._begun: deque[torch.cuda.Event] = deque()  # recorded before each of the last steps

    def __call__(self, batch: Batch) -> Tensor:
        """Train on one batch in host or device memory. Return the loss, a detached scalar on the device."""
        self._begin()
        if not self.graph:
            loss = self._train(self._moved(batch))
        else:
            batch = batch if self.graph.captured and not self._copies else self._moved(batch)
            loss = self.graph(**batch).clone()  # the next replay overwrites it
        self.schedule.step()
        return loss

    def eager(self, batch: Batch) -> Tensor:
        """Train on one batch without replaying a CUDA graph; needs memory beside that of the graph."""
        self._begin()
        batch = self._moved(batch)
        loss = self.graph.eager(**batch) if self.graph else self._train(batch)
        self.schedule.step()
        return loss

    def _begin(self) -> None:
        """Count the step, and announce it to the other ranks."""
        self.steps += 1
        if self.components.parallel:
            self.components.parallel.begin()

    def _moved(self, batch: Batch) -> Batch:
        """Return the batch on the device. With non_blocking the copy goes on beside the step before."""
        if not self._copies:
            return {name: value.to(self.device) for name, value in batch.items()}
        if len(self._begun) == STEPS_AHEAD:  # else the batches of all steps to come would be there
            self._begun.popleft().synchronize()
        current = torch.cuda.current_stream()
        self._begun.append(current.record_event())
        with torch.cuda.stream(self._copies):
            moved = {name: value.to(self.device, non_blocking=True) for name, value in batch.items()}
        current.wait_stream(self._copies)
        for value in moved.values():
            value.record_stream(current)
        return moved

    def _train(self, batch: Batch) -> Tensor:
        size = self.components.bench.batch_size
        micro_batch_size = size // self.components.micro_batches
        parallel = self.components.parallel
        # Drawn for the whole batch: its noise does not depend on the number of micro-batches.
        draws = draw(self.components, size, self.generator)
        losses: list[Tensor] = []
        for start in range(0, size, micro_batch_size):
            rows = slice(start, start + micro_batch_size)
            micro_batch = {name: value[rows] for name, value in batch.items()}
            # Micro-batches are equally large, so that the sum of these losses is the mean over the batch.
            last = start + micro_batch_size >= size
            with parallel.micro_batch(last) if parallel else nullcontext():
                loss = diffusion_loss(self.components, micro_batch, draws.rows(rows)) / self.components.micro_batches
                self.scaler.scale(loss).backward()
            losses.append(loss.detach())
        mean_loss = sum(losses[1:], losses[0])
        if parallel:
            mean_loss = parallel.average(mean_loss)
        if self.max_grad_norm is not None:
            for optimizer in self.optimizers:
                self.scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(self.parameters, self.max_grad_norm)
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
        self.scaler.update()
        if self.ema:
            self.ema.update()
        for optimizer in self.optimizers:
            # None before every step: a capture then allocates the gradients in the memory pool of its graph.
            optimizer.zero_grad(set_to_none=True)
        return mean_loss

    def close(self) -> None:
        """Release the CUDA graph. No step after that."""
        if self.graph:
            self.graph.close()

    def skipped_steps(self) -> int:
        """Return the number of updates that the gradient scaler skipped. Synchronises with the device."""
        if not self.scaler.is_enabled():
            return 0
        state: dict[str, Any] = next(iter(own_optimizer(self.optimizers[0]).state.values()), {})
        return self.steps - int(state.get("step", 0))  # the optimizer counts the updates that it made

    # --- checkpoints -----------------------------------------------------------------------------

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return all that the next step depends on besides its batch: tensors by name, and plain JSON.

        Where the ranks have parts of it they all call this, and rank 0 alone gets something.
        """
        parallel = self.components.parallel
        if parallel and not parallel.gather(self.optimizers):
            return {}, {}
        tensors = {f"parameter.{i}": for_checkpoint(p.detach()) for i, p in enumerate(self.parameters)}
        for i, optimizer in enumerate(self.optimizers):
            tensors |= {f"optimizer.{i}.{k}": v for k, v in optimizers.state_tensors(optimizer).items()}
        if self.ema:
            tensors |= {f"ema.{i}": tensor for i, tensor in enumerate(self.ema.tensors)}
        tensors["generator"] = self.generator.get_state()
        if parallel and parallel.pipeline:
            tensors = parallel.pipeline.collect(tensors)
        values = {"steps": self.steps, "scaler": self.scaler.state_dict(), "schedule": self.schedule.state()}
        return tensors, values

    @torch.no_grad()
    def load_state(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Continue from what `state` returned. Raises UserError, before anything is changed, for another model's."""
        for i, parameter in enumerate(self.parameters):
            saved = tensors.get(f"parameter.{i}")
            if saved is None or saved.shape != parameter.shape:
                shape = "missing" if saved is None else f"of shape {list(saved.shape)}"
                raise UserError(f"parameter {i} is {shape} in the checkpoint, of shape {list(parameter.shape)} here")
        for i, parameter in enumerate(self.parameters):
            parameter.copy_(own_part(parameter, tensors[f"parameter.{i}"]))
        for i, optimizer in enumerate(self.optimizers):
            prefix = f"optimizer.{i}."
            state = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
            optimizers.load_state_tensors(optimizer, state)
        if self.ema:
            torch._foreach_copy_(
                self.ema.tensors, [tensors[f"ema.{i}"].to(self.device) for i in range(len(self.ema.tensors))]
            )
        self.scaler.load_state_dict(values["scaler"])
        self.schedule.load_state(values.get("schedule", {}))  # earlier checkpoints have none
        self.generator.set_state(tensors["generator"].cpu())
        self.steps = values["steps"]
