"""What a compute node offers a job: the job of `doctor site --probe` writes it into one JSON file.

Every check may fail without affecting the others.
"""

from __future__ import annotations

import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path

import msgspec

from inpaint_bench.core import environment
from inpaint_bench.core.paths import PACKAGE
from inpaint_bench.core.records import write_record
from inpaint_bench.core.schema import PRODUCER

# What a job imports before its first step; each is a possible reason for the next to fail.
MODULES = ("torch", "diffusers", "transformers", "pyarrow", "inpaint_bench.run.worker")
GPU_S = 5.0  # how long the GPU is examined
QUOTA_TIMEOUT_S = 15
MAX_QUOTA_LINES = 20


class Check(msgspec.Struct, kw_only=True):
    """The result of a check as a phrase, or why it failed."""

    result: str | None = None
    error: str | None = None


class FolderCheck(Check, kw_only=True):
    """Whether a job can write into a folder of the site file, and what is free there."""

    path: str | None


class NodeFindings(msgspec.Struct, kw_only=True):
    """The result of a probe job."""

    producer: str = PRODUCER
    node: str
    partition: str | None
    required: dict[str, Check]  # what every job needs: the imports and CUDA
    nvml: Check
    facts: dict[str, str]
    folders: dict[str, FolderCheck]  # by their key in the site file
    quotas: dict[str, str]  # command: output
    seconds: float


@dataclass(frozen=True, kw_only=True)
class NodeProbe:
    """The call that the job unpickles; writes NodeFindings to `out`."""

    out: Path
    folders: dict[str, str | None]  # by their key in the site file: storage.scratch, storage.node_tmp

    def __call__(self) -> None:
        start_s = time.monotonic()
        required = {f"import {name}": _check(partial(_import, name)) for name in MODULES}
        required["CUDA"] = _check(_describe_cuda)
        software = environment.fingerprint()
        findings = NodeFindings(
            node=socket.gethostname(),
            partition=(environment.slurm() or {}).get("partition"),
            required=required,
            nvml=_check(_examine_gpu),
            facts={
                "Python": f"{platform.python_version()}, {sys.executable}",
                "code": str(PACKAGE),
                "driver": software["driver"] or "not found",
                "processor": f"{software['cpu']}, {software['cores']} cores for the job",
            },
            folders={key: check_folder(path) for key, path in self.folders.items()},
            quotas=read_quotas([path for path in self.folders.values() if path]),
            seconds=round(time.monotonic() - start_s, 1),
        )
        write_record(self.out, findings)


def _check(describe: Callable[[], str]) -> Check:
    try:
        return Check(result=describe())
    except Exception as error:  # whatever it raises would have ended a job
        return Check(error=f"{type(error).__name__}: {' '.join(str(error).split())}")


def _import(name: str) -> str:
    start_s = time.monotonic()
    version = getattr(import_module(name), "__version__", None)
    return f"{version or 'works'}, {time.monotonic() - start_s:.1f} s"


def _describe_cuda() -> str:
    import torch

    visible = f"CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}"
    if not torch.cuda.is_available():
        raise RuntimeError(f"PyTorch {torch.__version__} sees no GPU ({visible})")
    gpu = torch.cuda.get_device_properties(0)
    memory = f"{gpu.total_memory / 2**30:.1f} GiB"
    return f"{gpu.name}, {memory}, {torch.cuda.device_count()} visible ({visible}), CUDA {torch.version.cuda}"


def _examine_gpu() -> str:
    """Examine the job's GPU as `doctor gpu` does, which gives the details."""
    # Not at the top: an installation without NVML must be able to run the other checks.
    from inpaint_bench.telemetry.nvml.probe import examine_gpu

    calls = examine_gpu(None, GPU_S).calls
    missing = [f"{call.feeds}: {call.missing}" for call in calls if call.missing]
    return f"{len(calls) - len(missing)} of {len(calls)} values available; missing {', '.join(missing) or 'none'}"


def check_folder(path: str | None) -> FolderCheck:
    """Write a file, read it back and remove it."""
    if path is None:
        return FolderCheck(path=None, error="the site file names none")
    try:
        # A file without a name, so a probe that is killed leaves nothing; os.access knows nothing of a full quota.
        with tempfile.TemporaryFile(dir=path, prefix=".inpaint-bench-") as file:
            file.write(b"probe")
            file.seek(0)
            assert file.read() == b"probe"
        free = os.statvfs(path)
    except OSError as error:
        return FolderCheck(path=path, error=str(error.strerror or error))
    # f_favail is 0 on a file system that creates inodes on demand.
    files = f", {free.f_favail:,} files" if free.f_favail else ""
    return FolderCheck(path=path, result=f"writable; free: {free.f_bavail * free.f_frsize / 2**30:.1f} GiB{files}")


def read_quotas(paths: list[str]) -> dict[str, str]:
    """Run the quota commands that exist here: showquota is a site's own, lfs is Lustre's."""
    quotas = {}
    for command in [["showquota"], ["quota", "-s"], *(["lfs", "quota", "-h", path] for path in paths)]:
        if shutil.which(command[0]) is None:
            continue
        try:
            result = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, timeout=QUOTA_TIMEOUT_S)
            # A command without an answer says why on stderr, such as lfs for a folder that is not on Lustre.
            output = result.stdout.strip() or result.stderr.strip()
            lines = output.decode(errors="replace").splitlines()[:MAX_QUOTA_LINES]
        except (OSError, subprocess.SubprocessError) as error:
            lines = [str(error)]
        quotas[" ".join(command)] = "\n".join(lines)
    return quotas
