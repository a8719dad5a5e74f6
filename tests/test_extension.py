"""A lever and a workload are added to a copy of the project, as docs/design.md says, and run, complete and report."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from inpaint_bench.core.paths import ROOT

SAMPLE = Path(__file__).parent / "extension"
PACKAGES = ("inpaint_bench", "launchers", "analysis", "hydra_plugins", "conf", "slurm_templates")
FIELD = "    deterministic: bool = False  # PyTorch's deterministic algorithms\n"
# One interpreter for all commands.
COMMANDS = """
import sys
from inpaint_bench import launch
from inpaint_bench.cli import app
from inpaint_bench.commands import launch_arguments

out = sys.argv[1]
assert launch_arguments.complete(["launch"], "workload=mat") == ["workload=matmul"]
assert launch_arguments.complete(["launch"], "recipe=cpu+determ") == ["recipe=cpu+deterministic"]
assert launch_arguments.complete(["launch"], "workload.wid") == []  # keys of other workloads are in their help
assert app.main(["launch", "--help", "workload=matmul"]) == 0
assert app.main(["levers", "deterministic"]) == 0
options = ["gpu=h200", "profile=demo", "wait=true", "workload=matmul", "workload.min_measure_s=0.5"]
assert launch.main(["-m", *options, "recipe=cpu,cpu+deterministic", f"hydra.sweep.dir={out}/sweep"]) == 0
assert app.main(["merge", f"{out}/sweep", "-o", f"{out}/dataset"]) == 0
assert app.main(["report", f"{out}/dataset", "-o", f"{out}/report", "--export", "none"]) == 0
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Return a copy of the project with the sample's files, and the field of its lever."""
    copy = tmp_path / "project"
    for name in PACKAGES:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(SAMPLE, copy, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    config = copy / "inpaint_bench/core/config/levers.py"
    before, mark, after = config.read_text().partition("    mask_pool: int")
    config.write_text(before + FIELD + mark + after)
    return copy


def test_a_lever_and_a_workload_need_no_change_elsewhere(project: Path, tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(project)}
    command = [sys.executable, "-c", COMMANDS, str(tmp_path)]
    done = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "workload.width=64" in done.stdout
    assert "deterministic: PyTorch's deterministic algorithms\n  sets recipe.deterministic=true" in done.stdout
    manifests = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("sweep/*/attempt-1/manifest.json"))]
    assert [manifest["recipe"] for manifest in manifests] == ["cpu", "cpu+deterministic"]
    (lever,) = manifests[1]["levers"]
    assert (lever["name"], lever["active"]) == ("deterministic", True)
    report = (tmp_path / "report" / "report.md").read_text()
    assert "Products of matrices" in report
    assert "cpu+deterministic" in report
