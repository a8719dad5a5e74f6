"""One training step of Stable Diffusion inpainting, in the order of diffusers' train_text_to_image.py.

Draw noise and timesteps, encode, add noise, predict, loss, backward, optimizer, EMA: read from top to bottom.
`StepComponents` holds the parts that levers replace before the first step; the step calls them and knows no lever.
Nothing here waits for the device or reads a value from it (except PyTorch's gradient scaler, with fp16).

Shapes: B images of R x R pixels, latents of r x r (r = R / 8), L text tokens and P location tokens of width D.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from inpaint_bench.core.config import BenchConfig, RecipeConfig
from inpaint_bench.core.errors import UserError
from inpaint_bench.data.samples import Batch, Samples
from inpaint_bench.data.source import Source

from . import optimizers
from .networks import DTYPES, INPUT_CHANNELS, LATENT_CHANNELS, Networks, set_fp32_precision

if TYPE_CHECKING:
    from .latent_cache import LatentCache

WARMUP_STEPS = 3  # eager steps before a CUDA graph is captured: autotuning, lazy state and allocations happen there
LOG_VARIANCE_RANGE = (-30.0, 20.0)  # to which diffusers clamps the VAE's
LOCATION_DROPOUT = 0.1  # share of samples trained without position, as text is dropped in SD's own recipe


@dataclass(kw_only=True)
class StepComponents:
    """The parts of a training step: the baseline's, then as the levers of the recipe change them.

    `networks` are what is trained and saved. `unet`, `vae_encoder` and `text_encoder` are what the step calls: the
    same networks, compiled perhaps. `image_moments`, `masked_moments` and `text_states` give the outputs of the
    frozen networks for a batch: computed (`encode_...`) unless a cache replaces them.
    """

    bench: BenchConfig
    device: torch.device
    networks: Networks
    source: Source
    unet: Callable[..., Any]  # (sample [B, 9, r, r], timesteps [B], states [B, L + P, D]) -> noise [B, 4, r, r]
    vae_encoder: Callable[[Tensor], Tensor]  # [B, 3, R, R] -> hidden states
    text_encoder: Callable[[Tensor], Tensor]  # [B, L] token ids -> [B, L, D]
    make_optimizers: Callable[[list[nn.Parameter], float], list[torch.optim.Optimizer]]
    fp32_precision: dict[str, str]  # in effect for operations that stay fp32
    memory_format: torch.memory_format = torch.contiguous_format
    attention_kernels: Callable[[], AbstractContextManager[Any]] = nullcontext
    autocast_dtype: torch.dtype | None = None  # None: no autocast
    unet_dtype: torch.dtype = torch.float32  # of the UNet's weights and floating-point inputs
    micro_batches: int = 1
    ema_decay: float | None = None
    cuda_graph: bool = False
    non_blocking: bool = False  # copies of batches to the device
    cache: LatentCache | None = None

    def __post_init__(self) -> None:
        self.image_moments: Callable[[Batch], Tensor] = self.encode_image
        self.masked_moments: Callable[[Batch], tuple[Tensor, Tensor]] = self.encode_masked_image
        self.text_states: Callable[[Batch], Tensor] = self.encode_text

    @classmethod
    def baseline(cls, bench: BenchConfig, device: torch.device, networks: Networks, source: Source) -> StepComponents:
        """Return the components of the device's baseline. Resets PyTorch's global switches to it."""
        torch.backends.cudnn.benchmark = False
        text_encoder = networks.text_encoder
        return cls(
            bench=bench,
            device=device,
            networks=networks,
            source=source,
            unet=networks.unet,
            vae_encoder=networks.vae.encoder,
            text_encoder=lambda tokens: text_encoder(tokens).last_hidden_state,
            make_optimizers=optimizers.baseline_adamw,
            fp32_precision=set_fp32_precision(tf32=False),
            autocast_dtype=DTYPES["bf16"] if device.type == "cuda" else None,
        )

    @property
    def recipe(self) -> RecipeConfig:
        """Return the recipe whose levers are applied."""
        return self.bench.recipe

    @property
    def micro_batch_size(self) -> int:
        """Images that are computed at once."""
        return int(self.bench.batch) // self.micro_batches

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the autocast context. In a CUDA graph the cache of cast weights must not outlive the step."""
        dtype = self.autocast_dtype
        return torch.autocast(
            self.device.type, dtype=dtype, enabled=dtype is not None, cache_enabled=not self.cuda_graph
        )

    def unet_context(self) -> AbstractContextManager[Any]:
        """Return autocast as the UNet needs it: off for 16-bit weights, where it would make norms return fp32."""
        if self.unet_dtype == torch.float32:
            return self.autocast()
        return torch.autocast(self.device.type, enabled=False)

    def encode_image(self, batch: Batch) -> Tensor:
        """Return moments of the images, [B, 8, r, r]."""
        return self.vae_moments(batch["image"])

    def encode_masked_image(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return moments of the masked images, [B, 8, r, r], and their masks, [B, 1, r, r]."""
        moments = self.vae_moments(batch["masked_image"])
        return moments, F.interpolate(batch["mask"], size=moments.shape[-2:], mode="nearest")

    def encode_text(self, batch: Batch) -> Tensor:
        """Return text states, [B, L, D]."""
        return self.text_encoder(batch["tokens"])

    def vae_moments(self, image: Tensor) -> Tensor:
        """[B, 3, R, R] in -1..1 -> [B, 8, r, r]: mean and log variance of the latents, not scaled."""
        hidden = self.vae_encoder(image.contiguous(memory_format=self.memory_format))
        quant_conv = self.networks.vae.quant_conv
        moments: Tensor = hidden if quant_conv is None else quant_conv(hidden)
        return moments

    def samples(self) -> Samples:
        """Return the training samples, with what the recipe needs of each."""
        data, recipe, cache = self.bench.data, self.recipe, self.cache
        return Samples(
            self.source,
            self.networks.tokenize,
            self.bench.seed,
            masks=data.masks,
            full_mask_share=data.full_mask_share,
            pixels=not (recipe.cache_image and recipe.cache_masked),
            mask_pool=recipe.mask_pool if recipe.cache_masked else None,
            cached=cache.rows if cache and cache.in_loader else None,
        )


def unet_inputs(components: StepComponents, count: int, generator: Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Draw inputs of the UNet, on the CPU and so equal on every machine: sample, timesteps and encoder states.

    [B, 9, r, r], [B] and [B, L + P, D], in the types and layout that the components need.
    """
    networks, device, dtype = components.networks, components.device, components.unet_dtype
    side = components.bench.data.resolution_px // networks.downscale
    length = networks.context_length + components.bench.model.location_tokens
    sample = torch.randn(count, INPUT_CHANNELS, side, side, generator=generator).to(device, dtype)
    states = torch.randn(count, length, networks.unet.config.cross_attention_dim, generator=generator)
    timesteps = torch.randint(len(networks.sqrt_alphas_cumprod), (count,), generator=generator)
    return sample.contiguous(memory_format=components.memory_format), timesteps.to(device), states.to(device, dtype)


# --- forward pass --------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Draws:
    """Everything random in a step, for B samples."""

    image_noise: Tensor  # [B, 4, r, r]: samples the image's latents from their moments
    masked_noise: Tensor  # [B, 4, r, r]: likewise for the masked image
    noise: Tensor  # [B, 4, r, r]: what the UNet has to predict
    timesteps: Tensor  # [B] int64
    drop_location: Tensor  # [B] bool

    def rows(self, rows: slice) -> Draws:
        """Return the draws of a micro-batch."""
        return Draws(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})


