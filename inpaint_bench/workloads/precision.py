"""How numbers are rounded, pinned explicitly: PyTorch's own default is fp32 matmuls beside TF32 convolutions.

One interface only: PyTorch refuses to answer once its older `allow_tf32` and its newer `fp32_precision`
have been mixed. The newer is used where this PyTorch has it (2.9 and later).
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def pin_fp32(tf32: bool) -> dict[str, str]:
    """Let what stays fp32 use TF32, or not: matmuls and convolutions alike. Returns what is now in effect."""
    backends: Any = torch.backends  # the newer attributes are not in every version's type stubs
    if hasattr(backends.cudnn, "conv") and hasattr(backends.cuda.matmul, "fp32_precision"):
        places = {
            "matmul": backends.cuda.matmul,
            "conv": backends.cudnn.conv,
            "rnn": backends.cudnn.rnn,  # unused, but cuDNN's flags must agree among themselves
        }
        for place in places.values():
            place.fp32_precision = "tf32" if tf32 else "ieee"
        return {name: str(place.fp32_precision) for name, place in places.items()}
    backends.cuda.matmul.allow_tf32 = tf32
    backends.cudnn.allow_tf32 = tf32
    words = {True: "tf32", False: "ieee"}
    return {"matmul": words[backends.cuda.matmul.allow_tf32], "conv": words[backends.cudnn.allow_tf32]}


def autocast(device: torch.device, precision: str) -> AbstractContextManager[Any]:
    """Autocast to `precision`; for fp32 one that is switched off."""
    return torch.autocast(device.type, dtype=DTYPES[precision], enabled=precision != "fp32")
