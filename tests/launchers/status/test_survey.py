"""poll_sweep: which Slurm and which jobs are believed, and what an incomplete record of the sweep does."""

import errno
import json
import os
import shutil
import socket
import threading
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from inpaint_bench import launch
from inpaint_bench.cli import app
from inpaint_bench.core.attempt_state import SchedulerState
from inpaint_bench.core.config.site import ConnectConfig, SiteConfig
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.schema import LEDGER, MANIFEST, SWEEP, PointState
from inpaint_bench.run.manifest import check_owner
from launchers import entry
from launchers.points import point_file
from launchers.points.compose import composer
from launchers.slurm import local_executor
from launchers.slurm.query import SlurmReply, jobs_named
from launchers.status import survey
from launchers.sweep.events import Cancelled
from launchers.sweep.ledger import Ledger
from tests.launchers.sweeps import a_point, a_sweep, exited_process, plan, submit, sweep_of_jobs, write_manifest

pytestmark = pytest.mark.slow

NAME = "inpaint-s1-g"  # of the array that sweep_of_jobs plans

QUICK = ["data.num_images=16", "workload.warmup_steps=1", "workload.measure_steps=2", "workload.min_measure_s=1"]


def run(capsys, *argv: str) -> tuple[int, str]:
    """Exit code and output of a verb."""
    capsys.readouterr()
    code = app.main(argv)
    output = capsys.readouterr()
    return code, output.out + output.err


def as_json(folder: Path, capsys) -> dict:
    return json.loads(run(capsys, "status", str(folder), "--json")[1])


class TestSlurmDoesNotAnswer:
    """What was reported or saved earlier must not end a job that may still run."""

    @pytest.fixture
    def ledger(self, tmp_path, monkeypatch):
        monkeypatch.setattr(survey, "query_jobs", lambda *_, **__: SlurmReply(squeue="silent", sacct="silent"))
        monkeypatch.setattr(survey, "find_arrays", lambda *_: None)
        ledger = a_sweep(tmp_path, [a_point(0)], {"delta": asdict(SiteConfig(name="delta"))})
        plan(ledger, [a_point(0)])
        (tmp_path / "0" / "attempt-1").mkdir(parents=True)
        return ledger

    def state(self, ledger):
        return survey.poll_sweep(ledger).points[0].state

    def test_cancelled_job_may_still_run(self, ledger):
        submit(ledger, [0])
        ledger.append(Cancelled(attempts=[(0, 1)]))
        assert self.state(ledger) is PointState.UNKNOWN

    def test_cancelled_array_whose_launcher_died_may_still_run(self, ledger):
        ledger.append(Cancelled(attempts=[(0, 1)]))
        assert self.state(ledger) is PointState.UNKNOWN

    def test_cancel_does_not_record_jobs_without_an_id_as_cancelled(self, ledger, capsys):
        code, output = run(capsys, "cancel", str(ledger.folder))
        assert code == 2
        assert "had been submitted; cancel again" in output
        assert not ledger.points()[0].last.cancelled

    @pytest.mark.parametrize(("saved", "state"), [("PREEMPTED", PointState.UNKNOWN), ("TIMEOUT", PointState.FAILED)])
    def test_saved_state_counts_only_if_slurm_does_not_requeue_after_it(self, ledger, saved, state):
        submit(ledger, [0])
        SchedulerState(state=saved).save(ledger.folder / "0" / "attempt-1")
        assert self.state(ledger) is state


