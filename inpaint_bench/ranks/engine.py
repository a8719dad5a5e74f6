"""The processes of one run, a rank per GPU, which torch's elastic agent starts and ends: one agent on each node.

Slurm's warning and Ctrl-C go to rank 0 alone, which lets the others end at a step boundary. If a rank ends badly, the
agent ends the others of its node; what happened to it is written to the run directory, where other nodes find it.
"""

import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing import process as processes
from pathlib import Path

import msgspec

from inpaint_bench.core.child import stat_fields
from inpaint_bench.core.config.bench import BenchConfig
from inpaint_bench.core.records import Manifest, RankFacts, read_record, write_record
from inpaint_bench.core.schema import MANIFEST, Reason, Status
from inpaint_bench.core.signals import SIGNALS

STOPPED_S = 120  # seconds until a process counts as lost: stopped, by SIGSTOP for example, or still there after the end
PORTS = (20000, 10000)  # the first that a job of several nodes may use, and how many
GRACE_S = 30  # for the ranks of this node to end by themselves after a failure on another one


class RankFailure(msgspec.Struct):
    """What ended a rank, and so the run."""

    reason: Reason
    message: str


def record_failure(run_dir: Path, rank: int, pid: int, what: str, reason: Reason = Reason.APP_ERROR) -> RankFailure:
    """Write what ended a rank of this node, unless the failure of another one came first. Returns the first one."""
    path = _failure_path(run_dir)
    if not (failure := read_record(path, RankFailure)):
        failure = RankFailure(reason, f"rank {rank} (process {pid} on {socket.gethostname()}){what}")
        write_record(path, failure)
    return failure


def is_ending(run_dir: Path, ranks: Iterable[RankFacts]) -> bool:
    """Tell whether a rank has failed or died, so that torch's agent ends the others, by SIGTERM."""
    if _failure_path(run_dir).exists():
        return True
    try:
        for rank in ranks:
            if rank.node == socket.gethostname():
                os.kill(rank.pid, 0)
    except OSError:  # it has ended, or its id is another user's process now
        return True
    return False


def _failure_path(run_dir: Path) -> Path:
    # The name tells this start of the job: another one may have left its file.
    start = [os.environ.get(name, "0") for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_STEP_ID")]
    return run_dir / f"failed-rank-{'.'.join(start)}.json"


def run_ranks(bench: BenchConfig, run_dir: Path, main: Callable[[BenchConfig, Path], None]) -> RankFailure | int:
    """Run `main` in the ranks of this node. Returns rank 0's exit code, or the failure that it may not know."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in ("torch.distributed.elastic", "torch.multiprocessing"):  # the ranks tell what ends them
        logging.getLogger(name).setLevel(logging.CRITICAL)
    # Else each rank has a thread for every core: steps of a tiny model took 8 s on 16 cores.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(len(os.sched_getaffinity(0)) // bench.gpus, 1)))
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")  # NCCL's own default, which the agent would replace
    node, host, port = 0, "localhost", 0  # the kernel chooses a port
    if bench.nodes > 1:
        node, host = int(os.environ["SLURM_NODEID"]), os.environ["SLURM_LAUNCH_NODE_IPADDR"]  # of the first node
        port = PORTS[0] + int(os.environ["SLURM_JOB_ID"]) % PORTS[1]  # tasks of an array have job ids of their own
    config = LaunchConfig(
        min_nodes=bench.nodes,
        max_nodes=bench.nodes,
        nproc_per_node=bench.gpus,
        run_id=_failure_path(run_dir).stem,
        rdzv_backend="static" if port else "c10d",
        rdzv_endpoint=f"{host}:{port}",
        rdzv_configs={"rank": node} if port else {},
        local_addr=None if port else "127.0.0.1",  # the name of a host need not lead back to it
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
        signals_to_handle="SIGQUIT",  # at the others the agent would end all ranks within 30 s
    )
    if node == 0:
        _failure_path(run_dir).unlink(missing_ok=True)  # of a start that was killed
    ended, received = threading.Event(), list[int]()

    def forward(signum: int, _: object) -> None:
        received.append(signum)
        for _rank, pid in _ranks(bench, node)[:1] if node == 0 else []:
            os.kill(pid, signum)

    watch = threading.Thread(target=_watch, args=(bench, run_dir, node, ended), daemon=True)
    handlers = {signum: signal.signal(signum, forward) for signum in SIGNALS}
    # The ranks inherit the mask: none gets a signal before it can handle it. The watching thread accepts them here.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        watch.start()
        elastic_launch(config, main)(bench, run_dir)
        return 0
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode
        if rank == 0 and code > 0 and (received or not _failure_path(run_dir).exists()):
            return code  # rank 0 has written what ended it
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        return record_failure(run_dir, rank, failure.pid, f" ended without a message, {how}")
    except Exception as error:  # another node did not come, or the port is in use
        return RankFailure(Reason.APP_ERROR, f"torch's elastic agent: {error}")
    finally:
        ended.set()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
        if node == 0:
            _failure_path(run_dir).unlink(missing_ok=True)


def _watch(bench: BenchConfig, run_dir: Path, node: int, ended: threading.Event) -> None:
    """End the ranks that torch's agent leaves: stopped, or still there after the run; all if another node lost one."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    stopped: dict[int, int] = {}  # seconds by rank, counted: this process may have been suspended too
    failed = ending = 0
    while not ended.wait(1.0):
        failed += _failure_path(run_dir).exists()
        record = read_record(run_dir / MANIFEST, Manifest)
        ending += bool(record and record.status is not Status.RUNNING)
        for rank, pid in _ranks(bench, node):
            with suppress(OSError):  # it has ended
                is_stopped = stat_fields(pid)[0] == "T"
                stopped[rank] = stopped.get(rank, 0) + 1 if is_stopped else 0
                if stopped[rank] == STOPPED_S:
                    record_failure(run_dir, rank, pid, f" was stopped for {STOPPED_S} s, by SIGSTOP for example")
                if failed == 1:
                    os.kill(pid, signal.SIGTERM)
                if failed == GRACE_S or ending == STOPPED_S or stopped[rank] >= STOPPED_S:
                    os.kill(pid, signal.SIGKILL)


def _ranks(bench: BenchConfig, node: int) -> list[tuple[int, int]]:
    """Return the ranks of this node and their processes, in the order in which the agent has started them."""
    # Not active_children(): it waits for those that have ended, and so does torch's agent at the same time.
    children = sorted(processes._children, key=lambda child: int(child.name.rpartition("-")[2]))  # type: ignore[attr-defined]
    return [(node * bench.gpus + local, child.pid) for local, child in enumerate(children) if child.pid]
