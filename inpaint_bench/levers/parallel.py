"""How several ranks exchange gradients, and what each keeps (models/parallel/)."""

from __future__ import annotations

from typing import Any

import torch

from inpaint_bench.core.config.bench import BenchConfig
from inpaint_bench.core.workloads.finetune_inpaint import finetune_keys
from inpaint_bench.models.architectures.base import own_blocks
from inpaint_bench.models.parallel.sharding import DIVIDED_WEIGHTS, divided_layers, own_bytes, state_bytes
from inpaint_bench.models.training_step import StepComponents

from .base import Lever, Observation, Verification


class _SeveralRanks(Lever[StepComponents]):
    """What several ranks do together, set up when the UNet is wrapped."""

    def available(self, bench: BenchConfig, device: torch.device) -> str | None:
        return None if bench.ranks > 1 else "it concerns what several GPUs exchange: set gpus too"


class _DdpSwitch(_SeveralRanks):
    """A switch of DDP, which is set when it wraps the UNet."""

    logged: str  # its name in DDP's own log

    def available(self, bench: BenchConfig, device: torch.device) -> str | None:
        if reason := super().available(bench, device):
            return reason
        if (exchange := bench.recipe.exchange) != "default":
            return f"exchange={exchange} takes the place of DDP, which has this switch"
        instead = {"fsdp2": "FSDP2", "pipeline": "the pipeline"}.get(bench.recipe.sharding)
        return f"{instead} takes the place of DDP, which has this switch" if instead else None

    def verify(self, observed: Observation[StepComponents]) -> Verification:
        parallel = observed.execution.parallel
        assert parallel is not None
        value = parallel.ddp._get_ddp_logging_data().get(self.logged)
        return Verification(value, f"{self.logged} read from DDP's log")


class Exchange(Lever[StepComponents]):
    """Gradients are averaged by an exchange of ours, see models/parallel/exchange.py.

    One GPU takes it and exchanges nothing, so that one sweep can have 1, 2 and 4.
    """

    field = "exchange"

    def available(self, bench: BenchConfig, device: torch.device) -> str | None:
        if bench.recipe.sharding != "none":
            return f"sharding={bench.recipe.sharding} has an exchange of its own"
        if bench.recipe.exchange != "peer_copies" or bench.ranks == 1:
            return None
        if bench.nodes > 1:
            return "a GPU writes into the memory of GPUs of its own node only: set exchange=in_place"
        others = set(range(torch.cuda.device_count())) - {device.index} if device.type == "cuda" else set()
        if not all(torch.cuda.can_device_access_peer(device, other) for other in others):
            return "a GPU of this node cannot write into the memory of another: set exchange=in_place"
        return None

    def verify(self, observed: Observation[StepComponents]) -> Verification:
        if observed.execution.parallel is None:
            return Verification(None, "one GPU has nothing to exchange", None)
        exchange = observed.execution.parallel.exchange
        groups = exchange.groups if exchange else 0
        return Verification(groups, f"{groups} groups of gradients were averaged in the last eager step")


class BucketSize(_DdpSwitch):
    """MiB of gradients that are averaged at once. The first bucket is smaller, which is DDP's own choice."""

    field, logged = "bucket_mb", "bucket_cap_bytes"


class BucketView(_DdpSwitch):
    """Gradients are views into the buckets."""

    field, logged = "bucket_view", "gradient_as_bucket_view"


class StaticGraph(_DdpSwitch):
    """The set of used parameters never changes, nor their order."""

    field, logged = "static_graph", "static_graph"


class Compress(_DdpSwitch):
    """Gradients travel as bf16, which halves their bytes."""

    field, logged = "compress", "comm_hook"

    def available(self, bench: BenchConfig, device: torch.device) -> str | None:
        if reason := super().available(bench, device):
            return reason
        return None if device.type == "cuda" else "PyTorch compresses gradients for NCCL only, which needs GPUs"