def draw(components: StepComponents, count: int, generator: Generator) -> Draws:
    """Draw what is random in a step of `count` samples.

    Order and shapes are the same for every recipe, so that recipes can be compared on equal noise.
    """
    device, networks = components.device, components.networks
    side = components.bench.data.resolution_px // networks.downscale

    def normal() -> Tensor:
        return torch.randn(count, LATENT_CHANNELS, side, side, device=device, generator=generator)

    return Draws(
        image_noise=normal(),
        masked_noise=normal(),
        noise=normal(),
        timesteps=torch.randint(len(networks.sqrt_alphas_cumprod), (count,), device=device, generator=generator),
        drop_location=torch.rand(count, device=device, generator=generator) < LOCATION_DROPOUT,
    )


def diffusion_loss(components: StepComponents, batch: Batch, draws: Draws) -> Tensor:
    """Return the mean squared error of the predicted noise, over all latents (masked or not, as SD trains)."""
    networks = components.networks
    with torch.no_grad():
        with components.autocast():
            image_moments = components.image_moments(batch)  # [B, 8, r, r]
            masked_moments, mask = components.masked_moments(batch)  # [B, 8, r, r], [B, 1, r, r]
            states = components.text_states(batch)  # [B, L, D]
        scale = networks.vae.config.scaling_factor
        latents = sample_latents(image_moments, draws.image_noise, scale)
        masked_latents = sample_latents(masked_moments, draws.masked_noise, scale)
        signal_weight = networks.sqrt_alphas_cumprod[draws.timesteps, None, None, None]
        noise_weight = networks.sqrt_one_minus_alphas_cumprod[draws.timesteps, None, None, None]
        noisy = signal_weight * latents + noise_weight * draws.noise
        sample = torch.cat([noisy, mask, masked_latents], dim=1)  # [B, 9, r, r]
        sample = sample.to(components.unet_dtype).contiguous(memory_format=components.memory_format)
        states = states.to(components.unet_dtype)
    if networks.location:
        with components.autocast():
            location = networks.location(batch["latitude"], batch["longitude"], draws.drop_location)
        states = torch.cat([states, location.to(states.dtype)], dim=1)  # [B, L + P, D]
    with components.unet_context(), components.attention_kernels():
        predicted = components.unet(sample, draws.timesteps, states, return_dict=False)[0]  # [B, 4, r, r]
    return F.mse_loss(predicted.float(), draws.noise)


