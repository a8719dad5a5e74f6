"""Replaying a part of a step as one CUDA graph."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Generator, Tensor


class CudaGraph:
    """Runs `function` eagerly `warmup` times, captures it once, and replays it from then on.

    `function` takes tensors by name. It must not wait for the device, and may read nothing that changes but these
    tensors, parameters and `generator`. The warm-up calls and the first replay after the capture are ordinary calls:
    none is lost. A replay overwrites the result of the one before.
    """

    def __init__(self, function: Callable[..., Tensor], *, warmup: int, generator: Generator | None = None) -> None:
        self._function, self._generator, self._warmup = function, generator, warmup
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._stream = torch.cuda.Stream()
        self._inputs: dict[str, Tensor] = {}  # static: every replay reads these tensors
        self._result: Tensor | None = None

    @property
    def captured(self) -> bool:
        return self._graph is not None

    def __call__(self, **inputs: Tensor) -> Tensor:
        """Return what the function returns of inputs with the shapes of the first call."""
        if self._graph is None:
            if self._calls < self._warmup:
                self._calls += 1
                return self.eager(**inputs)
            # A capture runs nothing: the replay below is the call with these inputs.
            self._capture(inputs)
        assert self._graph is not None
        assert self._result is not None
        for name, value in inputs.items():
            self._inputs[name].copy_(value, non_blocking=True)
        self._graph.replay()
        return self._result

    def eager(self, **inputs: Tensor) -> Tensor:
        """Run the function on the stream of the capture: allocations made there stay usable there."""
        # Each stream waits for the other: the inputs come from the current one, and the result is read there.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            result = self._function(**inputs)
        torch.cuda.current_stream().wait_stream(self._stream)
        return result

    def close(self) -> None:
        """Release the graph. NCCL's communicator, if a collective was captured, is not destroyed before that."""
        if self._graph is not None:
            self._graph.reset()

    def _capture(self, inputs: dict[str, Tensor]) -> None:
        self._inputs = {name: value.clone() for name, value in inputs.items()}
        graph = torch.cuda.CUDAGraph()
        if self._generator is not None:  # else every replay would draw the numbers of the capture again
            graph.register_generator_state(self._generator)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
            self._result = self._function(**self._inputs)
        self._graph = graph
