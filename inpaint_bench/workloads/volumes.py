"""The workloads `volume3d_train` and `volume3d_sample`: diffusion of volumes, conditioned on their segmentation.

Training is on volumes that stay on the device, and validated on others; sampling goes from noise and the segmentations
of held-out volumes to volumes.

Protocol of Med-DDPM: noise of 250 steps by a cosine schedule, mean absolute error of the predicted noise, Adam; no
average of the weights, which it starts at step 2000. Volumes stay on the device, so that no loader is measured. Every
recipe starts from the same weights, volumes and noise, and is compared with fp32 (IEEE), contiguous, eager.
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from inpaint_bench import levers
from inpaint_bench.core.config import recipe
from inpaint_bench.core.config.bench import BenchConfig
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.files import expand_path
from inpaint_bench.core.stages import stage
from inpaint_bench.core.workloads import Result, volume3d_sample, volume3d_train
from inpaint_bench.core.workloads._volumes import VolumeConfig, VolumeFacts
from inpaint_bench.data.volumes import NiftiFolder, SyntheticVolumes
from inpaint_bench.models import flops
from inpaint_bench.models.architectures.volume_unet import Diffusion, VolumeUNet
from inpaint_bench.models.execution import Execution, in_fp32
from inpaint_bench.models.networks import FROZEN_SEED
from inpaint_bench.models.pipeline_folder import check_network
from inpaint_bench.profiling.profile import free_memory, synchronize
from inpaint_bench.quality import grid, metrics

from . import Call, MeasuringWorkload, ProfiledCall, Recorder, parity
from .batch_search import attempt

SLICES = "slices.png"


class VolumeDiffusion(MeasuringWorkload):
    """The network, its levers, its inputs, and the comparison of a recipe with the baseline."""

    config: VolumeConfig
    execution: Execution
    facts: VolumeFacts
    uniform_steps = True

    def __init__(self, bench: BenchConfig, device: torch.device) -> None:
        config = bench.workload
        assert isinstance(config, VolumeConfig)
        self.bench, self.config, self.device = bench, config, device
        self.shape, self.sides = config.shape, config.sides
        self.images_per_step = bench.batch_size
        levers.require(bench, device)
        torch.manual_seed(FROZEN_SEED)
        self.network = VolumeUNet(self.shape).to(device)
        self.execution = Execution(
            bench=bench,
            device=device,
            networks={"network": self.network},
            calls={"network": self.network},
            eager_pass=self._eager_pass,
            channels_last=torch.channels_last_3d,
        )
        self.diffusion = Diffusion(config.diffusion_steps, device)
        self.flop = _forward_flop(config)
        kind = NiftiFolder if bench.data.kind == "nifti" else SyntheticVolumes
        self.source = kind(bench.data, *config.volumes_needed(bench))
        self.facts = VolumeFacts(
            **self.execution.facts(),
            weights=None,
            network=config.network,
            volume=list(self.sides),
            diffusion_steps=config.diffusion_steps,
            parameters=sum(p.numel() for p in self.network.parameters()),
            cudnn=torch.backends.cudnn.version(),
        )

    def predict(self, volumes: Tensor, labels: Tensor, steps: Tensor, *, eager: bool = False) -> Tensor:
        """Return the noise that the network predicts in noisy volumes; `eager`: not compiled, for another batch."""
        inputs = torch.cat([volumes, labels], dim=1).contiguous(memory_format=self.execution.memory_format)
        with self.execution.autocast():
            return (self.network if eager else self.execution.calls["network"])(inputs, steps).float()

    def _eager_pass(self) -> None:
        count = self.execution.compared_size  # layouts may depend on how many there are
        volumes = self.noise(count, self.generator(0))
        labels = volumes.new_zeros(count, self.shape.label_channels, *self.sides)
        with torch.no_grad():
            self.predict(volumes, labels, torch.zeros(count, dtype=torch.long, device=self.device), eager=True)

    def read(self, *, held_out: bool) -> tuple[Tensor, Tensor]:
        """Return images [N, C, D, H, W] and one-hot labels [N, L, D, H, W] in host memory."""
        images, labels = zip(*self.source.read(self.shape, self.sides, held_out=held_out), strict=True)
        return torch.from_numpy(np.stack(images)), torch.from_numpy(np.stack(labels))

    def generator(self, number: int) -> torch.Generator:
        """Return the source of noise of a call, on the device."""
        return torch.Generator(self.device).manual_seed(self.bench.seed * 1_000_003 + number)

    def noise(self, count: int, generator: torch.Generator) -> Tensor:
        """Return noise of the shape of so many volumes."""
        size = (count, self.shape.image_channels, *self.sides)
        return torch.randn(size, generator=generator, device=self.device)

    def compare(self, results: Callable[[], dict[str, Tensor]]) -> None:
        """Apply the recipe, and measure how far what it computes is from fp32."""
        with stage("parity"), in_fp32(self.execution):
            reference, _ = attempt(results, self.device)  # the recipe may need less memory
        self._clear()
        levers.apply(self.execution)
        self.facts.fp32_precision = self.execution.fp32_precision
        start_s = time.monotonic()
        with stage("compilation"):
            computed, _ = attempt(results, self.device)
            synchronize(self.device)
        self.facts.compile_s = round(time.monotonic() - start_s, 3)
        if reference is None or computed is None:
            self.parity = parity.ran_out(reference is None)
        else:
            self.parity = parity.judge(parity.FP32, parity.relative_errors(reference, computed))
        self._clear()

    def _clear(self) -> None:
        self.network.zero_grad(set_to_none=True)
        free_memory(self.device)  # the recipe's peaks are not to hold the baseline's memory

    # --- measuring -------------------------------------------------------------------------------

    def row(self, call: Call) -> dict[str, Any]:
        """Return the columns that both results have."""
        depth, height, width = self.sides
        sizes = {"network": self.config.network, "depth": depth, "height": height, "width": width}
        return {"window_id": call.window_id, "step": call.step, **sizes}


def label_slices(labels: Tensor) -> Tensor:
    """Return one-hot labels [N, L, D, H, W] as grey values [N, D, H, W] in -1..1."""
    numbers = torch.arange(1, labels.shape[1] + 1, device=labels.device, dtype=labels.dtype)
    return (labels * numbers[None, :, None, None, None]).sum(1) * 2 / labels.shape[1] - 1


def _forward_flop(config: VolumeConfig) -> int:
    """Count the operations of the network for one volume, on shapes alone."""
    shape = config.shape
    with torch.device("meta"), torch.no_grad():
        inputs = torch.empty(1, shape.image_channels + shape.label_channels, *config.sides)
        return flops.operations(lambda: VolumeUNet(shape)(inputs, torch.zeros(1, dtype=torch.long)))


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
            loss=metrics.finite(float(losses[0])),
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
            validation_l1=metrics.finite(l1),
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
        return sum(errors) / count, metrics.ieee(metrics.volume_ms_ssim, torch.cat(estimates), volumes)

    def finish(self, run_dir: Path) -> dict[str, Any]:
        grid.write_slices(run_dir / SLICES, self._pictures)
        written = {"pictures": SLICES}
        if self.config.save_weights:
            weights = {name: value.contiguous().cpu() for name, value in self._trained.items()}
            save_file(weights, run_dir / WEIGHTS, {"recipe": recipe.name(self.bench)})
            written["weights"] = WEIGHTS
        return written


class VolumeSampling(VolumeDiffusion):
    """A network with its weights, and the volumes whose segmentations it follows."""

    config: volume3d_sample.Config

    def __init__(self, bench: BenchConfig, device: torch.device) -> None:
        super().__init__(bench, device)
        self.network.eval().requires_grad_(False)
        self._found: dict[str, Any] = {"compared_volumes": self.config.compared_volumes or None}
        for key in ("other_weights", "weights"):  # now: a damaged file ends the run before its first step
            if getattr(self.config, key):
                self._found["trained_with"] = self._load(key)
        self.facts.weights, self.facts.sampler_steps = self.config.weights, self.config.steps
        self.facts.flop_per_image = self.config.steps * self.flop
        self._held_out = self.read(held_out=True)
        self.volumes, self.labels = (tensor[: self.images_per_step].to(device) for tensor in self._held_out)
        self.data = self.source.facts
        self._samples: list[Tensor] = []
        self.compare(self._results)
        if len(self._samples) == 2:
            baseline, own = self._samples
            self._found["baseline_l1"] = metrics.finite(float(F.l1_loss(own, baseline)))
            self._found["baseline_ms_ssim"] = metrics.ieee(metrics.volume_ms_ssim, own, baseline)
        self._samples = []
        self._done = 0
        self._first: Tensor | None = None

    def _load(self, key: str) -> str | None:
        path = expand_path(getattr(self.config, key))
        try:
            self.network.load_state_dict(load_file(path))
        except Exception as error:
            reason = " ".join(str(error).split())[:200]
            raise UserError(f"workload.{key}={path}: not weights of network {self.config.network} ({reason})") from None
        check_network(self.network, f"workload.{key}={path}: network {self.config.network}", path.parent, {})
        return (safe_open(path, "pt").metadata() or {}).get("recipe")

    def _results(self) -> dict[str, Tensor]:
        sample = self.sample(self.config.reference_steps, self.generator(0), self.labels)
        self._samples.append(sample)
        return {"prediction_rel": sample.cpu()}

    @torch.no_grad()
    def sample(self, count: int, generator: torch.Generator, labels: Tensor) -> Tensor:
        """Return volumes [B, C, D, H, W] after `count` evaluations of the network."""
        volumes = self.noise(self.images_per_step, generator)
        schedule = self.diffusion.subset(count)
        for step, following in zip(schedule, [*schedule[1:], None], strict=True):
            steps = torch.full((len(volumes),), step, device=self.device)
            noise = self.predict(volumes, labels, steps)
            volumes = self.diffusion.denoise(volumes, noise, step, following, self.noise(len(volumes), generator))
        return volumes

    def _sample_set(self) -> Tensor:
        """Return a sample for each held-out segmentation, of noise that depends on seed and batch alone."""
        parts = enumerate(self._held_out[1].to(self.device).split(self.images_per_step))
        return torch.cat([self.sample(self.config.steps, self.generator(number), part) for number, part in parts])

    def measure(self, recorder: Recorder) -> None:
        if self.config.compared_volumes:
            real, samples = self._held_out[0].to(self.device), self._sample_set()
            self._found["mmd"] = metrics.ieee(metrics.mmd, samples, real)
            self._found["pair_ms_ssim"] = metrics.ieee(metrics.pair_ms_ssim, samples)
            self._found["real_pair_ms_ssim"] = metrics.ieee(metrics.pair_ms_ssim, real)
            if self.config.other_weights:
                self._load("other_weights")
                self._found["other_weights_rel"] = metrics.ieee(parity.relative_error, self._sample_set(), samples)
                self._load("weights")
        super().measure(recorder)

    def step(self, recorder: Recorder) -> None:
        samples: list[Tensor] = []
        generator = self.generator(self._done)
        call = recorder.call(lambda: samples.append(self.sample(self.config.steps, generator, self.labels)))
        if self._first is None:
            self._first = samples[0]
            self._found["ms_ssim"] = metrics.ieee(metrics.volume_ms_ssim, self._first.clamp(-1, 1), self.volumes)
        self._done += 1
        row: Result = volume3d_sample.Result(
            **self.row(call),
            sampler_steps=self.config.steps,
            total_ms=call.host_ms if call.device_ms is None else call.device_ms,
            finite=bool(samples[0].isfinite().all()),
            **self._found,
            ms_ssim_scales=metrics.ms_ssim_scales(self.sides),
        )
        recorder.result(row)

    def probe(self) -> Callable[[], object]:
        return lambda: self.sample(2, self.generator(0), self.labels)

    def profiled_calls(self) -> Iterator[ProfiledCall]:
        # All steps do the same work, so that two of them show where the time goes.
        yield ProfiledCall(name="two steps of sampling", work=self.probe(), measured=self.config.steps == 2)

    def finish(self, run_dir: Path) -> dict[str, Any]:
        assert self._first is not None
        columns = {"Labels": label_slices(self.labels), "Volume": self.volumes[:, 0], "Sample": self._first[:, 0]}
        grid.write_slices(run_dir / SLICES, columns)
        return {"pictures": SLICES}