class TestWhatSlurmPrints:
    """Commands that print what a Slurm, a wrapper or a login profile may print: what is not understood is unknown."""

    @pytest.fixture
    def sweep(self, tmp_path, fake_command):
        """Write a sweep of one array, a day old, whose Slurm prints these rows; return its folder."""

        def make(squeue: str = "", sacct: str = "", tasks: int = 1) -> Path:
            for name, rows in (("squeue", squeue), ("sacct", sacct)):
                (tmp_path / name).write_text(rows)
                fake_command(name, f"cat {tmp_path / name}")
            site = SiteConfig(name="delta", connect=ConnectConfig(hostnames=[".*"]))
            return sweep_of_jobs(tmp_path / "sweep", [f"7_{task}" for task in range(tasks)], site)

        return make

    def queued(self, task: int, state: str = "PENDING", reason: str = "Priority") -> str:
        return f"7_{task}|{state}|{reason}||N/A|N/A|10:00|{NAME}\n"

    def ended(self, task: int | str, state: str, exit_code: str = "0:0", reason: str = "None") -> str:
        return f"7_{task}|{state}|{exit_code}|{reason}|n1|{NAME}\n"

    def states(self, folder: Path, capsys) -> list[tuple[str, str | None]]:
        return [(point["state"], point["reason"]) for point in as_json(folder, capsys)["points"]]

    @pytest.mark.parametrize(
        "name", ["manifest.json", "samples_fast/.journal.arrows", "steps/part-000001.parquet", "log"]
    )
    def test_file_that_was_just_written_outweighs_a_missing_row(self, name, sweep, capsys, fake_command):
        """Regression: `rerun` submitted the point a second time."""
        folder = sweep()
        run_dir = write_manifest(folder, 0, "running")
        path = run_dir / name if name != "log" else folder / "jobs" / "g" / "7_0_0_log.out"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        old = [other for other in run_dir.rglob("*") if other != path]
        for other in old:
            os.utime(other, (1.0, 1.0))
        (point,) = as_json(folder, capsys)["points"]
        assert point["state"] == "unknown"
        assert f"Slurm does not list it, but its {path.name} was written " in point["message"]
        calls = fake_command("sbatch", "exit 1")
        code, output = run(capsys, "rerun", str(folder))
        assert code == 1
        assert f"but its {path.name} was written " in output
        assert not calls.exists()
        os.utime(path, (1.0, 1.0))
        assert self.states(folder, capsys) == [("failed", "lost")]

    @pytest.mark.parametrize("state", ["RUNNING", "PENDING", "COMPLETING", "REQUEUED"])
    def test_full_list_of_squeue_outweighs_a_row_of_sacct_that_never_ends(self, state, sweep, capsys):
        folder = sweep(sacct=self.ended(0, state))
        assert self.states(folder, capsys) == [("failed", "lost")]
        path = write_manifest(folder, 0, "completed") / MANIFEST
        os.utime(path, (1.0, 1.0))
        (point,) = as_json(folder, capsys)["points"]
        assert point["state"] == "completed"
        assert f"sacct still says {state} (see `sacctmgr show runawayjobs`)" in point["message"]
        path.write_text(path.read_text().replace("completed", "running"))
        os.utime(path, (1.0, 1.0))
        assert self.states(folder, capsys) == [("failed", "lost")]
        path.touch()
        assert self.states(folder, capsys)[0][0] in ("running", "queued")

    @pytest.mark.parametrize("listed", ["[0-1,3-5]", "[0-5]", "[0-1,3-5%2]"])
    def test_pending_task_that_left_the_list_of_its_array_is_cancelled(self, listed, sweep, capsys):
        rest = [task for task in range(6) if task != 2]
        folder = sweep("".join(map(self.queued, rest)), self.ended(listed, "PENDING"), tasks=6)
        states = self.states(folder, capsys)
        assert states.pop(2) == ("failed", "cancelled")
        assert states == [("queued", None)] * 5

    @pytest.mark.parametrize(
        ("squeue", "shown"),
        [
            ("Usage: squeue [-A account]\n  [--clusters names]\n", "printed what cannot be read (Usage: squeue"),
            ("  JOBID PARTITION NAME\n 7_0 gpu inpaint\n", "printed what cannot be read (JOBID PARTITION"),
            ("7_0|RUNNING|no", "printed what cannot be read (7_0|RUNNING|no)"),
            ("9_0|RUNNING|None|n1|1|2|3|x\n7_0|RUN", "printed also what cannot be read (7_0|RUN)"),
        ],
    )
    def test_output_that_is_not_understood_ends_no_job(self, squeue, shown, sweep, capsys):
        """Regression: it counted as an empty list, and `rerun` submitted what was running."""
        folder = sweep(squeue)
        status = as_json(folder, capsys)
        assert status["points"][0]["state"] == "unknown"
        assert shown in status["sources"]["delta"]["squeue"]
        assert shown in run(capsys, "status", str(folder))[1]
        code, output = run(capsys, "rerun", str(folder))
        assert (code, shown in output) == (1, True)
        code, output = run(capsys, "cancel", str(folder))
        assert (code, shown in output) == (2, True)

    def test_answer_without_rows_beside_an_error_is_none(self, sweep, capsys, fake_command):
        folder = sweep()
        fake_command("sacct", "echo 'sacct: error: Problem talking to the database: Connection refused' >&2")
        assert self.states(folder, capsys) == [("unknown", None)]
        fake_command("sacct", "echo 'sacct: warning: 2 nodes are drained' >&2")
        assert self.states(folder, capsys) == [("failed", "lost")]

    def test_row_without_a_state_is_unknown_and_the_others_count(self, sweep, capsys):
        """Regression: an IndexError ended the command."""
        folder = sweep(sacct=self.ended(0, "") + self.ended(1, "CANCELLED by 1000"), tasks=2)
        assert self.states(folder, capsys) == [("unknown", None), ("failed", "cancelled")]
        assert "a state that is not known here (no state)" in as_json(folder, capsys)["points"][0]["message"]

    @pytest.mark.parametrize(
        ("state", "shown", "text"),
        [
            ("REVOKED", "unknown", "another cluster runs it; `squeue --me --federation` shows where"),
            ("HIBERNATING", "unknown", "a state that is not known here (HIBERNATING)"),
            ("STOPPED", "running", "was stopped by a signal and keeps its GPUs; `scancel --signal=CONT`"),
            ("SIGNALING", "running", "(SIGNALING)"),
            ("RESV_DEL_HOLD", "queued", "is held because its reservation was deleted (RESV_DEL_HOLD)"),
            ("LAUNCH_FAILED", "queued", "could not be started on its node (LAUNCH_FAILED)"),
            ("POWER_UP_NODE", "queued", "its nodes are booting"),
            ("PENDING,REQUEUED", "queued", "is being requeued"),
            ("RUNNING,FAILED", "running", ""),
            ("COMPLETING,FAILED,NODE_FAIL", "running", ""),
            ("REVOKED,CANCELLED", "unknown", "another cluster runs it"),
            ("CANCELLED,HIBERNATING", "unknown", "(HIBERNATING)"),
            (",", "unknown", "(no state)"),
        ],
    )
    def test_state_is_shown_as_what_it_is(self, state, shown, text, sweep, capsys):
        folder = sweep(self.queued(0, state, "None"))
        (point,) = as_json(folder, capsys)["points"]
        assert (point["state"], text in point["message"]) == (shown, True), point["message"]
        if state in ("RESV_DEL_HOLD", "LAUNCH_FAILED"):
            assert f"Will not start: 1 point at delta ({state})" in run(capsys, "status", str(folder))[1]

    @pytest.mark.parametrize(
        ("slurm", "exit_code", "state"),
        [
            ("FAILED", "0:12", "completed"),
            ("FAILED", "12:0", "completed"),
            ("FAILED", "1:0", "failed"),
            ("TIMEOUT", "0:15", "completed"),  # its process hung as it closed
            ("CANCELLED", "0:15", "completed"),
            ("OUT_OF_MEMORY", "0:125", "failed"),  # it may have been short of memory while it was measured
        ],
    )
    def test_end_of_the_job_after_a_completed_run_does_not_undo_it(self, slurm, exit_code, state, sweep, capsys):
        folder = sweep(sacct=self.ended(0, slurm, exit_code, "BeginTime"))
        write_manifest(folder, 0, "completed")
        for _ in range(2):  # the second time by what the first one saved
            (point,) = as_json(folder, capsys)["points"]
            assert point["state"] == state
            assert f"{slurm} (exit code {exit_code}, on n1)" in point["message"]
            (folder.parent / "sacct").write_text("")

    @pytest.mark.parametrize(
        "listed", ["[-]", "[5-0]", "[0-4:0]", "[1-]", "[,]", "[0,3-1]", "[\u0661]", "[0-99999999999]", "[0x3F]", "*"]
    )
    @pytest.mark.parametrize("others", [True, False])
    def test_list_of_tasks_that_is_not_understood_ends_no_task(self, listed, others, sweep, capsys):
        """Regression: "7_[5-0]" ended every task of its array as lost or cancelled, the long one in a traceback."""
        folder = sweep(self.queued(0) if others else "", self.ended(listed, "PENDING"), tasks=3)
        assert self.states(folder, capsys) == [("queued" if others else "unknown", None), *[("unknown", None)] * 2]

    @pytest.mark.parametrize("ended", ["NODE_FAIL", "COMPLETED", "PREEMPTED"])
    @pytest.mark.parametrize("order", [1, -1])
    def test_row_of_an_earlier_start_outweighs_none_that_has_not_ended(self, ended, order, sweep, capsys, fake_command):
        rows = [self.ended(0, ended), self.ended(0, "RUNNING")][::order]
        folder = sweep(sacct="".join(rows))
        fake_command("squeue", "exit 1")
        assert self.states(folder, capsys) == [("running", None)]

    @pytest.mark.parametrize("job_id", ["\uff17_0", "7_\uff10", "007_0", "7_00", "7_0-1", "7_0.batch"])
    def test_row_of_another_form_is_not_taken_for_a_missing_one(self, job_id, sweep, capsys):
        folder = sweep(self.queued(0, "RUNNING").replace("7_0", job_id))
        assert self.states(folder, capsys) == [("unknown", None)]

    def test_cancel_says_that_a_row_does_not_name_its_task(self, sweep, capsys):
        code, output = run(capsys, "cancel", str(sweep(self.queued(0).replace("7_0", "7"))))
        assert (code, "squeue does not say which tasks of 7 it lists" in output) == (2, True)

    def test_jobs_in_a_hidden_partition_are_ours_too(self, sweep, capsys, fake_command):
        """As squeue does it with `Hidden=YES`. Regression: both were lost, and `rerun` submitted them again."""
        folder = sweep("", self.ended("[0-1]", "PENDING"), tasks=2)
        rows = (self.queued(task).strip() for task in range(2))
        fake_command("squeue", f"""case " $* " in *" -a "*) printf '%s\\n' '{"' '".join(rows)}';; esac""")
        assert self.states(folder, capsys) == [("queued", None)] * 2
        fake_command("squeue", f"""case " $* " in *" -a "*) echo '7_0|PENDING|{NAME}';; esac""")
        assert jobs_named(SiteConfig(name="delta"), NAME)[0] == [("7_0", NAME, True)]

    def test_array_that_was_submitted_twice_is_told(self, sweep, capsys, fake_command):
        scancel = fake_command("scancel", "")
        folder = sweep(self.queued(0) + self.queued(0, "RUNNING").replace("7_0", "6_0"))
        sentence = "job 6 is also named inpaint-s1-g, and is not recorded: unless a copy of this sweep submitted it, "
        sentence += "both write into one folder, so `scancel 6`"
        assert sentence in " ".join(run(capsys, "status", str(folder))[1].split())
        code, output = run(capsys, "cancel", str(folder))
        assert (code, sentence in output, scancel.read_text()) == (2, True, "7_0\n")

    def test_without_accounting_a_job_that_left_the_queue_has_ended(self, sweep, capsys, fake_command):
        folder = sweep(self.queued(1, "RUNNING"), tasks=3)
        fake_command("sacct", "echo 'Slurm accounting storage is disabled' >&2; exit 1")
        write_manifest(folder, 2, "completed")
        assert self.states(folder, capsys) == [("failed", "lost"), ("running", None), ("completed", None)]

    def test_failed_scancel_has_cancelled_nothing(self, sweep, capsys, fake_command):
        fake_command(
            "scancel", "echo 'scancel: error: Kill job error on job id 7: Access/permission denied' >&2; exit 1"
        )
        code, output = run(capsys, "cancel", str(sweep(self.queued(0))))
        assert (code, "1 point cancelled" in output, "Access/permission denied" in output) == (2, False, True)

    def test_log_that_slurm_could_not_open_is_the_cause(self, sweep, capsys):
        folder = sweep(sacct=self.ended(0, "FAILED", "0:53", "RaisedSignal:53(Real-time_signal_19)"))
        (point,) = as_json(folder, capsys)["points"]
        assert point["message"].endswith("that node lacks the sweep directory, or may not write into it")

    @pytest.mark.parametrize("end", ["inf", "nan", "9" * 30, "-1", "1e400", "9999-12-31T23:59:59"])
    def test_end_that_is_no_time_is_not_shown(self, end, sweep, capsys):
        """Regression: an OverflowError ended the command."""
        folder = sweep(self.queued(0, "RUNNING").replace("N/A|10:00", f"{end}|UNLIMITED"))
        code, output = run(capsys, "status", str(folder))
        assert (code, "1 point: 1 running" in output) == (3, True)

    def test_file_dated_in_the_future_is_not_called_just_written(self, sweep, capsys):
        folder = sweep()
        os.utime(write_manifest(folder, 0, "running") / MANIFEST, (time.time() + 3600,) * 2)
        (point,) = as_json(folder, capsys)["points"]
        assert point["state"] == "unknown"
        assert "s after now by the file system's clock, so its age is not known" in point["message"]

    @pytest.mark.parametrize(
        "content", [{"status": "paused"}, {"status": "completed", "progress": [1]}, {"batch": {"images": 9}}]
    )
    def test_manifest_of_a_later_version_is_no_damage(self, content, sweep, capsys):
        """Regression: the point was lost, and `rerun` submitted it again."""
        folder = sweep()
        os.utime(write_manifest(folder, 0, schema_version=99, **content) / MANIFEST, (1.0, 1.0))
        (point,) = as_json(folder, capsys)["points"]
        assert (point["state"], "a later version wrote it" in point["message"]) == ("unknown", True)

    def test_saved_state_of_a_job_that_has_not_ended_does_not_count(self, sweep, capsys):
        folder = sweep()
        run_dir = write_manifest(folder, 0, "running")
        (run_dir / "scheduler.json").write_text('{"state": "RUNNING"}')
        for path in run_dir.iterdir():
            os.utime(path, (1.0, 1.0))
        assert self.states(folder, capsys) == [("failed", "lost")]

    def test_list_of_tasks_with_a_step_and_one_that_is_cut_off(self, sweep, capsys):
        folder = sweep(sacct=self.ended("[0-4:2]", "CANCELLED by 0"), tasks=6)
        assert self.states(folder, capsys)[0:5:2] == [("failed", "cancelled")] * 3
        (folder.parent / "sacct").write_text(self.ended("[0,2,...,5...]", "CANCELLED"))
        assert self.states(folder, capsys) == [
            ("failed", "cancelled") if task in (0, 2) else ("unknown", None) for task in range(6)
        ]


