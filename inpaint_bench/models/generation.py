"""From a prompt to decoded images, in stages: text, image (inpainting only), sampling, decoding.

The UNet decides what is done: one of 4 input channels makes images of texts, one of 9 repaints the masked part of an
image. With guidance (arXiv:2207.12598) the UNet predicts every image twice, without the text and the position and with
them. Stages are functions of tensors, each of which may be captured as a CUDA graph.

`restore` does the same with networks as a training has them, for images of which the unmasked part is kept.

Samplers are diffusers' schedulers over the model's own noise schedule. All their coefficients are numbers of the host
and their timesteps Python integers: a step waits for nothing on the device, so that a CUDA graph can hold a whole
sampling loop.

Shapes: B images of R x R pixels, latents of r x r (r = R / 8), L text tokens and P location tokens of width D; N is B,
with guidance 2 B: first all without, then all with the text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from diffusers import DPMSolverMultistepScheduler, FlowMatchEulerDiscreteScheduler, PNDMScheduler
from torch import Tensor

from inpaint_bench.core.config.bench import BenchConfig
from inpaint_bench.core.errors import UserError
from inpaint_bench.data.samples import Batch

from .architectures.base import ddim_scheduler
from .architectures.nhwc_unet import NhwcUNet
from .execution import Execution
from .networks import Networks
from .training_step import unet_pass

# sample [B, 9, r, r], timesteps [B] int64, states [B, L + P, D] -> predicted noise [B, 4, r, r]
Predict = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(kw_only=True)
class Generation:
    """How images are made. `unet` and `vae_decoder` of the execution are called, compiled perhaps."""

    execution: Execution
    sampler: Sampler
    guidance: float

    def __post_init__(self) -> None:
        self.networks: Networks = self.execution.networks  # a lever may replace one of them
        # A tensor each: slices of one would not be aligned as compiled code wants its inputs.
        self._timesteps = [torch.tensor([t], device=self.networks.device) for t in self.sampler.timesteps]

    @property
    def guided(self) -> bool:
        """Return whether every image is predicted twice. The guidance of FLUX is an input of its network."""
        return self.guidance != 1 and not self.networks.guidance_input

    @property
    def evaluations(self) -> int:
        """Return how often the UNet predicts the noise of one image."""
        return len(self.sampler.timesteps) * (2 if self.guided else 1)

    # --- stages ----------------------------------------------------------------------------------

    @torch.no_grad()
    def encode_text(self, tokens: Tensor, latitude: Tensor, longitude: Tensor) -> Tensor:
        """Encode [N, L] token ids, [N] and [N] degrees (NaN: unknown) -> [N, L + P, D] text and location states."""
        with self.execution.autocast():
            states = encoder_states(self.networks, tokens, latitude, longitude)
        return states.to(self.execution.dtype)

    @torch.no_grad()
    def encode_image(self, image: Tensor, mask: Tensor) -> Tensor:
        """Encode [B, 3, R, R] in -1..1, [B, 1, R, R] (1 = repaint) -> the UNet's [B, 5, r, r] after the latents."""
        with self.execution.autocast():
            return inpainting_channels(self.networks, self._prepared(image), mask)

    @torch.no_grad()
    def sample(self, noise: Tensor, states: Tensor, channels: Tensor | None = None) -> Tensor:
        """Turn noise [B, 4, r, r] into latents [B, 4, r, r] float32.

        `states` [N, L + P, D] and `channels` [B, 5, r, r] are what `encode_text` and `encode_image` returned.
        """
        with self.execution.autocast(), self.execution.attention_kernels():
            predict = self._predictor(states)

            def guided_noise(latents: Tensor, number: int) -> Tensor:
                sample = latents if channels is None else torch.cat([latents, channels], dim=1)
                if self.guided:
                    sample = torch.cat([sample, sample])
                prediction = predict(self._prepared(sample), number)
                if not self.guided:
                    return prediction.to(torch.float32, copy=True)  # compiled code may overwrite its result
                without, given = prediction.float().chunk(2)
                return torch.lerp(without, given, self.guidance)

            return self.sampler.run(noise, guided_noise)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Decode [B, 4, r, r] latents -> images [B, 3, R, R] float32 in -1..1."""
        with self.execution.autocast():
            vae = self.networks.vae
            scaled = self._prepared(self.networks.architecture.unscaled(vae, latents))
            # diffusers keeps this convolution outside of the decoder, and some VAEs are configured without it.
            hidden = scaled if vae.post_quant_conv is None else vae.post_quant_conv(scaled)
            return self.execution.calls["vae_decoder"](hidden).float().clamp(-1, 1)

    def _prepared(self, maps: Tensor) -> Tensor:
        return maps.to(self.execution.dtype).contiguous(memory_format=self.execution.memory_format)

    def _predictor(self, states: Tensor) -> Callable[[Tensor, int], Tensor]:
        """Return the UNet with these states, as a function of its sample [N, in, r, r] and the evaluation's number."""
        unet = self.networks.unet
        if isinstance(unet, NhwcUNet):
            # What depends on the text or on the timestep alone is computed once per batch, not in every evaluation.
            keys_values = unet.keys_values(states)
            shifts = unet.shifts(torch.cat(self._timesteps))

            def predict_nhwc(sample: Tensor, number: int) -> Tensor:
                rows = [shift[number : number + 1].expand(len(sample), -1) for shift in shifts]
                return unet.predict(sample, rows, keys_values)

            return predict_nhwc

        def predict(sample: Tensor, number: int) -> Tensor:
            return self.execution.calls["unet"](sample, self._timesteps[number], states, return_dict=False)[0]

        return predict


