"""One rank in its process. Rank 0 runs the attempt; every other one has a device and a workload of its own.

The others do what rank 0 announces, and write no files, but for the telemetry of a node that rank 0 is not on.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from contextlib import ExitStack, closing
from pathlib import Path

import torch
import torch.multiprocessing

from inpaint_bench import workloads
from inpaint_bench.core import environment, schema
from inpaint_bench.core.config.bench import BenchConfig
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.records import Device, Manifest, read_record
from inpaint_bench.core.signals import obey_parent
from inpaint_bench.models.parallel.data_parallel import Command, next_command
from inpaint_bench.ranks import group
from inpaint_bench.ranks.engine import record_failure
from inpaint_bench.workloads import TrainingWorkload

from .attempt import start_sidecar
from .manifest import ManifestFile
from .trainer import read_workload_state
from .worker import diagnose, run_attempt

log = logging.getLogger(__name__)

Done = tuple[int, float, float | None]  # steps, seconds of waiting for data, peak of the GPU in MiB

WATCH_S = 5.0  # until a failure is reported that another rank may explain: that one ends this process before


def run_rank(bench: BenchConfig, run_dir: Path) -> None:
    """Run this process's rank. It ends with the process that started it."""
    torch.multiprocessing._prctl_pr_set_pdeathsig(signal.SIGKILL)  # type: ignore[attr-defined]
    os.setsid()  # Ctrl-C on the terminal comes through the process that started it, once
    rank = int(os.environ["RANK"])
    logging.basicConfig(level=logging.INFO, format=f"rank {rank}: %(message)s")
    record = read_record(run_dir / schema.MANIFEST, Manifest)
    assert record
    try:
        if rank == 0:
            run_attempt(bench, ManifestFile(run_dir / schema.MANIFEST, record), is_job=True)
        else:
            obey_parent()
            group.gather(_follow(bench, run_dir, record.run_id))
            group.leave_group(lambda: os._exit(1))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except Exception as error:
        if not isinstance(error, UserError):
            log.exception("failed")
        if rank or "peer" in str(error):
            time.sleep(WATCH_S)
        if rank:
            _, reason, message = diagnose(error, bench)
            record_failure(run_dir, rank, os.getpid(), f": {message}", reason)
        sys.exit(getattr(error, "exit_code", 1))


def _follow(bench: BenchConfig, run_dir: Path, run_id: str) -> Done | None:
    """Do what rank 0 announces, to the end. Returns what was done, unless it is in the results of rank 0."""
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