class TestFileSystemDoesNotAnswer:
    """Errors of a network file system concern the point whose files they hide, and say nothing of them."""

    @pytest.fixture
    def folder(self, tmp_path):
        folder = sweep_of_jobs(tmp_path / "sweep", [exited_process(), exited_process()])
        for num in range(2):
            write_manifest(folder, num)
        return folder

    @pytest.fixture
    def fails(self, monkeypatch):
        """Let a system call raise an error for paths with this ending, as often as given."""

        def patch(name: str, ending: str, code: int, times: int) -> list[str]:
            real, calls = getattr(os, name), []

            def call(path, *args, **options):
                if str(path).endswith(ending) and len(calls) < times:
                    calls.append(str(path))
                    raise OSError(code, os.strerror(code), str(path))
                return real(path, *args, **options)

            monkeypatch.setattr(os, name, call)
            return calls

        return patch

    @pytest.mark.parametrize(
        ("name", "ending", "code"),
        [
            *(
                ("stat", "0/attempt-1", code)
                for code in (errno.EIO, errno.ETIMEDOUT, errno.ENOTCONN, errno.EKEYEXPIRED)
            ),
            ("open", f"0/attempt-1/{MANIFEST}", errno.ESTALE),
            ("listdir", "0/attempt-1", errno.ESTALE),
        ],
    )
    def test_one_point_is_unknown_with_the_reason(self, name, ending, code, folder, fails, capsys):
        """Regression: a traceback, or `rerun` submitted a completed point again."""
        fails(name, ending, code, 1000)
        status = as_json(folder, capsys)
        assert [point["state"] for point in status["points"]] == ["unknown", "completed"]
        assert os.strerror(code) in status["points"][0]["message"]
        code, output = run(capsys, "rerun", str(folder))
        assert (code, "the state of 1 point is unknown" in output) == (1, True)

    @pytest.mark.parametrize("ending", ["0/attempt-1", f"0/attempt-1/{MANIFEST}", LEDGER, SWEEP])
    @pytest.mark.parametrize("name", ["stat", "open"])
    def test_an_error_that_passes_changes_nothing(self, name, ending, folder, fails, capsys):
        calls = fails(name, ending, errno.ESTALE, 1)
        assert as_json(folder, capsys)["counts"] == {"completed": 2}
        assert calls or (name, ending) == ("open", "0/attempt-1")

    def test_ledger_that_is_not_read_ends_the_command_with_a_sentence(self, folder, fails, capsys):
        fails("open", LEDGER, errno.ESTALE, 1000)
        code, output = run(capsys, "status", str(folder))
        assert code == 2
        assert f"{folder / LEDGER}: Stale file handle; its file system does not answer, try again" in output

    def test_work_is_done_without_threads_where_none_can_be_started(self, folder, monkeypatch, capsys):
        def refuse(_):
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(threading.Thread, "start", refuse)
        assert as_json(folder, capsys)["counts"] == {"completed": 2}


