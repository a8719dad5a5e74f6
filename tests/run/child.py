"""Run one point: `python -m tests.run.child RUN_DIR OVERRIDE...`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from inpaint_bench.run.worker import run

from .support import compose

if __name__ == "__main__":
    torch.set_num_threads(1)
    run(compose(*sys.argv[2:]), Path(sys.argv[1]), [])
