"""The workload `volume3d_sample`: from noise and the segmentations of held-out volumes to volumes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from inpaint_bench.core.config.bench import BenchConfig
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.files import expand_path
from inpaint_bench.core.workloads import Result, volume3d_sample
from inpaint_bench.models.pipeline_folder import check_network
from inpaint_bench.quality import grid, metrics

from . import ProfiledCall, Recorder
from .volumes import SLICES, VolumeDiffusion, finite, ieee_ms_ssim, label_slices


class VolumeSampling(VolumeDiffusion):
    """A network with its weights, and the volumes whose segmentations it follows."""

    config: volume3d_sample.Config

    def __init__(self, bench: BenchConfig, device: torch.device) -> None:
        super().__init__(bench, device)
        self.network.eval().requires_grad_(False)
        if self.config.weights:
            self._load(expand_path(self.config.weights))
        self.facts.weights, self.facts.sampler_steps = self.config.weights, self.config.steps
        self.facts.flop_per_image = self.config.steps * self.flop
        self.volumes, self.labels = (tensor.to(device) for tensor in self.read(held_out=True))
        self.data = self.source.facts
        self._samples: list[Tensor] = []
        self.compare(self._results)
        self._to_baseline: dict[str, Any] = {"baseline_l1": None, "baseline_ms_ssim": None}
        if len(self._samples) == 2:
            baseline, own = self._samples
            self._to_baseline["baseline_l1"] = finite(float(F.l1_loss(own, baseline)))
            self._to_baseline["baseline_ms_ssim"] = ieee_ms_ssim(own, baseline)
        self._samples = []
        self._done = 0
        self._similarity: float | None = None
        self._first: Tensor | None = None

    def _load(self, path: Path) -> None:
        try:
            self.network.load_state_dict(load_file(path))
        except Exception as error:
            reason = " ".join(str(error).split())[:200]
            raise UserError(
                f"workload.weights={path}: not weights of network {self.config.network} ({reason})"
            ) from None
        check_network(self.network, f"workload.weights={path}: network {self.config.network}", path.parent, {})

    def _results(self) -> dict[str, Tensor]:
        sample = self.sample(self.config.reference_steps, self.generator(0))
        self._samples.append(sample)
        return {"prediction_rel": sample.cpu()}

    @torch.no_grad()
    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        """Return volumes [B, C, D, H, W] after `count` evaluations of the network."""
        volumes = self.noise(self.images_per_step, generator)
        schedule = self.diffusion.subset(count)
        for step, following in zip(schedule, [*schedule[1:], None], strict=True):
            steps = torch.full((len(volumes),), step, device=self.device)
            noise = self.predict(volumes, self.labels, steps)
            volumes = self.diffusion.denoise(volumes, noise, step, following, self.noise(len(volumes), generator))
        return volumes

    def step(self, recorder: Recorder) -> None:
        samples: list[Tensor] = []
        generator = self.generator(self._done)
        call = recorder.call(lambda: samples.append(self.sample(self.config.steps, generator)))
        if self._first is None:
            self._first = samples[0]
            self._similarity = ieee_ms_ssim(self._first.clamp(-1, 1), self.volumes)
        self._done += 1
        row: Result = volume3d_sample.Result(
            **self.row(call),
            sampler_steps=self.config.steps,
            total_ms=call.host_ms if call.device_ms is None else call.device_ms,
            finite=bool(samples[0].isfinite().all()),
            ms_ssim=self._similarity,
            **self._to_baseline,
            ms_ssim_scales=metrics.ms_ssim_scales(self.sides),
        )
        recorder.result(row)

    def probe(self) -> Callable[[], object]:
        return lambda: self.sample(2, self.generator(0))

    def profiled_calls(self) -> Iterator[ProfiledCall]:
        # All steps do the same work, so that two of them show where the time goes.
        yield ProfiledCall(name="two steps of sampling", work=self.probe(), measured=self.config.steps == 2)

    def finish(self, run_dir: Path) -> dict[str, Any]:
        assert self._first is not None
        columns = {"Labels": label_slices(self.labels), "Volume": self.volumes[:, 0], "Sample": self._first[:, 0]}
        grid.write_slices(run_dir / SLICES, columns)
        return {"pictures": SLICES}


build = VolumeSampling
