"""How several ranks exchange gradients, and what each keeps (models/parallel/)."""

from typing import Any

import torch

from inpaint_bench.core.config.bench import BenchConfig
from inpaint_bench.models.architectures.base import own_blocks
from inpaint_bench.models.parallel.sharding import divided_layers, own_bytes, state_bytes
from inpaint_bench.models.training_step import StepComponents

from .base import Lever, Observation, Verification


class DdpSwitch(Lever[StepComponents]):
    """A switch of DDP, which is set when it wraps the UNet. The first bucket is smaller, which is DDP's own choice."""

    logged = {  # their names in DDP's own log
        "bucket_mb": "bucket_cap_bytes",
        "bucket_view": "gradient_as_bucket_view",
        "static_graph": "static_graph",
        "compress": "comm_hook",
    }
    fields = tuple(logged)

    def verify(self, observed: Observation[StepComponents]) -> Verification:
        parallel = observed.execution.parallel
        assert parallel is not None
        logged = self.logged[self.field]
        return Verification(parallel.ddp._get_ddp_logging_data().get(logged), f"{logged} read from DDP's log")


class Exchange(Lever[StepComponents]):
    """Gradients are averaged by an exchange of ours, see models/parallel/exchange.py."""

    field = "exchange"

    def available(self, bench: BenchConfig, device: torch.device) -> str | None:
        if bench.recipe.exchange != "peer_copies" or bench.ranks == 1 or device.type != "cuda":
            return None
        others = set(range(torch.cuda.device_count())) - {device.index}
        if all(torch.cuda.can_device_access_peer(device, other) for other in others):
            return None
        return "a GPU of this node cannot write into the memory of another: set exchange=in_place"

    def verify(self, observed: Observation[StepComponents]) -> Verification:
        if observed.execution.parallel is None:
            return Verification(None, "one GPU has nothing to exchange", None)
        exchange = observed.execution.parallel.exchange
        groups = exchange.groups if exchange else 0
        return Verification(groups, f"{groups} groups of gradients were averaged in the last eager step")


class Sharding(Lever[StepComponents]):
    """zero1: each rank updates a part of the weights and sends it. fsdp2: it keeps that part only.

    tensor: it keeps a part of the transformer blocks, and computes with that part only.
    pipeline: it keeps some of the transformer blocks.
    """

    field = "sharding"

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