class TestSlurmOfAnotherSite:
    """This machine has a Slurm, and the sweep was submitted to another one."""

    @pytest.fixture
    def folder(self, tmp_path):
        site = SiteConfig(name="delta", connect=ConnectConfig(hostnames=["dt-login.*"]))
        return sweep_of_jobs(tmp_path / "sweep", ["7_0", "7_1"], site)

    def test_is_not_queried_and_the_source_is_missing(self, folder, fake_command, capsys):
        calls = [fake_command(name, "exit 0") for name in ("squeue", "sacct", "sbatch")]
        run_dir = write_manifest(folder, 1, "running")
        os.utime(run_dir / MANIFEST, (0, 0))  # the last write is long ago, and still nobody says that the job is lost
        status = as_json(folder, capsys)
        assert status["counts"] == {"unknown": 2}
        assert "is not a machine of delta" in status["points"][0]["message"]
        assert status["sources"]["delta"]["no_answer_reason"].startswith("its Slurm cannot be queried from here")
        assert not any(path.exists() for path in calls)

    def test_cancels_nothing(self, folder, fake_command, capsys):
        calls = fake_command("scancel", "exit 0")
        code, output = run(capsys, "cancel", str(folder))
        assert code == 2
        assert "its Slurm cannot be reached from here" in output
        assert not calls.exists()
        assert not any(record.last.cancelled for record in Ledger(folder).points().values())

    def test_rerun_submits_nothing_and_says_why(self, folder, capsys):
        code, output = run(capsys, "rerun", str(folder))
        assert code == 1
        assert "nothing was submitted: the state of 2 points is unknown" in output
        assert "is not a machine of delta" in output
        assert "Nothing to submit" not in output


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """Return a sweep of two points that completed on this machine."""
    folder = tmp_path_factory.mktemp("finished") / "sweep"
    overrides = ["gpu=a40", "batch=2,3", "profile=demo", "telemetry=none", *QUICK, f"hydra.sweep.dir={folder}"]
    assert launch.main(["-m", *overrides]) == 0
    return folder


