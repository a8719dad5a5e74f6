"""Every rank but 0: it has a device and a workload of its own, and does what rank 0 announces.

It writes no files, but for the telemetry of a node that rank 0 is not on. Signals are for rank 0, which lets the others
end at a step boundary; a follower ends at once if its connection to rank 0 does.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import socket
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from inpaint_bench import workloads
from inpaint_bench.core import environment, schema
from inpaint_bench.core.config.bench import BenchConfig
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.records import RankFacts
from inpaint_bench.core.signals import SIGNALS
from inpaint_bench.models.parallel.data_parallel import Command, next_command
from inpaint_bench.ranks import group
from inpaint_bench.ranks.group import Connection, Place, Rendezvous
from inpaint_bench.telemetry.client import SidecarClient

from .attempt import start_sidecar
from .trainer import read_workload_state
from .worker import diagnose

log = logging.getLogger(__name__)

WATCH_S = 5.0  # until a failure of a collective operation is reported: another rank has failed before, as a rule


class Follower:
    """One rank from its start to its end."""

    def __init__(self, bench: BenchConfig, run_dir: Path, place: Place, rendezvous: Rendezvous) -> None:
        self._bench, self._run_dir, self._place = bench, run_dir, place
        self._run_id = rendezvous.run_id
        self._ended = False
        self._connection = Connection.to(rendezvous)
        self._connection.send(group.Hello(rendezvous.token, place.rank))

    def run(self) -> None:
        """Follow rank 0 to the end. What ends it early is reported to rank 0, and raised."""
        try:
            facts = self._follow()
            self._ended = True
            self._connection.send(group.Done(facts))
            group.leave_group(lambda: os._exit(1))
        except Exception as error:
            if dist.is_initialized() and isinstance(error, RuntimeError) and "peer" in str(error):
                time.sleep(WATCH_S)  # rank 0 ends this process, with what has really happened in its manifest
            _, reason, message = diagnose(error, self._bench)
            self._connection.send(group.Failure(reason, message))
            if isinstance(error, UserError):
                sys.exit(error.exit_code)  # rank 0 tells the user
            raise

    def _follow(self) -> RankFacts:
        device, uuids = group.choose_device(self._bench, self._place.local_rank)
        facts = group.rank_facts(self._place, device, uuids)
        first = self._place.node > 0 and self._place.local_rank == 0
        sidecar = self._start_sidecar() if first and self._bench.telemetry.source != "none" else None
        try:
            self._connection.send(group.Ready(facts, sidecar.devices if sidecar else []))
            return self._do(device, facts)
        finally:
            if sidecar:
                sidecar.stop()

    def _start_sidecar(self) -> SidecarClient:
        """Sample the GPUs of this node; rank 0 does so on its own."""
        uuids = [uuid for local in range(self._bench.gpus) for uuid in group.choose_device(self._bench, local)[1]]
        if uuids and len(set(uuids)) < self._bench.gpus:
            raise UserError(
                f"{socket.gethostname()}: {len(set(uuids))} GPUs are visible to its first rank, which samples "
                f"{self._bench.gpus}; set telemetry=none, or let every task see all GPUs of its node"
            )
        folder = self._run_dir / schema.NODE.format(self._place.node)
        return start_sidecar(self._bench, folder, self._run_id, uuids, self._place.node)

    def _do(self, device: torch.device, facts: RankFacts) -> RankFacts:
        """Do what rank 0 announces, until the end. Returns the facts with what was done."""
        meeting = self._connection.receive()
        if not isinstance(meeting, group.Meet):
            raise ConnectionError("rank 0 has ended")
        threading.Thread(target=self._watch, daemon=True).start()
        store = dist.TCPStore(meeting.host, meeting.port, self._place.ranks, False)
        group.join_group(self._place, device, store)
        workload = workloads.load(self._bench, device)
        if isinstance(workload, workloads.MeasuringWorkload):
            with closing(workload):
                workload.follow()
                assert next_command()[0] is Command.END  # a profile, perhaps, is of rank 0 alone
            return facts  # what it measured is in the results of rank 0
        steps = data_wait_ns = 0
        try:
            while (command := next_command())[0] is not Command.END:
                match command:
                    case Command.RESTORE, path:
                        workload.restore(*read_workload_state(Path(path), self._bench))
                    case Command.STATE, _:
                        workload.state()
                    case _:
                        start = time.monotonic_ns()
                        batch = workload.next_batch()
                        data_wait_ns += time.monotonic_ns() - start
                        workload.step(batch)
                        steps += 1
        finally:
            workload.close()
        mib = torch.cuda.max_memory_allocated(device) / 2**20 if device.type == "cuda" else None
        return msgspec.structs.replace(
            facts, steps=steps, data_wait_s=round(data_wait_ns / 1e9, 6), allocated_peak_mib=mib
        )

    def _watch(self) -> None:
        """End this process when rank 0 ends or gives no sign of life, wherever it waits."""
        self._connection.receive()
        if not self._ended:
            os._exit(1)


def follow(bench: BenchConfig, run_dir: Path, place: Place, rendezvous: Rendezvous | None = None) -> None:
    """Run one rank. Without a rendezvous, wait for the one in the run directory."""
    for signum in SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    if bench.identity.code is not None:
        environment.check_running(Path(bench.identity.code))
    try:
        Follower(bench, run_dir, place, rendezvous or group.await_rendezvous(run_dir)).run()
    except ConnectionError as error:  # rank 0 has ended and tells why
        log.info("%s", error)
        sys.exit(1)


def main() -> int:
    """Run the rank that rank 0 describes on the standard input."""
    bench, run_dir, place, rendezvous = pickle.load(sys.stdin.buffer)
    logging.basicConfig(level=logging.INFO, format=f"rank {place.rank}: %(message)s")
    follow(bench, run_dir, place, rendezvous)
    return 0


if __name__ == "__main__":
    sys.exit(main())
