"""Software, machine and code state that a run records. Each probe fails alone and gives null; all take about 2 s.

Credentials are removed from URLs. torch is not imported here: if the process has imported it, its
versions are read from the module, otherwise from the package metadata.
"""

import hashlib
import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from . import child
from .errors import UserError
from .files import read_json
from .paths import ROOT
from .records import Environment, GitState, SlurmJob, to_record
from .schema import SNAPSHOT

OUR_PACKAGES = ("inpaint_bench", "launchers", "hydra_plugins")  # what a job may import
NAME_DIGITS = 12  # digits of the content hash in the name of a snapshot
GIT_TIMEOUT_S = 0.6  # per call, of three
PACKAGES = ("diffusers", "hydra-core", "numpy", "nvidia-ml-py", "pyarrow", "torch", "transformers")


def machine() -> Environment:
    """Return what is true of every program on this machine."""
    return Environment(
        cores=_try(lambda: len(os.sched_getaffinity(0))),
        node_cores=_try(os.cpu_count),
        cpu=_try(_cpu_model),
        driver=_try(_driver),
        hostname=_try(socket.gethostname),
        kernel=_try(platform.release),
    )


def fingerprint() -> Environment:
    """Return software, machine and code state."""
    found = machine()
    for name in PACKAGES:
        setattr(found, name.replace("-", "_"), _try(metadata.version, name))
    # Without torch in this process the first two are null, and the version is that of the installed package.
    torch: Any = sys.modules.get("torch")
    found.cuda = _try(lambda: torch.version.cuda)
    found.cudnn = _try(lambda: torch.backends.cudnn.version())
    found.torch = _try(lambda: str(torch.__version__)) or found.torch
    found.git = to_record(code_state(), GitState | None)
    found.python = platform.python_version()
    return found


def boot_id() -> str | None:
    """Return the id of the machine's boot: times of CLOCK_MONOTONIC compare only within one boot."""
    return _try(lambda: Path("/proc/sys/kernel/random/boot_id").read_text().strip())


def slurm() -> SlurmJob | None:
    """Return Slurm's ids and names of this job, or None outside of a job."""
    given = os.environ.get
    if "SLURM_JOB_ID" not in os.environ:
        return None
    return SlurmJob(
        array_job_id=given("SLURM_ARRAY_JOB_ID"),
        array_task_id=_try(int, given("SLURM_ARRAY_TASK_ID")),
        cluster=given("SLURM_CLUSTER_NAME"),
        job_id=given("SLURM_JOB_ID"),
        node=given("SLURMD_NODENAME"),
        partition=given("SLURM_JOB_PARTITION"),
        restart_count=_try(int, given("SLURM_RESTART_COUNT")),
    )


def code_state(root: Path = ROOT) -> dict[str, Any] | None:
    """Return the commit of the code, from the snapshot beside the packages or else from the checkout, or None."""
    # A job runs from the snapshot, which has no .git; the checkout may have changed since it was taken.
    taken = _try(read_json, root / SNAPSHOT)
    if isinstance(taken, dict):
        git = taken.get("git") or {}
        return {**git, "content_sha256": taken.get("content_sha256")}
    return git_state(root)


def git_state(root: Path) -> dict[str, Any] | None:
    """Return commit, dirtiness and remote of a checkout, or None if `root` is not one.

    Dirty is what a job could run: photographs and results beside the code do not count, its untracked files do.
    """
    # Checked here because git would also find an outer repository that happens to hold an installation.
    if not (root / ".git").exists():
        return None
    status = _git(root, "status", "--porcelain", "--", *OUR_PACKAGES, "conf", "slurm_templates")
    remote = _git(root, "config", "--get", "remote.origin.url")
    return {
        "commit": _git(root, "rev-parse", "--verify", "HEAD"),
        "dirty": bool(status) if status is not None else None,
        "remote": without_credentials(remote) if remote else None,
    }


def without_credentials(url: str) -> str:
    """Return a URL without user, password, query and fragment; `user@host:path` keeps host and path."""
    if "://" not in url:
        return url.rpartition("@")[2]
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def _git(root: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(root), *arguments]
    # `git status` would otherwise refresh, and so write, the index of the user's checkout.
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    try:
        done = child.run(command, timeout_s=GIT_TIMEOUT_S, env=environment)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace").strip() if done.returncode == 0 else None


def _cpu_model() -> str | None:
    text = Path("/proc/cpuinfo").read_text()
    match = re.search(r"^(?:model name|Model|cpu model)\s*:\s*(.+)$", text, re.MULTILINE)
    return match[1].strip() if match else platform.machine()


def _driver() -> str | None:
    """Return the version of NVIDIA's kernel module, the proprietary or the open one."""
    path = Path("/proc/driver/nvidia/version")
    if not path.exists():
        return None
    match = re.search(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", path.read_text())
    return match[1] if match else None


def _try(probe: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return probe(*arguments)
    except Exception:  # a failing probe must never end a run
        return None


# --- the code snapshot of a sweep -----------------------------------------------------------------


def check_running(code: Path) -> None:
    """Raise UserError unless this process has imported our packages from the snapshot `code`, and it is unchanged."""
    # hydra_plugins is a namespace that other distributions share, so it has no file of its own.
    for name in ("inpaint_bench", "launchers", "hydra_plugins.inpaint_bench_launcher"):
        source = getattr(sys.modules.get(name), "__file__", None)
        if source is not None and not Path(source).resolve().is_relative_to(code.resolve()):
            raise UserError(
                f"{name} was imported from {Path(source).parent} and not from {code}, the code that was submitted: "
                "something in the job puts another folder before it in PYTHONPATH, for example the site's "
                "environment.setup"
            )
    if content_hash(snapshot_files(code))[:NAME_DIGITS] != code.name:
        raise UserError(f"{code}: the code was changed after it was submitted; `rerun` submits the point with a copy")


def snapshot_files(code: Path) -> dict[Path, Path]:
    """Return the files of a stored snapshot by their path in it."""
    return {path.relative_to(code): path for path in files_below(code) if path != code / SNAPSHOT}


def files_below(folder: Path) -> Iterator[Path]:
    """Return the files of a folder at any depth, without compiled Python."""
    return (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)


def content_hash(files: Mapping[Path, Path]) -> str:
    """Return a hash over names and contents."""
    digest = hashlib.sha256()
    for relative, path in sorted(files.items()):
        digest.update(f"{relative}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()
