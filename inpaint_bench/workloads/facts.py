"""What the analysis must know to make rates comparable: shapes, precisions, and the work of one image."""

from __future__ import annotations

import json
from typing import Any

import torch

from inpaint_bench.models import flops
from inpaint_bench.models.assembly import ADAMW, Assembly


def of(assembly: Assembly, optimizers: list[torch.optim.Optimizer], scaled: bool) -> dict[str, Any]:
    """manifest["workload_facts"]. `flop_per_image`: of the model, less what a cache has done; recomputation of
    activations is not counted, as is usual for MFU."""
    bench, nets, recipe = assembly.bench, assembly.nets, assembly.recipe
    parameters, trained = nets.counts(), sum(p.numel() for p in nets.trained())
    parts = flops.count(bench.model, bench.data.resolution_px, nets)
    encodes, text = 2 - (recipe.cache_image + recipe.cache_masked), not recipe.cache_text
    first = optimizers[0]
    return {
        "resolution_px": bench.data.resolution_px,
        "precision": recipe.precision if recipe.weights == "fp32" else "bf16",
        "weights_precision": recipe.weights,
        "tf32": recipe.tf32,
        "fp32_precision": assembly.fp32,
        "channels_last": recipe.channels_last,
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "weights": bench.model.weights,
        "own_shapes": _own_shapes(bench.model.unet, nets.unet.config),
        "parameters": parameters["unet"],  # without the location encoder
        "parameters_trained": trained,
        "parameters_by_network": parameters,
        "flop_per_image": flops.training(parts, encodes=encodes, text=text),
        "flop_parts": parts,
        "encodes_online": encodes,
        "text_online": text,
        "cache": assembly.cache.facts if assembly.cache else None,
        "location_tokens": bench.model.location_tokens,
        "optimizer": {
            "class": type(first).__name__,
            "foreach": first.defaults.get("foreach"),
            "fused": first.defaults.get("fused"),
            "lr": bench.workload.learning_rate,
            "betas": list(ADAMW["betas"]),
            "eps": ADAMW["eps"],
            "weight_decay": ADAMW["weight_decay"],
            "grad_scaler": scaled,
        },
        "skipped_steps": 0,
        "epochs": bench.workload.epochs,
        "dataset_images": bench.workload.dataset_images,
        "num_images": len(assembly.source),
    }


def _own_shapes(described: dict[str, Any], loaded: Any) -> bool:
    """Whether the weights that were loaded are of another size than the model whose name the run bears."""
    names = ("block_out_channels", "layers_per_block", "cross_attention_dim")
    return any(json.dumps(loaded[name]) != json.dumps(described[name]) for name in names if name in described)