def baseline_execution(bench: BenchConfig, device: torch.device, networks: Networks) -> Execution:
    """Return the execution of these networks as the device's baseline makes images."""
    calls = {"unet": networks.unet, "vae_decoder": networks.vae.decoder}
    execution = Execution(
        bench=bench, device=device, networks=networks, calls=calls, eager_pass=lambda: unet_pass(execution)
    )
    return execution


def initial_noise(seeds: Sequence[int], side: int, channels: int) -> Tensor:
    """Return [B, channels, side, side], an image's from its own seed and drawn on the CPU: the same on every device."""
    shape = (channels, side, side)
    return torch.stack([torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in seeds])


@contextmanager
def evaluation_mode(networks: Networks) -> Iterator[None]:
    """Compute no gradients and put the trained networks into evaluation mode within the block."""
    trained = [network for network in (networks.unet, networks.location) if network]
    modes = [network.training for network in trained]
    try:
        for network in trained:
            network.eval()
        with torch.no_grad():
            yield
    finally:
        for network, training in zip(trained, modes, strict=True):
            network.train(training)


def unet_prediction(networks: Networks, execution: Execution | None = None) -> Predict:
    """Return the prediction of the UNet: plain, or under an execution but not compiled, as these shapes occur once."""
    dtype = execution.dtype if execution else next(networks.unet.parameters()).dtype

    def predict(sample: Tensor, timesteps: Tensor, states: Tensor) -> Tensor:
        if execution is None:
            return networks.unet(sample.to(dtype), timesteps, states.to(dtype), return_dict=False)[0]
        sample = sample.to(dtype).contiguous(memory_format=execution.memory_format)
        with execution.autocast(), execution.attention_kernels():
            return networks.unet(sample, timesteps, states.to(dtype), return_dict=False)[0]

    return predict


def mean_latents(networks: Networks, image: Tensor) -> Tensor:
    """[B, 3, R, R] in -1..1 -> [B, 4, r, r] float32, scaled."""
    weight = next(networks.vae.parameters())
    # The mode of a Gaussian is its mean, so nothing is drawn.
    mean: Tensor = networks.vae.encode(image.to(weight.device, weight.dtype)).latent_dist.mode()
    return networks.architecture.scaled(networks.vae, mean.float())


