"""How far a recipe is from fp32: forward and backward pass on fixed inputs, in fp32 by PyTorch's own operations before
the levers are applied, and as the recipe computes them afterwards, on the same weights.

The inputs are latents drawn from a generator of their own, so nothing that training draws changes. Four images are
compared: with 16 of FLUX that took 34 s on an H200. Errors are relative: |a - b| / |a| with a the reference's. Levers
of the data path do not show here; their own verification compares what they return.
"""

import logging
import math
import time
from collections import defaultdict
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from inpaint_bench.core.config.levers import DIVIDED_WEIGHTS
from inpaint_bench.core.records import PARITY_TOLERANCE, Parity
from inpaint_bench.core.stages import stage
from inpaint_bench.core.workloads.finetune_inpaint import finetune_keys
from inpaint_bench.models import adapters
from inpaint_bench.models.architectures.nhwc_unet import NhwcUNet
from inpaint_bench.models.execution import DTYPES, in_fp32
from inpaint_bench.models.optimizers import baseline_adamw
from inpaint_bench.models.parallel.sharding import whole
from inpaint_bench.models.training_step import StepComponents, unet_inputs
from inpaint_bench.profiling.profile import free_memory, synchronize

from .batch_search import attempt

log = logging.getLogger(__name__)

FP32 = "fp32 ieee, eager"  # the reference
SEED = 20_261_121
FP16_SCALE = 2.0**12  # without it small gradients underflow in fp16
IMAGES_COMPARED = 4  # the first of a batch
PARAMETERS_COMPARED = 16  # evenly through the network; all would need a second copy of the gradients


@dataclass(kw_only=True)
class Results:
    """What the passes compute of the images that are compared, in host memory."""

    values: dict[str, Tensor]  # by the error that is made of them
    gradients: dict[str, Tensor]  # some of the UNet's parameters, by diffusers' names; with adapters, each B


@stage("parity")
def reference(components: StepComponents, size: int | None = None) -> Results | None:
    """Compute in fp32, `size` images at a time. Return None if that does not fit into memory. Before the levers.

    It needs less memory than training: blocks are computed again in the backward pass, and only the gradients that are
    compared are kept. It takes several images at a time if they are small, as it lengthens the start of every run.
    """
    size = size or (1 if components.networks.architecture.large else IMAGES_COMPARED)
    results, _ = attempt(partial(_in_fp32, components, size), components.device)
    _clear_gradients(components)
    return results


def _in_fp32(components: StepComponents, size: int) -> Results:
    unet = components.networks.unet
    trained = {name: p for name, p in unet.named_parameters() if p.requires_grad}
    kept = [(trained[name], trained[name].dtype) for name in _compared(components, trained)]
    try:
        unet.conditions_dtype = DTYPES[components.facts()["precision"]]  # for FLUX: equal inputs on both sides
        unet.requires_grad_(False)
        widened = partial(in_fp32, components)  # repeated if blocks are recomputed, in a thread of its own
        recompute = partial(checkpoint, use_reentrant=False, context_fn=lambda: (nullcontext(), widened()))
        unet.enable_gradient_checkpointing(recompute)
        for parameter, _ in kept:
            parameter.data = parameter.data.float()  # as their gradients then are
            parameter.requires_grad_(True)
        with widened():
            return _run(components, size)
    finally:
        for parameter, dtype in kept:
            parameter.grad = None
            parameter.data = parameter.data.to(dtype)
        for parameter in trained.values():
            parameter.requires_grad_(True)
        unet.disable_gradient_checkpointing()
        unet.conditions_dtype = None


@stage("parity")
def compare(components: StepComponents, against: Results | None) -> tuple[Parity, float]:
    """Return the recipe's errors, and the seconds of its first pass (with compilation)."""
    start_s = time.monotonic()
    # In one pass, as in training: a compiled network is compiled once.
    run = partial(_run, components, components.compared_size)
    # If there are several ranks, the others would wait for one whose pass has ended early.
    with stage("compilation"):
        results = run() if components.parallel else attempt(run, components.device)[0]
        synchronize(components.device)
    seconds = time.monotonic() - start_s
    errors = None
    if against is not None and results is not None:
        errors, _ = attempt(partial(_errors, components, against, results), components.device)
    _clear_gradients(components)
    return judge(FP32, errors) if errors else ran_out(against is None), seconds


