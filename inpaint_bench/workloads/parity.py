"""How far a recipe is from the baseline: one forward and backward pass on fixed inputs, before and after the levers
are applied, on the same weights.

The inputs are latents drawn from a generator of their own, so nothing that training draws changes. Errors are
relative: |a - b| / |a| with a the baseline's. Levers of the data path do not show here; their own verification
compares what they return.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inpaint_bench.core.records import Parity
from inpaint_bench.models.networks import INPUT_CHANNELS, LATENT_CHANNELS
from inpaint_bench.models.optimizers import baseline_adamw
from inpaint_bench.models.training_step import StepComponents

log = logging.getLogger(__name__)

SEED = 20_261_121
FP16_SCALE = 2.0**12  # without it small gradients underflow in fp16
TOLERANCE = 0.1  # bf16 stays below 0.03, see benchmarks/README.md; beyond it something else is computed
PARAMETERS_COMPARED = 16  # evenly through the network; all would need a second copy of the gradients


@dataclass(kw_only=True)
class Reference:
    """The baseline's results."""

    moments: Tensor | None  # of the encoder, unless it is cached
    prediction: Tensor
    loss: Tensor
    gradients: list[Tensor]
    weights: list[Tensor]


def reference(components: StepComponents) -> Reference | None:
    """Run the baseline at the recipe's micro-batch size. Return None where that does not fit into memory."""
    try:
        prediction, loss = _forward(components)
        loss.backward()
        moments = _encode(components)
    except torch.cuda.OutOfMemoryError:
        _clear_gradients(components)
        return None
    parameters = _compared_parameters(components)
    result = Reference(
        moments=moments,
        prediction=prediction.detach().float(),
        loss=loss.detach(),
        gradients=[_gradient(p) for p in parameters],
        weights=[p.detach().clone() for p in parameters],
    )
    _clear_gradients(components)
    return result


def compare(components: StepComponents, baseline: Reference | None) -> tuple[Parity, float]:
    """Return the recipe's errors, and the seconds of its first pass (with compilation)."""
    began = time.monotonic()
    prediction, loss = _forward(components)
    scale = FP16_SCALE if components.autocast_dtype is torch.float16 else 1.0
    (loss * scale).backward()
    moments = _encode(components)
    if components.device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.monotonic() - began
    if baseline is None:
        _clear_gradients(components)
        return Parity(unavailable=f"the baseline does not fit on this GPU at {_size(components)} images"), seconds
    gradients = [_gradient(p) / scale for p in _compared_parameters(components)]
    _clear_gradients(components)
    errors: dict[str, Any] = {
        "prediction_rel": _relative_error(baseline.prediction, prediction.detach().float()),
        "loss_rel": _relative_error(baseline.loss, loss.detach()),
        "gradient_rel": _relative_error(_concatenate(baseline.gradients), _concatenate(gradients)),
        "update_rel": _update_error(components, baseline.weights, baseline.gradients),
        "encoder_rel": None
        if moments is None or baseline.moments is None
        else _relative_error(baseline.moments, moments),
    }
    far = {name: error for name, error in errors.items() if error is not None and not error <= TOLERANCE}
    if far:
        log.warning("this recipe does not compute what the baseline does: %s", far)
    not_finite = [name for name, error in far.items() if not math.isfinite(error)]
    errors |= dict.fromkeys(not_finite)
    return Parity(reference="baseline", **errors, far=bool(far), not_finite=not_finite), seconds


def _size(components: StepComponents) -> int:
    return int(components.bench.batch) // components.recipe.accumulate


def _forward(components: StepComponents) -> tuple[Tensor, Tensor]:
    """Return prediction and loss on inputs that depend on shapes alone."""
    bench, networks, device, size = components.bench, components.networks, components.device, _size(components)
    side = bench.data.resolution_px // networks.downscale
    length = networks.context_length + bench.model.location_tokens
    generator = torch.Generator("cpu").manual_seed(SEED)  # the same numbers on every machine

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    sample = normal(size, INPUT_CHANNELS, side, side).to(components.unet_dtype)
    states = normal(size, length, networks.unet.config.cross_attention_dim).to(components.unet_dtype)
    # As in training with a location encoder, so that a compiled network is compiled once.
    states.requires_grad_(networks.location is not None)
    target = normal(size, LATENT_CHANNELS, side, side)
    timesteps = torch.randint(len(networks.sqrt_alphas_cumprod), (size,), generator=generator).to(device)
    sample = sample.contiguous(memory_format=components.memory_format)
    with components.unet_context(), components.attention_kernels():
        predicted = components.unet(sample, timesteps, states, return_dict=False)[0]
    return predicted, F.mse_loss(predicted.float(), target)


@torch.no_grad()
def _encode(components: StepComponents) -> Tensor | None:
    """Return moments of images that depend on shapes alone; None where caches replace the encoder."""
    if components.recipe.cache_image and components.recipe.cache_masked:
        return None
    side = components.bench.data.resolution_px
    generator = torch.Generator("cpu").manual_seed(SEED)
    image = torch.rand(_size(components), 3, side, side, generator=generator).mul_(2).sub_(1).to(components.device)
    with components.autocast():
        return components.vae_moments(image).float()


def _compared_parameters(components: StepComponents) -> list[nn.Parameter]:
    parameters = list(components.networks.unet.parameters())
    return parameters[:: max(1, len(parameters) // PARAMETERS_COMPARED)]


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad.detach().float().clone()


def _clear_gradients(components: StepComponents) -> None:
    for parameter in components.networks.trainable_parameters():  # with the location gate, used in the UNet's attention
        parameter.grad = None
    if components.device.type == "cuda":
        torch.cuda.empty_cache()


def _concatenate(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def _relative_error(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / a.norm())


def _update_error(components: StepComponents, weights: list[Tensor], gradients: list[Tensor]) -> float | None:
    """Compare the first update on equal gradients; None for bf16 weights, whose rounding it would measure."""
    if components.unet_dtype != torch.float32:
        return None
    updates = []
    for make_optimizers in (baseline_adamw, components.make_optimizers):
        copies = [nn.Parameter(weight.clone()) for weight in weights]
        for copy, gradient in zip(copies, gradients, strict=True):
            copy.grad = gradient.to(copy.dtype).clone(memory_format=torch.preserve_format)
        for optimizer in make_optimizers(copies, 1e-3):
            optimizer.step()
        updates.append(_concatenate([copy.detach() - weight for copy, weight in zip(copies, weights, strict=True)]))
    return _relative_error(updates[0], updates[1])