def inpainting_channels(networks: Networks, image: Tensor, mask: Tensor) -> Tensor:
    """[B, 3, R, R] and [B, 1, R, R] (1 = repaint) -> channels after the noisy latents; without a mask none."""
    if not networks.inpaints:
        return image.new_zeros(len(image), 0, *(side // networks.downscale for side in image.shape[-2:]))
    masked = mean_latents(networks, image * (mask < 0.5))
    return networks.architecture.conditions(networks.mask_channels(mask.float()), masked)


def encoder_states(networks: Networks, tokens: Tensor, latitude: Tensor, longitude: Tensor) -> Tensor:
    """[B, L] token ids, [B] and [B] degrees (NaN: unknown) -> [B, L + P, D] text and location states."""
    text: Tensor = networks.text_encoder(tokens).last_hidden_state
    if networks.location is None:
        return text
    location = networks.location(latitude, longitude, latitude.isnan() | longitude.isnan())
    return torch.cat([text, location.to(text.dtype)], dim=1)


# --- samplers ------------------------------------------------------------------------------------

SAMPLERS: dict[str, Callable[[Any], Any]] = {
    # Without Runge-Kutta steps PNDM is PLMS (arXiv:2202.09778); one more evaluation than it has steps.
    "plms": partial(PNDMScheduler.from_config, skip_prk_steps=True, set_alpha_to_one=False, steps_offset=1),
    "ddim": ddim_scheduler,
    "dpmpp": partial(
        DPMSolverMultistepScheduler.from_config, algorithm_type="dpmsolver++", solver_order=2, steps_offset=1
    ),
    "euler": FlowMatchEulerDiscreteScheduler.from_config,  # only for a flow, and the only one for it
}


class Sampler:
    """One of SAMPLERS with a number of steps, over the noise schedule of `networks`, for latents of `side`."""

    def __init__(self, name: str, networks: Networks, steps: int, side: int) -> None:
        self._scheduler = SAMPLERS[name](networks.scheduler.config)
        self._settings = networks.architecture.sampler_settings(networks, steps, side)
        self._scheduler.set_timesteps(**self._settings)
        self.timesteps: list[float] = self._scheduler.timesteps.tolist()  # one per evaluation of the UNet
        # By its rounding diffusers may name timesteps beyond both ends, or one twice.
        used, schedule = {*self.timesteps}, {*range(len(networks.signal_weights))}
        if networks.architecture.whole_timesteps and not (used <= schedule and len(used) >= steps):
            raise UserError(f"{steps} steps of {name} do not fit a schedule of {len(schedule)}; choose another number")

    def run(self, noise: Tensor, predict: Callable[[Tensor, int], Tensor]) -> Tensor:
        """Turn noise [B, 4, r, r] into latents; `predict(latents, number)` gives the noise at `timesteps[number]`."""
        # Forgets the predictions of the image before.
        self._scheduler.set_timesteps(**self._settings)
        latents = noise * getattr(self._scheduler, "init_noise_sigma", 1.0)
        for number, timestep in enumerate(self.timesteps):
            latents = self._scheduler.step(predict(latents, number), timestep, latents, return_dict=False)[0]
        return latents


# --- inpainting with networks that are trained ---------------------------------------------------


def restore(
    networks: Networks, batch: Batch, steps: int, seeds: Sequence[int], *, predict: Predict | None = None
) -> Tensor:
    """Repaint the images of a batch under their masks; the other pixels are pasted back. Or make images of its texts.

    The batch has image, mask, tokens, latitude and longitude (data/samples.py; NaN: unknown). Every image starts from
    the noise of its own seed, drawn on the CPU, so that its result depends neither on the rest of the batch nor on the
    device (but for rounding). `predict` replaces the plain UNet. Returns float32 on the networks' device.
    """
    side = batch["image"].shape[-1] // networks.downscale
    sampler, device = Sampler(networks.architecture.sampler, networks, steps, side), networks.device
    images, masks = batch["image"].to(device).float(), batch["mask"].to(device)
    predict_noise = predict or unet_prediction(networks)
    with evaluation_mode(networks):
        channels = inpainting_channels(networks, images, masks)
        states = encoder_states(networks, *(batch[name].to(device) for name in ("tokens", "latitude", "longitude")))

        def predict_step(latents: Tensor, number: int) -> Tensor:
            sample = torch.cat([latents, channels], dim=1)
            timesteps = torch.full((len(sample),), sampler.timesteps[number], device=device)
            return predict_noise(sample, timesteps, states).float()

        latents = sampler.run(initial_noise(seeds, side, networks.latent_channels).to(device), predict_step)
        weight = next(networks.vae.parameters())
        decoded = networks.vae.decode(networks.architecture.unscaled(networks.vae, latents).to(weight.dtype)).sample
    if not networks.inpaints:
        return decoded.float().clamp(-1, 1)
    # The VAE changes kept pixels slightly when it encodes and decodes them, so the originals are pasted back.
    return torch.where(masks > 0.5, decoded.float().clamp(-1, 1), images)
