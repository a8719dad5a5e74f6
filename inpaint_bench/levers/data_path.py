"""Where the inputs of a step come from: loader settings, formats, and caches of the frozen networks."""

from typing import Any

from inpaint_bench.core.stages import stage
from inpaint_bench.core.workloads.finetune_inpaint import finetune_keys
from inpaint_bench.models.latent_cache import LatentCache
from inpaint_bench.models.training_step import StepComponents

from .base import Lever, Observation, Phase, Verification


class LoaderSetting(Lever[StepComponents]):
    """A setting that the loader reads from the recipe and reports."""

    fields, phase = ("format", "stage_to", "num_workers", "prefetch_factor"), Phase.DATA

    def verify(self, observed: Observation[StepComponents]) -> Verification:
        batches = observed.execution.batches
        assert batches is not None
        setting: dict[str, Any] = batches.settings[self.field]
        text = "the loader's report"
        if "path" in setting:  # staged data
            text = f"{setting['bytes']:,} bytes at {setting['path']}"
        return Verification(setting["effective"], text)


class PinMemory(LoaderSetting):
    """Batches in page-locked host memory."""

    field = "pin_memory"

    def verify(self, observed: Observation[StepComponents]) -> Verification:
        pinned = [value.is_pinned() for value in observed.execution.batch.values()]
        text = f"{sum(pinned)} of {len(pinned)} tensors of a batch in host memory are pinned"
        return Verification(all(pinned), text)


class NonBlocking(LoaderSetting):
    """Asynchronous copies of batches to the GPU."""

    field = "non_blocking"

    def apply(self, execution: StepComponents) -> None:
        # Without page-locked memory PyTorch copies synchronously whatever is requested.
        execution.non_blocking = execution.recipe.pin_memory


class _Cached(Lever[StepComponents]):
    """An output of the frozen networks that is read from the cache."""

    phase = Phase.CACHES
    component: str  # the method of the step components that one of the cache replaces
    network: str  # that is then not called

    def apply(self, execution: StepComponents) -> None:
        # The first of the three cache levers opens the cache, for all of them.
        if execution.cache is None:
            with stage("data"):
                execution.cache = LatentCache(execution.bench, execution.networks, execution.source, execution.device)
        # LatentCache names its methods after those that they replace.
        setattr(execution, self.component, getattr(execution.cache, self.component))

    def verify(self, observed: Observation[StepComponents]) -> Verification:
        execution = observed.execution
        if any(graph.captured for graph in execution.graphs):
            return Verification(None, "the step is one CUDA graph, calls inside it cannot be counted", None)
        # One encoder serves image and masked image: with only one of them cached it still runs once per micro-batch.
        per_pass = execution.encodes if self.network == "vae_encoder" else 0
        calls, expected = observed.calls[self.network], per_pass * execution.micro_batches
        return Verification(calls, f"{calls} calls of {self.network} in a step, {expected} expected", calls == expected)


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
        networks, keys = execution.networks, finetune_keys(execution.bench)
        if networks.architecture.large and keys.encodes_texts_once(execution.recipe):
            networks.text_encoder.to("meta")  # 10 GB of T5 that nothing reads any more


class CacheStorage(Lever[StepComponents]):
    """Where the cached arrays are: on disk, or in the GPU's memory."""

    field, phase = "cache_storage", Phase.DATA

    def verify(self, observed: Observation[StepComponents]) -> Verification:
        cache = observed.execution.cache
        storage = cache.facts["storage"] if cache else None
        return Verification(storage, "where the opened arrays are")


class MaskPool(Lever[StepComponents]):
    """Masks per image in the pool."""

    field, phase = "mask_pool", Phase.DATA

    def verify(self, observed: Observation[StepComponents]) -> Verification:
        cache = observed.execution.cache
        size = cache.facts["inputs"]["mask_pool"] if cache else None
        return Verification(size, "the opened cache's description")
