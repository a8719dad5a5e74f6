"""From a prompt to decoded images, in stages: text, image (inpainting only), sampling, decoding.

The UNet decides what is done: one of 4 input channels makes images of texts, one of 9 repaints the masked part of an
image. With guidance (arXiv:2207.12598) the UNet predicts every image twice, without the text and the position and with
them. Stages are functions of tensors, each of which may be captured as a CUDA graph.

Shapes: B images of R x R pixels, latents of r x r (r = R / 8), L text tokens and P location tokens of width D; N is B,
with guidance 2 B: first all without, then all with the text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from inpaint_bench.core.config.bench import BenchConfig

from .architectures.nhwc_unet import NhwcUNet
from .components import unet_pass
from .execution import Execution
from .networks import INPUT_CHANNELS, LATENT_CHANNELS, Networks
from .samplers import Sampler


@dataclass(kw_only=True)
class Generation:
    """How images are made. `unet` and `vae_decoder` of the execution are called, compiled perhaps."""

    execution: Execution
    sampler: Sampler
    guidance: float

    def __post_init__(self) -> None:
        # A tensor each: slices of one would not be aligned as compiled code wants its inputs.
        self._timesteps = [torch.tensor([t], device=self.networks.device) for t in self.sampler.timesteps]

    @property
    def networks(self) -> Networks:
        """Return the networks as they are: a lever may have replaced one."""
        networks: Networks = self.execution.networks
        return networks

    @property
    def inpaints(self) -> bool:
        """Return whether images are repainted, and not made of texts alone."""
        return bool(self.networks.unet.config.in_channels == INPUT_CHANNELS)

    @property
    def guided(self) -> bool:
        """Return whether the UNet predicts every image twice."""
        return self.guidance != 1

    @property
    def evaluations(self) -> int:
        """Return how often the UNet predicts the noise of one image."""
        return len(self.sampler.timesteps) * (2 if self.guided else 1)

    @contextmanager
    def inference(self) -> Iterator[None]:
        """Compute no gradients, under the autocast of this recipe."""
        with torch.no_grad(), self.execution.autocast():
            yield

    # --- stages ----------------------------------------------------------------------------------

    def encode_text(self, tokens: Tensor, latitude: Tensor, longitude: Tensor) -> Tensor:
        """Encode [N, L] token ids, [N] and [N] degrees (NaN: unknown) -> [N, L + P, D] text and location states."""
        with self.inference():
            states: Tensor = self.networks.text_encoder(tokens).last_hidden_state
            if location := self.networks.location:
                absent = latitude.isnan() | longitude.isnan()
                states = torch.cat([states, location(latitude, longitude, absent).to(states.dtype)], dim=1)
        return states.to(self.execution.dtype)

    def encode_image(self, image: Tensor, mask: Tensor) -> Tensor:
        """Encode [B, 3, R, R] in -1..1, [B, 1, R, R] (1 = repaint) -> the UNet's [B, 5, r, r] after the latents."""
        with self.inference():
            vae = self.networks.vae
            masked = (
                (image * (mask < 0.5)).to(self.execution.dtype).contiguous(memory_format=self.execution.memory_format)
            )
            # The mode of a Gaussian is its mean, so nothing is drawn.
            latents = vae.encode(masked).latent_dist.mode().float() * vae.config.scaling_factor
            return torch.cat([F.interpolate(mask, size=latents.shape[-2:], mode="nearest"), latents], dim=1)

    def sample(self, noise: Tensor, states: Tensor, channels: Tensor | None = None) -> Tensor:
        """Turn noise [B, 4, r, r] into latents [B, 4, r, r] float32.

        `states` [N, L + P, D] and `channels` [B, 5, r, r] are what `encode_text` and `encode_image` returned.
        """
        with self.inference(), self.execution.attention_kernels():
            predict = self._predictor(states)

            def guided_noise(latents: Tensor, number: int) -> Tensor:
                sample = latents if channels is None else torch.cat([latents, channels], dim=1)
                if self.guided:
                    sample = torch.cat([sample, sample])
                prediction = predict(
                    sample.to(self.execution.dtype).contiguous(memory_format=self.execution.memory_format), number
                )
                if not self.guided:
                    return prediction.to(torch.float32, copy=True)  # compiled code may overwrite its result
                without, given = prediction.float().chunk(2)
                return torch.lerp(without, given, self.guidance)

            return self.sampler.run(noise, guided_noise)

    def decode(self, latents: Tensor) -> Tensor:
        """Decode [B, 4, r, r] latents -> images [B, 3, R, R] float32 in -1..1."""
        with self.inference():
            vae = self.networks.vae
            scaled = (
                (latents / vae.config.scaling_factor)
                .to(self.execution.dtype)
                .contiguous(memory_format=self.execution.memory_format)
            )
            # diffusers keeps this convolution outside of the decoder, and some VAEs are configured without it.
            hidden = scaled if vae.post_quant_conv is None else vae.post_quant_conv(scaled)
            return self.execution.calls["vae_decoder"](hidden).float().clamp(-1, 1)

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
            noise: Tensor = self.execution.calls["unet"](sample, self._timesteps[number], states, return_dict=False)[0]
            return noise

        return predict


class CapturedStage:
    """Replays `stage` as one CUDA graph from the first call on. Its result is overwritten by the next call.

    `stage` must not wait for the device, and may read nothing that changes but its arguments.
    """

    def __init__(self, stage: Callable[..., Tensor]) -> None:
        self._stage = stage
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: list[Tensor] = []
        self._result: Tensor | None = None

    @property
    def captured(self) -> bool:
        """Tell whether the stage is replayed by now."""
        return self._graph is not None

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Return what the stage returns of inputs with the shapes of the first call."""
        if self._graph is None:
            self._capture(inputs)
        assert self._graph is not None
        assert self._result is not None
        for static, value in zip(self._inputs, inputs, strict=True):
            static.copy_(value, non_blocking=True)
        self._graph.replay()
        return self._result

    def _capture(self, inputs: tuple[Tensor, ...]) -> None:
        self._inputs = [value.clone() for value in inputs]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # kernels are compiled and chosen in this call
            self._stage(*self._inputs)
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=stream):
            self._result = self._stage(*self._inputs)


def baseline_execution(bench: BenchConfig, device: torch.device, networks: Networks) -> Execution:
    """Return the execution of these networks as the device's baseline makes images."""

    def eager_pass() -> None:
        with torch.no_grad():
            unet_pass(execution)

    execution = Execution(
        bench=bench,
        device=device,
        networks=networks,
        calls={"unet": networks.unet, "vae_decoder": networks.vae.decoder},
        eager_pass=eager_pass,
    )
    return execution


def initial_noise(seeds: Sequence[int], side: int) -> Tensor:
    """Return [B, 4, side, side], an image's from its own seed and drawn on the CPU: the same on every device."""
    shape = (LATENT_CHANNELS, side, side)
    return torch.stack([torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in seeds])
