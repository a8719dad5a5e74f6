"""Judging a model on held-out images: validation during training, and metrics and pictures when it ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import default_collate

from inpaint_bench.core.workloads.finetune_inpaint import finetune_keys
from inpaint_bench.data.samples import Batch, Samples
from inpaint_bench.data.split import Indices
from inpaint_bench.models import adapters, generation
from inpaint_bench.models.components import StepComponents
from inpaint_bench.models.generation import Predict
from inpaint_bench.models.pipeline_folder import save_pipeline
from inpaint_bench.quality import grid, metrics, validation_loss

MASK_SEED = 7_919  # the held-out images' masks are the same in every run, whatever its seed
BATCH = 8  # images; evaluation is not what is measured
GRID = Path("quality") / "grid.png"
WEIGHTS = Path("weights")


def validate(components: StepComponents, held_out: Indices) -> dict[str, float]:
    """Return `loss` on fixed noise, timesteps and masks, and `n`; with locations also `loss_shuffled`.

    In the latter every image has another one's position. Empty where nothing is held out.
    """
    chosen = _evenly_spaced(held_out, finetune_keys(components.bench).validation_images)
    if not len(chosen):
        return {}

    def mean_loss(shuffle_positions: bool) -> float:
        batches, predict = _batches(components, chosen), _unet_prediction(components)
        per_image = validation_loss.losses(
            components.networks, batches, predict=predict, shuffle_positions=shuffle_positions
        )
        return float(per_image.mean())

    result = {"loss": mean_loss(shuffle_positions=False), "n": len(chosen)}
    # The same images with another image's position: the difference is what the model learned from positions.
    if components.networks.location and len(chosen) > 1:
        result["loss_shuffled"] = mean_loss(shuffle_positions=True)
    return result


def finish(components: StepComponents, held_out: Indices, run_dir: Path) -> dict[str, Any]:
    """Restore held-out images, image_metrics and show them, and save the weights, as the configuration asks.

    With EMA, the averaged weights are judged and saved.
    """
    config = finetune_keys(components.bench)
    result: dict[str, Any] = {"metrics": {}, "pictures": None, "weights": None}
    with components.ema.applied() if components.ema else nullcontext():
        chosen = _evenly_spaced(held_out, config.sample_images)
        if len(chosen):
            result |= _restore(components, chosen, run_dir)
        if config.save_weights:
            save = adapters.save if adapters.layers(components.networks.unet) else save_pipeline
            save(components.networks, run_dir / WEIGHTS)
            result["weights"] = WEIGHTS.as_posix()
    return result


def _restore(components: StepComponents, chosen: Indices, run_dir: Path) -> dict[str, Any]:
    bench = components.bench
    image_metrics = metrics.ImageMetrics(bench.quality, len(chosen), components.device)
    shown: list[tuple[Tensor, Tensor, Tensor]] = []
    for batch in _batches(components, chosen):
        with components.autocast(), components.attention_kernels():
            restored = generation.restore(
                components.networks,
                batch,
                finetune_keys(bench).sample_steps,
                # A seed per image: the result does not depend on the others of its batch.
                [MASK_SEED + int(index) for index in batch["index"]],
                predict=_unet_prediction(components),
            )
        image_metrics.add(batch["image"], restored, batch["mask"])
        if len(shown) < grid.ROWS:
            shown += zip(batch["image"], batch["mask"], restored.cpu(), strict=True)
    (run_dir / GRID).parent.mkdir(exist_ok=True)
    grid.write(run_dir / GRID, shown, [components.source.names[index] for index in chosen])
    return {"metrics": image_metrics.results(), "pictures": GRID.as_posix()}


def _evenly_spaced(held_out: Indices, limit: int) -> Indices:
    """Choose at most `limit` images, evenly: neighbours in the index are neighbours on the map."""
    count = min(limit, len(held_out))
    return held_out[np.linspace(0, len(held_out) - 1, count).round().astype(np.int64)]


def _batches(components: StepComponents, chosen: Indices) -> Iterator[Batch]:
    # No masks that hide the whole image: nothing would be left to restore it from.
    masks = components.bench.data.masks
    samples = Samples(components.source, components.networks.tokenize, MASK_SEED, masks=masks, full_mask_share=0.0)
    for start in range(0, len(chosen), BATCH):
        yield default_collate([samples[int(index), 0] for index in chosen[start : start + BATCH]])


def _unet_prediction(components: StepComponents) -> Predict:
    """Return the UNet's prediction under the recipe, but not compiled: these shapes occur once."""
    unet, dtype = components.networks.unet, components.dtype

    def predict(sample: Tensor, timesteps: Tensor, states: Tensor) -> Tensor:
        sample = sample.to(dtype).contiguous(memory_format=components.memory_format)
        with components.autocast(), components.attention_kernels():
            return unet(sample, timesteps, states.to(dtype), return_dict=False)[0]

    return predict