# What divided weights do not go with: fields of the recipe, their values that they take, and the reason.
_ALONE = "rank 0 reads it back by a pass of the UNet alone, and has a part of the weights only"
_NOT_WITH_PARTS: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("unet", ("diffusers",), "the channels-last UNet keeps its weights packed for its kernels"),
    ("compile", ("none",), "the exchange in every block would break the one graph that is compiled"),
    ("precision", ("bf16", "fp32"), "fp16's loss scaling would look for overflow in a part of the gradients only"),
    ("ema", (False,), "the average is of whole weights, which no GPU has"),
    ("channels_last", (False,), _ALONE),
    ("attention", ("default",), _ALONE),
)
_NOT_WITH_TENSOR: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("linears", ("default",), "its products take whole weights"),
    *_NOT_WITH_PARTS,
)
# In a pipeline blocks are whole, and rank 0 can pass through its own alone.
_NOT_WITH_A_PIPELINE: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("compile", ("none", "blocks"), "other ranks have a part of that graph: set recipe.compile=blocks"),
    *(row for row in _NOT_WITH_PARTS if row[0] in ("precision", "ema")),
)


class Sharding(_SeveralRanks):
    """zero1: each rank updates a part of the weights and sends it. fsdp2: it keeps that part only.

    tensor: it keeps a part of the transformer blocks, and computes with that part only.
    pipeline: it keeps some of the transformer blocks.
    """

    field = "sharding"

    def available(self, bench: BenchConfig, device: torch.device) -> str | None:
        if reason := super().available(bench, device):
            return reason
        recipe, workload = bench.recipe, finetune_keys(bench)
        pipeline = recipe.sharding == "pipeline"
        if recipe.weights != "fp32" and not (pipeline and recipe.lora_rank):
            return f"weights={recipe.weights} have an AdamW of their own with one state for all, which is not divided"
        if recipe.optimizer == "adamw_8bit":
            return "bitsandbytes nests its state, which is not brought together again for a checkpoint"
        if recipe.cuda_graph:
            return "what the ranks send each other for it is not captured in a CUDA graph"
        if recipe.sharding not in DIVIDED_WEIGHTS:
            return None
        rows = {"pipeline": _NOT_WITH_A_PIPELINE, "tensor": _NOT_WITH_TENSOR}.get(recipe.sharding, _NOT_WITH_PARTS)
        for name, taken, reason in rows:
            if (value := getattr(recipe, name)) not in taken:
                return f"not with recipe.{name}={str(value).lower()}: {reason}"
        if workload.validates or workload.save_weights:
            return (
                "validation, samples and saved weights need whole weights on rank 0, which has a part only: set "
                "workload.validate_every=0, sample_images=0 and save_weights=false, or continue with sharding=none"
            )
        return None

    def verify(self, observed: Observation[StepComponents]) -> Verification:
        execution, kind = observed.execution, observed.recipe.sharding
        unet = execution.networks.unet
        # A pipeline divides frozen weights too, some of which are stored as buffers.
        kept = [*unet.parameters(), *unet.buffers()] if kind == "pipeline" else execution.trained
        state, weights = sum(map(state_bytes, execution.optimizers)), sum(map(own_bytes, kept))
        all_weights = sum(tensor.nbytes for tensor in kept)
        all_state = 2 * sum(parameter.nbytes for parameter in execution.trained)  # two moments as wide as the weights
        effective: dict[str, Any] = {
            f"{name}_mib": round(count / 2**20, 3)
            for name, count in (
                *(("state", state), ("state_of_all", all_state)),
                *(("weights", weights), ("weights_of_all", all_weights)),
            )
        }
        classes = dict.fromkeys(type(parameter).__name__ for parameter in execution.trained)
        text = (
            f"{type(execution.optimizers[0]).__name__} over {' and '.join(classes)}: between steps rank 0 keeps "
            f"{state / 2**20:.1f} of {all_state / 2**20:.1f} MiB of optimizer state and {weights / 2**20:.1f} of "
            f"{all_weights / 2**20:.1f} MiB of weights"
        )
        if kind == "tensor":
            blocks, layers, divided = divided_layers(unet)
            effective |= {"blocks": blocks, "divided_layers": divided}
            text += f"; {divided} of the {layers} linear layers in {blocks} transformer blocks are divided"
            return Verification(effective, text, divided == layers > 0)
        if kind == "pipeline":
            own, blocks, passes = len(own_blocks(unet)), len(unet.blocks), observed.calls["unet"]
            effective |= {"blocks": blocks, "own_blocks": own, "micro_batches": passes}
            text += f"; it computes {own} of {blocks} transformer blocks, with {passes} micro-batches in a step"
        fewer = weights == all_weights if kind == "zero1" else weights < all_weights
        return Verification(effective, text, fewer)
