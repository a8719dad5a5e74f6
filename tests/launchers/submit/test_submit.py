"""Whole sweeps: on this machine, and on two real Slurm clusters."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from inpaint_bench import launch
from inpaint_bench.cli import app
from inpaint_bench.core import console
from inpaint_bench.core.errors import PointsFailedError
from inpaint_bench.core.schema import PLAN_PATTERN
from inpaint_bench.run import progress_log
from launchers.status.waiting import wait
from launchers.sweep import snapshot
from launchers.sweep.ledger import Ledger
from launchers.sweep.sweep_record import SweepRecord
from tests.launchers.sweeps import planned_rows

QUICK = ["data.num_images=16", "workload.warmup_steps=1", "workload.measure_steps=2", "workload.min_measure_s=1"]
BROKEN = "workload.module=inpaint_bench.workloads.finetune_inpaint,inpaint_bench.missing"  # the second point raises


def sweep(folder: Path, *overrides: str) -> int:
    return launch.main(["-m", *QUICK, *overrides, f"hydra.sweep.dir={folder}"])  # the last value of a key counts


def manifests(folder: Path) -> list[dict]:
    return [json.loads(file.read_text()) for file in sorted(folder.glob("*/attempt-*/manifest.json"))]


def status_of(folder: Path, capsys) -> list[dict]:
    """Return the points in `status --json`."""
    capsys.readouterr()
    assert app.main(["status", str(folder), "--json"]) != 2
    return json.loads(capsys.readouterr().out)["points"]


class TestThisMachine:
    @pytest.fixture(scope="class")
    def broken(self, tmp_path_factory):
        """Two points, of which the second raises."""
        folder = tmp_path_factory.mktemp("local") / "sweep"
        code = sweep(folder, "gpu=a40", "batch=2", "profile=demo", BROKEN)
        return folder, code

    def test_failing_point_fails_the_command_with_its_message(self, broken, capsys):
        folder, code = broken
        assert code == 1
        good, bad = status_of(folder, capsys)
        assert good["state"] == "completed"
        assert (bad["state"], bad["reason"]) == ("failed", "app_error")
        assert "inpaint_bench.missing" in bad["message"]

    def test_manifest_identifies_the_attempt(self, broken):
        folder, _ = broken
        first = manifests(folder)[0]
        assert (first["point"], first["attempt"], first["site"]) == (0, 1, "grace")
        assert first["sweep_id"] == Ledger.open(folder).sweep.sweep_id
        assert first["environment"]["git"] is not None

    @pytest.mark.parametrize(("named", "expected"), [([], []), (["--only", "app_error"], [2])])
    def test_dry_rerun_prints_its_plan_as_json(self, broken, named, expected, capsys, monkeypatch):
        folder, _ = broken
        monkeypatch.setattr(console.output, "as_json", False)
        capsys.readouterr()
        assert app.main(["rerun", str(folder), "--dry-run", "--json", *named]) == 0
        plan = json.loads(capsys.readouterr().out)
        assert [point["batch"] for array in plan["arrays"] for point in array["points"]] == expected

    def test_rerun_submits_only_failures_as_new_attempts(self, broken, capsys):
        folder, _ = broken
        assert app.main(["rerun", str(folder), "--only", "app_error"]) == 1
        assert [point["attempt"] for point in status_of(folder, capsys)] == [1, 2]
        assert app.main(["rerun", str(folder), "--only", "timeout"]) == 0
        assert "Nothing to submit" in capsys.readouterr().out
        assert [point["attempt"] for point in status_of(folder, capsys)] == [1, 2]

    def test_rerun_leaves_application_errors_and_says_how_to_submit_them(self, broken, capsys):
        folder, _ = broken
        capsys.readouterr()
        assert app.main(["rerun", str(folder)]) == 0
        out = capsys.readouterr().out
        assert "left alone: --only app_error submits it" in out
        assert "Nothing to submit" in out

    def test_sweep_is_not_written_over_another(self, broken, capsys):
        """Regression: the refused launch, and a dry run, overwrote multirun.yaml; a refused one could delete it."""
        folder, _ = broken
        record = (folder / "multirun.yaml").read_text()
        assert BROKEN in record
        assert sweep(folder, "gpu=a40", "profile=demo") == 2
        assert "holds a sweep already" in capsys.readouterr().err
        assert sweep(folder, "gpu=a40", "batch=0") == 2
        assert sweep(folder, "gpu=a40", "dry_run=true") == 2
        with Ledger(folder).lock():
            assert sweep(folder, "gpu=a40") == 2
        assert (folder / "multirun.yaml").read_text() == record

    def test_second_submitter_is_refused(self, broken, capsys):
        folder, _ = broken
        with Ledger(folder).lock():
            assert app.main(["rerun", str(folder)]) == 2
        assert "another command is submitting" in capsys.readouterr().err

    def test_running_point_is_told_with_its_place_among_all(self, broken, capsys, monkeypatch):
        folder, _ = broken
        monkeypatch.setattr(progress_log, "INTERVAL_S", 0.0)
        assert app.main(["rerun", str(folder), "--only", "app_error"]) == 1
        lines = capsys.readouterr().out.splitlines()
        start = next(index for index, line in enumerate(lines) if line.startswith("[1/1] point 1 on grace: "))
        assert lines[start + 1].startswith("[1/1] no step yet")

    def test_rerun_takes_overrides(self, broken, capsys):
        folder, _ = broken
        changes = ["--only", "app_error", "workload.module=inpaint_bench.workloads.finetune_inpaint", "batch=3"]
        assert app.main(["rerun", str(folder), *changes]) == 0
        assert [point["overrides"][-1] for point in status_of(folder, capsys)][1] == "batch=3"
        assert [point["state"] for point in status_of(folder, capsys)] == ["completed", "completed"]


def test_refused_launch_leaves_no_files(tmp_path, capsys):
    assert sweep(tmp_path / "sweep", "gpu=a40", "batch=0") == 2
    assert not list(tmp_path.iterdir())


def test_points_of_an_unreachable_site_wait_in_a_plan_file(tmp_path, capsys):
    folder = tmp_path / "sweep"
    assert sweep(folder, "gpu=h200", "batch=2,4", "profile=demo", "sites.delta.connect.method=slurm") == 0
    plan = folder / PLAN_PATTERN.format(site="delta")
    said = capsys.readouterr().out
    assert f"--plan {plan.name}" in said
    assert "delta needs an account: sites.delta.account.value=... (pattern" in said
    assert [point["state"] for point in status_of(folder, capsys)] == ["planned", "planned"]
    assert launch.main(["--plan", str(plan), "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "gpus-per-node=1" in out
    assert launch.main(["--plan", str(plan)]) == 2
    assert "delta cannot be reached from here" in capsys.readouterr().err


def test_plan_is_submitted_once(tmp_path, capsys):
    folder = tmp_path / "sweep"
    unreachable = "sites.delta.connect.method=slurm"
    assert sweep(folder, "gpu=h200", "batch=2", f"out={tmp_path}", "profile=demo", unreachable) == 0
    plan = folder / PLAN_PATTERN.format(site="delta")
    local = plan.read_text().replace(unreachable, "sites.delta.connect.method=local")
    plan.write_text(local)
    assert launch.main(["--plan", str(plan)]) == 0
    assert launch.main([f"--plan={plan}"]) == 2
    assert "was submitted already" in capsys.readouterr().err
    assert app.main(["rerun", str(folder)]) == 0
    assert "plan.delta.yaml is left alone" in capsys.readouterr().out


def test_dry_run_writes_the_scripts_and_submits_nothing(tmp_path, capsys):
    folder = tmp_path / "sweep"
    assert sweep(folder, "gpu=a40,a100,h200", "batch=8,16,32", "dry_run=true") == 0
    out = capsys.readouterr().out
    assert out.count(" cpus=") == 3  # what an array requests stands once
    assert len(planned_rows(out)) == 7  # two do not fit their cards
    assert len(list((folder / "sbatch").glob("*.sh"))) == 3
    assert not (folder / "ledger.jsonl").exists()


STUDY = ["gpu=a40", "batch=2", "profile=demo", "study=ladder", "study.base=cpu", "study.levers=[channels_last]"]


def test_study_whose_launcher_died_before_it_submitted_a_point_is_completed_by_rerun(tmp_path, capsys, monkeypatch):
    """Regression: the grid was expanded from the command line alone, which does not name a study's recipes."""
    folder = tmp_path / "sweep"
    with monkeypatch.context() as patch:
        patch.setattr(snapshot, "take", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        assert sweep(folder, *STUDY, "repeats=2") == 130
    assert (folder / "sweep.json").exists()
    assert {point["reason"] for point in status_of(folder, capsys)} == {"never_started"}
    assert app.main(["rerun", str(folder)]) == 0
    overrides = [point["overrides"] for point in status_of(folder, capsys)]
    chosen = [tuple(o for o in point_overrides if o.startswith(("recipe=", "seed="))) for point_overrides in overrides]
    recipes = ("recipe=[cpu]", "recipe=[cpu,channels_last]")
    for seed in (0, 1):
        assert set(chosen[2 * seed : 2 * seed + 2]) == {(recipe, f"seed={seed}") for recipe in recipes}
    assert {point["state"] for point in status_of(folder, capsys)} == {"completed"}
    assert app.main(["rerun", str(folder)]) == 0
    assert "Nothing to submit" in capsys.readouterr().out
    # real runs are replicates that count: same configuration, valid, with an interval
    assert app.main(["rerun", str(folder), "--repeats", "auto", "repeats_max=2", "repeats_target=0.0001"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if "repeats_max=2 is reached" in line]
    assert [row[row.index("%") - 3 : row.index("%") - 1] for row in rows] == [["2", "2"], ["2", "2"]]


def test_launch_that_died_before_its_record_can_be_repeated(tmp_path, capsys, monkeypatch):
    folder = tmp_path / "sweep"
    with monkeypatch.context() as patch:
        patch.setattr(SweepRecord, "write", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        assert sweep(folder, *STUDY) == 130
    assert not (folder / "sweep.json").exists()
    for verb in ("status", "rerun", "cancel"):
        assert app.main([verb, str(folder)]) == 2
        assert "a launch that ended before it submitted anything, make none" in capsys.readouterr().err
    assert sweep(folder, *STUDY) == 0


class TestUnavailable:
    @pytest.fixture(scope="class")
    def completed(self, tmp_path_factory):
        folder = tmp_path_factory.mktemp("unavailable") / "sweep"
        assert sweep(folder, "gpu=a40", "batch=2,3", "profile=demo") == 0
        return folder

    @pytest.fixture
    def unavailable(self, completed, tmp_path):
        """Two points that completed, the second of which is then made unavailable."""
        folder = shutil.copytree(completed, tmp_path / "sweep")
        file = folder / "1" / "attempt-1" / "manifest.json"
        changes = {"status": "failed", "reason": "unavailable", "message": "dali is not installed"}
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
        return folder

    def test_wait_reports_it_without_failing(self, unavailable, caplog):
        with caplog.at_level("INFO"):
            wait(Ledger.open(unavailable), {0, 1})
        assert "1 of 2 points is unavailable here: dali is not installed" in caplog.text

    def test_another_failure_still_fails_the_command(self, unavailable):
        file = unavailable / "0" / "attempt-1" / "manifest.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "status": "failed", "reason": "app_error"}))
        with pytest.raises(PointsFailedError, match="1 of 2 points did not complete"):
            wait(Ledger.open(unavailable), {0, 1})

    def test_status_shows_its_own_state(self, unavailable, capsys):
        capsys.readouterr()
        assert app.main(["status", str(unavailable)]) != 2
        assert "2 points: 1 completed, 1 unavailable" in capsys.readouterr().out

    def test_rerun_submits_it_only_if_named(self, unavailable, capsys):
        assert app.main(["rerun", str(unavailable)]) == 0
        assert "Nothing to submit" in capsys.readouterr().out
        assert app.main(["rerun", str(unavailable), "--only", "unavailable"]) == 0
        assert [point["attempt"] for point in status_of(unavailable, capsys)] == [1, 2]


@pytest.fixture
def slow_sweep(tmp_path):
    """Start a local sweep of two points in another process; its first point measures for a minute."""
    folder = tmp_path / "sweep"
    command = [sys.executable, "-m", "inpaint_bench.launch", "-m", "gpu=a40", "batch=2,3", "profile=demo"]
    command += [*QUICK, f"hydra.sweep.dir={folder}", "workload.min_measure_s=${oc.env:MEASURE_S,1}"]
    slow = {**os.environ, "MEASURE_S": "60"}
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        env=slow,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # `nohup make test &` ignores it
    )
    deadline = time.monotonic() + 60
    while not list(folder.glob("0/attempt-1/windows.json")) and time.monotonic() < deadline:
        time.sleep(0.1)
    yield folder, process
    process.kill()


def test_local_sweep_can_be_watched_and_cancelled_by_another_process(slow_sweep, capsys):
    folder, process = slow_sweep
    assert [point["state"] for point in status_of(folder, capsys)] == ["running", "queued"]
    assert app.main(["rerun", str(folder)]) == 2
    assert app.main(["cancel", str(folder)]) == 0
    _, error = process.communicate(timeout=60)
    assert process.returncode == 1, error
    assert [point["reason"] for point in status_of(folder, capsys)] == ["cancelled", "cancelled"]


class TestTwoClusters:
    @pytest.fixture(autouse=True)
    def _reach(self, testbed, monkeypatch):
        monkeypatch.setenv("INPAINT_BENCH_TESTBED", str(testbed.state))

    @pytest.fixture(scope="class")
    def ended(self, testbed, tmp_path_factory):
        """One point, submitted from inside another job. The folder has a space in its name."""
        folder = tmp_path_factory.mktemp("ended") / "with a space"
        others = {
            "SBATCH_PARTITION": "nowhere",
            "SLURM_JOB_ID": "1",
            "SLURM_CONF": "/nonexistent",
            "SLURM_MEM_PER_CPU": "7",
            "SBATCH_EXPORT": "NONE",
        }
        with pytest.MonkeyPatch.context() as patch:
            for name, value in {**others, "INPAINT_BENCH_TESTBED": str(testbed.state)}.items():
                patch.setenv(name, value)
            code = sweep(folder, "gpu=h200", "batch=2", "profile=testbed", "wait=true")
        return folder, code

    def test_variables_of_another_job_do_not_reach_the_sweep(self, ended):
        assert ended[1] == 0

    def test_queued_jobs_run_the_code_of_the_submission(self, ended):
        (snapshot,) = (ended[0] / "code").iterdir()
        script = next((ended[0] / "jobs").rglob("sbatch.sh")).read_text()
        assert f"export PYTHONPATH='{snapshot}" in script
        code = manifests(ended[0])[0]["environment"]["git"]
        assert code["content_sha256"] == json.loads((snapshot / "snapshot.json").read_text())["content_sha256"]

    def test_cancel_stops_queued_and_running_jobs(self, tmp_path, capsys, monkeypatch):
        folder = tmp_path / "sweep"
        assert sweep(folder, "gpu=h200", "batch=1,2", "profile=testbed", "workload.min_measure_s=120") == 0
        monkeypatch.setenv("SCANCEL_STATE", "RUNNING")  # scancel would leave pending jobs alone
        assert app.main(["cancel", str(folder)]) == 0
        deadline = time.monotonic() + 100
        # sacct may call a job running for a while after squeue has let go of it
        while (points := status_of(folder, capsys)) and time.monotonic() < deadline:
            if [point["reason"] for point in points] == ["cancelled", "cancelled"]:
                break
            time.sleep(0.5)
        assert [(point["state"], point["reason"]) for point in points] == [("failed", "cancelled")] * 2, points
        assert app.main(["cancel", str(folder)]) == 0
        assert "Nothing is queued or running" in capsys.readouterr().out
