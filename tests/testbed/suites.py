"""Install Debian suites in folders and run make there, with the suite's Slurm and Python: `make faults SLURM=24.11`.

A folder holds what debootstrap and apt-get install, and `venv`. A command sees it as the root folder, with this
checkout at its own path and `venv` as the checkout's .venv. Mounts and processes are in namespaces of the command, and
end with it.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from .errors import PackagesError
from .packages import FULL

SUITES = {"bookworm": "22.05", "trixie": "24.11", "forky": "26.05"}
ROOT = Path(__file__).parents[2]
PACKAGES = (
    *FULL,
    *("openssh-client", "openssh-server", "rsync", "procps", "ca-certificates"),
    *("git", "make", "g++", "python3-dev", "python3-venv"),
)
# libmariadb3 11.8.9 of Debian 13 and testing breaks slurmdbd ("Number of columns in result (=1)"). That of Debian 12
# works; it lies where the loader looks first, because other packages need the newer one.
OLDER_CLIENT = """
echo 'deb http://deb.debian.org/debian bookworm main' > /etc/apt/sources.list.d/bookworm.list
apt-get update
cd /tmp
apt-get download libmariadb3/bookworm
dpkg -x libmariadb3_*.deb libmariadb3
cp libmariadb3/usr/lib/*/libmariadb.so.3 /usr/local/lib
ldconfig
rm -r libmariadb3*
"""
INSTALL = """
printf '#!/bin/sh\\nexit 101\\n' > /usr/sbin/policy-rc.d
chmod 755 /usr/sbin/policy-rc.d
echo 'Acquire::Check-Valid-Until "false";' > /etc/apt/apt.conf.d/mirror-may-lag
export DEBIAN_FRONTEND=noninteractive
apt-get update
apt-get install -y --no-install-recommends {packages}
{more}
touch /{done}
"""
DONE = ".installed"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# What a shell or an outer make says about the machine's own Python and Slurm.
_NOT_PASSED_ON = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "MAKEOVERRIDES", "VIRTUAL_ENV", "PYTHONPATH", "TMPDIR")


def suite_of(version: str) -> str:
    """Return the suite with this version of Slurm. Raises PackagesError if there is none."""
    for suite, slurm in SUITES.items():
        if version == slurm:
            return suite
    have = ", ".join(f"{slurm} ({suite})" for suite, slurm in SUITES.items())
    raise PackagesError(f"SLURM={version}: no Debian suite here has it; must be one of {have}")


def install(suite: str, folder: Path | None = None) -> Path:
    """Install a suite, unless it is installed, and return its folder."""
    folder = (folder or ROOT / ".suites" / suite).absolute()
    if os.geteuid() != 0:
        raise PackagesError(f"Debian {suite} in {folder}: only root may install it or run a command there")
    if (folder / DONE).exists():
        return folder
    if not shutil.which("debootstrap", path=PATH):
        raise PackagesError(f"Debian {suite} is not in {folder}, and there is no debootstrap to install it")
    if folder.exists() and any(folder.iterdir()) and not (folder / "var/lib/dpkg").exists():
        raise PackagesError(f"{folder} holds other files than Debian {suite}: name an empty or a new folder")
    print(f"Installing Debian {suite} with Slurm {SUITES[suite]} in {folder}: minutes.", flush=True)
    if not (folder / "usr/bin/apt-get").exists() or (folder / "debootstrap").exists():
        _must(["debootstrap", "--variant=minbase", suite, str(folder)], suite)
    more = "" if suite == "bookworm" else OLDER_CLIENT
    script = INSTALL.format(packages=" ".join(PACKAGES), more=more.strip(), done=DONE)
    _must(_inside(folder, ["sh", "-ec", script]), suite)
    return folder


def make(version: str, targets: Sequence[str], folder: Path | None = None) -> int:
    """Run make of this checkout in the suite with this version of Slurm, and return its exit code."""
    folder = install(suite_of(version), folder)
    env = {name: value for name, value in os.environ.items() if name not in _NOT_PASSED_ON}
    env |= {"HOME": "/root", "PATH": PATH, "LANG": "C.UTF-8", "INPAINT_BENCH_REQUIRE_TESTBED": "1"}
    command = ["make", "--no-print-directory", "-C", str(ROOT), *targets]
    return subprocess.run(_inside(folder, command), env=env, check=False).returncode


def _inside(folder: Path, command: Sequence[str]) -> list[str]:
    """Return the command that runs one with the folder as its root."""
    for name in ("resolv.conf", "hosts", "ssl/certs/ca-certificates.crt"):
        if Path("/etc", name).exists():
            (folder / "etc" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(Path("/etc", name), folder / "etc" / name)
    git = ["git", "-C", str(ROOT), "rev-parse", "--path-format=absolute", "--git-common-dir"]
    history = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    checkout = {ROOT, Path(history or ROOT)}  # a work tree has its history elsewhere
    (folder / "venv").mkdir(exist_ok=True)
    binds = [*((path, path) for path in sorted(checkout)), (folder / "venv", ROOT / ".venv")]
    mounts = ["-t proc proc proc", "--rbind /sys sys", "--rbind /dev dev", "-t tmpfs tmpfs dev/shm"]
    mounts += [f"--mkdir --bind {shlex.quote(str(source))} {shlex.quote(f'.{target}')}" for source, target in binds]
    steps = [
        f"cd {shlex.quote(str(folder))}",
        *(f"mount {mount}" for mount in mounts),
        f"chroot . {shlex.join(command)}",
    ]
    # Not the command itself: the shell is process 1 of the namespace, and reaps what loses its parent.
    return ["unshare", "--mount", "--pid", "--fork", "--kill-child", "bash", "-c", f"{' && '.join(steps)}; exit $?"]


def _must(command: list[str], suite: str) -> None:
    done = subprocess.run(command, env=os.environ | {"PATH": PATH}, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = (done.stderr.strip() or done.stdout.strip()).splitlines()[-3:]
        raise PackagesError(f"Debian {suite} could not be installed: {' '.join(lines)}")
