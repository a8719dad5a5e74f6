"""A whole training step as one CUDA graph: one launch per step instead of thousands."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Generator, Tensor

from inpaint_bench.data.samples import Batch

WARMUP_STEPS = 3  # eager steps before the capture: autotuning, lazy state and allocations happen there


class CudaGraphStep:
    """Runs `step(batch)` eagerly WARMUP_STEPS times, captures it once, and replays it from then on.

    `step` must not wait for the device, and may read nothing that changes but the batch, the parameters and
    `generator`. The warm-up steps and the first replay after the capture are ordinary steps: none is lost.
    """

    def __init__(self, step: Callable[[Batch], Tensor], generator: Generator) -> None:
        self._step, self._generator = step, generator
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._stream = torch.cuda.Stream()
        self._batch: Batch = {}  # static input: every replay reads these tensors
        self._loss: Tensor | None = None

    @property
    def captured(self) -> bool:
        """Whether steps are replayed by now."""
        return self._graph is not None

    def __call__(self, batch: Batch) -> Tensor:
        """Run a step and return its loss, in memory of its own."""
        if self._graph is None:
            if self._calls < WARMUP_STEPS:
                self._calls += 1
                return self._warm_up(batch)
            self._capture(batch)
        assert self._graph is not None
        assert self._loss is not None
        for name, value in batch.items():
            self._batch[name].copy_(value, non_blocking=True)
        self._graph.replay()
        return self._loss.clone()

    def _warm_up(self, batch: Batch) -> Tensor:
        """Run a step on the stream of the capture: allocations made there stay usable there."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            loss = self._step(batch)
        torch.cuda.current_stream().wait_stream(self._stream)
        return loss

    def _capture(self, batch: Batch) -> None:
        self._batch = {name: value.clone() for name, value in batch.items()}
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self._generator)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=self._stream):
            self._loss = self._step(self._batch)
        self._graph = graph
