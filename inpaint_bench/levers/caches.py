"""Outputs of the frozen networks from a cache instead of the networks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inpaint_bench.models.assembly import Assembly
from inpaint_bench.models.latent_cache import Cache

from .base import Effective, Lever, Machine

if TYPE_CHECKING:
    from .observation import Running, Seen


class _Cached(Lever):
    network = ""  # whose calls must be gone

    def available(self, machine: Machine) -> str | None:
        kind = machine.bench.data.kind
        return None if kind == "prepared" else f"needs data=prepared with caches, this is data={kind}"

    def apply(self, assembly: Assembly) -> None:
        if assembly.cache is None:
            assembly.cache = Cache.open(assembly.bench, assembly.nets, assembly.source, assembly.device)

    def verify(self, workload: Running, seen: Seen) -> Effective:
        if seen.graph_launches:
            text = "the step is one CUDA graph, calls inside it cannot be counted"
            return Effective(effective=None, active=None, evidence=text)
        recipe = workload.bench.recipe
        left = 2 - recipe.cache_image - recipe.cache_masked if self.network == "encoder" else 0
        expected = left * workload.assembly.micro_batches
        calls = seen.calls[self.network]
        text = f"{calls} calls of the {self.network} in a step, {expected} expected"
        return Effective(effective=calls, active=calls == expected, evidence=text)


class Image(_Cached):
    field = "cache_image"
    network = "encoder"


class Masked(_Cached):
    field = "cache_masked"
    network = "encoder"


class Text(_Cached):
    field = "cache_text"
    network = "text"


def _nothing_cached(machine: Machine) -> str | None:
    recipe = machine.recipe
    if recipe.cache_image or recipe.cache_masked or recipe.cache_text:
        return None
    return "nothing is cached: take cache_image, cache_masked or cache_text with it"


class Place(Lever):
    field = "cache_storage"

    def available(self, machine: Machine) -> str | None:
        return _nothing_cached(machine)

    def verify(self, workload: Running, seen: Seen) -> Effective:
        cache = workload.assembly.cache
        place = cache.facts["place"] if cache else None
        active = place == workload.bench.recipe.cache_storage
        return Effective(effective=place, active=active, evidence="where the opened arrays lie")


class Pool(Lever):
    field = "mask_pool"

    def available(self, machine: Machine) -> str | None:
        return None if machine.recipe.cache_masked else "masks come from a pool only with cache_masked"

    def verify(self, workload: Running, seen: Seen) -> Effective:
        cache = workload.assembly.cache
        size = cache.facts["made_of"]["mask_pool"] if cache else None
        active = size == workload.bench.recipe.mask_pool
        return Effective(effective=size, active=active, evidence="the opened cache's own account")
