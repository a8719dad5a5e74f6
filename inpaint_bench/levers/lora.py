"""LoRA adapters in the place of the UNet's weights (models/adapters.py)."""

from collections import Counter
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from inpaint_bench.core.config.bench import BenchConfig
from inpaint_bench.kernels.linear import FrozenLinear, store_frozen
from inpaint_bench.models import adapters
from inpaint_bench.models.architectures.base import own_blocks
from inpaint_bench.models.parallel.sharding import state_bytes
from inpaint_bench.models.training_step import StepComponents

from .base import Lever, Observation, Phase, Verification


class Rank(Lever[StepComponents]):
    """Adapters of a rank, which are added to the networks as all of these levers say."""

    field, phase = "lora_rank", Phase.ADAPTERS

    def available(self, bench: BenchConfig, device: torch.device) -> str | None:
        return None if find_spec("peft") else "peft is not installed: pip install 'inpaint-bench[lora]'"

    def apply(self, execution: StepComponents) -> None:
        adapters.add(execution.networks, execution.recipe)

    def verify(self, observed: Observation[StepComponents]) -> Verification:
        execution, unet = observed.execution, observed.execution.networks.unet
        kinds = _kinds(layers := adapters.layers(unet), execution.networks.architecture.lora_targets["all"])
        ranks = {layer.r[adapters.ADAPTER] for layer in layers.values()}
        frozen = not any(p.requires_grad for name, p in unet.named_parameters() if ".lora_" not in name)
        trained = sum(parameter.numel() for parameter in execution.trained)
        effective: dict[str, Any] = {
            "rank": next(iter(ranks), 0),
            "layers": len(layers),
            "parameters": trained,
            "state_mib": round(sum(map(state_bytes, execution.optimizers)) / 2**20, 3),
        }
        text = (
            f"{len(layers)} layers of the UNet ({kinds}), whose own weights "
            f"{'are frozen' if frozen else 'are trained too'}; {trained:,} parameters are trained, location encoder "
            f"included; {effective['state_mib']:.1f} MiB of optimizer state"
        )
        if observed.cuda:
            text += f"; at most {torch.cuda.max_memory_allocated(execution.device) / 2**20:,.0f} MiB were allocated"
        products = [layer.lora_B[adapters.ADAPTER].weight for layer in layers.values()]
        moved = any((product != 0).any().item() for product in products if not product.is_meta)
        return Verification(effective, text, frozen and moved and len(ranks) == 1)


class Alpha(Lever[StepComponents]):
    """What scales their product, over the rank."""

    field, phase = "lora_alpha", Phase.ADAPTERS

    def verify(self, observed: Observation[StepComponents]) -> Verification:
        layers = adapters.layers(observed.execution.networks.unet).values()
        found = {layer.scaling[adapters.ADAPTER] * layer.r[adapters.ADAPTER] for layer in layers}
        text = f"scaling of {len(layers)} layers read back"
        return Verification(sorted(found), text)


class Targets(Lever[StepComponents]):
    """Which layers of the UNet have one."""

    field, phase = "lora_targets", Phase.ADAPTERS

    def verify(self, observed: Observation[StepComponents]) -> Verification:
        networks = observed.execution.networks
        layers, targets = adapters.layers(networks.unet), networks.architecture.lora_targets
        more = [name for name in layers if not name.endswith(targets["attention"])]
        return Verification(len(layers), _kinds(layers, targets["all"]), bool(more))


class FrozenStorage(Lever[StepComponents]):
    """The frozen weights of the transformer's blocks in 8 or 4 bits (kernels/linear.py)."""

    field, phase = "frozen_storage", Phase.ADAPTERS

    def apply(self, execution: StepComponents) -> None:
        for block in execution.networks.unet.blocks:
            store_frozen(block, execution.recipe.frozen_storage)

    def verify(self, observed: Observation[StepComponents]) -> Verification:
        blocks = own_blocks(observed.execution.networks.unet)
        layers = [m for block in blocks for m in block.modules() if isinstance(m, FrozenLinear)]
        types = {str(layer.stored.dtype).removeprefix("torch.") for layer in layers}
        stored = sum(layer.stored_bytes for layer in layers) / 2**20
        weights = sum(layer.in_features * layer.out_features for layer in layers)
        kept = sum(type(m) is nn.Linear and not m.weight.requires_grad for block in blocks for m in block.modules())
        text = f"{len(layers)} linear layers of {len(blocks)} blocks as {', '.join(types)}: {stored:,.1f} MiB"
        effective = {
            "layers": len(layers),
            "of": len(layers) + kept,
            "weights": weights,
            "weights_mib": round(stored, 3),
        }
        return Verification(effective, f"{text}, in 16 bits {weights / 2**19:,.1f}")


class TextEncoder(Lever[StepComponents]):
    """Adapters in the text encoder, which is then no longer frozen."""

    field, phase = "lora_text_encoder", Phase.ADAPTERS

    def apply(self, execution: StepComponents) -> None:
        execution.train_text_encoder = True

    def verify(self, observed: Observation[StepComponents]) -> Verification:
        layers = adapters.layers(observed.execution.networks.text_encoder)
        moved = sum(bool((layer.lora_B[adapters.ADAPTER].weight != 0).any()) for layer in layers.values())
        text = f"{len(layers)} layers ({_kinds(layers, adapters.TEXT_TARGETS)}), of which {moved} have changed"
        return Verification(len(layers), text, moved == len(layers))


def _kinds(layers: dict[str, Any], targets: Sequence[str]) -> str:
    kinds = Counter(next(kind for kind in targets if name.endswith(kind)) for name in layers)
    return ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
