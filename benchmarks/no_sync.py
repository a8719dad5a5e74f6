"""Does a training step wait for the GPU? PyTorch is told to raise if one would; prints what it finds.

usage: python benchmarks/no_sync.py [override ...]     (needs a GPU; the overrides are those of `launch`)
"""

import sys

import torch
from hydra import compose, initialize_config_dir

from inpaint_bench import workloads
from inpaint_bench.core.config.parse import parse_config
from inpaint_bench.core.hydra_support import register
from inpaint_bench.core.paths import conf_dir

STEPS = 20


def main() -> int:
    register()
    with initialize_config_dir(version_base="1.3", config_dir=str(conf_dir())):
        bench = parse_config(compose("config", overrides=["gpu=h200", "site=local", "batch=4", *sys.argv[1:]]))
    workload = workloads.load(bench, torch.device("cuda", 0))
    for _ in range(3):
        workload.step(workload.next_batch())
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    for _ in range(STEPS):
        workload.step(workload.next_batch())
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    workload.close()
    print(f"{torch.cuda.get_device_name()}: {STEPS} steps, no host synchronisation")
    return 0


if __name__ == "__main__":
    sys.exit(main())
