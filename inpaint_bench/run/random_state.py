"""The random number generators that everyone in the process shares: read and set, never drawn from."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor


def snapshot() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """State of PyTorch's default generators (CPU and every GPU), NumPy's and Python's: tensors, and plain JSON."""
    tensors = {"torch": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        tensors |= {f"cuda.{index}": torch.cuda.get_rng_state(index) for index in range(torch.cuda.device_count())}
    numpy = np.random.get_state(legacy=False)
    assert isinstance(numpy, dict)
    state = {**numpy["state"], "key": numpy["state"]["key"].tolist()}
    return tensors, {"numpy": {**numpy, "state": state}, "python": random.getstate()}


def restore(tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
    """Set what `snapshot` read. A GPU that was not there then keeps its state, one that is gone is left out."""
    torch.set_rng_state(tensors["torch"])
    if torch.cuda.is_initialized():
        for index in range(torch.cuda.device_count()):
            if (state := tensors.get(f"cuda.{index}")) is not None:
                torch.cuda.set_rng_state(state, index)
    numpy = values["numpy"]
    key = np.array(numpy["state"]["key"], dtype=np.uint32)
    np.random.set_state({**numpy, "state": {**numpy["state"], "key": key}})
    version, internal, gauss = values["python"]
    random.setstate((version, tuple(internal), gauss))


@contextmanager
def kept() -> Iterator[None]:
    """Whatever the block draws, afterwards the shared generators stand where they stood."""
    before = snapshot()
    try:
        yield
    finally:
        restore(*before)
