"""One thread: networks this small lose more to other processes on the machine than they gain from cores."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
