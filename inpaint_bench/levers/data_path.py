"""Where the inputs of a step come from: loader settings, formats, decoder, and caches of the frozen networks."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from inpaint_bench.core.config.bench import BenchConfig
from inpaint_bench.data.prepared import dali
from inpaint_bench.data.source import Source
from inpaint_bench.models.components import StepComponents
from inpaint_bench.models.latent_cache import LatentCache

from .base import Lever, Observation, Verification

COMPARED_IMAGES = 8
MAX_MEAN_LEVELS = 3.0  # a guess: DALI's coarse transform is off by 1.3 on noise at quality 95, swapped channels by tens


def _needs_prepared_data(bench: BenchConfig) -> str | None:
    kind = bench.data.kind
    return None if kind == "prepared" else f"needs data=prepared, this is data={kind}"


def _needs_images(bench: BenchConfig) -> str | None:
    """Return why a lever of reading images cannot run; None where images are read from prepared data."""
    if bench.recipe.cache_image and bench.recipe.cache_masked:
        return "with images and masked images cached no image is read"
    return _needs_prepared_data(bench)


class _LoaderSetting(Lever[StepComponents]):
    """A setting that the loader reads from the recipe and reports."""

    phase = 1

    def verify(self, observed: Observation[StepComponents]) -> Verification:
        batches = observed.execution.batches
        assert batches is not None
        setting: dict[str, Any] = batches.settings[self.field]
        text = "the loader's report"
        if "path" in setting:  # of staged data
            text = f"{setting['bytes']:,} bytes at {setting['path']}"
        return Verification(setting["effective"], setting["effective"] == setting["requested"], text)


class Format(_LoaderSetting):
    """The copy of prepared data that is read."""

    field = "format"

    def available(self, bench: BenchConfig, device: torch.device) -> str | None:
        return _needs_images(bench)


class StageTo(Format):
    """Data that is first copied to the node's disk or memory."""

    field = "stage_to"


class Decode(Lever[StepComponents]):
    """Images decoded by DALI instead of Pillow. Verification also compares their pixels."""

    field, phase = "decode", 1

    def available(self, bench: BenchConfig, device: torch.device) -> str | None:
        kind, format = bench.data.kind, bench.recipe.format
        if kind != "prepared" or format != "files":
            return f"DALI needs data=prepared and recipe.format=files, this is data={kind} with format {format}"
        return _needs_images(bench) or dali.unavailable_reason()

    def verify(self, observed: Observation[StepComponents]) -> Verification:
        execution = observed.execution
        assert execution.batches is not None
        decoder = execution.batches.decoder
        if decoder is None or not decoder.num_batches:
            return Verification(None, False, "no batch came from DALI")
        image = execution.batch["image"]
        mean, largest = _level_difference(image, execution.batch["index"].tolist(), execution.source)
        text = (
            f"DALI's decoder ({decoder.decoder}) returned {decoder.num_batches} batches, the last one on "
            f"{image.device.type}; it differs from Pillow by {mean:.3f} of 255 levels on average, {largest:.0f} at most"
        )
        active = image.device.type == execution.device.type and mean <= MAX_MEAN_LEVELS
        return Verification(f"dali {decoder.decoder}", active, text)


class NumWorkers(_LoaderSetting):
    """Processes that load."""

    field = "num_workers"


class PrefetchFactor(_LoaderSetting):
    """Batches that each of them prepares ahead."""

    field = "prefetch_factor"
    needs = "num_workers", "without loader processes nothing is prefetched"


class PinMemory(_LoaderSetting):
    """Batches in page-locked host memory."""

    field, gpu = "pin_memory", "page-locked memory needs a GPU"

    def verify(self, observed: Observation[StepComponents]) -> Verification:
        # DALI's are on the GPU.
        on_host = [value for value in observed.execution.batch.values() if value.device.type == "cpu"]
        pinned = sum(value.is_pinned() for value in on_host)
        text = f"{pinned} of {len(on_host)} tensors of a batch in host memory are pinned"
        return Verification(pinned == len(on_host), pinned == len(on_host), text)


