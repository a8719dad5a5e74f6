"""`status`: its table, its JSON, one point in detail, and damaged sweep directories."""

import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

import pytest

from inpaint_bench import launch
from inpaint_bench.cli import app
from inpaint_bench.core.config.site import ConnectConfig, Limits, SiteConfig
from inpaint_bench.core.paths import ROOT
from inpaint_bench.core.schema import LEDGER, MANIFEST, SWEEP
from launchers.slurm.local_executor import machine
from launchers.status import survey
from launchers.sweep.ledger import Ledger
from tests.launchers.sweeps import (
    a_point,
    a_sweep,
    add_point,
    defer,
    exited_process,
    plan,
    submit,
    sweep_of_jobs,
    write_manifest,
)


def as_json(folder: Path, capsys) -> dict:
    capsys.readouterr()
    assert app.main(["status", str(folder), "--json"]) != 2
    return json.loads(capsys.readouterr().out)


def test_the_latest_ten_sweeps_are_listed_without_a_path(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for number in range(12):
        folder = tmp_path / f"runs/2026-11-{number + 10}/08-30-inpaint"
        folder.mkdir(parents=True)
        a_sweep(folder, [a_point(0)], {"delta": {}}, overrides=["gpu=h200", f"batch={number}"])
        os.utime(folder / SWEEP, (number, number))
    (folder / SWEEP).write_text("{")
    os.utime(folder / SWEEP, (11, 11))
    assert app.main(["status"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [
        "runs/2026-11-21/08-30-inpaint  (its record cannot be read)",
        "runs/2026-11-20/08-30-inpaint  gpu=h200 batch=10",
    ]
    assert len(lines) == 10


class TestDamage:
    def test_ledger_line_of_an_unknown_point_is_reported(self, tmp_path, capsys):
        folder = sweep_of_jobs(tmp_path / "sweep", [exited_process()])
        submit(Ledger(folder), [5])
        assert "line 3" in as_json(folder, capsys)["notes"][0]

    def test_manifest_with_fields_of_the_wrong_type_is_no_traceback(self, tmp_path, capsys):
        folder = sweep_of_jobs(tmp_path / "sweep", [f"pid:{os.getpid()}@elsewhere"] * 3)
        for num, state in enumerate(("running", "completed", "failed")):
            write_manifest(folder, num, state)
            path = folder / str(num) / "attempt-1" / MANIFEST
            content = json.loads(path.read_text())
            path.write_text(json.dumps(dict.fromkeys(content, "x") | {"status": state}))
            (path.parent / "windows.json").write_text('[{"kind": "measure", "t_end_unix_ns": "x"}, 3]')
        assert as_json(folder, capsys)["counts"] == {"unknown": 3}  # and nothing else tells their states
        for point in ("0", "1", "2"):
            assert app.main(["status", str(folder), "--point", point]) != 2

    def test_process_on_another_machine_is_a_missing_source(self, tmp_path, capsys):
        folder = sweep_of_jobs(tmp_path / "sweep", ["pid:1@elsewhere", "pid:1@elsewhere"])
        write_manifest(folder, 0)
        done, nothing = as_json(folder, capsys)["points"]
        assert (done["state"], nothing["state"]) == ("completed", "unknown")
        assert "from the manifest only" in done["message"]
        assert "on elsewhere and cannot be checked from here" in nothing["message"]

    def test_read_only_sweep_is_shown(self, tmp_path, capsys):
        folder = sweep_of_jobs(tmp_path / "sweep", [exited_process()])
        write_manifest(folder, 0)
        (folder / ".lock").mkdir()  # cannot be opened, as where permission is lacking
        assert as_json(folder, capsys)["counts"] == {"completed": 1}

    def test_points_in_the_same_state_share_a_row_if_there_are_many(self, tmp_path, capsys):
        folder = sweep_of_jobs(tmp_path / "sweep", [exited_process()] * 120)
        for num in range(119):
            write_manifest(folder, num)
        assert app.main(["status", str(folder)]) != 2
        rows = capsys.readouterr().out.splitlines()
        assert sum("completed" in row and "120 points" not in row for row in rows) == 1
        assert any(row.split()[0] == "0-118" for row in rows if row.strip())
        assert app.main(["status", str(folder), "--all"]) != 2
        assert sum(" completed " in row for row in capsys.readouterr().out.splitlines()) >= 119

    def test_log_that_collect_copied_is_shown(self, tmp_path, capsys):
        """The other site numbers its arrays itself."""
        connect = ConnectConfig(method="ssh", host="delta", folder="/scratch")
        site = SiteConfig(name="delta", python="/usr/bin/python3", connect=connect)
        folder = sweep_of_jobs(tmp_path / "sweep", ["77_0"], site)
        ledger = folder / LEDGER
        ledger.write_text(ledger.read_text().replace('"g"', '"01-delta-gpuH200x8-h200"'))
        write_manifest(folder, 0, "failed")
        for group, text in (("00-delta-gpuH200x8-h200", "its end"), ("02-delta-gpuA40x4-a40", "of another")):
            log = folder / "logs" / group / "77_0_0_log.err"
            log.parent.mkdir(parents=True)
            log.write_text(f"{text} \x1b[2J\n")
        assert app.main(["status", str(folder), "--point", "0"]) != 2
        out = capsys.readouterr().out
        assert str(folder / "logs" / "00-delta-gpuH200x8-h200" / "77_0_0_log.err") in out
        assert "| its end" in out
        assert "of another" not in out
        assert "\x1b" not in out
        (attempt,) = as_json(folder, capsys)["points"][0]["attempts"]
        assert [Path(log).parent.name for log in attempt["logs"]] == ["00-delta-gpuH200x8-h200"]

    def test_unknown_point_is_a_user_error(self, tmp_path, capsys):
        folder = sweep_of_jobs(tmp_path / "sweep", [exited_process()])
        assert app.main(["status", str(folder), "--point", "3"]) == 2
        assert "has no such point; it has 0 to 0" in capsys.readouterr().err


class TestExitCodes:
    """What a script wants to know first: 3 wait, 4 find out, 1 rerun, 0 go on."""

    @pytest.fixture
    def running(self):
        process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", "submitit"])
        yield f"pid:{process.pid}@{machine()}"
        process.kill()
        process.wait()

    def code(self, folder: Path, *options: str) -> int:
        return app.main(["status", str(folder), *options])

    def test_all_completed(self, tmp_path):
        folder = sweep_of_jobs(tmp_path / "sweep", [exited_process()] * 2)
        for num in (0, 1):
            write_manifest(folder, num)
        assert [self.code(folder, *options) for options in ([], ["--json"], ["--watch"])] == [0] * 3

    def test_failed_and_never_submitted(self, tmp_path):
        folder = sweep_of_jobs(tmp_path / "sweep", [exited_process()] * 2)
        write_manifest(folder, 0)
        write_manifest(folder, 1, "failed")
        assert (self.code(folder), self.code(folder, "--point", "0"), self.code(folder, "--point", "1")) == (1, 0, 1)
        site = {"local": asdict(SiteConfig(name="local", connect=ConnectConfig(method="local")))}
        ledger = a_sweep(tmp_path / "planned", [a_point(0, site="local")], site)
        assert self.code(ledger.folder) == 1
        defer(ledger, [0], "local")
        assert self.code(ledger.folder) == 1

    def test_unavailable_is_a_result(self, tmp_path):
        folder = sweep_of_jobs(tmp_path / "sweep", [exited_process()])
        write_manifest(folder, 0, "failed", reason="unavailable")
        assert self.code(folder) == 0

    def test_unknown_outweighs_failed_and_open_outweighs_both(self, tmp_path, running):
        failed, unknown = exited_process(), "pid:1@elsewhere"
        assert self.code(sweep_of_jobs(tmp_path / "a", [failed, unknown])) == 4
        assert self.code(sweep_of_jobs(tmp_path / "b", [failed, unknown, running])) == 3

    def test_wrong_directory(self, tmp_path):
        assert self.code(tmp_path) == 2

    def test_the_help_names_every_code(self, capsys):
        assert app.main(["status", "--help"]) == 0
        shown = " ".join(capsys.readouterr().out.split())
        for sentence in ("exit code is 3 while", "else 4 if", "else 1 if", "else 0", "2 is a wrong command"):
            assert sentence in shown


class TestCommandsThatHang:
    """A Slurm that does not answer makes states unknown, in bounded time; nothing is lost or submitted twice."""

    @pytest.fixture
    def hung(self, tmp_path, fake_command) -> Path:
        connect, limits = ConnectConfig(hostnames=[".*"]), Limits(command_timeout_s=1)
        fake_command("sbatch", "")
        for name in ("squeue", "sacct", "scancel", "scontrol"):
            fake_command(name, "sleep 600")
        site = SiteConfig(name="delta", connect=connect, limits=limits)
        folder = sweep_of_jobs(tmp_path / "sweep", ["7_0", "7_1"], site)
        ledger = Ledger(folder)
        add_point(ledger, a_point(2))
        plan(ledger, [a_point(2)], group="h", job_name="inpaint-s1-h")
        return folder

    def test_squeue_and_sacct(self, hung, capsys):
        start = time.monotonic()
        shown = as_json(hung, capsys)
        assert shown["counts"] == {"unknown": 3}
        assert "squeue did not answer within 1 s, sacct did not answer within 1 s" in shown["points"][0]["message"]
        assert app.main(["status", str(hung)]) == 4
        assert app.main(["cancel", str(hung)]) == 2
        assert "nothing was cancelled because squeue did not answer within 1 s" in capsys.readouterr().err
        assert app.main(["rerun", str(hung)]) == 1
        assert "nothing was submitted: the state of 3 points is unknown" in capsys.readouterr().err
        assert time.monotonic() - start < 120

    def test_sacct_alone(self, hung, fake_command, capsys):
        fake_command("squeue", "true")
        write_manifest(hung, 0)
        assert as_json(hung, capsys)["counts"] == {"completed": 1, "unknown": 2}
        assert app.main(["status", str(hung)]) == 4
        sentence = "squeue ok, sacct did not answer within 1 s, so its states come from squeue and the files"
        assert sentence in capsys.readouterr().out

    def test_scancel(self, hung, fake_command, capsys):
        fake_command("squeue", "echo '7_0|RUNNING|None|n1|N/A|N/A|1:00|inpaint-s1-g'")
        assert app.main(["cancel", str(hung)]) == 2
        assert "scancel did not answer within 1 s" in capsys.readouterr().err

    def test_the_default_is_20_seconds(self):
        assert (Limits().command_timeout_s, ConnectConfig().timeout_s) == (20, 20)


class TestWatch:
    @pytest.fixture
    def running(self, tmp_path):
        """Yield a process of this machine, and a sweep with it as its only point."""
        process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", "submitit"])
        yield process, sweep_of_jobs(tmp_path / "sweep", [f"pid:{process.pid}@{machine()}"])
        process.kill()
        process.wait()

    def watch(self, folder):
        command = [sys.executable, "-m", "inpaint_bench", "status", str(folder), "--watch", "--every", "0.3"]
        return subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # `nohup make test &` ignores it
        )

    def test_ends_when_all_points_have_finished(self, running):
        job, folder = running
        process = self.watch(folder)
        assert any("1 running" in line for line in process.stdout)  # reads only up to that line
        job.kill()
        job.wait()
        out, error = process.communicate(timeout=60)
        assert (process.returncode, error) == (1, "")  # its only point has failed
        assert out.rstrip().splitlines()[-1].startswith("Next: `inpaint-bench rerun")

    def test_ends_without_a_traceback_when_interrupted(self, running):
        process = self.watch(running[1])
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
        assert process.returncode == 130
        assert "Interrupted" in error
        assert "Traceback" not in error


FIELDS = {
    *(
        "point",
        "overrides",
        "gpu",
        "batch",
        "site",
        "plan",
        "state",
        "reason",
        "message",
        "attempt",
        "job_id",
        "cluster",
    ),
    *("run_id", "step", "steps_total", "images_per_s", "expected_start", "expected_end"),
    *("cost", "cost_at_most", "cost_unit"),
    *("expected_end_basis", "expected_end_is_latest", "tracking", "stages", "pending", "attempts"),
}
QUICK = ["data.num_images=16", "workload.warmup_steps=1", "workload.measure_steps=2", "workload.min_measure_s=1"]


class TestOnSlurm:
    @pytest.fixture(autouse=True)
    def _reach(self, testbed, monkeypatch):
        monkeypatch.setenv("INPAINT_BENCH_TESTBED", str(testbed.state))

    @pytest.fixture(scope="class")
    def swept(self, testbed, tmp_path_factory):
        """Two points at delta, the second of which fails."""
        folder = tmp_path_factory.mktemp("status") / "sweep"
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("INPAINT_BENCH_TESTBED", str(testbed.state))
            broken = "workload.module=inpaint_bench.workloads.finetune_inpaint,inpaint_bench.missing"
            overrides = ["gpu=h200", "batch=2", broken, "profile=testbed", "wait=true", *QUICK]
            assert launch.main(["-m", *overrides, f"hydra.sweep.dir={folder}"]) == 1
        return folder

    @pytest.fixture
    def copy(self, swept, tmp_path):
        """Return a copy to be damaged, without the saved states of its jobs, so that Slurm is queried."""
        folder = tmp_path / "copy"
        shutil.copytree(swept, folder)
        for path in folder.glob("*/attempt-1/scheduler.json"):
            path.unlink()
        return folder

    def test_json_has_every_documented_field_and_the_next_commands(self, swept, capsys):
        shown = as_json(swept, capsys)
        good, bad = shown["points"]
        assert good.keys() == bad.keys() == FIELDS
        names = {*FIELDS, *shown, *good["attempts"][0], *shown["sources"]["delta"]}
        documented = (ROOT / "docs" / "running.md").read_text().partition("### The fields of `status --json`")[2]
        assert {name for name in names if f"`{name}`" not in documented} == set()
        assert shown["counts"] == {"completed": 1, "failed": 1}
        assert shown["sources"]["delta"]["squeue"] == "ok"
        assert datetime.fromisoformat(shown["polled_at"]).utcoffset().total_seconds() == 0
        assert (good["step"], good["pending"], good["expected_end"]) == (good["steps_total"], None, None)
        (attempt,) = bad["attempts"]
        assert (attempt["state"], attempt["reason"], attempt["manifest"]) == ("failed", "app_error", "failed")
        assert "FAILED" in attempt["scheduler"]
        assert all(Path(log).is_file() for log in attempt["logs"])
        assert any("--only app_error" in line for line in shown["next"])

    def test_point_details_show_the_output_of_slurm_and_the_end_of_the_log(self, copy, capsys):
        assert app.main(["status", str(copy), "--point", "1"]) != 2
        out = capsys.readouterr().out
        assert "sacct: FAILED, exit code 1:0, on gpuh001" in out
        assert any(line.strip().startswith("| ") and "inpaint_bench.missing" in line for line in out.splitlines())

    def test_each_site_is_queried_once_for_all_points_and_sacct_not_again(self, copy, capsys, tmp_path, monkeypatch):
        calls = tmp_path / "calls"
        for name in ("squeue", "sacct"):
            real = shutil.which(name)
            script = tmp_path / "bin" / name
            script.parent.mkdir(exist_ok=True)
            script.write_text(f'#!/bin/sh\necho {name} >> {calls}\nexec {real} "$@"\n')
            script.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
        as_json(copy, capsys)
        assert sorted(calls.read_text().split()) == ["sacct", "squeue"]
        as_json(copy, capsys)
        assert sorted(calls.read_text().split()) == ["sacct", "squeue", "squeue"]

    def test_unknown_job_of_another_user_is_not_lost(self, testbed, tmp_path, capsys, monkeypatch):
        if os.getuid():
            pytest.skip("only root gives files away")
        connect = ConnectConfig(slurm_conf=str(testbed.conf("delta")))
        folder = sweep_of_jobs(tmp_path / "sweep", ["66000000_0"], SiteConfig(name="delta", connect=connect))
        (point,) = as_json(folder, capsys)["points"]
        assert (point["state"], point["reason"]) == ("failed", "lost")
        os.chown(folder / SWEEP, pwd.getpwnam("daemon").pw_uid, -1)  # squeue 26.05 knows no user nobody
        # The reader's own site file has the same connection.
        monkeypatch.setattr(survey, "own_site", lambda name: SiteConfig(name=name, connect=connect))
        (point,) = as_json(folder, capsys)["points"]
        assert point["state"] == "unknown"
        assert "no such job is visible for user daemon" in point["message"]

    def test_pending_job_is_shown_with_its_reason_expected_start_and_advice(self, testbed, tmp_path, capsys):
        partition = ("scontrol", "update", "partitionname=gpuH200x8")
        testbed.run("delta", *partition, "state=down")
        folder = tmp_path / "sweep"
        try:
            overrides = ["gpu=h200", "batch=1,2", "profile=testbed", f"hydra.sweep.dir={folder}"]
            assert launch.main(["-m", *overrides, *QUICK]) == 0
            first, second = as_json(folder, capsys)["points"]
            assert first["pending"]["code"] == "PartitionDown"
            assert "Slurm gives this reason (PartitionDown)" in first["message"]
            testbed.run("delta", "scontrol", "uhold", first["job_id"])
            testbed.run("delta", "scontrol", "update", f"job={second['job_id']}", "starttime=now+1hour")
            testbed.run("delta", *partition, "state=up")
            shown = as_json(folder, capsys)
            testbed.wait(lambda: shown.update(as_json(folder, capsys)) or shown["points"][1]["expected_start"])
            first, second = shown["points"]
            assert first["pending"]["stuck"]
            assert f"scontrol release {first['job_id']}" in first["pending"]["advice"]
            wait_s = datetime.fromisoformat(second["expected_start"]).timestamp() - time.time()
            assert wait_s == pytest.approx(3600, abs=120)
            assert second["expected_end_is_latest"]  # by its time limit of 10 minutes: no similar run has ended
            assert app.main(["status", str(folder)]) != 2
            out = capsys.readouterr().out
            assert "Will not start: 1 point at delta (JobHeldUser)" in out
            assert "ETA unknown: no end can be forecast for 1 of 2 open points" in out
        finally:
            testbed.run("delta", *partition, "state=up")
            testbed.run("delta", "scancel", *(p["job_id"] for p in as_json(folder, capsys)["points"]))