class TestIncompleteRecord:
    @pytest.fixture
    def copy(self, finished, tmp_path):
        folder = tmp_path / "copy"
        shutil.copytree(finished, folder)
        return folder

    def refused(self, folder: Path, capsys, gap: str) -> None:
        """`status` shows the gap, `rerun` refuses because of it, and nothing is submitted."""
        notes = as_json(folder, capsys)["notes"]
        assert gap in notes[0]
        assert "`rerun` refuses this sweep" in notes[0]
        assert "inpaint-bench rerun" not in run(capsys, "status", str(folder))[1]
        code, output = run(capsys, "cancel", str(folder))
        assert code == 2
        assert "its ledger lacks attempts" in output
        for more in ([], ["--repeats", "2"]):
            code, output = run(capsys, "rerun", str(folder), *more)
            assert code == 2
            assert gap in output
            assert "a point could be submitted twice. Restore ledger.jsonl" in output
        assert len(list(folder.glob("*/attempt-*"))) == 2

    def test_sweep_without_a_ledger_is_not_rerun(self, copy, capsys):
        (copy / LEDGER).unlink()
        self.refused(copy, capsys, "ledger.jsonl does not record 0/attempt-1, 1/attempt-1, jobs/00-grace-a40")

    def test_sweep_without_a_planned_line_is_not_rerun(self, copy, capsys):
        lines = (copy / LEDGER).read_text().splitlines()
        (copy / LEDGER).write_text("\n".join(line for line in lines if '"planned"' not in line) + "\n")
        self.refused(copy, capsys, "ledger.jsonl does not record the attempt of line 1")

    def test_sweep_with_a_directory_of_an_unknown_attempt_is_not_rerun(self, copy, capsys):
        (copy / "1" / "attempt-1").rename(copy / "1" / "attempt-2")
        self.refused(copy, capsys, "ledger.jsonl does not record 1/attempt-2")

    def test_commands_say_what_to_do_without_sweep_json(self, copy, capsys):
        (copy / SWEEP).unlink()
        for verb in ("status", "rerun", "cancel"):
            code, output = run(capsys, verb, str(copy))
            assert code == 2
            assert "sweep.json is missing, so it is not known which jobs were submitted" in output
            assert "launch the sweep again; `merge` reads the runs without it" in output

    def test_manifest_of_another_run_does_not_count(self, copy, capsys):
        path = copy / "0" / "attempt-1" / MANIFEST
        path.write_text(json.dumps(json.loads(path.read_text()) | {"run_id": "r-other"}))
        point = as_json(copy, capsys)["points"][0]
        assert (point["state"], point["reason"]) == ("failed", "lost")
        assert "belongs to run r-other" in point["message"]


