"""A site that only a person with a file can reach: the plan goes out with its code, the results come back.

The site is this machine, which knows itself as delta only where SITE_IS says so.
"""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest

from inpaint_bench import launch
from inpaint_bench.cli import app
from launchers.remote import bundle, export

QUICK = ["data.num_images=16", "workload.warmup_steps=1", "workload.measure_steps=2", "workload.min_measure_s=1"]
SITE = "sites.delta.connect.method=${oc.env:SITE_IS,bundle}"


def told(folder: Path, capsys) -> list[dict]:
    capsys.readouterr()
    assert app.main(["status", str(folder), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    return said["points"] if isinstance(said, dict) else said


def there(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A command as it is typed at the site, in a folder of its own."""
    command = [sys.executable, "-m", *words]
    site = os.environ | {"SITE_IS": "local", "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(command, cwd=folder, env=site, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def carried(tmp_path_factory):
    """The sweep here, its plan run there, the results in a file."""
    root = tmp_path_factory.mktemp("carried")
    here, site = root / "here", root / "site"
    site.mkdir()
    sweep = ["gpu=h200", "batch=2", "profile=demo", "wait=false", SITE, *QUICK]
    assert launch.main(["-m", *sweep, f"hydra.sweep.dir={here}"]) == 0
    ran = there(site, "inpaint_bench.launch", "--plan", str(here / "plan.delta.tar"))
    assert ran.returncode == 0, ran.stderr
    (sent,) = (site / "runs").iterdir()
    exported = there(site, "inpaint_bench", "collect", str(sent), "--export", "out.tar")
    assert exported.returncode == 0, exported.stderr
    return here, site, sent


def test_the_plan_brings_its_code_and_runs_with_it(carried):
    here, _, sent = carried
    (mine,), (its,) = (list((folder / "code").iterdir()) for folder in (here, sent))
    assert its.name == mine.name
    assert json.loads((its / "snapshot.json").read_text()) == json.loads((mine / "snapshot.json").read_text())
    manifest = json.loads((sent / "0" / "attempt-1" / "manifest.json").read_text())
    assert manifest["environment"]["git"]["content_sha256"].startswith(its.name)


def test_results_come_back_into_the_sweep_that_asked_for_them_twice_the_same(carried, tmp_path, capsys):
    here, site, _ = carried
    before = told(here, capsys)
    assert [point["state"] for point in before] == ["planned"]
    file = str(site / "out.tar")
    assert app.main(["collect", file]) == 2
    assert "say --into SWEEP" in capsys.readouterr().err
    assert app.main(["collect", file, "--into", str(here)]) == 0
    assert "of 1 run," in capsys.readouterr().out
    after = told(here, capsys)
    assert [(point["state"], point["attempt"]) for point in after] == [("completed", 1)]
    assert app.main(["collect", file, "--into", str(here)]) == 0
    assert "nothing new" in capsys.readouterr().out
    assert told(here, capsys) == after
    assert app.main(["merge", str(here), "-o", str(tmp_path / "dataset")]) == 0
    assert pl.read_parquet(tmp_path / "dataset" / "runs.parquet")["valid"].to_list() == [True]
    assert app.main(["rerun", str(here)]) == 0
    assert app.main(["cancel", str(here)]) == 0
    assert "Nothing is queued or running" in capsys.readouterr().out


def test_a_plan_is_no_result_and_a_result_no_plan(carried, capsys):
    here, site, _ = carried
    assert app.main(["collect", str(here / "plan.delta.tar")]) == 2
    assert "is a plan" in capsys.readouterr().err
    assert launch.main(["--plan", str(site / "out.tar")]) == 2
    assert "holds no plan" in capsys.readouterr().err


def test_results_are_not_brought_back_to_where_they_were_made(carried, capsys):
    """There the journals of what still runs would be taken for old ones."""
    _, site, sent = carried
    assert app.main(["collect", str(site / "out.tar"), "--into", str(sent)]) == 1
    assert "point 0, attempt 1: it was sent from here; there is nothing to bring" in capsys.readouterr().out


@pytest.mark.parametrize("name", [".journal.arrows", ".journal.worker.arrows"])
def test_the_journals_of_all_writers_travel_and_nothing_else_that_is_hidden(name):
    assert export.travels(f"events/{name}")
    assert not export.travels(f"events/{name}.tmp")
    assert not export.travels("events/.part-000001.parquet.tmp")


def test_a_packed_plan_that_was_changed_runs_nothing(carried, tmp_path, capsys):
    here, _, _ = carried
    content = bytearray((here / "plan.delta.tar").read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "plan.delta.tar").write_bytes(content)
    assert launch.main(["--plan", str(tmp_path / "plan.delta.tar")]) == 2
    assert "plan.delta.tar: " in capsys.readouterr().err


def test_a_plan_that_would_unpack_elsewhere_is_refused(tmp_path, capsys):
    for path in ("../plan.delta.yaml", "/tmp/plan.delta.yaml"):
        with pytest.raises(bundle.BundleError):
            bundle.write(io.BytesIO(), {"kind": "plan"}, bundle.listed([bundle.Source(path=path, content=b"x")]))
    with (tmp_path / "plan.tar").open("wb") as out:
        bundle.write(out, {"kind": "plan"}, bundle.listed([bundle.Source(path="code/x/evil.py", content=b"x")]))
    assert launch.main(["--plan", str(tmp_path / "plan.tar")]) == 2
    assert "not a packed plan" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nowhere"], "not a sweep directory"),
        (["nowhere", "--into", "x"], "is for a file"),
        (["nowhere", "--export", "x.tar"], "not a sweep directory"),
    ],
)
def test_what_cannot_be_collected_is_said_in_a_sentence(arguments, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert app.main(["collect", *arguments]) == 2
    assert says in capsys.readouterr().err
