"""Decide between a Triton kernel and its PyTorch reference."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of PyTorch come without it
    triton = tl = None

interpret = False  # tests: run the kernels on the processor, in Triton's interpreter (TRITON_INTERPRET=1)


def jit(function: Any) -> Any:
    """Make a kernel of a function in Triton's language. Without Triton nothing calls it."""
    return triton.jit(function) if triton else function


def use_triton(x: Tensor) -> bool:
    """Tell whether the kernels run on `x`: on a CUDA device, in a type of at most 32 bits."""
    return triton is not None and (x.is_cuda or interpret) and x.element_size() <= 4


def autocast_dtype(x: Tensor) -> torch.dtype:
    """Return the type that autocast computes in on the device of `x`; the type of `x` if autocast is off."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def cdiv(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


def largest_power_of_two_divisor(n: int, limit: int) -> int:
    """Return the largest power of two, at most `limit`, that divides `n`."""
    return min(n & -n, limit)
