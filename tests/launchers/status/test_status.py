"""What `status` tells of a sweep: why points wait, when they end, who was asked, and what is damaged."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import pytest
from launchers.status.overview import together

from inpaint_bench import launch
from inpaint_bench.cli import app, status
from inpaint_bench.core.attempt_state import AttemptState, RunArtifacts, SchedulerState
from inpaint_bench.core.schema import LEDGER, MANIFEST, STEPS, SWEEP, TELEMETRY, PointState, Reason
from inpaint_bench.core.site import Account, ConnectConfig, SiteConfig
from inpaint_bench.telemetry.storage.parts import PartWriter
from launchers.slurm import query
from launchers.status import survey as watch
from launchers.status.forecast import forecast_points, last_end
from launchers.status.survey import AttemptStatus, PointStatus
from launchers.status.tables import span, spans
from launchers.submit.submit import site_content
from launchers.sweep.events import Cancelled
from launchers.sweep.ledger import Attempt, Ledger, PointRecord
from tests.launchers.sweeps import a_point, a_sweep, plan, submit

NOW = 1_800_000_000.0
DELTA = SiteConfig(name="delta", account=Account(how_to_list="accounts"))


def manifest(state: str = "running", *, ago_s: float = 0.0, begun_ago_s: float = 100.0, **progress):
    known = {"step": None, "steps_total": None, "images_per_s": None, "t_unix_ns": int((NOW - ago_s) * 1e9)}
    return {
        "status": state,
        "batch": 16,
        "started_unix_ns": int((NOW - begun_ago_s) * 1e9),
        "ended_unix_ns": int(NOW * 1e9) if state == "completed" else None,
        "progress": known | progress if progress else None,
    }


def point_status(num, state, manifest=None, *, scheduler=None, run_dir=None, overrides=("gpu=h200",), job="7_0"):
    attempt = Attempt(point=num, attempt=1, run_id="r", site="delta", group="g", planned_unix=NOW, job_id=job)
    record = PointRecord(num=num, overrides=list(overrides), gpu="h200", batch=16, site="delta", attempts=[attempt])
    resolved, artifacts = AttemptState(state=state), RunArtifacts(manifest=manifest)
    run_dir = run_dir or Path("no-such-folder")
    last = AttemptStatus(attempt=attempt, resolved=resolved, artifacts=artifacts, run_dir=run_dir, scheduler=scheduler)
    return PointStatus(record=record, resolved=resolved, attempts=(last,))


def pending(**times):
    return SchedulerState(state="PENDING", **times)


class TestSilence:
    """squeue and sacct do not answer; what was told or kept before must then end nothing that may go on."""

    @pytest.fixture
    def ledger(self, tmp_path, monkeypatch):
        monkeypatch.setattr(watch, "query_jobs", lambda *_, **__: query.SlurmReply(squeue="silent", sacct="silent"))
        monkeypatch.setattr(watch, "find_arrays", lambda *_: None)
        made = a_sweep(tmp_path, [a_point(0)], {"delta": site_content(DELTA)})
        plan(made, [a_point(0)])
        (tmp_path / "0" / "attempt-1").mkdir(parents=True)
        return made

    def submitted(self, ledger):
        submit(ledger, [0])

    def cancelled(self, ledger):
        ledger.append(Cancelled(attempts=[(0, 1)]))

    def state(self, ledger):
        return watch.poll_sweep(ledger).points[0].state

    def test_a_job_that_was_told_to_stop_may_still_run(self, ledger):
        self.submitted(ledger)
        self.cancelled(ledger)
        assert self.state(ledger) is PointState.UNKNOWN

    def test_an_array_whose_launcher_died_may_run_though_it_was_cancelled(self, ledger):
        self.cancelled(ledger)
        assert self.state(ledger) is PointState.UNKNOWN

    def test_cancel_calls_nothing_cancelled_that_it_cannot_name(self, ledger, capsys):
        assert app.main(["cancel", str(ledger.folder)]) == 2
        assert "had been submitted; cancel again" in capsys.readouterr().err
        assert not ledger.points()[0].last.cancelled

    @pytest.mark.parametrize(("word", "state"), [("PREEMPTED", PointState.UNKNOWN), ("TIMEOUT", PointState.FAILED)])
    def test_a_word_that_slurm_may_take_back_is_no_last_word(self, ledger, word, state):
        self.submitted(ledger)
        SchedulerState(state=word).save(ledger.folder / "0" / "attempt-1")
        assert self.state(ledger) is state


RUNNING, QUEUED, COMPLETED = PointState.RUNNING, PointState.QUEUED, PointState.COMPLETED
HALF = {"step": 30, "steps_total": 60, "images_per_s": 32.0}


class TestOutlook:
    def one(self, *points):
        return forecast_points(points, NOW)[points[0].record.num]

    def test_a_running_point_ends_when_its_steps_are_done_at_its_pace(self):
        found = self.one(point_status(0, RUNNING, manifest(ago_s=10, **HALF)))
        assert found.end_unix == pytest.approx(NOW - 10 + 30 * 16 / 32)
        assert (found.step, found.steps_total, found.images_per_s, found.pace_age_s) == (30, 60, 32.0, 10.0)

    def test_a_training_needs_the_time_of_its_validations_too(self, tmp_path):
        spans_s = (("measure", 0, 10), ("validation", 10, 15), ("measure", 15, 25))
        windows = [
            {"kind": kind, "t_start_unix_ns": begin * 10**9 + 1, "t_end_unix_ns": end * 10**9 + 1}
            for kind, begin, end in spans_s
        ]
        (tmp_path / "windows.json").write_text(json.dumps(windows))
        found = self.one(point_status(0, RUNNING, manifest(**HALF), run_dir=tmp_path))
        assert found.end_unix == pytest.approx(NOW + 1.25 * 30 * 16 / 32)

    @pytest.mark.parametrize("lacks", ["steps_total", "images_per_s"])
    def test_without_a_pace_or_a_last_step_no_end_is_made_up(self, lacks):
        found = self.one(point_status(0, RUNNING, manifest(**HALF | {lacks: None})))
        assert (found.end_unix, found.basis) == (None, "not known")

    def test_before_its_first_step_a_point_is_expected_to_take_as_long_as_those_like_it(self):
        seed = point_status(1, COMPLETED, manifest("completed", begun_ago_s=80), overrides=("gpu=h200", "seed=1"))
        other = point_status(2, COMPLETED, manifest("completed", begun_ago_s=500), overrides=("gpu=h200", "model=b"))
        found = self.one(point_status(0, RUNNING, manifest(begun_ago_s=30)), seed, other)
        assert found.end_unix == pytest.approx(NOW - 30 + 80)
        assert found.basis == "1 completed run like it"

    def test_before_any_run_has_ended_the_time_limit_is_the_latest_end(self):
        word = SchedulerState(state="RUNNING", end_unix=NOW + 600)
        found = self.one(point_status(0, RUNNING, manifest(), scheduler=word))
        assert (found.end_unix, found.at_most, found.basis) == (NOW + 600, True, "time limit")

    def test_a_queued_point_ends_after_its_expected_start(self):
        like = point_status(1, COMPLETED, manifest("completed", begun_ago_s=80))
        point = point_status(0, QUEUED, scheduler=pending(start_unix=NOW + 60, time_limit_s=600.0))
        assert self.one(point, like).end_unix == NOW + 140
        assert self.one(point).end_unix == NOW + 660
        assert self.one(point).at_most

    def test_a_queued_point_without_an_expected_start_has_no_end(self):
        found = self.one(point_status(0, QUEUED, scheduler=pending(time_limit_s=600.0)))
        assert (found.end_unix, found.start_unix, found.basis) == (None, None, "Slurm expects no start yet")

    def test_an_expected_start_that_has_passed_is_now(self):
        assert (
            self.one(point_status(0, QUEUED, scheduler=pending(start_unix=NOW - 999, time_limit_s=60.0))).start_unix
            == NOW
        )

    def test_a_clock_that_is_ahead_is_told_and_gives_no_negative_age(self):
        found = self.one(point_status(0, RUNNING, manifest(ago_s=-90, **HALF)))
        assert found.skew_s == pytest.approx(90)
        assert found.pace_age_s == 0

    def test_an_end_that_has_passed_is_not_told_as_one(self):
        found = self.one(point_status(0, RUNNING, manifest(ago_s=900, **HALF)))
        assert found.end_unix is None
        assert found.basis == "should have ended by its own pace"

    def test_the_pace_of_now_is_that_of_the_last_rows_on_disk(self, tmp_path):
        window = {"window_id": "measure-0", "kind": "measure", "t_start_mono_ns": 0, "t_start_unix_ns": 0}
        begin_ns = int((NOW - 100) * 1e9)
        (tmp_path / "windows.json").write_text(json.dumps([window | {"t_end_unix_ns": None}]))
        rows = PartWriter(tmp_path / "steps", STEPS, {"run_id": "r"}, part_s=600, journal_s=0.001)
        rows.tick(0.0)
        for step in range(90):  # one a second, the last 30 s twice as many images
            at_ns = begin_ns + step * 10**9
            images = 16 if step < 60 else 32
            row = {"t_start_mono_ns": at_ns - 1, "t_end_mono_ns": at_ns, "data_wait_ns": 0, "images": images}
            rows.append(window_id="measure-0", step=step, **row)
        rows.tick(1.0)
        found = self.one(point_status(0, RUNNING, manifest(ago_s=5, **HALF), run_dir=tmp_path))
        assert found.images_per_s == pytest.approx(32, rel=0.02)
        assert found.pace_age_s == pytest.approx(11, abs=0.01)
        rows.close()
        assert self.one(point_status(0, RUNNING, manifest(ago_s=5, **HALF), run_dir=tmp_path)).pace_age_s == 5

    def test_points_that_wait_for_this_machine_come_one_after_another(self):
        done = point_status(9, COMPLETED, manifest("completed", begun_ago_s=80), job="pid:1@here")
        first = point_status(0, RUNNING, manifest(**HALF), job="pid:2@here")
        second, third = (point_status(num, QUEUED, job=None) for num in (1, 2))
        found = forecast_points([first, second, third, done], NOW)
        assert [found[num].end_unix - NOW for num in (0, 1, 2)] == pytest.approx([15, 95, 175])

    def test_the_sweep_ends_with_its_last_point_or_that_is_not_known(self):
        first = point_status(0, RUNNING, manifest(**HALF))
        later = point_status(1, QUEUED, scheduler=pending(start_unix=NOW + 60, time_limit_s=600.0))
        unknown = point_status(2, QUEUED, scheduler=pending())
        assert last_end([first], forecast_points([first], NOW)) == (pytest.approx(NOW + 15), "expected")
        assert last_end([first, later], forecast_points([first, later], NOW)) == (NOW + 660, "at the latest")
        every = [first, later, unknown]
        assert last_end(every, forecast_points(every, NOW)) == (None, "of 1 of 3 open points no end can be told yet")


@pytest.mark.parametrize(
    ("seconds", "words"), [(5, "5 s"), (61, "1 min"), (3600, "1 h"), (3900, "1 h 5 min"), (90_000, "1 d 1 h")]
)
def test_a_span_of_time_is_told_in_two_units(seconds, words):
    assert span(seconds) == words


def test_numbers_and_tasks_are_put_together():
    assert spans([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"
    assert together(["7_0", "7_1", "8_4", "7_3"]) == ["7_[0-1,3]", "8_[4]"]


def made(folder: Path, job_ids: list[str], site: SiteConfig | None = None) -> Path:
    """A sweep directory as a launcher leaves it, of one array of points."""
    site = site or SiteConfig(name="local", connect=ConnectConfig(method="local"))
    points = [
        a_point(num, overrides=[f"batch={num + 1}"], batch=num + 1, site=site.name) for num in range(len(job_ids))
    ]
    ledger = a_sweep(folder, points, {site.name: site_content(site)}, created_unix=NOW)
    if points:
        plan(ledger, points, group="g", job_name="n")
    for num, job_id in enumerate(job_ids):
        submit(ledger, [num], job_id=job_id, group="g")
    return folder


def left_behind(folder: Path, num: int, state: str = "completed") -> None:
    run = folder / str(num) / "attempt-1"
    run.mkdir(parents=True)
    (run / MANIFEST).write_text(json.dumps(manifest(state) | {"telemetry": {"source": "none"}}))


def as_json(folder: Path, capsys) -> dict:
    capsys.readouterr()
    assert app.main(["status", str(folder), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def dead_pid() -> str:
    process = subprocess.Popen(["true"])
    process.wait()
    return f"pid:{process.pid}@{socket.gethostname()}"


class TestDamage:
    def test_a_ledger_line_that_was_cut_short_is_told_and_the_rest_is_read(self, tmp_path, capsys):
        folder = made(tmp_path / "sweep", [dead_pid()])
        left_behind(folder, 0)
        with (folder / LEDGER).open("a") as out:
            out.write('{"t_unix": 1, "kind": "subm')
        found = as_json(folder, capsys)
        assert found["counts"] == {"completed": 1}
        assert "line 3 is damaged and was skipped" in found["notes"][0]

    def test_a_ledger_line_of_a_point_that_is_none_is_told(self, tmp_path, capsys):
        folder = made(tmp_path / "sweep", [dead_pid()])
        submit(Ledger(folder), [5])
        assert "line 3" in as_json(folder, capsys)["notes"][0]

    @pytest.mark.parametrize("text", ['{"sweep_id": "s', "[]", "{}"])
    def test_a_sweep_record_that_cannot_be_read_is_a_sentence(self, text, tmp_path, capsys):
        folder = made(tmp_path / "sweep", [dead_pid()])
        (folder / SWEEP).write_text(text)
        assert app.main(["status", str(folder)]) == 2
        assert str(folder / SWEEP) in capsys.readouterr().err

    def test_a_manifest_with_fields_of_the_wrong_kind_is_no_traceback(self, tmp_path, capsys):
        here = f"pid:{os.getpid()}@elsewhere"
        folder = made(tmp_path / "sweep", [here] * 3)
        for num, state in enumerate(("running", "completed", "failed")):
            left_behind(folder, num, state)
            path = folder / str(num) / "attempt-1" / MANIFEST
            whole = json.loads(path.read_text())
            path.write_text(json.dumps(dict.fromkeys(whole, "x") | {"status": state}))
            (path.parent / "windows.json").write_text('[{"kind": "measure", "t_end_unix_ns": "x"}, 3]')
        assert as_json(folder, capsys)["counts"] == {"failed": 2, "running": 1}
        for point in ("0", "1", "2"):
            assert app.main(["status", str(folder), "--point", point]) == 0

    def test_a_process_on_another_machine_is_a_missing_witness(self, tmp_path, capsys):
        folder = made(tmp_path / "sweep", ["pid:1@elsewhere", "pid:1@elsewhere"])
        left_behind(folder, 0)
        done, nothing = as_json(folder, capsys)["points"]
        assert (done["state"], nothing["state"]) == ("completed", "unknown")
        assert "from the manifest only" in done["message"]
        assert "on elsewhere and cannot be checked from here" in nothing["message"]

    def test_a_sweep_that_one_may_only_read_is_told_all_the_same(self, tmp_path, capsys):
        folder = made(tmp_path / "sweep", [dead_pid()])
        left_behind(folder, 0)
        (folder / ".lock").mkdir()  # cannot be opened, as where permission is lacking
        assert as_json(folder, capsys)["counts"] == {"completed": 1}

    def test_of_very_many_points_those_alike_share_a_row(self, tmp_path, capsys):
        folder = made(tmp_path / "sweep", [dead_pid()] * 120)
        for num in range(119):
            left_behind(folder, num)
        assert app.main(["status", str(folder)]) == 0
        rows = capsys.readouterr().out.splitlines()
        assert sum("completed" in row and "120 points" not in row for row in rows) == 1
        assert any(row.split()[0] == "0-118" for row in rows if row.strip())
        assert app.main(["status", str(folder), "--all"]) == 0
        assert sum(" completed " in row for row in capsys.readouterr().out.splitlines()) >= 119

    def test_the_log_of_a_point_is_shown_where_collect_put_it(self, tmp_path, capsys):
        """There the arrays have numbers of their own."""
        folder = made(tmp_path / "sweep", ["77_0"], SiteConfig(name="delta", connect=ConnectConfig(method="ssh")))
        ledger = folder / LEDGER
        ledger.write_text(ledger.read_text().replace('"g"', '"01-delta-gpuH200x8-h200"'))
        left_behind(folder, 0, "failed")
        for group, text in (("00-delta-gpuH200x8-h200", "its end"), ("02-delta-gpuA40x4-a40", "of another")):
            log = folder / "logs" / group / "77_0_0_log.err"
            log.parent.mkdir(parents=True)
            log.write_text(f"{text} \x1b[2J\n")
        assert app.main(["status", str(folder), "--point", "0"]) == 0
        out = capsys.readouterr().out
        assert "log       " + str(folder / "logs" / "00-delta-gpuH200x8-h200" / "77_0_0_log.err") in out
        assert "| its end" in out
        assert "of another" not in out
        assert "\x1b" not in out
        (attempt,) = as_json(folder, capsys)["points"][0]["attempts"]
        assert [Path(log).parent.name for log in attempt["logs"]] == ["00-delta-gpuH200x8-h200"]

    def test_a_point_that_is_none_is_refused(self, tmp_path, capsys):
        folder = made(tmp_path / "sweep", [dead_pid()])
        assert app.main(["status", str(folder), "--point", "3"]) == 2
        assert "--point 3: not a point" in capsys.readouterr().err


class TestWatch:
    @pytest.fixture
    def running(self, tmp_path):
        """A process of this machine, and a sweep whose one point it is."""
        process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", "submitit"])
        yield process, made(tmp_path / "sweep", [f"pid:{process.pid}@{socket.gethostname()}"])
        process.kill()
        process.wait()

    def watch(self, folder):
        command = [sys.executable, "-m", "inpaint_bench", "status", str(folder), "--watch", "--every", "0.3"]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def test_ends_by_itself_when_nothing_is_open(self, running):
        job, folder = running
        process = self.watch(folder)
        assert any("1 running" in line for line in process.stdout)  # reads no further than that
        job.kill()
        job.wait()
        out, error = process.communicate(timeout=60)
        assert (process.returncode, error) == (0, "")
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
    *("point", "overrides", "gpu", "batch", "site", "plan", "state", "reason", "message", "attempt", "job_id"),
    *("run_id", "step", "steps_total", "images_per_s", "images_per_s_age_s", "expected_start", "expected_end"),
    *("expected_end_basis", "expected_end_is_latest", "pending", "attempts"),
}
QUICK = ["data.num_images=16", "workload.warmup_steps=1", "workload.measure_steps=2", "workload.min_measure_s=1"]


@contextmanager
def silenced(testbed, *daemons: str):
    """They are there and do not answer."""
    pids = [testbed.daemons()[name] for name in daemons]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


@pytest.mark.testbed
class TestOnSlurm:
    @pytest.fixture(autouse=True)
    def _reach(self, testbed, monkeypatch):
        monkeypatch.setenv("INPAINT_BENCH_TESTBED", str(testbed.state))

    @pytest.fixture(scope="class")
    def swept(self, testbed, tmp_path_factory):
        """Two points at delta, of which the second raises."""
        folder = tmp_path_factory.mktemp("status") / "sweep"
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("INPAINT_BENCH_TESTBED", str(testbed.state))
            broken = "model.weights=null,/no/such/weights"
            asked = ["gpu=h200", "batch=2", broken, "profile=testbed", "wait=true", *QUICK]
            assert launch.main(["-m", *asked, f"hydra.sweep.dir={folder}"]) == 1
        return folder

    @pytest.fixture
    def copy(self, swept, tmp_path):
        """The same, to be hurt; Slurm's last words are not kept, so that it is asked."""
        folder = tmp_path / "copy"
        shutil.copytree(swept, folder)
        for path in folder.glob("*/attempt-1/scheduler.json"):
            path.unlink()
        return folder

    def test_json_has_every_documented_field_and_says_what_to_do(self, swept, capsys):
        found = as_json(swept, capsys)
        good, bad = found["points"]
        assert good.keys() == bad.keys() == FIELDS
        told = {*FIELDS, *found, *good["attempts"][0], *found["witnesses"]["delta"]}
        assert {name for name in told if name not in status.__doc__} == set()
        assert found["counts"] == {"completed": 1, "failed": 1}
        assert found["witnesses"]["delta"]["squeue"] == "ok"
        assert datetime.fromisoformat(found["looked_at"]).utcoffset().total_seconds() == 0
        assert (good["step"], good["pending"], good["expected_end"]) == (good["steps_total"], None, None)
        (attempt,) = bad["attempts"]
        assert (attempt["state"], attempt["reason"], attempt["manifest"]) == ("failed", "app_error", "failed")
        assert "FAILED" in attempt["scheduler"]
        assert all(Path(log).is_file() for log in attempt["logs"])
        assert any("--only app_error" in line for line in found["next"])

    def test_one_point_in_detail_shows_slurms_own_words_and_the_end_of_its_log(self, copy, capsys):
        assert app.main(["status", str(copy), "--point", "1"]) == 0
        out = capsys.readouterr().out
        assert "sacct: FAILED, exit code 1:0, on gpuh001" in out
        assert any(line.strip().startswith("| ") and "/no/such/weights" in line for line in out.splitlines())

    def test_each_site_is_asked_once_for_all_points_and_sacct_not_again(self, copy, capsys, tmp_path, monkeypatch):
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

    def test_what_was_deleted_or_is_stale_is_told_and_never_called_completed(self, copy, capsys):
        run = copy / "0" / "attempt-1"
        path = run / MANIFEST
        path.write_text(json.dumps(json.loads(path.read_text()) | {"status": "running"}))
        point = as_json(copy, capsys)["points"][0]
        assert (point["state"], point["reason"]) == ("failed", "lost")
        assert "process exited without writing a final status" in point["message"]
        shutil.rmtree(run)
        point = as_json(copy, capsys)["points"][0]
        assert (point["state"], point["reason"]) == ("failed", "lost")
        assert "scheduler says COMPLETED, but there is no run directory" in point["message"]

    def test_a_lost_part_is_missed(self, copy, capsys):
        run = copy / "0" / "attempt-1"
        closed = json.loads((run / TELEMETRY).read_text())["tables"]["samples_fast"]["parts"]
        next((run / "samples_fast").glob("part-*.parquet")).unlink()
        point = as_json(copy, capsys)["points"][0]
        assert point["reason"] == Reason.TELEMETRY_INCOMPLETE
        assert f"{closed - 1} of {closed} parts of samples_fast" in point["message"]

    def test_without_sacct_or_without_slurm_the_states_are_those_of_the_files_and_that_is_said(
        self, testbed, copy, capsys, monkeypatch
    ):
        monkeypatch.setattr(query, "TIMEOUT_S", 2)
        with silenced(testbed, "database/slurmdbd"):
            assert app.main(["status", str(copy)]) == 0
            out = capsys.readouterr().out
            assert "1 completed, 1 failed" in out
            assert "squeue ok, sacct did not answer within 2 s, so its states come from squeue and the files" in out
            for path in copy.glob("*/attempt-1/scheduler.json"):
                path.unlink()
            with silenced(testbed, "delta/slurmctld"):
                found = as_json(copy, capsys)
        assert found["witnesses"]["delta"]["silence"] == (
            "squeue did not answer within 2 s, sacct did not answer within 2 s"
        )
        assert found["counts"] == {"completed": 1, "failed": 1}
        assert "from the manifest only: squeue did not answer" in found["points"][0]["message"]

    def test_a_job_that_slurm_does_not_show_is_lost_only_where_it_is_ones_own(self, testbed, tmp_path, capsys):
        if os.getuid():
            pytest.skip("only root gives files away")
        connect = ConnectConfig(slurm_conf=str(testbed.conf("delta")))
        folder = made(tmp_path / "sweep", ["66000000_0"], SiteConfig(name="delta", connect=connect))
        (mine,) = as_json(folder, capsys)["points"]
        assert (mine["state"], mine["reason"]) == ("failed", "lost")
        os.chown(folder / SWEEP, 65534, -1)
        (theirs,) = as_json(folder, capsys)["points"]
        assert theirs["state"] == "unknown"
        assert "no such job is visible for user nobody" in theirs["message"]

    def test_what_waits_is_told_with_its_reason_its_start_and_what_to_do(self, testbed, tmp_path, capsys):
        partition = ("scontrol", "update", "partitionname=gpuH200x8")
        testbed.run("delta", *partition, "state=down")
        folder = tmp_path / "sweep"
        try:
            asked = ["gpu=h200", "batch=1,2", "profile=testbed", f"hydra.sweep.dir={folder}"]
            assert launch.main(["-m", *asked, *QUICK]) == 0
            first, second = as_json(folder, capsys)["points"]
            assert first["pending"]["code"] == "PartitionDown"
            assert "Slurm gives this reason (PartitionDown)" in first["message"]
            testbed.run("delta", "scontrol", "uhold", first["job_id"])
            testbed.run("delta", "scontrol", "update", f"job={second['job_id']}", "starttime=now+1hour")
            testbed.run("delta", *partition, "state=up")
            told = as_json(folder, capsys)
            testbed.wait(lambda: told.update(as_json(folder, capsys)) or told["points"][1]["expected_start"])
            first, second = told["points"]
            assert first["pending"]["stuck"]
            assert f"scontrol release {first['job_id']}" in first["pending"]["advice"]
            wait_s = datetime.fromisoformat(second["expected_start"]).timestamp() - time.time()
            assert wait_s == pytest.approx(3600, abs=120)
            assert second["expected_end_is_latest"]  # by its limit of 10 minutes: none like it has ended
            assert app.main(["status", str(folder)]) == 0
            out = capsys.readouterr().out
            assert "Will not start as it is: 1 point of delta (JobHeldUser)" in out
            assert "When the last one ends is not known: of 1 of 2 open points" in out
        finally:
            testbed.run("delta", *partition, "state=up")
            testbed.run("delta", "scancel", *(p["job_id"] for p in as_json(folder, capsys)["points"]))
