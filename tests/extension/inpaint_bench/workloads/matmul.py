"""The sample workload `matmul`: products of random matrices."""

from __future__ import annotations

import torch
from torch import nn

from inpaint_bench import levers
from inpaint_bench.core.config.bench import BenchConfig
from inpaint_bench.core.workloads import Facts, matmul
from inpaint_bench.models.execution import Execution

from . import MeasuringWorkload, Recorder


class Matmul(MeasuringWorkload):
    uniform_steps = True

    def __init__(self, bench: BenchConfig, device: torch.device) -> None:
        assert isinstance(bench.workload, matmul.Config)
        self.bench, self.width, self.images_per_step = bench, bench.workload.width, bench.batch_size
        levers.require(bench, device)
        self.network = nn.Linear(self.width, self.width, bias=False).to(device)
        self.input = torch.rand(bench.batch_size, self.width, device=device)
        networks = {"linear": self.network}
        self.execution = Execution(
            bench=bench, device=device, networks=networks, calls=dict(networks), eager_pass=self._product
        )
        levers.apply(self.execution)
        self.facts = Facts(**self.execution.facts())

    def _product(self) -> None:
        with torch.no_grad():
            self.execution.calls["linear"](self.input)

    def step(self, recorder: Recorder) -> None:
        call = recorder.call(self._product)
        row = matmul.Result(window_id=call.window_id, step=call.step, width=self.width, time_ms=call.host_ms)
        recorder.result(row)


def build(config: BenchConfig, device: torch.device) -> Matmul:
    return Matmul(config, device)
