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
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inpaint_bench.core.records import PARITY_TOLERANCE, Parity
from inpaint_bench.models import adapters
from inpaint_bench.models.architectures.nhwc_unet import NhwcUNet
from inpaint_bench.models.components import StepComponents, unet_inputs
from inpaint_bench.models.optimizers import baseline_adamw
from inpaint_bench.models.parallel.sharding import DIVIDED_WEIGHTS, whole
from inpaint_bench.profiling.profile import free_memory, synchronize

log = logging.getLogger(__name__)

SEED = 20_261_121
FP16_SCALE = 2.0**12  # without it small gradients underflow in fp16
PARAMETERS_COMPARED = 16  # evenly through the network; all would need a second copy of the gradients


@dataclass(kw_only=True)
class Results:
    """What one pass computes."""

    values: dict[str, Tensor]  # by the error that is made of them
    gradients: dict[str, Tensor]  # of some of the UNet's parameters, by diffusers' names; of adapters, of each B


def reference(components: StepComponents) -> Results | None:
    """Run the baseline at the recipe's micro-batch size. Return None where that does not fit into memory."""
    try:
        return _run(components)
    # The recipe may need less memory than the baseline, so it still runs, without this comparison.
    except torch.cuda.OutOfMemoryError:
        pass
    # After the exception is gone, as its frames hold what the pass made: else the driver has no memory for a stream.
    _clear_gradients(components)
    return None


def compare(components: StepComponents, baseline: Results | None) -> tuple[Parity, float]:
    """Return the recipe's errors, and the seconds of its first pass (with compilation)."""
    start_s = time.monotonic()
    results = _run(components)
    synchronize(components.device)
    seconds = time.monotonic() - start_s
    if baseline is None:
        return Parity(
            unavailable=f"the baseline does not fit on this GPU at {components.compared_size} images"
        ), seconds
    if adapters.layers(components.networks.unet):
        # The baseline has gradients of the weights beneath the adapters.
        of_b = adapters.gradients_of_b(components.networks.unet, baseline.gradients)
        baseline = replace(baseline, gradients=of_b)
    baseline = replace(baseline, gradients={name: baseline.gradients[name] for name in results.gradients})
    errors = {
        **relative_errors(baseline.values, results.values),
        "gradient_rel": relative_error(_flat(baseline.gradients.values()), _flat(results.gradients.values())),
        "update_rel": _update_error(components, baseline.gradients),
    }
    return judge("baseline", errors), seconds


def judge(reference: str, errors: dict[str, Any]) -> Parity:
    """Return the errors against a reference, None where one was not measured, and whether any is too large."""
    # Not `error > PARITY_TOLERANCE`: NaN compares false, and must count as far.
    far = {name: error for name, error in errors.items() if error is not None and not error <= PARITY_TOLERANCE}
    if far:
        log.warning("this recipe does not compute what the baseline does: %s", far)
    not_finite = [name for name, error in far.items() if not math.isfinite(error)]
    # JSON has neither NaN nor infinity: such errors become None, and are named instead.
    return Parity(reference=reference, **errors | dict.fromkeys(not_finite), far=bool(far), not_finite=not_finite)


def _run(components: StepComponents) -> Results:
    """Run forward and backward pass and the encoder; the gradients are cleared."""
    prediction, loss = _forward(components)
    scale = FP16_SCALE if components.autocast_dtype is torch.float16 else 1.0
    (loss * scale).backward()
    every = components.networks.unet_gradients()
    trained = (name for name, p in components.networks.unet.named_parameters() if p.requires_grad and p.is_meta)
    names = adapters.compared(components.recipe, {*every, *trained})  # in a pipeline other ranks have some
    names = names[:: max(1, len(names) // PARAMETERS_COMPARED)]
    gradients = {name: whole(every[name].detach()).float() / scale for name in names if name in every}
    values = {"prediction_rel": prediction.detach().float(), "loss_rel": loss.detach()}
    if components.encodes:
        values["encoder_rel"] = _encode(components)
    _clear_gradients(components)
    return Results(values=values, gradients=gradients)


def _forward(components: StepComponents) -> tuple[Tensor, Tensor]:
    """Return prediction and loss on inputs that depend on shapes alone."""
    generator = torch.Generator().manual_seed(SEED)
    sample, timesteps, states = unet_inputs(components, components.compared_size, generator)
    # As in training with a location encoder, so that a compiled network is compiled once.
    states.requires_grad_(components.networks.location is not None)
    shape = (len(sample), components.networks.latent_channels, *sample.shape[2:])
    target = torch.randn(shape, generator=generator).to(components.device)
    with components.network_context(), components.attention_kernels():
        predicted = components.calls["unet"](sample, timesteps, states, return_dict=False)[0]
    return predicted, F.mse_loss(predicted.float(), target)


@torch.no_grad()
def _encode(components: StepComponents) -> Tensor:
    """Return moments of images that depend on shapes alone."""
    side = components.bench.data.resolution_px
    generator = torch.Generator("cpu").manual_seed(SEED)
    image = torch.rand(components.compared_size, 3, side, side, generator=generator).mul_(2).sub_(1)
    with components.encoder_context():
        return components.vae_moments(image.to(components.device)).float()


def _flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def _clear_gradients(components: StepComponents) -> None:
    for parameter in components.networks.trainable_parameters():  # with the location gate, used in the UNet's attention
        parameter.grad = None
    free_memory(components.device)


def relative_errors(reference: dict[str, Tensor], computed: dict[str, Tensor]) -> dict[str, Any]:
    """Return the relative error of each value."""
    return {name: relative_error(value, computed[name]) for name, value in reference.items()}


def relative_error(a: Tensor, b: Tensor) -> float:
    """Return |a - b| / |a|."""
    return float((a - b).norm() / a.norm())


def _update_error(components: StepComponents, gradients: dict[str, Tensor]) -> float | None:
    """Compare the first update on equal gradients; None for bf16 weights, whose rounding it would measure."""
    if components.dtype != torch.float32 or isinstance(components.networks.unet, NhwcUNet):
        return None
    if components.parallel and components.parallel.sharding in DIVIDED_WEIGHTS:
        return None  # the same optimizer, on parts of the weights
    by_name = dict(components.networks.unet.named_parameters())
    parameters = [by_name[name] for name in gradients]
    updates = []
    # Equal weights and gradients on both sides, so that only the optimizers differ.
    for make_optimizers in (baseline_adamw, components.make_optimizers):
        copies = [nn.Parameter(p.detach().clone()) for p in parameters]
        for copy, gradient in zip(copies, gradients.values(), strict=True):
            # In the memory layout of its weight, as autograd makes gradients: channels_last perhaps.
            copy.grad = torch.empty_like(copy).copy_(gradient)
        for optimizer in make_optimizers(copies, 1e-3):
            optimizer.step()
        updates.append(_flat((copy - p).detach() for copy, p in zip(copies, parameters, strict=True)))
    return relative_error(updates[0], updates[1])
