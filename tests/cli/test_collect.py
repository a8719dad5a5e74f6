"""A site that no ssh reaches: a plan file is copied there, and the sweep directory that it made is copied back.

The site is the second cluster of the test bed, which this machine reaches only where SITE_IS says so.
"""

import os
import subprocess
import sys
from pathlib import Path

import polars as pl

from inpaint_bench import launch
from inpaint_bench.cli import app
from tests.testbed import ssh

QUICK = ["data.num_images=16", "workload.warmup_steps=1", "workload.measure_steps=2", "workload.min_measure_s=1"]
SITE = "sites.delta.connect.method=${oc.env:SITE_IS,bundle}"


def test_a_plan_file_runs_at_its_site_and_both_sweep_directories_are_merged(
    testbed_light, tmp_path, monkeypatch, capsys
):
    ssh.install()  # rsync too
    monkeypatch.setenv("INPAINT_BENCH_TESTBED", str(testbed_light.state))
    sweep, site = tmp_path / "sweep", tmp_path / "site"
    site.mkdir()
    overrides = ["gpu=h200", "batch=2", "profile=testbed", "wait=false", SITE, *QUICK]
    assert launch.main(["-m", *overrides, f"hydra.sweep.dir={sweep}"]) == 0
    plan = sweep / "plan.delta.yaml"
    advice = f"Copy {plan} and this commit to delta and run there: inpaint-bench launch --plan plan.delta.yaml; "
    assert advice + "afterwards rsync its sweep directory here and merge both" in capsys.readouterr().out
    command = [sys.executable, "-m", "inpaint_bench.launch", "--plan", str(plan), "--wait"]
    environment = os.environ | {"SITE_IS": "slurm", "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run(command, cwd=site, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    (submitted,) = (site / "runs").iterdir()
    copied = tmp_path / submitted.name
    subprocess.run(["rsync", "--archive", f"{submitted}/", str(copied)], check=True)
    assert app.main(["collect", str(sweep)]) == 0
    assert "plan.delta.yaml: rsync the sweep directory" in capsys.readouterr().out
    assert app.main(["merge", str(sweep), str(copied), "-o", str(tmp_path / "dataset")]) == 0
    assert "no run of" not in capsys.readouterr().out
    runs = pl.read_parquet(tmp_path / "dataset" / "runs.parquet")
    assert runs.select("site", "point", "valid").rows() == [("delta", "0", True)]


def test_a_packed_plan_is_refused(capsys):
    assert launch.main(["--plan", str(Path("plan.delta.tar"))]) == 2
    assert "plan.delta.tar: plans are no longer packed; copy plan.SITE.yaml" in capsys.readouterr().err
