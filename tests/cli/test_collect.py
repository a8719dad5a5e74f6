"""A site that no ssh reaches: a tar file takes the plan and its code there, another one brings the results back.

The site is this machine, which is delta only where SITE_IS says so.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest

from inpaint_bench import launch
from inpaint_bench.cli import app
from launchers.remote.archive import write_archive

QUICK = ["data.num_images=16", "workload.warmup_steps=1", "workload.measure_steps=2", "workload.min_measure_s=1"]
SITE = "sites.delta.connect.method=${oc.env:SITE_IS,bundle}"


def points_of(folder: Path, capsys) -> list[dict]:
    capsys.readouterr()
    assert app.main(["status", str(folder), "--json"]) != 2
    points: list[dict] = json.loads(capsys.readouterr().out)["points"]
    return points


def run_at_site(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command as it is typed at the site, in a folder of its own."""
    command = [sys.executable, "-m", *arguments]
    site = os.environ | {"SITE_IS": "local", "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(command, cwd=folder, env=site, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def carried(tmp_path_factory):
    """Return the sweep, the folder at the site with an archive of results, and the sweep directory in it."""
    root = tmp_path_factory.mktemp("carried")
    sweep, site = root / "sweep", root / "site"
    site.mkdir()
    overrides = ["gpu=h200", "batch=2", "profile=demo", "wait=false", SITE, *QUICK]
    assert launch.main(["-m", *overrides, f"hydra.sweep.dir={sweep}"]) == 0
    ran = run_at_site(site, "inpaint_bench.launch", "--plan", str(sweep / "plan.delta.tar"))
    assert ran.returncode == 0, ran.stderr
    (submitted,) = (site / "runs").iterdir()
    exported = run_at_site(site, "inpaint_bench", "collect", str(submitted), "--export", "out.tar")
    assert exported.returncode == 0, exported.stderr
    return sweep, site, submitted


def test_a_plan_runs_with_the_code_that_was_packed_with_it(carried):
    sweep, _, submitted = carried
    (packed,), (used,) = (list((folder / "code").iterdir()) for folder in (sweep, submitted))
    assert used.name == packed.name
    assert json.loads((used / "snapshot.json").read_text()) == json.loads((packed / "snapshot.json").read_text())
    manifest = json.loads((submitted / "0" / "attempt-1" / "manifest.json").read_text())
    assert manifest["environment"]["git"]["content_sha256"].startswith(used.name)


def test_results_are_copied_into_the_sweep_that_requested_them_once(carried, tmp_path, capsys):
    sweep, site, _ = carried
    before = points_of(sweep, capsys)
    assert [point["state"] for point in before] == ["planned"]
    file = str(site / "out.tar")
    assert app.main(["status", str(sweep)]) != 2
    assert f"Next: carry {sweep / 'plan.delta.tar'} to its site" in capsys.readouterr().out
    assert app.main(["collect", file]) == 2
    assert "takes an exported file and its sweep directory" in capsys.readouterr().err
    assert app.main(["collect", file, "--into", str(sweep)]) == 0
    assert "of 1 run," in capsys.readouterr().out
    after = points_of(sweep, capsys)
    assert [(point["state"], point["attempt"]) for point in after] == [("completed", 1)]
    assert app.main(["collect", file, "--into", str(sweep)]) == 0
    assert "nothing new" in capsys.readouterr().out
    assert points_of(sweep, capsys) == after
    assert app.main(["merge", str(sweep), "-o", str(tmp_path / "dataset")]) == 0
    assert pl.read_parquet(tmp_path / "dataset" / "runs.parquet")["valid"].to_list() == [True]
    assert app.main(["rerun", str(sweep)]) == 0
    assert app.main(["cancel", str(sweep)]) == 0
    assert "Nothing is queued or running" in capsys.readouterr().out


def test_a_plan_is_not_taken_for_results_nor_results_for_a_plan(carried, capsys):
    sweep, site, _ = carried
    assert app.main(["collect", str(sweep / "plan.delta.tar"), "--into", str(sweep)]) == 2
    assert "launch --plan" in capsys.readouterr().err
    assert launch.main(["--plan", str(site / "out.tar")]) == 2
    assert "not a packed plan" in capsys.readouterr().err


def test_results_are_not_copied_back_to_where_they_were_measured(carried, capsys):
    _, site, submitted = carried
    assert app.main(["collect", str(site / "out.tar"), "--into", str(submitted)]) == 1
    assert "point 0, attempt 1: it was submitted from this sweep directory" in capsys.readouterr().out


def test_a_packed_plan_that_was_changed_runs_nothing(carried, tmp_path, capsys):
    sweep, _, _ = carried
    content = bytearray((sweep / "plan.delta.tar").read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "plan.delta.tar").write_bytes(content)
    assert launch.main(["--plan", str(tmp_path / "plan.delta.tar")]) == 2
    assert "plan.delta.tar: " in capsys.readouterr().err


@pytest.mark.parametrize("names", [["code/x/evil.py"], ["../plan.delta.yaml"], ["plan.delta.yaml"]])
def test_an_archive_that_is_not_a_packed_plan_runs_nothing(names, tmp_path, capsys):
    with (tmp_path / "plan.tar").open("wb") as out:
        write_archive(out, [(name, b"x") for name in names])
    assert launch.main(["--plan", str(tmp_path / "plan.tar")]) == 2
    assert "plan.tar: " in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [tmp_path / "plan.tar"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "not a sweep directory"),
        (["nowhere", "--into", "x"], "takes an exported file"),
        (["nowhere", "--export", "x.tar"], "not a sweep directory"),
    ],
)
def test_a_wrong_argument_of_collect_is_an_error(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert app.main(["collect", *arguments]) == 2
    assert message in capsys.readouterr().err
