"""Fine-tuning the UNet of Stable Diffusion, for location-aware inpainting or to make images of texts.

The model decides which of the two. The step: models/training_step.py.
"""

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from inpaint_bench import levers
from inpaint_bench.core.config.bench import BenchConfig
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.records import DataFacts
from inpaint_bench.core.stages import stage
from inpaint_bench.core.workloads.finetune_inpaint import Facts, finetune_keys
from inpaint_bench.data.loader import Batches
from inpaint_bench.data.open import open_source
from inpaint_bench.data.samples import Batch
from inpaint_bench.data.source import Source, open_split
from inpaint_bench.models import flops
from inpaint_bench.models.architectures.location import LONGEST_M
from inpaint_bench.models.networks import Networks, build_run_networks, network_facts
from inpaint_bench.models.optimizers import ADAMW
from inpaint_bench.models.training_step import StepComponents, TrainingStep

from . import ProfiledCall, TrainingWorkload, batch_search, evaluation, parity

log = logging.getLogger(__name__)


class FineTuning(TrainingWorkload):
    execution: StepComponents
    facts: Facts

    def __init__(self, bench: BenchConfig, device: torch.device) -> None:
        """Build data, networks and optimizer on `device`. Raises UserError for data or weights that cannot be used."""
        start_s = time.monotonic()
        # First, because it builds nothing: a lever that cannot run ends the point at once.
        with stage("imports"):  # of FlashAttention-4, for one
            levers.require(bench, device)
        with stage("data"):
            source = open_source(bench.data, bench.recipe)
        batch_requested = bench.batch
        if bench.searches_batch:
            # Before the networks are built: the search builds its own, and needs all of the GPU's memory.
            with stage("batch search"):
                bench = replace(bench, batch=batch_search.search(bench, device, source))
        self.bench = bench
        self.images_per_step = bench.batch_size * bench.ranks
        self.samples_seen = 0
        with stage("data"):
            self._train, self._held_out = open_split(source, bench.data, required=bench.workload.validates)
        networks = _build_networks(bench, device, source)
        self.components = components = StepComponents(bench=bench, device=device, networks=networks, source=source)
        self.execution = components
        # Both passes use the same weights: before and after the levers change networks and switches.
        reference = parity.reference(components)
        levers.apply(components)
        components.divide()
        self.training_step = TrainingStep(components, finetune_keys(bench).learning_rate, bench.seed)
        self._samples = components.samples()
        self.parity, first_pass_s = parity.compare(components, reference)
        self.facts = _facts(self.training_step)
        self.facts.compile_s = components.compile_s(first_pass_s)
        self.facts.batch_requested = batch_requested
        self.facts.setup_s = round(time.monotonic() - start_s, 3)

    # --- data ------------------------------------------------------------------------------------

    @property
    def batches(self) -> Batches:
        """Return the loader, made on first use: a run that resumes starts elsewhere in the stream."""
        if self.components.batches is None:
            self.components.batches = Batches(
                self._samples,
                self.bench.batch_size,
                self.bench.recipe,
                self.bench.seed,
                start=self.samples_seen,
                indices=self._train,
                rank=self.components.parallel.rank if self.components.parallel else 0,
                ranks=self.bench.ranks,
            )
        return self.components.batches

    @property
    def data(self) -> DataFacts:
        counts = {"train": len(self._train), "validation": len(self._held_out)}
        return self.components.source.facts(self.bench.data.root, **counts, loader=self.batches.settings)

    @property
    def prefetched_batches(self) -> int:
        settings = self.batches.settings
        return int(settings["num_workers"]["effective"] * (settings["prefetch_factor"]["effective"] or 0))

    def next_batch(self) -> Batch:
        batch = next(self.batches)
        self.samples_seen += self.images_per_step
        return batch

    # --- training --------------------------------------------------------------------------------

    def step(self, batch: Batch) -> Tensor:
        return self.training_step(batch)

    def learning_rate(self) -> float:
        return self.training_step.schedule.learning_rate

    def skipped_steps(self) -> int:
        return self.training_step.skipped_steps()

    def probe(self) -> Callable[[], object]:
        self.components.batch = batch = next(self.batches)
        return lambda: self.training_step(batch)

    def profiled_calls(self) -> Iterator[ProfiledCall]:
        step, batch = self.training_step, self.next_batch()
        name = "CUDA graph replay" if step.graph else "step"  # under ncu too, where it is captured later
        yield ProfiledCall(name=name, work=lambda: step(batch))
        # Several ranks would have to do that together: a collective is captured on all of them or on none.
        if step.graph and not self.components.parallel:
            yield ProfiledCall(name="eager step", work=lambda: step.eager(batch), measured=False)

    def validate(self) -> dict[str, float]:
        return evaluation.validate(self.components, self._held_out)

    def finish(self, run_dir: Path) -> dict[str, Any]:
        return evaluation.finish(self.components, self._held_out, run_dir)

    # --- checkpoints -----------------------------------------------------------------------------

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, values = self.training_step.state()
        return tensors, {**values, "samples_seen": self.samples_seen, "stream": self._stream()}

    def _stream(self) -> dict[str, Any]:
        """Return what determines the samples of a step beyond the configuration."""
        settings = self.batches.settings
        sharded = settings["format"]["effective"] == "webdataset"  # every worker reads shards of its own
        return {
            "batch": self.images_per_step,  # images of all ranks; with batch=auto as found
            "data": self.components.source.identity,
            "workers": settings["num_workers"]["effective"] if sharded else None,
        }

    def restore(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        saved, current = values["stream"], self._stream()
        differing = [
            f"{name} was {saved[name]}, is {current[name]}" for name in current if saved[name] != current[name]
        ]
        if differing:
            raise UserError(f"the checkpoint was made with a different data stream: {'; '.join(differing)}")
        self.training_step.load_state(tensors, values)
        # The loader is made again on its next use, and continues in the stream where the checkpoint was taken.
        self.samples_seen = values["samples_seen"]
        self._close_loader()

    def _close_loader(self) -> None:
        if self.components.batches:
            self.components.batches.close()
            self.components.batches = None

    def close(self) -> None:
        self.training_step.close()
        self._close_loader()
        self.components.source.close()


def _build_networks(config: BenchConfig, device: torch.device, source: Source) -> Networks:
    networks = build_run_networks(config, device, source.centre)
    torch.manual_seed(config.seed)  # seed for what is drawn from now on
    distance_m = networks.location.distance_m(*source.centre) if networks.location else 0.0
    if distance_m > LONGEST_M / 2:
        log.warning("the data is %s km from the area on which the weights were trained", f"{distance_m / 1000:,.0f}")
    return networks


def _facts(step: TrainingStep) -> Facts:
    """Return what makes rates comparable: shapes, precisions, and the work of one image.

    `flop_per_image` is the model's, less what a cache saves; recomputed activations are not counted, as usual for MFU.
    """
    components, networks = step.components, step.components.networks
    bench, keys = components.bench, finetune_keys(components.bench)
    optimizer = step.optimizers[-1 if keys.optimizer == "muon" else 0]
    parts = flops.count(bench.model, bench.data.resolution_px, networks, recipe=bench.recipe)
    # Left in the step: image and masked image are encoded, and the text, unless they are cached.
    encodes, text = components.encodes, components.encodes_texts
    return Facts(
        **components.facts(),
        **network_facts(bench, networks, networks.parameter_counts(), parts),
        parameters_trained=sum(parameter.numel() for parameter in step.parameters),
        flop_per_image=flops.training(parts, encodes=encodes, text=text),
        encodes_online=encodes,
        text_online=text,
        cache=components.cache.facts if components.cache else None,
        optimizer={
            "class": type(optimizer).__name__,
            "foreach": optimizer.defaults.get("foreach"),
            "fused": optimizer.defaults.get("fused"),
            "lr": keys.learning_rate,
            **({**ADAMW, "betas": list(ADAMW["betas"])} if keys.optimizer != "adafactor" else {}),
            "weight_decay": keys.weight_decay,
            **keys.update_keys(),
            "grad_scaler": step.scaler.is_enabled(),
        },
        skipped_steps=0,
        epochs=keys.epochs,
        dataset_images=keys.dataset_images,
        num_images=len(components.source),
    )


build = FineTuning
