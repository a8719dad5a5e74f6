"""Rank 0 and the others: it starts them if srun did not, meets them, and watches them to the end.

A rank that fails says so; one that dies closes its connection; one that is stopped gives no sign of life. Each ends the
run with that reason: the others are told to end, and rank 0 itself is ended after a grace period if it waits for the
lost rank on the device.
"""

from __future__ import annotations

import logging
import os
import pickle
import secrets
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from inpaint_bench.core.child import Child
from inpaint_bench.core.config.bench import BenchConfig
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.records import Device, RankFacts
from inpaint_bench.core.schema import Reason, Status

from . import group
from .group import Connection, Place, RankError, Rendezvous

if TYPE_CHECKING:
    import torch

GRACE_S = 30.0  # for rank 0 to notice by itself that another rank is lost, and to close the run
NOTICE_S = 3.0  # for the message of a lost rank to arrive, after an operation with it has failed

Update = Callable[..., None]  # sets fields of the manifest
Finish = Callable[[Status, Reason, str], None]  # writes its end

FOLLOWER = "inpaint_bench.run.follower"  # the module that runs another rank

log = logging.getLogger(__name__)


class Leader:
    """The other ranks, as rank 0 sees them."""

    def __init__(self, bench: BenchConfig, run_dir: Path, run_id: str, update: Update, finish: Finish) -> None:
        self._run_dir, self._update, self._finish = run_dir, update, finish
        place = group.slurm_place(bench)
        self.place = place or Place(0, 0, bench.ranks)
        self._children: dict[int, Child] = {}
        self._connections: dict[int, Connection] = {}
        self._facts: dict[int, RankFacts] = {}
        self._devices: dict[int, list[Device]] = {}  # devices of the nodes that other ranks sample
        self._done: set[int] = set()
        self._changed = threading.Condition()  # guards what is above
        self._cause: RankError | None = None  # what ended the first rank that was lost
        self._closed = False
        # On one node the loopback interface: the name of a host need not lead back to it.
        self._host = "127.0.0.1" if bench.nodes == 1 else socket.gethostname()
        self._listener = socket.create_server(("" if bench.nodes > 1 else self._host, 0), backlog=bench.ranks)
        self._rendezvous = Rendezvous(
            start=group.job_start(),
            host=self._host,
            port=self._listener.getsockname()[1],
            token=secrets.token_hex(16),
            run_id=run_id,
        )
        threading.Thread(target=self._accept, name="ranks", daemon=True).start()
        if place:
            group.publish(run_dir, self._rendezvous)
            return
        for rank in range(1, bench.ranks):  # without srun
            self._children[rank] = child = Child(FOLLOWER)
            child.send(pickle.dumps((bench, run_dir, Place(rank, rank, bench.ranks), self._rendezvous)))

    def meet(self, device: torch.device, uuids: list[str]) -> list[str]:
        """Wait for all ranks and form their group. Returns the UUIDs of all GPUs on this node, in the order of ranks.

        Raises RankError if one fails, dies or does not come in time.
        """
        import torch.distributed as dist

        self._facts[0] = group.rank_facts(self.place, device, uuids)
        deadline = time.monotonic() + group.MEETING_S
        with self._changed:
            while len(self._facts) < self.place.ranks and self._cause is None:
                self._changed.wait(0.5)
                for rank, child in self._children.items():
                    if rank not in self._connections and child.process.poll() is not None:
                        self._lose(Reason.APP_ERROR, f"rank {rank} ended before it connected{self._how(rank)}")
                if time.monotonic() > deadline and self._cause is None:
                    missing = sorted(set(range(self.place.ranks)) - set(self._facts))
                    raise RankError(
                        Reason.APP_ERROR, f"of {self.place.ranks} ranks {missing} did not come in {group.MEETING_S:g} s"
                    )
            if self._cause:
                raise self._cause
            facts = [self._facts[rank] for rank in range(self.place.ranks)]
        gpus = [rank.gpu_uuid for rank in facts if rank.gpu_uuid]
        if len(set(gpus)) < len(gpus):
            raise RankError(Reason.APP_ERROR, f"ranks share a GPU ({', '.join(gpus)}): each must have one of its own")
        self._update(ranks=facts)
        store = dist.TCPStore(self._host, 0, self.place.ranks, True, wait_for_workers=False)
        for connection in self._connections.values():
            connection.send(group.Meet(self._host, store.port))
        group.join_group(self.place, device, store)
        return [rank.gpu_uuid for rank in facts if rank.gpu_uuid and rank.node == facts[0].node]

    @property
    def devices(self) -> list[Device]:
        """Return the GPUs that are sampled on the other nodes, in the order of ranks. After `meet`."""
        return [device for rank in sorted(self._devices) for device in self._devices[rank]]

    def finish(self) -> None:
        """Let the other ranks end, and record what they have done. Raises RankError if one fails to.

        After the workload was closed: destroying NCCL's communicator waits for the CUDA graphs that use it.
        """
        from inpaint_bench.models.parallel.data_parallel import Command, announce

        announce(Command.END)
        with self._changed:
            others = self.place.ranks - 1
            ended = self._changed.wait_for(lambda: len(self._done) == others or self._cause, group.LEAVING_S)
            if self._cause:
                raise self._cause
            if not ended:
                raise RankError(Reason.APP_ERROR, f"a rank did not end within {group.LEAVING_S:g} s of the last step")
            self._update(ranks=[self._facts[rank] for rank in range(self.place.ranks)])
        group.leave_group(self._give_up)

    def cause(self) -> RankError | None:
        """Return what ended another rank; waits a moment, because an operation with it may fail first."""
        with self._changed:
            self._changed.wait_for(lambda: self._cause, NOTICE_S)
            return self._cause

    def close(self) -> None:
        """End the other processes that have not ended, and torch's group."""
        with self._changed:
            self._closed = True
            connections = list(self._connections.values())
        self._listener.close()
        for connection in connections:
            connection.close()
        for child in self._children.values():
            child.end(group.LEAVING_S)
        (self._run_dir / group.RENDEZVOUS).unlink(missing_ok=True)

    # --- in other threads ------------------------------------------------------------------------

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                connected, _ = self._listener.accept()
                threading.Thread(target=self._listen, args=(Connection(connected),), daemon=True).start()

    def _listen(self, connection: Connection) -> None:
        hello = connection.receive()
        if not isinstance(hello, group.Hello) or not secrets.compare_digest(hello.token, self._rendezvous.token):
            connection.close()
            return
        rank = hello.rank
        with self._changed:
            self._connections[rank] = connection
        while True:
            message = connection.receive()
            with self._changed:
                if self._closed:
                    return
                match message:
                    case group.Ready():
                        self._facts[rank], self._devices[rank] = message.facts, message.devices
                    case group.Done():
                        self._facts[rank] = message.facts
                        self._done.add(rank)
                    case group.Failure():
                        self._lose(message.reason, f"{self._name(rank)}: {message.message}")
                    case None if connection.silent:
                        silence = f"gave no sign of life for {group.SILENCE_S:g} s: it is stopped, or its node hangs"
                        self._lose(Reason.APP_ERROR, f"{self._name(rank)} {silence}")
                    case None:
                        self._lose(Reason.APP_ERROR, f"{self._name(rank)} ended without a message{self._how(rank)}")
                self._changed.notify_all()
                if not isinstance(message, group.Ready):
                    return

    def _lose(self, reason: Reason, message: str) -> None:
        if self._cause is None and not self._closed:
            self._cause = RankError(reason, message)
            log.error("%s", message)
            self._changed.notify_all()
            # Unless this process ends by itself: it may wait on the device for the lost rank.
            abandon = threading.Timer(GRACE_S, self._end_process, [self._cause])
            abandon.daemon = True
            abandon.start()

    def _give_up(self) -> None:
        cause = RankError(Reason.APP_ERROR, f"torch's process group did not end within {group.LEAVING_S:g} s")
        log.error("%s", cause)
        self._end_process(cause)

    def _end_process(self, cause: RankError) -> None:
        """End all ranks on this node at once, unless the run is being closed."""
        with self._changed:
            if self._closed:
                return
            for child in self._children.values():
                child.kill()
            self._finish(Status.FAILED, cause.reason, str(cause))
            os._exit(cause.exit_code)

    def _name(self, rank: int) -> str:
        facts = self._facts.get(rank)
        return f"rank {rank} (process {facts.pid} on {facts.node})" if facts else f"rank {rank}"

    def _how(self, rank: int) -> str:
        """Return how a process ended that rank 0 has started; of srun's tasks only srun knows it."""
        child = self._children.get(rank)
        if child is None:
            return "; the log of the job has what srun says about it"
        try:
            code = child.process.wait(NOTICE_S)
        except subprocess.TimeoutExpired:
            return ""
        return f", by {signal.Signals(-code).name}" if code < 0 else f", with exit code {code}"


@contextmanager
def leading(bench: BenchConfig, run_dir: Path, run_id: str, update: Update, finish: Finish) -> Iterator[Leader | None]:
    """Run the other ranks beside the block; None if there is one rank. Raises RankError if one of them ends it."""
    if bench.ranks == 1:
        yield None
        return
    leader = Leader(bench, run_dir, run_id, update, finish)
    try:
        yield leader
    except Exception as error:
        # A mistake that rank 0 sees too is reported as such.
        if isinstance(error, RankError | UserError) or (cause := leader.cause()) is None:
            raise
        raise cause from error
    finally:
        leader.close()
        import torch.distributed as dist

        # Not with NCCL, which may wait for a rank that is lost: there the process ends anyhow.
        if dist.is_initialized() and dist.get_backend() == group.CPU_BACKEND:
            dist.destroy_process_group()
