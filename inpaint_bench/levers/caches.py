"""Outputs of the frozen networks from a cache instead of the networks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inpaint_bench.models.latent_cache import LatentCache
from inpaint_bench.models.training_step import StepComponents

from .base import Lever, Machine, Verification

if TYPE_CHECKING:
    from .observe import StepObservation


class _Cached(Lever):
    """An input of the step that is read from the cache."""

    network = "vae_encoder"  # whose calls must be gone

    def available(self, machine: Machine) -> str | None:
        return machine.needs_prepared_data()

    def apply(self, components: StepComponents) -> None:
        if components.cache is None:
            components.cache = LatentCache.open(
                components.bench, components.networks, components.source, components.device
            )
        self.replace(components, components.cache)

    def replace(self, components: StepComponents, cache: LatentCache) -> None:
        """Read this input from the cache."""
        raise NotImplementedError

    def verify(self, observed: StepObservation) -> Verification:
        step, recipe = observed.step, observed.recipe
        if step.graph is not None and step.graph.captured:
            return Verification(None, None, "the step is one CUDA graph, calls inside it cannot be counted")
        per_pass = 2 - recipe.cache_image - recipe.cache_masked if self.network == "vae_encoder" else 0
        calls, expected = observed.calls[self.network], per_pass * observed.components.micro_batches
        return Verification(calls, calls == expected, f"{calls} calls of {self.network} in a step, {expected} expected")


class CacheImage(_Cached):
    """Moments of the images."""

    field = "cache_image"

    def replace(self, components: StepComponents, cache: LatentCache) -> None:
        components.image_moments = cache.image_moments


class CacheMasked(_Cached):
    """Moments of the masked images, for a pool of masks per image."""

    field = "cache_masked"

    def replace(self, components: StepComponents, cache: LatentCache) -> None:
        components.masked_moments = cache.masked_moments


class CacheText(_Cached):
    """Text states."""

    field = "cache_text"
    network = "text_encoder"

    def replace(self, components: StepComponents, cache: LatentCache) -> None:
        components.text_states = cache.text_states


class CacheStorage(Lever):
    """Where the cached arrays are: on disk, or in the GPU's memory."""

    field = "cache_storage"

    def available(self, machine: Machine) -> str | None:
        recipe = machine.recipe
        if recipe.cache_image or recipe.cache_masked or recipe.cache_text:
            return None
        return "nothing is cached: add cache_image, cache_masked or cache_text"

    def verify(self, observed: StepObservation) -> Verification:
        cache = observed.components.cache
        storage = cache.facts["storage"] if cache else None
        return Verification(storage, storage == observed.recipe.cache_storage, "where the opened arrays are")


class MaskPool(Lever):
    """Masks per image in the pool."""

    field = "mask_pool"

    def available(self, machine: Machine) -> str | None:
        return None if machine.recipe.cache_masked else "masks come from a pool only with cache_masked"

    def verify(self, observed: StepObservation) -> Verification:
        cache = observed.components.cache
        size = cache.facts["inputs"]["mask_pool"] if cache else None
        return Verification(size, size == observed.recipe.mask_pool, "the opened cache's description")
