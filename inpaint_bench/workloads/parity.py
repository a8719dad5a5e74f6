"""How far a recipe is from the baseline: one forward and backward pass on fixed inputs, before and after the
levers are applied, on the same weights.

The inputs are made at the latents' level with a generator of their own, so nothing that training draws moves.
Errors are relative: |a - b| / |a| with a the baseline. Levers of the data path do not show here; what they
hand out is compared by their own check.
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
from inpaint_bench.models.assembly import Assembly, plain_adamw
from inpaint_bench.models.networks import INPUT_CHANNELS, LATENT_CHANNELS

log = logging.getLogger(__name__)

SEED = 20_261_121
FP16_SCALE = 2.0**12  # small gradients would be zero in fp16, as loss scaling knows
FAR = 0.1  # bf16 stays below 0.03, see benchmarks/README.md; beyond it something else is computed
PARAMETERS_COMPARED = 16  # evenly through the network; all of them would need a second copy of the gradients


@dataclass(kw_only=True)
class Reference:
    """What the baseline gives, or why it could not be asked."""

    moments: Tensor | None = None  # of the encoder, where a step still encodes
    prediction: Tensor | None = None
    loss: Tensor | None = None
    gradients: list[Tensor] | None = None
    weights: list[Tensor] | None = None
    missing: str = ""


def reference(assembly: Assembly) -> Reference:
    """The baseline's answer, at the batch that the recipe will compute at once."""
    try:
        prediction, loss = _forward(assembly)
        loss.backward()
        moments = _encoded(assembly)
    except torch.cuda.OutOfMemoryError:
        _forget(assembly)
        return Reference(missing=f"the baseline does not fit on this GPU at {_count(assembly)} images")
    chosen = _chosen(assembly)
    result = Reference(
        moments=moments,
        prediction=prediction.detach().float(),
        loss=loss.detach(),
        gradients=[_gradient(p) for p in chosen],
        weights=[p.detach().clone() for p in chosen],
    )
    _forget(assembly)
    return result


def compare(assembly: Assembly, against: Reference) -> tuple[Parity, float]:
    """manifest["parity"], and the seconds of the first pass of the recipe (compiling included)."""
    started = time.monotonic()
    prediction, loss = _forward(assembly)
    scale = FP16_SCALE if assembly.autocast is torch.float16 else 1.0
    (loss * scale).backward()
    moments = _encoded(assembly)
    if assembly.device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.monotonic() - started
    if against.prediction is None or against.loss is None or against.gradients is None or against.weights is None:
        _forget(assembly)
        return Parity(unavailable=against.missing), seconds
    chosen = _chosen(assembly)
    gradients = [_gradient(p) / scale for p in chosen]
    _forget(assembly)
    errors: dict[str, Any] = {
        "prediction_rel": _relative(against.prediction, prediction.detach().float()),
        "loss_rel": _relative(against.loss, loss.detach()),
        "gradient_rel": _relative(_joined(against.gradients), _joined(gradients)),
        "update_rel": _update(assembly, against.weights, against.gradients),
        "encoder_rel": None if moments is None or against.moments is None else _relative(against.moments, moments),
    }
    far = {name: error for name, error in errors.items() if error is not None and not error <= FAR}
    if far:
        log.warning("this recipe does not compute what the baseline does: %s", far)
    not_finite = [name for name, error in far.items() if not math.isfinite(error)]
    errors |= dict.fromkeys(not_finite)
    return Parity(reference="baseline", **errors, far=bool(far), not_finite=not_finite), seconds


def _count(assembly: Assembly) -> int:
    return int(assembly.bench.batch) // assembly.recipe.accumulate


def _forward(assembly: Assembly) -> tuple[Tensor, Tensor]:
    """Prediction and loss on inputs that depend on shapes alone."""
    nets, device, count = assembly.nets, assembly.device, _count(assembly)
    side = assembly.bench.data.resolution_px // nets.downscale
    width, length = nets.unet.config.cross_attention_dim, nets.context_length + assembly.bench.model.location_tokens
    generator = torch.Generator("cpu").manual_seed(SEED)  # the same numbers on every machine

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    state = normal(count, INPUT_CHANNELS, side, side).to(assembly.input_dtype)
    text = normal(count, length, width).to(assembly.input_dtype)
    # As in training, where the location encoder wants it: a compiled network is then compiled once.
    text.requires_grad_(nets.location is not None)
    target = normal(count, LATENT_CHANNELS, side, side)
    times = torch.randint(len(nets.signal), (count,), generator=generator).to(device)
    with assembly.unet_cast(), assembly.attention():
        predicted = assembly.unet(state.contiguous(memory_format=assembly.layout), times, text, return_dict=False)[0]
    return predicted, F.mse_loss(predicted.float(), target)


@torch.no_grad()
def _encoded(assembly: Assembly) -> Tensor | None:
    """Moments of pictures that depend on shapes alone; None where caches stand for the encoder."""
    if assembly.recipe.cache_image and assembly.recipe.cache_masked:
        return None
    side = assembly.bench.data.resolution_px
    generator = torch.Generator("cpu").manual_seed(SEED)
    picture = torch.rand(_count(assembly), 3, side, side, generator=generator).mul_(2).sub_(1).to(assembly.device)
    with assembly.cast():
        return assembly.moments(picture).float()


def _chosen(assembly: Assembly) -> list[nn.Parameter]:
    every = list(assembly.nets.unet.parameters())
    step = max(1, len(every) // PARAMETERS_COMPARED)
    return every[::step]


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad.detach().float().clone()


def _forget(assembly: Assembly) -> None:
    for parameter in assembly.nets.trained():  # the location's gate too: it sits in the UNet's attention
        parameter.grad = None
    if assembly.device.type == "cuda":
        torch.cuda.empty_cache()


def _joined(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def _relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / a.norm())


def _update(assembly: Assembly, weights: list[Tensor], gradients: list[Tensor]) -> float | None:
    """Of the first update on equal gradients; None for bf16 weights, whose rounding it would measure."""
    if assembly.input_dtype != torch.float32:
        return None
    moved = []
    for make in (plain_adamw, assembly.optimizers):
        copies = [nn.Parameter(weight.clone()) for weight in weights]
        for copy, gradient in zip(copies, gradients, strict=True):
            copy.grad = gradient.to(copy.dtype).clone(memory_format=torch.preserve_format)
        for optimizer in make(copies, 1e-3):
            optimizer.step()
        moved.append(_joined([copy.detach() - weight for copy, weight in zip(copies, weights, strict=True)]))
    return _relative(moved[0], moved[1])
