"""Fingerprint of where a run happens. Every probe fails alone and gives null; all take under two seconds.

Keys are sorted. Credentials are taken out of URLs. Nothing here imports torch: what a process has already
imported is asked for its versions, the rest is read from package metadata.
"""

from __future__ import annotations

import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from .files import read_json
from .paths import ROOT
from .schema import SNAPSHOT

GIT_TIMEOUT_S = 0.6  # three calls
PACKAGES = ("diffusers", "hydra-core", "numpy", "nvidia-ml-py", "pyarrow", "torch", "transformers")

_SLURM = {
    "array_job_id": "SLURM_ARRAY_JOB_ID",
    "array_task_id": "SLURM_ARRAY_TASK_ID",
    "cluster": "SLURM_CLUSTER_NAME",
    "job_id": "SLURM_JOB_ID",
    "node": "SLURMD_NODENAME",
    "partition": "SLURM_JOB_PARTITION",
    "restart_count": "SLURM_RESTART_COUNT",
}
_NUMBERS = ("array_task_id", "restart_count")


def fingerprint() -> dict[str, Any]:
    """Software, machine and code state, JSON-ready, keys sorted."""
    found: dict[str, Any] = {name.replace("-", "_"): _try(metadata.version, name) for name in PACKAGES}
    found.update(
        cores=_try(lambda: len(os.sched_getaffinity(0))),
        cpu=_try(_cpu_model),
        driver=_try(_driver),
        git=code_state(),
        hostname=_try(socket.gethostname),
        kernel=_try(platform.release),
        python=platform.python_version(),
    )
    found.update(_torch())
    return dict(sorted(found.items()))


def boot_id() -> str | None:
    """Identity of the machine's boot: clocks of CLOCK_MONOTONIC compare only within one."""
    return _try(lambda: Path("/proc/sys/kernel/random/boot_id").read_text().strip())


def slurm() -> dict[str, Any] | None:
    """What Slurm calls this job; None outside of one."""
    if "SLURM_JOB_ID" not in os.environ:
        return None
    result: dict[str, Any] = {name: os.environ.get(variable) for name, variable in _SLURM.items()}
    for name in _NUMBERS:
        result[name] = _try(int, result[name])
    return result


def code_state(root: Path = ROOT) -> dict[str, Any] | None:
    """The code's commit: from the snapshot beside the packages, else from the checkout; None in neither."""
    snapshot = _try(read_json, root / SNAPSHOT)
    if isinstance(snapshot, dict):
        git = snapshot.get("git") or {}
        return {**git, "content_sha256": snapshot.get("content_sha256")}
    return git_state(root)


def git_state(root: Path) -> dict[str, Any] | None:
    """Commit, dirtiness (untracked files count) and remote of a checkout; None where `root` is none."""
    if not (root / ".git").exists():
        return None  # also where an outer repository happens to hold an installation
    status = _git(root, "status", "--porcelain")
    remote = _git(root, "config", "--get", "remote.origin.url")
    return {
        "commit": _git(root, "rev-parse", "--verify", "HEAD") or None,
        "dirty": bool(status) if status is not None else None,
        "remote": without_credentials(remote) if remote else None,
    }


def without_credentials(url: str) -> str:
    """A URL without its user, password, query and fragment; `user@host:path` keeps host and path."""
    if "://" not in url:
        return url.rpartition("@")[2]
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def _git(root: Path, *arguments: str) -> str | None:
    """Output of a git command, "" where it fails quietly (no such value), None where git cannot answer."""
    command = ["git", "-C", str(root), *arguments]
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_TIMEOUT_S, env=environment)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else (None if arguments[0] == "status" else "")


def _torch() -> dict[str, Any]:
    """Versions below torch, where this process has loaded it."""
    torch: Any = sys.modules.get("torch")
    return {
        "cuda": _try(lambda: torch.version.cuda),
        "cudnn": _try(lambda: torch.backends.cudnn.version()),
        "torch": _try(lambda: str(torch.__version__)) or _try(metadata.version, "torch"),
    }


def _cpu_model() -> str | None:
    text = Path("/proc/cpuinfo").read_text()
    found = re.search(r"^(?:model name|Model|cpu model)\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else platform.machine()


def _driver() -> str | None:
    """NVIDIA's kernel module version; the open module words its line a little differently."""
    path = Path("/proc/driver/nvidia/version")
    if not path.exists():
        return None
    found = re.search(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", path.read_text())
    return found[1] if found else None


def _try(probe: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return probe(*arguments)
    except Exception:  # a probe must never end a run
        return None
