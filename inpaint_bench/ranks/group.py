"""The processes of one run, a rank per GPU: the device of each, how they meet, and the messages between them.

Under Slurm, srun starts them, one task each; elsewhere rank 0 starts the others (leader.py). Rank 0 listens on a port
that the kernel chooses and publishes it in the run directory, which all nodes share. The connection of every other
rank stays open until it ends: a process that dies closes it, and TCP's keepalive notices a node that is lost.
"""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec

from inpaint_bench.core.config.bench import BenchConfig
from inpaint_bench.core.config.recipe import check_device
from inpaint_bench.core.config.recipe import name as recipe_name
from inpaint_bench.core.errors import PointsFailedError, UserError
from inpaint_bench.core.records import Device, RankFacts, decode_record, read_record, write_record
from inpaint_bench.core.schema import Reason

if TYPE_CHECKING:
    import torch

RENDEZVOUS = "rendezvous.json"
MEETING_S = 300.0  # until all ranks have met: a slow file system may take minutes to import torch
COLLECTIVE_S = 1800.0  # until a collective operation is given up: the others wait while rank 0 validates or saves
LEAVING_S = 60.0  # until a process has ended that has nothing to do any more
ALIVE_S = 10.0  # between signs of life
SILENCE_S = 80.0  # without one: the process is stopped, or its node hangs
MAX_LINE = 2**16
CPU_BACKEND = "gloo_of_one_thread"


class Place(msgspec.Struct, frozen=True):
    """Which of the processes this is."""

    rank: int
    local_rank: int  # on its node: the number of its GPU there
    ranks: int
    node: int = 0


class Rendezvous(msgspec.Struct, kw_only=True):
    """Where rank 0 listens, for processes that know the token."""

    start: str  # start of the job: an earlier start in the same directory left a file of its own
    host: str
    port: int
    token: str
    run_id: str


class Hello(msgspec.Struct, tag="hello"):
    """The first line of a rank."""

    token: str
    rank: int


class Ready(msgspec.Struct, tag="ready"):
    """It has its device; the first rank of a node other than rank 0's also samples the GPUs of that node."""

    facts: RankFacts
    devices: list[Device] = []


class Meet(msgspec.Struct, tag="meet"):
    """From rank 0: all are ready, and torch's store listens here."""

    host: str
    port: int


class Done(msgspec.Struct, tag="done"):
    """It has done all that rank 0 announced, and ends."""

    facts: RankFacts


class Failure(msgspec.Struct, tag="failure"):
    """It cannot go on."""

    reason: Reason
    message: str


class Alive(msgspec.Struct, tag="alive"):
    """A sign of life, of a thread of its own: a process that computes gives it, a stopped one does not."""


Message = Hello | Ready | Meet | Done | Failure | Alive


def job_start() -> str:
    """Return what names this start of a Slurm job."""
    names = ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_STEP_ID")
    return ".".join(os.environ.get(name, "0") for name in names)


def publish(run_dir: Path, rendezvous: Rendezvous) -> None:
    """Write the rendezvous, readable by this user alone: whoever knows the token takes part in the run."""
    umask = os.umask(0o077)
    try:
        write_record(run_dir / RENDEZVOUS, rendezvous)
    finally:
        os.umask(umask)


def await_rendezvous(run_dir: Path) -> Rendezvous:
    """Wait for the rendezvous of this start of the job. Raises UserError if rank 0 publishes none in time."""
    deadline = time.monotonic() + MEETING_S
    while time.monotonic() < deadline:
        rendezvous = read_record(run_dir / RENDEZVOUS, Rendezvous)
        if rendezvous and rendezvous.start == job_start():
            return rendezvous
        time.sleep(0.2)
    raise UserError(f"rank 0 published no address in {run_dir / RENDEZVOUS} within {MEETING_S:g} s")