def run_in_copy(finished, folder, run_id):
    """Start a run with this id in a copy of a finished one, which it must not change."""
    shutil.copytree(finished / "0", folder / "0")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with composer() as compose:
        point = compose(0, ["gpu=a40", "profile=demo", *QUICK])
        edits = {"hydra.sweep.dir": str(folder), "hydra.sweep.subdir": "0/attempt-1"}
        point.composed = point.composed.with_edits({**edits, "identity.run_id": run_id})
        file = point_file.write(point, folder / "sweep", "x")
    try:
        entry.run(file)
    finally:
        assert {path: path.read_bytes() for path in folder.glob("0/**/*") if path.is_file()} == before


def test_a_job_that_slurm_starts_again_after_its_end_does_not_run_a_second_time(finished, tmp_path, monkeypatch):
    """Regression: Slurm 24.11 requeues a job that was pre-empted and requeued itself, when it has completed."""
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    run_in_copy(finished, tmp_path, json.loads((finished / "0" / "attempt-1" / MANIFEST).read_text())["run_id"])


class TestRunDirectoryOfAnotherRun:
    @pytest.mark.parametrize("restarts", ["0", "1"])
    def test_is_refused_and_not_changed(self, finished, tmp_path, restarts, monkeypatch):
        """Regression: a second attempt 1 ran in it, moved its manifest and wrote its own parts beside the others."""
        monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
        with pytest.raises(UserError, match=r"manifest\.json belongs to run r-.*, this is run r-second"):
            run_in_copy(finished, tmp_path, "r-second")

    def test_is_recognised_by_its_parts_and_the_same_run_may_continue(self, finished, tmp_path):
        run_dir = tmp_path / "run"
        shutil.copytree(finished / "0" / "attempt-1", run_dir)
        run_id = json.loads((run_dir / MANIFEST).read_text())["run_id"]
        check_owner(run_dir, run_id)
        (run_dir / MANIFEST).unlink()
        check_owner(run_dir, run_id)
        with pytest.raises(UserError, match=rf"part-.*parquet belongs to run {run_id}"):
            check_owner(run_dir, "r-second")


