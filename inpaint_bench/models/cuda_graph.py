"""A step as one CUDA graph: the host then launches one thing per step instead of thousands."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Generator, Tensor

WARMUPS = 3  # eager steps before the capture: autotuning, lazy states and allocations happen there

Batch = dict[str, Tensor]


class GraphedStep:
    """Calls `step(batch)` eagerly WARMUPS times, captures it once, and replays it from then on.

    `step` must not wait for the device, and must allocate and read nothing that changes but the batch, the
    parameters and `generator`. The warm-ups and the capture's own replay are ordinary steps: none is lost.
    """

    def __init__(self, step: Callable[[Batch], Tensor], generator: Generator) -> None:
        self._step, self._generator = step, generator
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._stream = torch.cuda.Stream()
        self._batch: Batch = {}
        self._loss: Tensor | None = None

    @property
    def captured(self) -> bool:
        return self._graph is not None

    def __call__(self, batch: Batch) -> Tensor:
        """The loss of this step, a tensor of its own."""
        if self._graph is None:
            if self._calls < WARMUPS:
                self._calls += 1
                return self._aside(batch)
            self._capture(batch)
        assert self._graph is not None
        assert self._loss is not None
        for name, value in batch.items():
            self._batch[name].copy_(value, non_blocking=True)
        self._graph.replay()
        return self._loss.clone()

    def _aside(self, batch: Batch) -> Tensor:
        """On the stream that the capture will use: allocations made here stay usable there."""
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
