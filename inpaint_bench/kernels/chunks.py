"""Tensors that lie apart, walked by one launch: a program takes a chunk of one of them, whose address is in a table."""

from collections.abc import Sequence

import torch
from torch import Tensor


class Chunks:
    """Chunks of tensors with given sizes, which also have places in a flat buffer, `offsets`; both in elements."""

    def __init__(self, sizes: Sequence[int], offsets: Sequence[int], chunk: int, device: torch.device) -> None:
        chunks = [
            (number, offset + first, min(chunk, size - first), first)
            for number, (size, offset) in enumerate(zip(sizes, offsets, strict=True))
            for first in range(0, size, chunk)
        ]
        self._owner, starts, counts, self._inside = (
            torch.tensor(column, dtype=torch.int64) for column in zip(*chunks, strict=True)
        )
        self.offsets, self._device = offsets, device
        self.starts, self.counts = starts.to(device), counts.to(device)  # of each chunk, in the flat buffer
        # Host memory that a CUDA graph copies at every replay; memory cannot be page-locked during a graph's capture.
        self._for_graph = torch.zeros(len(chunks), dtype=torch.int64, pin_memory=device.type == "cuda")
        self._captured: Tensor | None = None

    def addresses(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return on the device where each chunk of the tensors begins. They are dense, and of these sizes."""
        first = torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.int64)
        addresses = first[self._owner] + self._inside * tensors[0].element_size()
        if self._device.type != "cuda":
            return addresses
        if not torch.cuda.is_current_stream_capturing():
            return addresses.pin_memory().to(self._device, non_blocking=True)
        if self._captured is not None:
            raise RuntimeError("these chunks were captured before: one CUDA graph may hold them")
        self._for_graph.copy_(addresses)
        self._captured = self._for_graph.to(self._device, non_blocking=True)
        return self._captured