def sample_latents(moments: Tensor, noise: Tensor, scale: float) -> Tensor:
    """[B, 8, r, r] moments and [B, 4, r, r] noise -> [B, 4, r, r] float32: a sample of the latents, scaled."""
    mean, log_variance = moments.float().chunk(2, dim=1)
    return (mean + torch.exp(0.5 * log_variance.clamp(*LOG_VARIANCE_RANGE)) * noise) * scale


# --- the step ------------------------------------------------------------------------------------


class EMA:
    """Exponential moving average of the trained weights, in fp32: ema = decay * ema + (1 - decay) * weights."""

    def __init__(self, parameters: list[nn.Parameter], decay: float) -> None:
        self.decay = decay
        self._parameters: list[Tensor] = list(parameters)
        self.tensors = [p.detach().float().clone(memory_format=torch.preserve_format) for p in parameters]

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the current weights."""
        current = [p.detach() if p.dtype == torch.float32 else p.detach().float() for p in self._parameters]
        torch._foreach_lerp_(self.tensors, current, 1 - self.decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Put the average in place of the trained weights within the block."""
        trained = [p.detach().clone(memory_format=torch.preserve_format) for p in self._parameters]
        with torch.no_grad():
            torch._foreach_copy_(self._parameters, self.tensors)
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(self._parameters, trained)


