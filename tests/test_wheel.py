"""The wheel works from an empty folder, with site files of the user's own, and the pins fit the project."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import polars as pl
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
TINY = ("model=tiny_inpaint", "recipe=cpu", "data.num_images=16", "data.resolution_px=32")
SHORT = ("workload.warmup_steps=1", "workload.measure_steps=2", "workload.min_measure_s=0")


def run(*command: str | Path, cwd: Path, **env: str) -> str:
    """Return what a command printed; fail with it where the command does."""
    done = subprocess.run(command, cwd=cwd, env=os.environ | env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel alone into a new environment; its dependencies are those of the tests. Return its bin/."""
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=ROOT)
    run(sys.executable, "-m", "venv", "--without-pip", folder / "env", cwd=folder)
    python = folder / "env" / "bin" / "python"
    options = ("--no-deps", "--no-index", "--quiet")
    run(sys.executable, "-m", "pip", "--python", python, "install", *options, *folder.glob("*.whl"), cwd=folder)
    # .pth files are not read in a folder that another one adds, so the editable installation stays out.
    packages = next((folder / "env" / "lib").glob("python*/site-packages"))
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return python.parent


@pytest.mark.timeout(1200)
def test_wheel_runs_from_an_empty_folder_with_sites_of_the_user(installed: Path, tmp_path: Path) -> None:
    def bench(*arguments: str) -> str:
        return run(installed / "inpaint-bench", *arguments, cwd=tmp_path, PYTHONPATH="")

    (conf,) = installed.parent.glob("lib/python*/site-packages/inpaint_bench/_data/conf")
    (tmp_path / "my" / "site").mkdir(parents=True)
    own_file = tmp_path / "my" / "site" / "mine.yaml"
    own_file.write_text((conf / "site" / "delta.yaml").read_text().replace("name: delta", "name: mine"))

    listed = bench("doctor", "machine", "--config-dir", "my")
    assert str(own_file) in re.sub(r"\s", "", listed)
    own = ("--config-dir", "my", "site=mine", "gpu=h200", "batch=8,16", "sites.mine.account.value=abcd-delta-gpu")
    bench("launch", "-m", *own, "dry_run=true", "hydra.sweep.dir=planned")
    (script,) = (tmp_path / "planned" / "sbatch").iterdir()
    assert "--account=abcd-delta-gpu" in script.read_text()
    bench("launch", "-m", "gpu=h200", "batch=2", "profile=demo", *TINY, *SHORT, "hydra.sweep.dir=sweep")
    bench("merge", "sweep", "-o", "dataset")
    bench("report", "dataset", "-o", "report")
    assert (tmp_path / "report" / "report.html").is_file()


def test_constraints_pin_every_dependency_in_its_range_and_name_no_host() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pins = {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = [Requirement(line) for line in project["dependencies"]]
    extras = [Requirement(line) for lines in project["optional-dependencies"].values() for line in lines]
    assert {canonicalize_name(package.name) for package in required} <= pins.keys()
    pinned = [package for package in required + extras if canonicalize_name(package.name) in pins]
    out_of_range = [str(item) for item in pinned if pins[canonicalize_name(item.name)] not in item.specifier]
    assert out_of_range == []


@pytest.mark.faults
def test_training_of_the_user_runs_as_its_page_says(installed: Path, tmp_path: Path) -> None:
    def bench(*arguments: str) -> str:
        return run(installed / "inpaint-bench", *arguments, cwd=tmp_path, PYTHONPATH=str(tmp_path))

    page = (ROOT / "docs" / "own_training.md").read_text()
    blocks = dict(re.findall(r"```(python|yaml)\n(.*?)```", page, re.DOTALL))
    (tmp_path / "my" / "workload").mkdir(parents=True)
    (tmp_path / "my" / "workload" / "mine.yaml").write_text(blocks["yaml"])
    (tmp_path / "my_training.py").write_text(blocks["python"])
    own = ("--config-dir", "my", "workload=mine", "gpu=cpu", "recipe=cpu", "telemetry=none", "site=local", *SHORT)
    bench("launch", "-m", *own, "batch=2,4", "hydra.sweep.dir=sweep")
    assert "runs merged: 2, valid: 2;" in bench("merge", "sweep", "-o", "dataset")
    bench("report", "dataset", "-o", "report", "--export", "none")
    assert "Workload: mine" in (tmp_path / "report" / "report.md").read_text()
    losses = pl.read_parquet(tmp_path / "dataset" / "steps" / "**" / "*.parquet")["loss"]
    assert losses.null_count() == 0
    assert losses.n_unique() > 2


def test_module_that_does_not_exist_is_refused_by_the_dry_run(installed: Path, tmp_path: Path) -> None:
    command = [installed / "inpaint-bench", "launch", "-m", "workload.module=nowhere", "gpu=h200", "dry_run=true"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert "workload.module=nowhere: no such module; install it in this environment" in done.stderr
