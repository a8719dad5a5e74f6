"""Sweeps whose points for delta go over ssh to the bed's login node."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from inpaint_bench import launch
from inpaint_bench.cli import app
from launchers.sweep.ledger import Ledger
from tests.testbed.ssh import LoginNodes

QUICK = ["data.num_images=16", "workload.warmup_steps=1", "workload.measure_steps=2", "workload.min_measure_s=1"]


def words(nodes: LoginNodes, timeout_s: float = 30) -> list[str]:
    """Delta over ssh, all else as in the profile."""
    connect = {
        "method": "ssh",
        "host": "delta-login",
        "ssh_config": nodes.config,
        "folder": nodes.bed.state / "scratch",
        "timeout_s": int(timeout_s),
    }
    over = [f"sites.delta.connect.{key}={value}" for key, value in connect.items()]
    return [*over, f"sites.delta.python={sys.executable}", "profile=testbed", *QUICK]


def sweep(nodes: LoginNodes, folder: Path, *overrides: str, timeout_s: float = 30) -> int:
    return launch.main(["-m", *words(nodes, timeout_s), *overrides, f"hydra.sweep.dir={folder}"])


def told(folder: Path, capsys: Any) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert app.main(["status", str(folder), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    points: list[dict[str, Any]] = said["points"] if isinstance(said, dict) else said
    return points


def shown(folder: Path, capsys: Any) -> str:
    """What `status` prints."""
    capsys.readouterr()
    assert app.main(["status", str(folder)]) == 0
    out: str = capsys.readouterr().out
    return out


def jobs(nodes: LoginNodes, folder: Path) -> list[str]:
    """What delta's Slurm holds of a sweep."""
    name = Ledger.open(folder).sweep["sweep_id"]
    listed = nodes.bed.run("delta", "squeue", "-h", "-r", "-o", "%i %j").stdout.splitlines()
    return [line.split()[0] for line in listed if name in line]
