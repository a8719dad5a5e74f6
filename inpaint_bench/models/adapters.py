"""LoRA: low-rank matrices beside frozen weights (Hu et al., arXiv 2106.09685), by peft and as diffusers saves them.

A layer W x becomes W x + alpha / rank * B A x. B starts at zero, so that the first prediction is that of W alone, and A
is drawn from the default generator. Adapters are fp32, whatever the type of the weights beneath them.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from inpaint_bench.core.config.levers import RecipeConfig
from inpaint_bench.core.files import replacing_folder

from .architectures.base import Architecture
from .networks import Networks
from .pipeline_folder import LOCATION, save_location
from .weights_folder import ADAPTERS

TEXT_TARGETS = ("q_proj", "k_proj", "v_proj", "out_proj")
ADAPTER = "default"  # peft's name of the only adapter
_B = f".lora_B.{ADAPTER}"


def add(networks: Networks, recipe: RecipeConfig) -> None:
    """Freeze the UNet and add the recipe's adapters to it, and to the text encoder if the recipe says so."""
    from peft import LoraConfig

    alpha = float(recipe.lora_rank if recipe.lora_alpha is None else recipe.lora_alpha)

    def config(targets: tuple[str, ...]) -> Any:
        return LoraConfig(
            r=recipe.lora_rank, lora_alpha=alpha, init_lora_weights="gaussian", target_modules=list(targets)
        )

    networks.architecture.check_adaptable(networks.unet)
    networks.unet.requires_grad_(False)
    networks.unet.add_adapter(config(networks.architecture.lora_targets[recipe.lora_targets]), adapter_name=ADAPTER)
    if recipe.lora_text_encoder:
        networks.text_encoder.add_adapter(config(TEXT_TARGETS), adapter_name=ADAPTER)
    for network in (networks.unet, networks.text_encoder):
        for layer in layers(network).values():
            # Autocast casts what it must; without it `_Narrow` does.
            layer.cast_input_dtype_enabled = False
            for part in (layer.lora_A, layer.lora_B):
                part.float()  # peft makes them of the type beneath
                if type(part[ADAPTER]) is nn.Linear:
                    part[ADAPTER].__class__ = _Narrow


class _Narrow(nn.Linear):
    """A linear layer with fp32 weights that multiplies in the type of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


def layers(network: nn.Module) -> dict[str, Any]:
    """Return the layers of a network that have an adapter, by name."""
    return {name: module for name, module in network.named_modules() if hasattr(module, "lora_A")}


# --- gradients -----------------------------------------------------------------------------------


def compared(architecture: Architecture, recipe: RecipeConfig, names: Iterable[str]) -> list[str]:
    """Return those of a UNet's parameters whose gradients tell how far a recipe is from the baseline, in order.

    With LoRA, before adapters are added: the weights that get one; afterwards: each B, in the same order.
    """
    if not recipe.lora_rank:
        return sorted(names)
    ends = tuple(f"{target}.weight" for target in architecture.lora_targets[recipe.lora_targets])
    return sorted((name for name in names if _B in name or name.endswith(ends)), key=lambda name: name.replace(_B, ""))


def gradients_of_b(unet: nn.Module, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return what the gradient of each B must be while B is zero, from those of the weights: alpha / rank * dW A^T."""
    result = {}
    for name, gradient in gradients.items():
        layer: Any = unet.get_submodule(name.removesuffix(".weight"))
        a, b = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
        if a.is_meta:
            continue  # belongs to another rank
        product = layer.scaling[ADAPTER] * gradient.flatten(1) @ a.detach().flatten(1).T.to(gradient)
        result[f"{name.removesuffix('.weight')}{_B}.weight"] = product.view_as(b)
    return result


# --- files ---------------------------------------------------------------------------------------


def save(networks: Networks, folder: Path) -> None:
    """Write the adapters for `load_lora_weights` of diffusers, and the location encoder beside them.

    An existing folder of adapters is replaced once the new one is complete and synced.
    """
    from diffusers import loaders
    from peft.utils import get_peft_model_state_dict

    saved: dict[str, Any] = {}
    for name in ("unet", "text_encoder"):
        network = getattr(networks, name)
        if layers(network):
            # In peft's names. diffusers' examples convert them, which renames attention's layers only, and its loader
            # then drops all that are named unlike the first (seen with 0.42).
            tensors = get_peft_model_state_dict(network, save_embedding_layers=False)
            role = networks.architecture.role if name == "unet" else name
            saved[f"{role}_lora_layers"] = {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
            # It has alpha, without which diffusers would take the rank for it.
            described = {**network.peft_config[ADAPTER].to_dict(), "base_model_name_or_path": None}  # a path of ours
            saved[f"{role}_lora_adapter_metadata"] = described
    with replacing_folder(folder, ADAPTERS) as new:
        mixin: Any = getattr(loaders, networks.architecture.lora_mixin)
        mixin.save_lora_weights(new, **saved)
        if networks.location:
            save_location(networks.location, new / LOCATION)
