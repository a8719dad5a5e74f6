"""Check for and install the Debian packages that the test bed needs."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from .errors import PackagesError

LIGHT = ("slurmctld", "slurmd", "slurm-client", "munge")
FULL = (*LIGHT, "slurmdbd", "slurm-wlm-mysql-plugin", "mariadb-server-core", "mariadb-client-core")

# Programs of the packages; checked first, because debs may have been unpacked without dpkg.
_LIGHT_PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged")
_FULL_PROGRAMS = (*_LIGHT_PROGRAMS, "slurmdbd", "sacct", "mariadbd", "mariadb-install-db")
_MYSQL_PLUGIN = "*/slurm*/accounting_storage_mysql.so"
_PATH = f"{os.environ.get('PATH', '')}:/usr/local/sbin:/usr/sbin:/sbin"


def missing_programs(*, light: bool) -> list[str]:
    programs = _LIGHT_PROGRAMS if light else _FULL_PROGRAMS
    missing = [program for program in programs if not shutil.which(program, path=_PATH)]
    if not light and not any(Path("/usr/lib").glob(_MYSQL_PLUGIN)):
        missing.append("slurmdbd's MySQL plugin")
    return missing


@cache
def slurm_version() -> str:
    """Return the version of the installed Slurm, such as 24.11.5."""
    shown = subprocess.run(["slurmctld", "-V"], env={"PATH": _PATH}, capture_output=True, text=True, check=True).stdout
    return shown.split()[-1]


def require(*, light: bool) -> None:
    """Raise PackagesError if a bed of this variant cannot start."""
    if missing := missing_programs(light=light):
        raise PackagesError(
            f"NO SLURM TEST BED: {', '.join(missing)} missing; run `python -m tests.testbed install` as root"
        )


def install(*, light: bool) -> str:
    """Install missing packages and return a sentence. Raises PackagesError if that fails."""
    missing = missing_programs(light=light)
    if not missing:
        return "Slurm's packages are present."
    packages = LIGHT if light else FULL
    apt_get(packages, f"NO SLURM TEST BED: {', '.join(missing)} missing")
    if missing := missing_programs(light=light):
        raise PackagesError(f"NO SLURM TEST BED: installed, yet {', '.join(missing)} cannot be found")
    return f"Installed {' '.join(packages)}."


def apt_get(packages: Sequence[str], lacking: str) -> None:
    """Install packages. Raises PackagesError whose message begins with `lacking` if that fails."""
    if os.geteuid() != 0:
        raise PackagesError(f"{lacking} and only root may install {' '.join(packages)}")
    if not shutil.which("apt-get"):
        raise PackagesError(f"{lacking} and there is no apt-get here to install {' '.join(packages)}")
    env = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for command in (["update"], ["install", "-y", "--no-install-recommends", *packages]):
        done = subprocess.run(["apt-get", *command], env=env, capture_output=True, text=True, check=False)
        if done.returncode:
            reason = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
            raise PackagesError(f"{lacking} and apt-get {command[0]} failed: {''.join(reason)}")
