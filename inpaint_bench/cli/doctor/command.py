"""`doctor`: what this machine can do. With --site a site file beside its live Slurm, with --gpu one GPU for 20 s."""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from rich.console import Console

from inpaint_bench.cli.command import parser, run_whole
from inpaint_bench.core import environment
from inpaint_bench.core.console import console, pluralize, table
from inpaint_bench.core.errors import UserError
from inpaint_bench.telemetry.nvml.api import NvmlError
from inpaint_bench.telemetry.nvml.real import RealNvml

from . import gpu_report

# What only one kind of examination reads.
_OF_GPU = ("uuid", "out", "json", "note", "loop_from")
_OF_SITE = ("update", "fix", "probe")
SBATCH_TIMEOUT_S = 10
DISTRIBUTION = "inpaint-bench"


def main(argv: Sequence[str] | None = None) -> int:
    """1 where a site file differs from its cluster, or a probe lacks what a job needs."""
    options = parser("doctor", "Say what this machine, a site and its GPUs can do.", "--site delta --update")
    _add_site_options(options)
    gpu_report.add_options(options)
    found: list[bool] = []
    code = run_whole(options, lambda given: found.append(_doctor(given)), argv)
    return code or int(any(found))


def _doctor(options: argparse.Namespace) -> bool:
    """Whether something is not as it must be."""
    _check(options)
    if options.gpu:
        gpu_report.examine(options)
        return False
    from . import site_report  # Hydra and submitit are not loaded to look at a GPU

    if options.probed:
        return site_report.show_probe(options.probed)
    if options.site:
        if options.update:
            site_report.check_writeable(options)
        return site_report.check_sites(options)
    _this_machine(console(), site_report.site_files(options.overrides))
    return False


def _add_site_options(options: argparse.ArgumentParser) -> None:
    options.add_argument("--site", metavar="NAME|all", help="hold a site's file against its Slurm, or every one's")
    dates = "write checked_on and verified into the blocks of the site file that were seen and are right"
    options.add_argument("--update", action="store_true", help=dates)
    options.add_argument("--fix", action="store_true", help="with --update: write the right values too")
    job = "send a job of about a minute to look at a compute node: PyTorch, our code, GPU, scratch, quota"
    options.add_argument("--probe", action="store_true", help=job)
    options.add_argument("--wait-min", type=float, default=10.0, metavar="MIN", help="how long to wait for it (10)")
    options.add_argument(
        "--probed", type=Path, metavar="FOLDER", help="print what a probe found that nobody waited for"
    )
    what = "configuration, as for launch: profile=testbed, sites.delta.account.value=..., gpu=h200 (the probe's)"
    options.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=what)


def _check(options: argparse.Namespace) -> None:
    """Refuse words that would be left out without a sound."""
    kinds = [f"--{name}" for name in ("gpu", "site", "probed") if getattr(options, name)]
    if len(kinds) > 1:
        raise UserError(f"{' and '.join(kinds)}: one examination at a time")
    for kind, words in (("gpu", _OF_GPU), ("site", _OF_SITE)):
        if not getattr(options, kind) and (given := [f"--{name}" for name in words if getattr(options, name)]):
            raise UserError(f"{', '.join(given).replace('_', '-')}: only together with --{kind}")
    if options.fix and not options.update:
        raise UserError("--fix: only together with --update, which writes into the site file")
    if options.overrides and (options.gpu or options.probed):
        raise UserError(f"{options.overrides[0]}: configuration is read with --site, or without any flag")
    if not 0 <= options.wait_min <= 7 * 24 * 60:
        raise UserError(f"--wait-min {options.wait_min:g}: must lie between 0 and a week")


def _this_machine(out: Console, sites: Sequence[Sequence[str]]) -> None:
    found = environment.fingerprint()
    names = ("python", "driver", "cpu", "cores", "kernel")
    rows = [(name, "not found" if found[name] is None else found[name], None) for name in names]
    out.print(table(("this machine", "", "wanted"), [*rows, ("sbatch", _sbatch(), None), *_packages()]))
    print(_gpus())
    heads = ("site", "file", "reached from here", "why", "blocks seen on the cluster")
    out.print(table(heads, sites))
    print("inpaint-bench doctor --site NAME holds a site's file against its Slurm")


def _packages() -> list[tuple[str, str, str | None]]:
    """What the project needs by its own account, and what is there; of a bare checkout the main ones."""
    try:
        wanted = [one for one in metadata.requires(DISTRIBUTION) or () if "extra ==" not in one]
    except metadata.PackageNotFoundError:
        wanted = list(environment.PACKAGES)
    rows = []
    for one in sorted(wanted):
        found = re.match(r"[\w.-]+", one)
        assert found is not None
        name, versions = found[0], one[found.end() :].strip()
        try:
            there = metadata.version(name)
        except metadata.PackageNotFoundError:
            there = "not installed"
        rows.append((name, there, versions or None))
    return rows


def _sbatch() -> str:
    path = shutil.which("sbatch")
    if path is None:
        return "not on PATH"
    try:
        done = subprocess.run(["sbatch", "--version"], capture_output=True, text=True, timeout=SBATCH_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError) as error:
        return f"{path}, which fails: {error}"
    return f"{path}, {done.stdout.strip()}" if done.returncode == 0 else f"{path}, no Slurm is set up here"


def _gpus() -> str:
    try:
        nvml = RealNvml()
        nvml.open()
        gpus = nvml.uuids()
        nvml.close()
    except NvmlError as error:
        return f"{gpu_report.in_words(error)}; where there is one, inpaint-bench doctor --gpu probes it"
    listed = f"NVML lists {pluralize(len(gpus), 'GPU')}: {', '.join(gpus) or 'none'}"
    return f"{listed}\ninpaint-bench doctor --gpu probes one, for about 20 s"
