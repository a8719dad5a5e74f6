"""Decide between a Triton kernel and its PyTorch reference."""

from __future__ import annotations

from torch import Tensor

try:
    import triton
except ImportError:  # CPU builds of PyTorch come without it
    triton = None

interpret = False  # tests: run the kernels on the processor, in Triton's interpreter (TRITON_INTERPRET=1)


def use_triton(x: Tensor) -> bool:
    """Tell whether the kernels run on `x`: on a CUDA device, in a type of at most 32 bits."""
    return triton is not None and (x.is_cuda or interpret) and x.element_size() <= 4


def cdiv(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


def largest_power_of_two_divisor(n: int, limit: int) -> int:
    """Return the largest power of two, at most `limit`, that divides `n`."""
    return min(n & -n, limit)


def next_power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least `n`."""
    return 1 << (n - 1).bit_length()