def ran_out(of_reference: bool) -> Parity:
    """Return that the memory of the GPU did not suffice for the reference, or for the recipe beside it."""
    return Parity(unavailable=f"{'the reference in fp32' if of_reference else 'this recipe'} ran out of GPU memory")


def _errors(components: StepComponents, against: Results, results: Results) -> dict[str, Any]:
    gradients = against.gradients
    if adapters.layers(components.networks.unet):
        # The reference has gradients of the weights beneath the adapters.
        gradients = adapters.gradients_of_b(components.networks.unet, gradients)
    gradients = {name: gradients[name] for name in results.gradients}
    return {
        **relative_errors(against.values, results.values),
        "gradient_rel": relative_error(_flat(gradients.values()), _flat(results.gradients.values())),
        "update_rel": _update_error(components, gradients),
    }


def judge(reference: str, errors: dict[str, Any]) -> Parity:
    """Return the errors against a reference, None if one was not measured, and whether any is too large."""
    # Not `error > PARITY_TOLERANCE`: NaN compares false, and must count as far.
    far = {name: error for name, error in errors.items() if error is not None and not error <= PARITY_TOLERANCE}
    if far:
        log.warning("this recipe does not compute what the reference (%s) does: %s", reference, far)
    not_finite = [name for name, error in far.items() if not math.isfinite(error)]
    # JSON has neither NaN nor infinity: such errors become None, and are named instead.
    return Parity(reference=reference, **errors | dict.fromkeys(not_finite), far=bool(far), not_finite=not_finite)


def _compared(components: StepComponents, names: Iterable[str]) -> list[str]:
    """Return the names of the parameters whose gradients are compared. Given its own result, it returns all of it."""
    ordered = adapters.compared(components.networks.architecture, components.recipe, names)
    return ordered[:: max(1, len(ordered) // PARAMETERS_COMPARED)]


def _run(components: StepComponents, size: int) -> Results:
    """Run forward and backward pass and the encoder over micro-batches of `size`; the gradients are cleared.

    The last of them may have more images than are compared, which get no gradient.
    """
    inputs, image = _inputs(components)
    count = min(len(image), IMAGES_COMPARED)
    scale = FP16_SCALE if components.autocast_dtype is torch.float16 else 1.0
    values: dict[str, list[Tensor]] = defaultdict(list)
    for start in range(0, count, size):
        rows, compared = slice(start, start + size), slice(count - start)
        *given, target = (value[rows] for value in inputs)
        # As in training before the UNet: with inductor's CUDA graphs the next compiled call overwrites its gradients.
        if components.encodes:
            with torch.no_grad(), components.encoder_context():
                moments = components.vae_moments(image[rows].to(components.device))
            values["encoder_rel"].append(moments[compared].float().cpu())
        with components.network_context(), components.attention_kernels():
            predicted = components.calls["unet"](*given, return_dict=False)[0][compared]
        # Their sum is the mean of all.
        loss = F.mse_loss(predicted.float(), target[compared]) * (len(predicted) / count)
        (loss * scale).backward()
        values["prediction_rel"].append(predicted.detach().float().cpu())
        values["loss_rel"].append(loss.detach().cpu()[None])
    if components.parallel:
        components.parallel.finish()
    every = components.networks.unet_gradients()
    trained = (name for name, p in components.networks.unet.named_parameters() if p.requires_grad and p.is_meta)
    names = _compared(components, {*every, *trained})  # in a pipeline other ranks have some
    gradients = {name: whole(every[name].detach()).float().cpu() / scale for name in names if name in every}
    _clear_gradients(components)
    joined = {name: torch.cat(parts) for name, parts in values.items()}
    return Results(values=joined | {"loss_rel": joined["loss_rel"].sum()}, gradients=gradients)


def _inputs(components: StepComponents) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return inputs of the UNet with its target, and images in host memory: they depend on shapes alone."""
    generator = torch.Generator().manual_seed(SEED)
    sample, timesteps, states = unet_inputs(components, components.compared_size, generator)
    # As in training with a location encoder, so that a compiled network is compiled once.
    states.requires_grad_(components.networks.location is not None)
    shape = (len(sample), components.networks.latent_channels, *sample.shape[2:])
    target = torch.randn(shape, generator=generator).to(components.device)
    side = components.bench.data.resolution_px
    image = torch.rand(len(sample), 3, side, side, generator=generator.manual_seed(SEED)).mul_(2).sub_(1)
    return (sample, timesteps, states, target), image


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
    if finetune_keys(components.bench).optimizer != "adamw":
        return None
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
