"""Every rank but 0: it has a device and a workload of its own, and does what rank 0 announces.

It writes no files, but for the telemetry of a node that rank 0 is not on.
"""

import os
import time
from contextlib import ExitStack, closing
from pathlib import Path

import torch

from inpaint_bench import workloads
from inpaint_bench.core import environment, schema
from inpaint_bench.core.config.bench import BenchConfig
from inpaint_bench.core.records import Device
from inpaint_bench.core.signals import obey_parent
from inpaint_bench.models.parallel.data_parallel import Command, next_command
from inpaint_bench.ranks import group
from inpaint_bench.workloads import TrainingWorkload

from .attempt import start_sidecar
from .trainer import read_workload_state

Done = tuple[int, float, float | None]  # steps, seconds of waiting for data, peak of the GPU in MiB


def follow(bench: BenchConfig, run_dir: Path, run_id: str) -> None:
    """Do what rank 0 announces, to the end."""
    obey_parent()
    group.leave_group(_follow(bench, run_dir, run_id), lambda: os._exit(1))


def _follow(bench: BenchConfig, run_dir: Path, run_id: str) -> Done | None:
    """Return what was done, unless it is in the results of rank 0."""
    if bench.identity.code is not None:
        environment.check_running(Path(bench.identity.code))
    local_rank, node = int(os.environ["LOCAL_RANK"]), int(os.environ["GROUP_RANK"])
    device, uuids = group.choose_device(bench, local_rank)
    with ExitStack() as stack:
        sampled: list[Device] = []
        if node > 0 and local_rank == 0 and bench.telemetry.source != "none":  # rank 0 samples the GPUs of its own node
            of_node = [uuid for local in range(bench.gpus) for uuid in group.choose_device(bench, local)[1]]
            sidecar = start_sidecar(bench, run_dir / schema.NODE.format(node), run_id, of_node, node)
            stack.callback(sidecar.stop)
            sampled = sidecar.devices
        group.meet(device, uuids, sampled)
        workload = stack.enter_context(closing(workloads.load(bench, device)))
        if not isinstance(workload, workloads.MeasuringWorkload):
            return _train(bench, workload, device)
        workload.follow()
        assert next_command()[0] is Command.END  # a profile, perhaps, is of rank 0 alone
        return None


def _train(bench: BenchConfig, workload: TrainingWorkload, device: torch.device) -> Done:
    steps = data_wait_ns = 0
    while (command := next_command())[0] is not Command.END:
        match command:
            case Command.RESTORE, path:
                workload.restore(*read_workload_state(Path(path), bench))
            case Command.STATE, _:
                workload.state()
            case _:
                start = time.monotonic_ns()
                batch = workload.next_batch()
                data_wait_ns += time.monotonic_ns() - start
                workload.step(batch)
                steps += 1
    mib = torch.cuda.max_memory_allocated(device) / 2**20 if device.type == "cuda" else None
    return steps, round(data_wait_ns / 1e9, 6), mib