class NonBlocking(_LoaderSetting):
    """Asynchronous copies of batches to the GPU."""

    field, gpu = "non_blocking", "there is no copy to a GPU"

    def apply(self, execution: StepComponents) -> None:
        # Without page-locked memory PyTorch copies synchronously whatever is requested.
        execution.non_blocking = execution.recipe.pin_memory


def _level_difference(image: Tensor, indices: list[int], source: Source) -> tuple[float, float]:
    """Return the mean and largest difference to Pillow's pixels, in levels of 255, of a batch's first images."""
    # -1..1 back to 0..255, and channels last, as the pixels of the source are.
    decoded = image[:COMPARED_IMAGES].cpu().permute(0, 2, 3, 1).add(1).mul(127.5)
    reference = torch.from_numpy(np.stack([source.pixels(index) for index in indices[:COMPARED_IMAGES]]))
    difference = (decoded - reference).round().abs()
    return float(difference.mean()), float(difference.max())


class _Cached(Lever[StepComponents]):
    """An output of the frozen networks that is read from the cache."""

    phase = 1
    component: str  # the method of the step components that one of the cache replaces
    network: str  # that is then not called

    def available(self, bench: BenchConfig, device: torch.device) -> str | None:
        return _needs_prepared_data(bench)

    def apply(self, execution: StepComponents) -> None:
        # The first of the three cache levers opens the cache, for all of them.
        if execution.cache is None:
            execution.cache = LatentCache(execution.bench, execution.networks, execution.source, execution.device)
        # LatentCache names its methods after those that they replace.
        setattr(execution, self.component, getattr(execution.cache, self.component))

    def verify(self, observed: Observation[StepComponents]) -> Verification:
        execution = observed.execution
        if any(graph.captured for graph in execution.graphs):
            return Verification(None, None, "the step is one CUDA graph, calls inside it cannot be counted")
        # One encoder serves image and masked image: with only one of them cached it still runs once per micro-batch.
        per_pass = execution.encodes if self.network == "vae_encoder" else 0
        calls, expected = observed.calls[self.network], per_pass * execution.micro_batches
        return Verification(calls, calls == expected, f"{calls} calls of {self.network} in a step, {expected} expected")


class CacheImage(_Cached):
    """Moments of the images."""

    field, component, network = "cache_image", "image_moments", "vae_encoder"


class CacheMasked(_Cached):
    """Moments of the masked images."""

    field, component, network = "cache_masked", "masked_moments", "vae_encoder"


class CacheText(_Cached):
    """Text states."""

    field, component, network = "cache_text", "text_states", "text_encoder"

    def apply(self, execution: StepComponents) -> None:
        super().apply(execution)
        if execution.networks.flow and not execution.bench.workload.validates:
            execution.networks.text_encoder.to("meta")  # 10 GB of T5 that nothing reads any more


class CacheStorage(Lever[StepComponents]):
    """Where the cached arrays are: on disk, or in the GPU's memory."""

    field, phase = "cache_storage", 1

    def available(self, bench: BenchConfig, device: torch.device) -> str | None:
        if bench.recipe.cache_image or bench.recipe.cache_masked or bench.recipe.cache_text:
            return None
        return "nothing is cached: add cache_image, cache_masked or cache_text"

    def verify(self, observed: Observation[StepComponents]) -> Verification:
        cache = observed.execution.cache
        storage = cache.facts["storage"] if cache else None
        return Verification(storage, storage == observed.recipe.cache_storage, "where the opened arrays are")


class MaskPool(Lever[StepComponents]):
    """Masks per image in the pool."""

    field, phase = "mask_pool", 1
    needs = "cache_masked", "masks come from a pool only with cache_masked"

    def verify(self, observed: Observation[StepComponents]) -> Verification:
        cache = observed.execution.cache
        size = cache.facts["inputs"]["mask_pool"] if cache else None
        return Verification(size, size == observed.recipe.mask_pool, "the opened cache's description")
