"""How numbers are rounded, pinned explicitly: PyTorch's own default is fp32 matmuls beside TF32 convolutions.

One interface only, the older `allow_tf32`: it exists in every PyTorch we support, and what it sets can be
read back through both. After the newer `fp32_precision` (2.9 and later) has said "ieee" for cuDNN, reading
`cudnn.allow_tf32` raises (seen with 2.13), and inductor's convolution templates read it.
"""

from __future__ import annotations

import torch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def pin_fp32(tf32: bool) -> dict[str, str]:
    """Let what stays fp32 use TF32, or not: matmuls and convolutions alike. Returns what is now in effect."""
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32
    words = {True: "tf32", False: "ieee"}
    return {
        "matmul": words[torch.backends.cuda.matmul.allow_tf32],
        "conv": words[torch.backends.cudnn.allow_tf32],
    }
