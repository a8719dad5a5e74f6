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
from importlib import import_module
from pathlib import Path
from typing import Any

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


class ImportCheck(msgspec.Struct, kw_only=True):
    """Whether a module can be imported."""

    error: str | None = None
    version: str | None = None
    seconds: float | None = None


class FolderCheck(msgspec.Struct, kw_only=True):
    """Whether a job may write into a folder, and what is free there."""

    path: str | None
    error: str | None = None
    free_gib: float | None = None
    free_files: int | None = None  # null: the file system creates inodes on demand


class Quota(msgspec.Struct, kw_only=True):
    """The output of a quota command."""

    command: str
    text: str


class CudaCheck(msgspec.Struct, kw_only=True):
    """The first GPU as PyTorch sees it."""

    error: str | None = None
    visible: str | None = None  # CUDA_VISIBLE_DEVICES
    version: str | None = None
    name: str | None = None
    count: int | None = None
    memory_gib: float | None = None
    uuid: str | None = None


class NodeFindings(msgspec.Struct, kw_only=True):
    """The result of a probe job."""

    producer: str = PRODUCER
    node: str
    partition: str | None
    python: str
    executable: str
    code: str
    imports: dict[str, ImportCheck]
    cuda: CudaCheck
    software: dict[str, Any]  # environment.fingerprint()
    folders: dict[str, FolderCheck]  # by their key in the site file
    quotas: list[Quota]
    gpu: dict[str, Any] | None = None  # telemetry.nvml.probe.GpuFindings, which a broken installation cannot import
    gpu_error: str | None = None
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class NodeProbe:
    """The call that the job unpickles; writes NodeFindings to `out`."""

    out: Path
    folders: dict[str, str | None]  # by their key in the site file: storage.scratch, storage.node_tmp

    def __call__(self) -> None:
        start_s = time.monotonic()
        imports = {name: check_import(name) for name in MODULES}
        cuda, error = _attempt(check_cuda)
        findings = NodeFindings(
            node=socket.gethostname(),
            partition=(environment.slurm() or {}).get("partition"),
            python=platform.python_version(),
            executable=sys.executable,
            code=str(PACKAGE),
            imports=imports,
            cuda=cuda or CudaCheck(error=error),
            software=environment.fingerprint(),
            folders={key: check_folder(path) for key, path in self.folders.items()},
            quotas=read_quotas([path for path in self.folders.values() if path]),
        )
        findings.gpu, findings.gpu_error = _attempt(lambda: examine_gpu(findings.cuda.uuid))
        findings.seconds = round(time.monotonic() - start_s, 1)
        write_record(self.out, findings)


def check_import(name: str) -> ImportCheck:
    """Import a module, as a job does."""
    start_s = time.monotonic()
    try:
        module = import_module(name)
    except Exception as error:  # whatever a module raises would have ended the job
        return ImportCheck(error=_describe(error))
    version = getattr(module, "__version__", None)
    return ImportCheck(version=version and str(version), seconds=round(time.monotonic() - start_s, 1))


def check_cuda() -> CudaCheck:
    """Describe the first GPU that PyTorch sees."""
    import torch

    check = CudaCheck(visible=os.environ.get("CUDA_VISIBLE_DEVICES"), version=torch.version.cuda)
    if not torch.cuda.is_available():
        check.error = f"PyTorch {torch.__version__} sees no GPU"
        return check
    properties = torch.cuda.get_device_properties(0)
    uuid = str(properties.uuid)
    check.name, check.count = properties.name, torch.cuda.device_count()
    check.memory_gib = round(properties.total_memory / 2**30, 1)
    check.uuid = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
    return check


def examine_gpu(uuid: str | None) -> dict[str, Any]:
    """Examine a GPU as `doctor gpu` does; without a UUID, the only one."""
    from inpaint_bench.telemetry.nvml.probe import choose_gpu, probe
    from inpaint_bench.telemetry.nvml.real import RealNvml

    nvml = RealNvml()
    nvml.open()
    try:
        findings, _ = probe(nvml, choose_gpu(nvml, uuid), GPU_S)
    finally:
        nvml.close()
    return dict(msgspec.to_builtins(findings))


def check_folder(path: str | None) -> FolderCheck:
    """Write a file, read it back and remove it."""
    if path is None:
        return FolderCheck(path=None, error="the site file names none")
    try:
        with tempfile.TemporaryFile(dir=path, prefix=".inpaint-bench-") as file:
            file.write(b"probe")
            file.seek(0)
            assert file.read() == b"probe"
        free = os.statvfs(path)
    except OSError as error:
        return FolderCheck(path=path, error=str(error.strerror or error))
    # f_favail is 0 on a file system that creates inodes on demand
    return FolderCheck(
        path=path, free_gib=round(free.f_bavail * free.f_frsize / 2**30, 1), free_files=free.f_favail or None
    )


def read_quotas(paths: list[str]) -> list[Quota]:
    """Run the quota commands that exist here: showquota is a site's own, lfs is Lustre's."""
    quotas = []
    for command in [["showquota"], ["quota", "-s"], *(["lfs", "quota", "-h", path] for path in paths)]:
        if shutil.which(command[0]) is None:
            continue
        try:
            result = subprocess.run(
                command,
                capture_output=True,
                text=True,
                errors="replace",
                stdin=subprocess.DEVNULL,
                timeout=QUOTA_TIMEOUT_S,
            )
            lines = (result.stdout.strip() or result.stderr.strip()).splitlines()[:MAX_QUOTA_LINES]
        except (OSError, subprocess.SubprocessError) as error:
            lines = [str(error)]
        quotas.append(Quota(command=" ".join(command), text="\n".join(lines)))
    return quotas


def _attempt(check: Callable[[], Any]) -> tuple[Any, str | None]:
    """Return the result of a check, or None and why it failed."""
    try:
        return check(), None
    except Exception as error:  # a check that fails is a finding
        return None, _describe(error)


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