class TrainingStep:
    """Trains the networks, a batch at each call. `step(batch)` queues device work and returns at once."""

    def __init__(self, components: StepComponents, lr: float, seed: int) -> None:
        self.components, self.device = components, components.device
        self.parameters = components.networks.trainable_parameters()
        self.optimizers = components.make_optimizers(self.parameters, lr)
        fp16 = components.autocast_dtype is torch.float16
        self.scaler = torch.amp.GradScaler(self.device.type) if fp16 else None
        self.ema = EMA(self.parameters, components.ema_decay) if components.ema_decay else None
        self.generator = Generator(self.device).manual_seed(seed)
        self.steps = 0
        self.graph = CudaGraphStep(self._train, self.generator) if components.cuda_graph else None

    def __call__(self, batch: Batch) -> Tensor:
        """Train on one batch in host or device memory. Return the loss, a detached scalar on the device."""
        self.steps += 1
        non_blocking = self.components.non_blocking
        batch = {name: value.to(self.device, non_blocking=non_blocking) for name, value in batch.items()}
        return self.graph(batch) if self.graph else self._train(batch)

    def _train(self, batch: Batch) -> Tensor:
        size, micro_batch_size = int(self.components.bench.batch), self.components.micro_batch_size
        draws = draw(self.components, size, self.generator)
        losses: list[Tensor] = []
        for start in range(0, size, micro_batch_size):
            rows = slice(start, start + micro_batch_size)
            micro_batch = {name: value[rows] for name, value in batch.items()}
            loss = diffusion_loss(self.components, micro_batch, draws.rows(rows)) / self.components.micro_batches
            (self.scaler.scale(loss) if self.scaler else loss).backward()
            losses.append(loss.detach())
        for optimizer in self.optimizers:
            self.scaler.step(optimizer) if self.scaler else optimizer.step()
        if self.scaler:
            self.scaler.update()
        if self.ema:
            self.ema.update()
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        return sum(losses[1:], losses[0])

    def skipped_steps(self) -> int:
        """Return the number of updates that the gradient scaler skipped. Synchronises with the device."""
        if not self.scaler:
            return 0
        state = self.optimizers[0].state.get(self.parameters[0], {})
        return self.steps - int(state.get("step", 0))  # the optimizer counts the updates that it made

    # --- checkpoints -----------------------------------------------------------------------------

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return all that the next step depends on besides its batch: tensors by name, and plain JSON."""
        tensors = {f"parameter.{i}": p.detach() for i, p in enumerate(self.parameters)}
        for i, optimizer in enumerate(self.optimizers):
            tensors |= {f"optimizer.{i}.{k}": v for k, v in optimizers.state_tensors(optimizer).items()}
        if self.ema:
            tensors |= {f"ema.{i}": tensor for i, tensor in enumerate(self.ema.tensors)}
        tensors["generator"] = self.generator.get_state()
        return tensors, {"steps": self.steps, "scaler": self.scaler.state_dict() if self.scaler else None}

    @torch.no_grad()
    def load_state(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Continue from what `state` returned. Raises UserError, before anything is changed, for another model's."""
        for i, parameter in enumerate(self.parameters):
            saved = tensors.get(f"parameter.{i}")
            if saved is None or saved.shape != parameter.shape:
                shape = "missing" if saved is None else f"of shape {list(saved.shape)}"
                raise UserError(f"parameter {i} is {shape} in the checkpoint, of shape {list(parameter.shape)} here")
        for i, parameter in enumerate(self.parameters):
            parameter.copy_(tensors[f"parameter.{i}"])
        for i, optimizer in enumerate(self.optimizers):
            prefix = f"optimizer.{i}."
            state = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
            optimizers.load_state_tensors(optimizer, state)
        if self.ema:
            torch._foreach_copy_(
                self.ema.tensors, [tensors[f"ema.{i}"].to(self.device) for i in range(len(self.ema.tensors))]
            )
        if self.scaler:
            self.scaler.load_state_dict(values["scaler"])
        self.generator.set_state(tensors["generator"].cpu())
        self.steps = values["steps"]


class CudaGraphStep:
    """Runs `step(batch)` eagerly WARMUP_STEPS times, captures it once, and replays it from then on.

    `step` must not wait for the device, and may read nothing that changes but the batch, the parameters and
    `generator`. The warm-up steps and the first replay after the capture are ordinary steps: none is lost.
    """

    def __init__(self, step: Callable[[Batch], Tensor], generator: Generator) -> None:
        self._step, self._generator = step, generator
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._stream = torch.cuda.Stream()
        self._batch: Batch = {}  # static input: every replay reads these tensors
        self._loss: Tensor | None = None

    @property
    def captured(self) -> bool:
        """Tell whether steps are replayed by now."""
        return self._graph is not None

    def __call__(self, batch: Batch) -> Tensor:
        """Run a step and return its loss, in memory of its own."""
        if self._graph is None:
            if self._calls < WARMUP_STEPS:
                self._calls += 1
                return self._warm_up(batch)
            self._capture(batch)
        assert self._graph is not None
        assert self._loss is not None
        for name, value in batch.items():
            self._batch[name].copy_(value, non_blocking=True)
        self._graph.replay()
        return self._loss.clone()

    def _warm_up(self, batch: Batch) -> Tensor:
        """Run a step on the stream of the capture: allocations made there stay usable there."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            loss = self._step(batch)
        torch.cuda.current_stream().wait_stream(self._stream)
        return loss

    def _capture(self, batch: Batch) -> None:
        self._batch = {name: value.clone() for name, value in batch.items()}
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self._generator)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=self._stream):
            self._loss = self._step(self._batch)
        self._graph = graph