class Connection:
    """Lines of JSON between rank 0 and another one."""

    def __init__(self, connected: socket.socket) -> None:
        # A lost node sends nothing: after these 10 + 4 * 5 s without an answer the kernel ends the connection.
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4)):
            connected.setsockopt(socket.IPPROTO_TCP, option, value)
        connected.settimeout(SILENCE_S)
        self.silent = False  # whether the other end gave no sign of life
        self._socket, self._sending = connected, threading.Lock()
        self._lines: BinaryIO = connected.makefile("rb")
        threading.Thread(target=self._give_signs_of_life, daemon=True).start()

    @classmethod
    def to(cls, rendezvous: Rendezvous) -> Connection:
        """Connect to rank 0. Raises OSError."""
        return cls(socket.create_connection((rendezvous.host, rendezvous.port), timeout=MEETING_S))

    def send(self, message: Message) -> None:
        """Send a message. Raises OSError if the other end is gone."""
        with self._sending:
            self._socket.sendall(msgspec.json.encode(message) + b"\n")

    def receive(self) -> Message | None:
        """Wait for a message; None if the other end is gone, is silent, or is none of ours."""
        message: Message | None = Alive()
        try:
            while isinstance(message, Alive):
                message = decode_record(self._lines.readline(MAX_LINE), Message)
        except (OSError, ValueError) as error:
            self.silent = isinstance(error, TimeoutError)
            return None
        return message

    def _give_signs_of_life(self) -> None:
        with suppress(OSError):  # the other end is gone
            while True:
                time.sleep(ALIVE_S)
                self.send(Alive())

    def close(self) -> None:
        """End the connection, also if another thread waits for a message."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class RankError(PointsFailedError):
    """What ended another rank, and so the run."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def slurm_place(bench: BenchConfig) -> Place | None:
    """Return the place that srun gave this process; None if it has started one process alone. Raises UserError."""
    # Tasks of the step: SLURM_NTASKS is also set in a shell of salloc, where srun starts none of the tasks.
    tasks = int(os.environ.get("SLURM_STEP_NUM_TASKS", "1"))
    if tasks == 1:
        return None
    if tasks != bench.ranks:
        raise UserError(f"srun started {tasks} tasks, but gpus={bench.gpus} nodes={bench.nodes} needs {bench.ranks}")
    rank, local_rank, node = (int(os.environ[f"SLURM_{name}"]) for name in ("PROCID", "LOCALID", "NODEID"))
    return Place(rank, local_rank, tasks, node)


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
    # All GPUs of the job are visible to each rank, unless the site binds one to each task.
    visible = torch.cuda.device_count()
    if 1 < visible <= local_rank or (visible == 1 < bench.gpus and "SLURM_STEP_NUM_TASKS" not in os.environ):
        raise UserError(f"gpus={bench.gpus}: {visible} GPUs are visible to this process")
    device = torch.device("cuda", local_rank if visible > 1 else 0)
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


def rank_facts(place: Place, device: torch.device, uuids: list[str]) -> RankFacts:
    return RankFacts(
        rank=place.rank,
        local_rank=place.local_rank,
        node=socket.gethostname(),
        pid=os.getpid(),
        device=device.type,
        gpu_uuid=uuids[0] if uuids else None,
    )


def join_group(place: Place, device: torch.device, store: torch.distributed.Store) -> None:
    """Make torch's process group of all ranks: gloo for values on the host, NCCL for GPUs."""
    import torch.distributed as dist

    if device.type == "cpu" and CPU_BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(CPU_BACKEND, _gloo_of_one_thread, devices=["cpu"])
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else CPU_BACKEND,
        store=store,
        rank=place.rank,
        world_size=place.ranks,
        timeout=timedelta(seconds=COLLECTIVE_S),
        device_id=device if device.type == "cuda" else None,
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


def leave_group(give_up: Callable[[], None]) -> None:
    """Destroy torch's process group. `give_up` runs in another thread if that takes longer than LEAVING_S.

    NCCL may wait for ever, in code that no signal interrupts.
    """
    import torch.distributed as dist

    limit = threading.Timer(LEAVING_S, give_up)
    limit.daemon = True
    limit.start()
    try:
        dist.destroy_process_group()
    finally:
        limit.cancel()
