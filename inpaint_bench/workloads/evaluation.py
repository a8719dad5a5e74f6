"""Judging a model on held-out images: validation during training, and metrics and pictures when it ends.

The validation loss has noise and timesteps that are equal at every call and in every recipe. Sample k has one timestep
and one noise, both functions of k alone: the timesteps are the van der Corput sequence over the schedule, of which the
first 2^m fall one into each of 2^m equal strata; the noise is drawn on the CPU with k as seed. Nothing here reads or
changes any other random state, so that a run with validation trains as one without.
"""

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from inpaint_bench.core.workloads.finetune_inpaint import finetune_keys
from inpaint_bench.data.samples import Batch, Samples
from inpaint_bench.data.source import Indices
from inpaint_bench.models import adapters, generation
from inpaint_bench.models.generation import Predict
from inpaint_bench.models.networks import Networks
from inpaint_bench.models.pipeline_folder import save_pipeline
from inpaint_bench.models.training_step import StepComponents
from inpaint_bench.quality import grid, metrics

MASK_SEED = 7_919  # the held-out images' masks are the same in every run, whatever its seed
NOISE_SEED = 2_025  # different from training's: samples with the same number share no noise
BATCH = 8  # images; evaluation is not what is measured
GRID = Path("quality") / "grid.png"
WEIGHTS = Path("weights")


def validate(components: StepComponents, held_out: Indices) -> dict[str, float]:
    """Return `loss` on fixed noise, timesteps and masks, and `n`; with locations also `loss_shuffled`.

    In the latter every image has another one's position. Empty if nothing is held out.
    """
    chosen = _evenly_spaced(held_out, finetune_keys(components.bench).validation_images)
    if not len(chosen):
        return {}

    networks, predict = components.networks, generation.unet_prediction(components.networks, components)

    def mean_loss(shuffle_positions: bool) -> float:
        batches = _batches(components, chosen)
        return float(losses(networks, batches, predict=predict, shuffle_positions=shuffle_positions).mean())

    result = {"loss": mean_loss(shuffle_positions=False), "n": len(chosen)}
    # The same images with another image's position: the difference is what the model learned from positions.
    if networks.location and len(chosen) > 1:
        result["loss_shuffled"] = mean_loss(shuffle_positions=True)
    return result


def finish(components: StepComponents, held_out: Indices, run_dir: Path) -> dict[str, Any]:
    """Restore held-out images, or make others of their texts; show them, and save the weights, as is configured.

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
    inpaints = components.networks.inpaints
    image_metrics = metrics.ImageMetrics(bench.quality, len(chosen), components.device)
    shown: list[tuple[Tensor, Tensor, Tensor]] = []
    for batch in _batches(components, chosen):
        if not inpaints:  # the picture shows no original in it
            batch["mask"] = torch.ones_like(batch["mask"])
        with components.autocast(), components.attention_kernels():
            restored = generation.restore(
                components.networks,
                batch,
                finetune_keys(bench).sample_steps,
                # A seed per image: the result does not depend on the others of its batch.
                [MASK_SEED + int(index) for index in batch["index"]],
                predict=generation.unet_prediction(components.networks, components),
            )
        if inpaints:  # an image of a text is not to be like the photograph
            image_metrics.add(batch["image"], restored, batch["mask"])
        if len(shown) < grid.ROWS:
            shown += zip(batch["image"], batch["mask"], restored.cpu(), strict=True)
    (run_dir / GRID).parent.mkdir(exist_ok=True)
    grid.write(run_dir / GRID, shown, [components.source.names[index] for index in chosen])
    return {"metrics": image_metrics.results() if inpaints else {}, "pictures": GRID.as_posix()}


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


# --- the validation loss -------------------------------------------------------------------------


def losses(
    networks: Networks, batches: Iterable[Batch], *, predict: Predict | None = None, shuffle_positions: bool = False
) -> Tensor:
    """Return each image's mean squared error over all its latents, [N] float64 on the CPU.

    `predict(sample, timesteps, states)` replaces the plain UNet. With `shuffle_positions` every image has another
    one's position (the same at every call), which tells whether the right position helps or merely any; noise and
    timesteps are the same, so that the differences are paired. The result does not depend on the batch size, but for
    rounding. Synchronises with the device.
    """
    held_out = list(batches)
    coordinates = torch.cat([torch.stack([b["latitude"], b["longitude"]], dim=1).double().cpu() for b in held_out])
    if shuffle_positions:
        coordinates = coordinates[_derangement(len(coordinates))]
    device, predict = networks.device, predict or generation.unet_prediction(networks)
    results, start = [], 0
    with generation.evaluation_mode(networks):
        for batch in held_out:
            # Numbered through all batches: the batch size must not change which noise an image gets.
            numbers = range(start, start + len(batch["image"]))
            start = numbers.stop
            latitude, longitude = coordinates[numbers.start : numbers.stop].to(device).unbind(1)
            image, mask = batch["image"].to(device), batch["mask"].to(device)
            latents = generation.mean_latents(networks, image)
            schedule = len(networks.signal_weights)
            timesteps = torch.tensor([timestep(number, schedule) for number in numbers], device=device)
            seeds = [NOISE_SEED + number for number in numbers]
            noise = generation.initial_noise(seeds, latents.shape[3], latents.shape[1]).to(device)
            signal_weight, noise_weight = networks.weights(timesteps)
            noisy = signal_weight * latents + noise_weight * noise
            sample = torch.cat([noisy, generation.inpainting_channels(networks, image, mask)], dim=1)
            states = generation.encoder_states(networks, batch["tokens"].to(device), latitude, longitude)
            target = networks.architecture.target(networks, latents, noise, timesteps)
            error = predict(sample, timesteps, states).float() - target
            results.append(error.square().mean(dim=(1, 2, 3)).double().cpu())
    return torch.cat(results)


def timestep(number: int, schedule: int) -> int:
    """Return the timestep of sample `number`: its binary digits mirrored at the point, times the schedule's length."""
    mirrored = int(f"{number:b}"[::-1], 2)
    return mirrored * schedule >> number.bit_length()


def _derangement(count: int) -> list[int]:
    """Return another image for every image, each one once: its predecessor in a seeded order. `count` is 2 or more."""
    order = np.random.default_rng(NOISE_SEED).permutation(count)
    donors = np.empty(count, np.int64)
    donors[order] = np.roll(order, 1)
    return donors.tolist()
