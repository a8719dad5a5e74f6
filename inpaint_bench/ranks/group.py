"""The group of the processes of one run, a rank per GPU: the device of each, and how they meet and leave."""

from __future__ import annotations

import os
import re
import socket
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from inpaint_bench.core.config.bench import BenchConfig
from inpaint_bench.core.config.recipe import check_device
from inpaint_bench.core.config.recipe import name as recipe_name
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.records import Device, RankFacts

if TYPE_CHECKING:
    import torch

COLLECTIVE_S = 1800.0  # until a collective operation is given up: the others wait while rank 0 validates or saves
LEAVING_S = 60.0  # until a process has ended that has nothing to do any more
CPU_BACKEND = "gloo_of_one_thread"


def choose_device(bench: BenchConfig, local_rank: int = 0) -> tuple[torch.device, list[str]]:
    """Return the device of a rank and its GPU's UUID. Raises UserError: nothing falls back to the CPU."""
    import torch

    gpu, recipe = bench.gpu, bench.recipe
    label = recipe_name(bench)
    check_device(bench)
    if recipe.device == "cpu":
        return torch.device("cpu"), []
    assert gpu.nvml_name
    if not torch.cuda.is_available():
        named = os.environ.get("CUDA_VISIBLE_DEVICES", "not set") or "empty"
        raise UserError(
            f"recipe {label} needs CUDA, which is not available to PyTorch {torch.__version__} "
            f"(CUDA_VISIBLE_DEVICES {named}); recipe=cpu runs on the CPU"
        )
    if bench.gpus > max(visible := torch.cuda.device_count(), 1):
        raise UserError(f"gpus={bench.gpus}: {visible} GPUs are visible to this process")
    device = torch.device("cuda", local_rank)
    properties = torch.cuda.get_device_properties(device)
    uuid = str(properties.uuid)  # CUDA's own, whether CUDA_VISIBLE_DEVICES holds numbers or UUIDs
    # CUDA appends the profile to the name of a slice, "MIG 1g.18gb"; its UUID may come without the prefix.
    if re.search(r"\bMIG\b", properties.name) or uuid.startswith("MIG-"):
        raise UserError(
            f"this run was given a MIG slice ({properties.name}); power and utilisation cannot be attributed to a "
            "slice: request a whole GPU"
        )
    # A pattern: the A100 of 40 GB, for example, has a name per form factor.
    if not re.match(gpu.nvml_name, properties.name):
        raise UserError(f"gpu={gpu.name} expects a device named {gpu.nvml_name!r}, this one is {properties.name!r}")
    return device, [uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"]


def meet(
    device: torch.device, uuids: list[str], sampled: Sequence[Device] = ()
) -> tuple[list[RankFacts], list[Device]]:
    """Make the group of all ranks. Returns their facts, and the GPUs that are sampled on other nodes than rank 0's.

    Raises UserError if ranks share a GPU.
    """
    join_group(device)
    facts = RankFacts(
        rank=int(os.environ["RANK"]),
        local_rank=int(os.environ["LOCAL_RANK"]),
        node=socket.gethostname(),
        pid=os.getpid(),
        device=device.type,
        gpu_uuid=uuids[0] if uuids else None,
    )
    ranks, devices = zip(*gather((facts, list(sampled))), strict=True)
    gpus = [rank.gpu_uuid for rank in ranks if rank.gpu_uuid]
    if len(set(gpus)) < len(gpus):
        raise UserError(f"ranks share a GPU ({', '.join(gpus)}): each must have one of its own")
    return list(ranks), [gpu for of_rank in devices for gpu in of_rank]


def gather(value: Any) -> list[Any]:
    """Return the values of all ranks, in their order."""
    import torch.distributed as dist

    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def join_group(device: torch.device, **place: Any) -> None:
    """Make torch's process group: gloo for values on the host, NCCL for GPUs. Torch's agent says which rank this is."""
    import torch.distributed as dist

    if device.type == "cpu" and CPU_BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(CPU_BACKEND, _gloo_of_one_thread, devices=["cpu"])
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else CPU_BACKEND,
        timeout=timedelta(seconds=COLLECTIVE_S),
        device_id=device if device.type == "cuda" else None,
        **place,
    )


def _gloo_of_one_thread(store: torch.distributed.Store, rank: int, size: int, timeout: timedelta) -> Any:
    """Return gloo's group with one worker thread in place of two.

    In PyTorch 2.13 the two write the name of the last operation to one string without a lock, and names that are longer
    than 15 characters, such as that of the all-gather of tensor parallelism, corrupt the heap (seen: SIGABRT, SIGSEGV).
    """
    import torch.distributed as dist

    gloo: Any = dist.ProcessGroupGloo  # its options are private
    options, interface = gloo._Options(), os.environ.get("GLOO_SOCKET_IFNAME")
    options._devices = [gloo.create_device(interface=interface) if interface else gloo.create_default_device()]
    options._threads, options._timeout = 1, timeout
    return gloo(store, rank, size, options)


def leave_group(value: Any, give_up: Callable[[], None]) -> list[Any]:
    """Destroy torch's process group. Returns the last values of all ranks, in their order.

    `give_up` runs in another thread if that takes longer than LEAVING_S: NCCL may wait for ever, in code that no signal
    interrupts.
    """
    import torch.distributed as dist

    limit = threading.Timer(LEAVING_S, give_up)
    limit.daemon = True
    limit.start()
    try:
        values = gather(value)
        dist.destroy_process_group()
    finally:
        limit.cancel()
    return values
