"""Sweeps whose points for delta go over ssh to the bed's login node."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from inpaint_bench import launch
from inpaint_bench.cli import app
from launchers.sweep.ledger import Ledger
from tests.testbed.ssh import LoginNodes

QUICK = ["data.num_images=16", "workload.warmup_steps=1", "workload.measure_steps=2", "workload.min_measure_s=1"]


def overrides(nodes: LoginNodes, timeout_s: float = 30) -> list[str]:
    """Return the overrides that reach delta over ssh; all else is as in the profile."""
    connect = {
        "method": "ssh",
        "host": "delta-login",
        "ssh_config": nodes.config,
        "folder": nodes.bed.state / "scratch",
        "timeout_s": int(timeout_s),
    }
    keys = [f"sites.delta.connect.{key}={value}" for key, value in connect.items()]
    return [*keys, f"sites.delta.python={sys.executable}", "profile=testbed", *QUICK]


def replace_ssh(folder: Path, monkeypatch: pytest.MonkeyPatch, **startup_files: str) -> Path:
    """Put an `ssh` on PATH that runs commands for `login` here, in a bash, and return the HOME of these files."""
    home, program = folder / "home", folder / "bin" / "ssh"
    for path in (home, program.parent):
        path.mkdir()
    for name, content in startup_files.items():
        (home / f".{name}").write_text(content)
    program.write_text(
        "#!/bin/bash\nwhile test $1 != login; do test $1 = -O && exit; shift; done; shift\n"
        f'export HOME={home}\nexec bash --norc -c \'. ~/.bashrc 2>&1; eval "$0"\' "$*"\n'
    )
    (home / ".bashrc").touch()
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    return home


def launch_sweep(nodes: LoginNodes, folder: Path, *more: str, timeout_s: float = 30) -> int:
    """Launch a sweep and return the exit code."""
    return launch.main(["-m", *overrides(nodes, timeout_s), *more, f"hydra.sweep.dir={folder}"])


def points_of(folder: Path, capsys: Any) -> list[dict[str, Any]]:
    """Return the points as `status --json` prints them."""
    capsys.readouterr()
    assert app.main(["status", str(folder), "--json"]) != 2
    points: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["points"]
    return points


def states_of(folder: Path, capsys: Any) -> list[str]:
    """Return the state of every point."""
    return [point["state"] for point in points_of(folder, capsys)]


def queued_jobs(nodes: LoginNodes, folder: Path) -> list[str]:
    """Return the jobs of a sweep that delta's Slurm holds."""
    name = Ledger.open(folder).sweep.sweep_id
    listed = nodes.bed.run("delta", "squeue", "-h", "-r", "-o", "%i %j").stdout.splitlines()
    return [line.split()[0] for line in listed if name in line]
