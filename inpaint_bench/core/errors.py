"""A user's mistake: one or two sentences, exit code 2, no traceback."""

from __future__ import annotations


class UserError(Exception):
    """What was wrong, where, and what would be right."""

    exit_code = 2


class PointsFailedError(Exception):
    """Points that were waited for did not complete, were not sent or fetched, or are unknown: which was said."""


class UnavailableError(UserError):
    """What was asked for cannot run on this machine, and why: a result, not a failure of the benchmark."""


def out_of_gpu_memory(error: BaseException) -> bool:
    """PyTorch's own exception, or what libraries below its allocator report in words."""
    import torch

    if isinstance(error, torch.cuda.OutOfMemoryError):
        return True
    words = ("CUDA out of memory", "CUDA error: out of memory", "STATUS_ALLOC_FAILED")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)