class TestOnSlurm:
    @pytest.fixture(autouse=True)
    def _reach(self, testbed, monkeypatch):
        monkeypatch.setenv("INPAINT_BENCH_TESTBED", str(testbed.state))

    def submit_held(self, testbed, name: str) -> str:
        """Submit a held job of this name; return its id."""
        options = ("-p", "cpu", "--hold", "--mem=1", "--parsable", "-o", "/dev/null", "--array=0-1", "-J", name)
        return testbed.run("delta", "sbatch", *options, "--wrap", "true").stdout.strip()

    def queued(self, testbed, job: str) -> list[str]:
        return testbed.run("delta", "squeue", "-h", "-r", "-j", job, "-o", "%T").stdout.split()

    def test_job_of_another_name_is_neither_believed_nor_cancelled(self, testbed, tmp_path, capsys):
        site = SiteConfig(name="delta", connect=ConnectConfig(slurm_conf=str(testbed.conf("delta"))))
        foreign, own = self.submit_held(testbed, "thesis"), self.submit_held(testbed, "inpaint-s1-g")
        try:
            folder = sweep_of_jobs(tmp_path / "sweep", [f"{foreign}_0", "66000000_0", f"{own}_0"], site)
            points = as_json(folder, capsys)["points"]
            assert [point["state"] for point in points] == ["unknown", "unknown", "queued"]
            assert f"another job under id {foreign}_0, named thesis" in points[0]["message"]
            code, output = run(capsys, "cancel", str(folder))
            assert code == 2
            assert f"job {foreign} is not this sweep's, it is named thesis" in output
            assert self.queued(testbed, foreign) == ["PENDING"] * 2
            assert self.queued(testbed, own) == ["PENDING"]
        finally:
            testbed.run("delta", "scancel", foreign, own)


