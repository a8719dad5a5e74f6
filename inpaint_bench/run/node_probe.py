"""What a compute node gives a job: the `doctor site --probe` job writes it into one JSON file; checks fail alone."""

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

from inpaint_bench.core import environment
from inpaint_bench.core.files import replace_json
from inpaint_bench.core.paths import PACKAGE
from inpaint_bench.core.schema import PRODUCER

# What a job imports before its first step, in the order in which each is the reason for the next to fail.
MODULES = ("torch", "diffusers", "transformers", "pyarrow", "inpaint_bench.run.worker")
GPU_S = 5.0  # how long the GPU is looked at
QUOTA_TIMEOUT_S = 15
QUOTA_LINES = 20


@dataclass(frozen=True, kw_only=True)
class NodeProbe:
    """Picklable; writes what it found to `out`, whole or not at all."""

    out: Path
    folders: dict[str, str | None]  # by their key of the site file: storage.scratch, storage.node_tmp

    def __call__(self) -> None:
        started = time.monotonic()
        found: dict[str, Any] = {
            "producer": PRODUCER,
            "node": socket.gethostname(),
            "slurm": environment.slurm(),
            "python": {"version": platform.python_version(), "executable": sys.executable},
            "code": str(PACKAGE),
            "imports": {name: imported(name) for name in MODULES},
            "cuda": _said(cuda),
            "software": environment.fingerprint(),
            "folders": {key: folder(path) for key, path in self.folders.items()},
            "quotas": quotas([path for path in self.folders.values() if path]),
        }
        found["gpu"] = _said(lambda: gpu(found["cuda"].get("uuid")))
        found["seconds"] = round(time.monotonic() - started, 1)
        replace_json(self.out, found)


def imported(name: str) -> dict[str, Any]:
    started = time.monotonic()
    try:
        module = import_module(name)
    except Exception as error:  # whatever a module raises is what the job would have died of
        return {"ok": False, "why": f"{type(error).__name__}: {' '.join(str(error).split())}"}
    version = getattr(module, "__version__", None)
    return {"ok": True, "version": version and str(version), "seconds": round(time.monotonic() - started, 1)}


def cuda() -> dict[str, Any]:
    import torch

    found: dict[str, Any] = {"visible": os.environ.get("CUDA_VISIBLE_DEVICES"), "version": torch.version.cuda}
    if not torch.cuda.is_available():
        return {**found, "why": f"PyTorch {torch.__version__} sees no GPU"}
    properties = torch.cuda.get_device_properties(0)
    uuid = str(properties.uuid)
    return {
        **found,
        "name": properties.name,
        "count": torch.cuda.device_count(),
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "uuid": uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}",
    }


def gpu(uuid: str | None) -> dict[str, Any]:
    """What `doctor gpu` finds, of the job's own GPU where CUDA named one."""
    from inpaint_bench.telemetry.nvml.probe import Phases, choose, probe
    from inpaint_bench.telemetry.nvml.real import RealNvml

    nvml = RealNvml()
    nvml.open()
    try:
        findings, _ = probe(nvml, choose(nvml, uuid), Phases.of(GPU_S))
    finally:
        nvml.close()
    return findings


def folder(path: str | None) -> dict[str, Any]:
    """Whether a job may write there, and what is free. A file is written, read back and removed."""
    if path is None:
        return {"path": None, "ok": False, "why": "the site file names none"}
    try:
        with tempfile.TemporaryFile(dir=path, prefix=".inpaint-bench-") as file:
            file.write(b"probe")
            file.seek(0)
            assert file.read() == b"probe"
        free = os.statvfs(path)
    except OSError as error:
        return {"path": path, "ok": False, "why": str(error.strerror or error)}
    # f_favail is 0 where a file system makes inodes as it needs them
    files = free.f_favail or None
    return {"path": path, "ok": True, "free_gib": round(free.f_bavail * free.f_frsize / 2**30, 1), "free_files": files}


def quotas(paths: list[str]) -> list[dict[str, str]]:
    """What the quota commands that are here print: one is a site's own, two are of file systems."""
    commands = [["showquota"], ["quota", "-s"], *(["lfs", "quota", "-h", path] for path in paths)]
    found = []
    for command in commands:
        if shutil.which(command[0]) is None:
            continue
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                errors="replace",
                stdin=subprocess.DEVNULL,
                timeout=QUOTA_TIMEOUT_S,
            )
            text = (done.stdout.strip() or done.stderr.strip()).splitlines()[:QUOTA_LINES]
        except (OSError, subprocess.SubprocessError) as error:
            text = [str(error)]
        found.append({"command": " ".join(command), "text": "\n".join(text)})
    return found


def _said(look: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return look()
    except Exception as error:  # a look that fails is a finding
        return {"why": f"{type(error).__name__}: {' '.join(str(error).split())}"}
