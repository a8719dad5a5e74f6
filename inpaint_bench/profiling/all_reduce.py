"""Time an all-reduce between the GPUs of this machine: `torchrun ... -m inpaint_bench.profiling.all_reduce MIB`.

Rank 0 prints a JSON line. Without a GPU it runs over gloo, on the CPU.
"""

import json
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist

REPEATS = 20


def main() -> None:
    """Print the median time of an all-reduce of so many MiB of fp32, in ms, and the bus bandwidth."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    values = torch.ones(int(sys.argv[1]) * 2**18, device=device)
    times_s = []
    for _ in range(5 + REPEATS):
        values.fill_(1)
        dist.barrier()
        if cuda:
            torch.cuda.synchronize()
        start_s = time.perf_counter()
        dist.all_reduce(values)
        if cuda:
            torch.cuda.synchronize()
        times_s.append(time.perf_counter() - start_s)
    ranks, median_s = dist.get_world_size(), statistics.median(times_s[5:])
    if not (values == ranks).all():
        raise SystemExit(f"the sum over {ranks} GPUs is wrong")
    if dist.get_rank() == 0:
        # What each GPU sends, as NCCL's tests define it: comparable with the link for any number of GPUs.
        bus_gb_s = 2 * (ranks - 1) / ranks * values.nbytes / median_s / 1e9
        print(json.dumps({"ranks": ranks, "ms": median_s * 1e3, "bus_gb_s": bus_gb_s}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