def test_connection_of_no_known_kind_is_damage_of_the_record(tmp_path, capsys):
    ledger = a_sweep(
        tmp_path, [a_point(0)], {"delta": asdict(SiteConfig(name="delta", connect=ConnectConfig(method="")))}
    )
    code, printed = run(capsys, "status", str(ledger.folder))
    assert code == 2
    assert "sweep.json: damaged (sites.delta: connect.method='')" in printed


@pytest.mark.parametrize("elsewhere", ["pid:7@other", f"pid:7@{socket.gethostname()}-4026532208"])
@pytest.mark.parametrize("written", ["manifest.json", "samples_fast/part-000001.parquet", "7_0_log.out", None])
def test_process_of_another_machine_is_gone_once_it_has_written_nothing_for_a_day(elsewhere, written, tmp_path, capsys):
    """A container that is made anew has another host name, or other process ids under the same one."""
    folder, old = sweep_of_jobs(tmp_path, [elsewhere]), time.time() - 90_000
    run_dir, logs = write_manifest(folder, 0, "running"), folder / "jobs" / "g"
    logs.mkdir(parents=True, exist_ok=True)
    for path in (run_dir / MANIFEST, run_dir / "samples_fast/part-000001.parquet", logs / "7_0_log.out"):
        path.parent.mkdir(exist_ok=True)
        path.touch()
        os.utime(path, None if path.name == str(written).rpartition("/")[2] else (old, old))
    (point,) = as_json(folder, capsys)["points"]
    expected = {None: "failed", MANIFEST: "running"}.get(written, "unknown")
    assert point["state"] == expected, point["message"]
    (run_dir / MANIFEST).unlink()
    (point,) = as_json(folder, capsys)["points"]
    assert point["state"] == ("unknown" if written not in (None, MANIFEST) else "failed"), point["message"]


def test_container_is_part_of_a_local_jobs_id(monkeypatch):
    host = socket.gethostname()
    monkeypatch.setattr(os, "readlink", lambda _: "pid:[4026532208]")
    assert local_executor.machine() == f"{host}-4026532208"
    assert local_executor.process_id(f"pid:7@{host}") == 7  # as earlier versions wrote it
    assert local_executor.process_id(f"pid:7@{host}-4026531836") is None
