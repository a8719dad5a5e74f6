"""Run one point here, in this process, with a CUDA allocator that gives out no more than GIB.

A card needs about 1 GiB more, for the CUDA context.

usage: python -m benchmarks.memory_limit GIB OVERRIDE...
"""

from __future__ import annotations

import runpy
import sys

import torch

from inpaint_bench.commands.exit_codes import guarded
from inpaint_bench.core.errors import UserError


def main() -> None:
    if len(sys.argv) < 2 or not sys.argv[1].replace(".", "", 1).isdigit():
        raise UserError("usage: python -m benchmarks.memory_limit GIB OVERRIDE...")
    gib, *overrides = sys.argv[1:]
    if any(each == "-m" or each.startswith(("gpus=", "nodes=", "--multirun")) for each in overrides):
        raise UserError(
            "-m, gpus= and nodes= start other processes, which would have no limit: give one point on one GPU"
        )
    torch.cuda.set_per_process_memory_fraction(float(gib) * 2**30 / torch.cuda.get_device_properties(0).total_memory)
    sys.argv[1:] = ["site=local", *overrides]
    runpy.run_module("inpaint_bench.launch", run_name="__main__")


if __name__ == "__main__":
    sys.exit(guarded(main))
