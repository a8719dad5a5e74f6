"""`doctor`: software and GPUs of this machine, and the sites that it can reach."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from inpaint_bench.core import child, environment
from inpaint_bench.core.config.user_file import user_file
from inpaint_bench.core.console import console, echo, pluralize, table
from inpaint_bench.telemetry.driver import DriverError
from inpaint_bench.telemetry.nvml.real import RealNvml

from . import gpu_report
from .site_report import site_files

SBATCH_TIMEOUT_S = 10
DISTRIBUTION = "inpaint-bench"


def run_machine(overrides: Sequence[str] | None, config_dir: Path | None) -> None:
    """Print this machine's software and GPUs, and which sites can be reached from it."""
    out, sites = console(), site_files(overrides or [], config_dir)
    facts = environment.fingerprint()
    names = ("python", "driver", "cpu", "cores", "kernel")
    rows = [(name, "not found" if (fact := getattr(facts, name)) is None else fact, None) for name in names]
    out.print(table(("this machine", "", "required"), [*rows, ("sbatch", _sbatch(), None), *_packages()]))
    print(_gpus())
    out.print(table(("site", "file", "reachable", "why", "blocks verified", "blocks to check"), sites))
    echo(f"your own file: {user_file() or 'none; docs/sites.md says where it would be'}")
    print("blocks to check: not compared with the site's Slurm, and the file names fewer than two sources of them")
    print("inpaint-bench doctor site NAME compares a site file with its Slurm")


def _packages() -> list[tuple[str, str, str | None]]:
    """Return name, installed and required version of each dependency; of the main ones if we are not installed."""
    try:
        # Optional dependencies are marked: peft >= 1; extra == "lora".
        requirements = [line for line in metadata.requires(DISTRIBUTION) or () if "extra ==" not in line]
    except metadata.PackageNotFoundError:
        requirements = list(environment.PACKAGES)
    rows = []
    for requirement in sorted(requirements):
        match = re.match(r"[\w.-]+", requirement)
        assert match is not None
        try:
            installed = metadata.version(match[0])
        except metadata.PackageNotFoundError:
            installed = "not installed"
        rows.append((match[0], installed, requirement[match.end() :].strip() or None))
    return rows


def _sbatch() -> str:
    path = shutil.which("sbatch")
    if path is None:
        return "not on PATH"
    try:
        done = child.run(["sbatch", "--version"], timeout_s=SBATCH_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError) as error:
        return f"{path}, which fails: {error}"
    version = done.stdout.decode(errors="replace").strip()
    return f"{path}, {version}" if done.returncode == 0 else f"{path}, no Slurm is set up here"


def _gpus() -> str:
    try:
        with RealNvml() as nvml:
            gpus = nvml.uuids()
    except DriverError as error:
        return f"{gpu_report.nvml_problem(error)}; where there is one, inpaint-bench doctor gpu examines it"
    listed = f"NVML lists {pluralize(len(gpus), 'GPU')}: {', '.join(gpus) or 'none'}"
    return f"{listed}\ninpaint-bench doctor gpu examines one, for about 20 s"
