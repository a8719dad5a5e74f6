"""Run `launch site=local` here with a CUDA allocator that gives out no more than a smaller card has.

usage: python -m benchmarks.memory_limit GIB OVERRIDE...
"""

from __future__ import annotations

import runpy
import sys

import torch


def main() -> None:
    gib = float(sys.argv.pop(1))
    torch.cuda.set_per_process_memory_fraction(gib * 2**30 / torch.cuda.get_device_properties(0).total_memory)
    runpy.run_module("inpaint_bench.launch", run_name="__main__")


if __name__ == "__main__":
    main()
