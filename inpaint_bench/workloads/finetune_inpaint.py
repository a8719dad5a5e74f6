"""Fine-tuning the Stable Diffusion 1.5 UNet for location-aware inpainting."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from inpaint_bench import levers
from inpaint_bench.core.config import BenchConfig
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.records import DataFacts, LeverReport, Parity
from inpaint_bench.data.loader import Batches
from inpaint_bench.data.open_source import Indices, open_source, open_split
from inpaint_bench.data.samples import Batch
from inpaint_bench.data.source import Source
from inpaint_bench.models import bf16_adamw, builders
from inpaint_bench.models import loss as objective
from inpaint_bench.models.assembly import Assembly
from inpaint_bench.models.cuda_graph import GraphedStep
from inpaint_bench.models.ema import Average
from inpaint_bench.models.location import LONGEST_M
from inpaint_bench.models.networks import Models

from . import batch_search, facts, parity, validation

log = logging.getLogger(__name__)


class FinetuneInpaint:
    """The workload `finetune_inpaint`; see `inpaint_bench.workloads.Workload`."""

    def __init__(self, assembly: Assembly, train: Indices, held: Indices) -> None:
        bench, nets = assembly.bench, assembly.nets
        self.assembly, self.bench, self.device = assembly, bench, assembly.device
        self.images_per_step = int(bench.batch)
        self._train, self._held = train, held
        self.parameters = nets.trained()
        self.optimizers = assembly.optimizers(self.parameters, bench.workload.learning_rate)
        fp16 = assembly.autocast is torch.float16
        self.scaler = torch.amp.GradScaler(self.device.type) if fp16 else None
        self.random = torch.Generator(self.device).manual_seed(bench.seed)
        self.average = Average(self.parameters, assembly.ema_decay) if assembly.ema_decay else None
        self.attempted = 0
        self.draws_taken = 0
        self.samples = assembly.samples()
        self._batches: Batches | None = None
        self.parity: Parity | None = None
        self.facts: dict[str, Any] = {}
        self.graphed = GraphedStep(self._update, self.random) if assembly.graph else None

    @property
    def batches(self) -> Batches:
        if self._batches is None:  # only now: a run that goes on starts elsewhere in the stream
            self._batches = Batches(
                self.samples,
                self.images_per_step,
                self.bench.recipe,
                self.bench.seed,
                start=self.draws_taken,
                indices=self._train,
            )
        return self._batches

    @property
    def data(self) -> DataFacts:
        facts = {
            **self.assembly.source.account.as_dict(),
            "root": self.bench.data.root,
            "identity": self.assembly.source.identity,
            "train": len(self._train),
            "validation": len(self._held),
            "loader": self.batches.settings,
        }
        return msgspec.convert(facts, DataFacts)

    @property
    def prefetched_batches(self) -> int:
        settings = self.batches.settings
        return int(settings["num_workers"]["effective"] * (settings["prefetch_factor"]["effective"] or 0))

    def next_batch(self) -> Batch:
        batch = next(self.batches)
        self.draws_taken += self.images_per_step
        return batch

    def learning_rate(self) -> float:
        return float(self.optimizers[0].param_groups[0]["lr"])

    def step(self, batch: Batch) -> Tensor:
        """Forward, backward and update. Returns the mean squared error, a scalar on the device."""
        self.attempted += 1
        batch = self.to_device(batch)
        return self.graphed(batch) if self.graphed else self._update(batch)

    def _update(self, batch: Batch) -> Tensor:
        assembly = self.assembly
        draws = objective.draw(assembly, self.images_per_step, self.random)
        total: Tensor | None = None
        for start in range(0, self.images_per_step, assembly.micro_batch):
            rows = slice(start, start + assembly.micro_batch)
            part = {name: value[rows] for name, value in batch.items()}
            loss = objective.loss(assembly, part, draws.part(rows)) / assembly.micro_batches
            (self.scaler.scale(loss) if self.scaler else loss).backward()
            total = loss.detach() if total is None else total + loss.detach()
        for optimizer in self.optimizers:
            self.scaler.step(optimizer) if self.scaler else optimizer.step()
        if self.scaler:
            self.scaler.update()
        if self.average:
            self.average.update()
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        assert total is not None
        return total

    def to_device(self, batch: Batch) -> Batch:
        wait = not self.batches.settings["non_blocking"]["effective"]
        return {name: value.to(self.device, non_blocking=not wait) for name, value in batch.items()}

    def skipped_steps(self) -> int:
        """Suppressed updates: the optimiser's own count stays behind that of the steps attempted."""
        if not self.scaler:
            return 0
        state = self.optimizers[0].state.get(self.parameters[0], {})
        return self.attempted - int(state.get("step", 0))

    def requested_levers(self) -> list[LeverReport]:
        return levers.requested(self.bench)

    def verify_levers(self) -> list[LeverReport]:
        """What is really active of every lever asked for. Runs one more step, under the profiler."""
        return levers.verify(self)

    def validate(self) -> dict[str, float]:
        return validation.validate(self.assembly, self._held)

    def finish(self, run_dir: Path) -> dict[str, Any]:
        return validation.finish(self.assembly, self._held, run_dir, self.average)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors = {f"parameter.{i}": p.detach() for i, p in enumerate(self.parameters)}
        values: dict[str, Any] = {"attempted": self.attempted, "draws_taken": self.draws_taken, "draws": self._draws()}
        for number, optimizer in enumerate(self.optimizers):
            tensors |= {f"optimizer.{number}.{k}": v for k, v in bf16_adamw.state_tensors(optimizer).items()}
        if self.average:
            tensors |= {f"average.{i}": tensor for i, tensor in enumerate(self.average.tensors)}
        if self.scaler:
            values["scaler"] = self.scaler.state_dict()
        tensors["generator"] = self.random.get_state()
        return tensors, values

    def _draws(self) -> dict[str, Any]:
        """What decides which samples a step gets, as far as the configuration alone does not tell."""
        settings = self.batches.settings
        tars = settings["format"]["effective"] == "webdataset"  # read by each worker for itself
        return {
            "batch": self.images_per_step,  # of batch=auto too
            "data": self.assembly.source.identity,
            "workers": settings["num_workers"]["effective"] if tars else None,
        }

    def restore(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        here, there = self._draws(), values["draws"]
        if other := [f"{name} {there[name]}, here {here[name]}" for name in here if there[name] != here[name]]:
            raise UserError(f"the checkpoint's samples are others: {'; '.join(other)}")
        with torch.no_grad():
            for i, parameter in enumerate(self.parameters):
                saved = tensors.get(f"parameter.{i}")
                if saved is None or saved.shape != parameter.shape:
                    shape = "nothing" if saved is None else list(saved.shape)
                    raise UserError(
                        f"the checkpoint holds {shape} for parameter {i}, here it is {list(parameter.shape)}"
                    )
                parameter.copy_(saved)
        for number, optimizer in enumerate(self.optimizers):
            start = f"optimizer.{number}."
            own = {k.removeprefix(start): v for k, v in tensors.items() if k.startswith(start)}
            bf16_adamw.load_tensors(optimizer, own)
        if self.average:
            count = len(self.average.tensors)
            self.average.load([tensors[f"average.{i}"].to(self.device) for i in range(count)])
        if self.scaler:
            self.scaler.load_state_dict(values["scaler"])
        self.random.set_state(tensors["generator"].cpu())
        self.attempted, self.draws_taken = values["attempted"], values["draws_taken"]
        if self._batches:
            self._batches.close()
            self._batches = None

    def close(self) -> None:
        if self._batches:
            self._batches.close()
        self.assembly.source.close()


def build(config: BenchConfig, device: torch.device) -> FinetuneInpaint:
    """Data, networks and optimiser on `device`. Raises UserError for data or weights that cannot be used."""
    started = time.monotonic()
    levers.require(config, device)
    source = open_source(config.data, config.recipe)
    asked = config.batch
    if isinstance(asked, str):
        config = replace(config, batch=batch_search.search(config, device, source))
    train, held = _split(config, source)
    nets = _networks(config, device, source)
    assembly = Assembly.base(config, device, nets, source)
    reference = parity.reference(assembly)
    levers.apply(assembly)
    workload = FinetuneInpaint(assembly, train, held)
    workload.parity, first_s = parity.compare(assembly, reference)
    workload.facts = facts.of(assembly, workload.optimizers, workload.scaler is not None)
    workload.facts["compile_s"] = round(first_s, 3) if config.recipe.compile != "none" else None
    workload.facts["batch_requested"] = asked
    workload.facts["setup_s"] = round(time.monotonic() - started, 3)
    return workload


def _split(config: BenchConfig, source: Source) -> tuple[Indices, Indices]:
    """Images for training and held-out ones. All for training where they cannot be told apart and nobody asks."""
    try:
        return open_split(source, config.data)
    except UserError as error:
        if config.workload.validate_every or config.workload.sample_images:
            raise
        log.warning("nothing is held out: %s", error)
        return np.arange(len(source)), np.arange(0)


def _networks(config: BenchConfig, device: torch.device, source: Source) -> Models:
    torch.manual_seed(builders.FROZEN_SEED)
    centre = np.median(source.positions, axis=0)
    nets = builders.build(config.model, device, (float(centre[0]), float(centre[1])))
    torch.manual_seed(config.seed)
    away = nets.location.away_m(float(centre[0]), float(centre[1])) if nets.location else 0.0
    if away > LONGEST_M / 2:
        log.warning("the data lies %s km from the ground whose places the weights know", f"{away / 1000:,.0f}")
    levels = 2 ** (len(nets.unet.config.block_out_channels) - 1)
    if config.data.resolution_px % (nets.downscale * levels):
        raise UserError(
            f"data.resolution_px={config.data.resolution_px}: model {config.model.name} needs a multiple "
            f"of {nets.downscale * levels}"
        )
    return nets
