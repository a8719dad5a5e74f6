"""The workload `volume3d_train`: training on volumes that stay on the device, and validation on others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from inpaint_bench.core.config.bench import BenchConfig
from inpaint_bench.core.workloads import volume3d_train
from inpaint_bench.models.networks import FROZEN_SEED
from inpaint_bench.quality import grid, metrics

from . import ProfiledCall, Recorder
from .volumes import SLICES, VolumeDiffusion, finite, ieee_ms_ssim, label_slices

WEIGHTS = "weights.safetensors"


class VolumeTraining(VolumeDiffusion):
    """A network with random weights, and the volumes that it is trained and validated on."""

    config: volume3d_train.Config

    def __init__(self, bench: BenchConfig, device: torch.device) -> None:
        super().__init__(bench, device)
        self.volumes, self.labels = (tensor.to(device) for tensor in self.read(held_out=False))
        self._held_out = self.read(held_out=True)  # now: a damaged file ends the run before its first step
        self.data = self.source.facts
        self.facts.flop_per_image, self.facts.learning_rate = 3 * self.flop, self.config.learning_rate
        self.facts.volumes = self.config.volumes
        self.compare(self._results)
        self.network.zero_last_layers()  # only now: a network that predicts zero shows no difference
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=self.config.learning_rate)
        self._order = torch.Generator().manual_seed(bench.seed)
        self._done = self._not_finite = 0
        self._last = self.config.warmup_steps + self.config.measure_steps  # the step that is validated
        self._trained: dict[str, Tensor] = {}
        self._held: volume3d_train.Result | None = None
        self._pictures: dict[str, Tensor] = {}

    def _loss(self, indices: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return prediction and loss of a micro-batch."""
        volumes, labels = self.volumes[indices], self.labels[indices]
        noise = self.noise(len(indices), generator)
        steps = torch.randint(self.diffusion.steps, (len(indices),), generator=generator, device=self.device)
        predicted = self.predict(self.diffusion.add_noise(volumes, noise, steps), labels, steps)
        return predicted, F.l1_loss(predicted, noise)

    def _results(self) -> dict[str, Tensor]:
        indices = torch.arange(self.execution.compared_size, device=self.device) % len(self.volumes)
        predicted, loss = self._loss(indices, self.generator(0))
        loss.backward()
        gradients = [p.grad.flatten() for p in self.network.parameters() if p.grad is not None]
        return {
            "prediction_rel": predicted.detach().cpu(),
            "loss_rel": loss.detach().cpu(),
            "gradient_rel": torch.cat(gradients).cpu(),
        }

    def _train(self, indices: Tensor, generator: torch.Generator) -> Tensor:
        """Train on a batch; return its loss on the device."""
        micro_batches = self.execution.micro_batches
        self.optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=self.device)
        for micro in indices.chunk(micro_batches):
            _, loss = self._loss(micro, generator)
            (loss / micro_batches).backward()
            total += loss.detach() / micro_batches
        self.optimizer.step()
        return total

    def step(self, recorder: Recorder) -> None:
        indices = torch.randint(len(self.volumes), (self.images_per_step,), generator=self._order).to(self.device)
        losses: list[Tensor] = []
        call = recorder.call(lambda: losses.append(self._train(indices, self.generator(self._done))))
        self._done += 1
        row = volume3d_train.Result(
            **self.row(call),
            parameters=self.facts.parameters,
            forward_tflop=self.flop / 1e12,
            loss=finite(float(losses[0])),
        )
        self._not_finite += row.loss is None
        if self._done == self._last:
            # A faster recipe takes more steps in the same time: only these weights can be compared.
            self._trained = {name: value.clone() for name, value in self.network.state_dict().items()}
            self._held = row
        else:
            recorder.result(row)

    def probe(self) -> Callable[[], object]:
        indices = torch.arange(self.images_per_step, device=self.device) % len(self.volumes)
        return lambda: self._train(indices, self.generator(0))

    def profiled_calls(self) -> Iterator[ProfiledCall]:
        yield ProfiledCall(name="training step", work=self.probe())

    def measure(self, recorder: Recorder) -> None:
        super().measure(recorder)
        self.facts.losses_not_finite = self._not_finite
        assert self._held is not None
        self.network.load_state_dict(self._trained)
        l1, similarity = self._validate()
        row = msgspec.structs.replace(
            self._held,
            trained_steps=self._last,
            validation_l1=finite(l1),
            validation_ms_ssim=similarity,
            ms_ssim_scales=metrics.ms_ssim_scales(self.sides),
        )
        recorder.result(row)

    @torch.no_grad()
    def _validate(self) -> tuple[float, float | None]:
        """Return L1 of the noise and MS-SSIM of the volumes without it, at steps over the whole schedule."""
        volumes, labels = (tensor.to(self.device) for tensor in self._held_out)
        generator = torch.Generator().manual_seed(FROZEN_SEED)
        errors, noisy, estimates = [], [], []
        count = len(volumes)
        for index in range(count):
            steps = torch.tensor([(2 * index + 1) * self.diffusion.steps // (2 * count)], device=self.device)
            noise = torch.randn(volumes[:1].shape, generator=generator).to(self.device)
            noisy.append(self.diffusion.add_noise(volumes[index : index + 1], noise, steps))
            predicted = self.predict(noisy[-1], labels[index : index + 1], steps, eager=True)
            errors.append(float(F.l1_loss(predicted, noise)))
            estimates.append(self.diffusion.estimate(noisy[-1], predicted, steps))
        self._pictures = {
            "Labels": label_slices(labels),
            "Volume": volumes[:, 0],
            "With noise": torch.cat(noisy)[:, 0],
            "Noise removed": torch.cat(estimates)[:, 0],
        }
        return sum(errors) / count, ieee_ms_ssim(torch.cat(estimates), volumes)

    def finish(self, run_dir: Path) -> dict[str, Any]:
        grid.write_slices(run_dir / SLICES, self._pictures)
        written = {"pictures": SLICES}
        if self.config.save_weights:
            weights = {name: value.contiguous().cpu() for name, value in self._trained.items()}
            save_file(weights, run_dir / WEIGHTS)
            written["weights"] = WEIGHTS
        return written


build = VolumeTraining
