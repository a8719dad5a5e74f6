"""Whom a sweep believes: the Slurm that it was sent to and the jobs that bear its names, and where the record of what
was sent is gone, the run directories."""

import json
import os
import shutil
from pathlib import Path

import pytest

from inpaint_bench import launch
from inpaint_bench.cli import app
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.schema import LEDGER, MANIFEST, SWEEP
from inpaint_bench.core.site import ConnectConfig, SiteConfig
from inpaint_bench.run.manifest import check_owner
from launchers.points.compose import composer
from launchers.slurm import query
from launchers.slurm.job import HydraState, PointJob
from launchers.sweep.ledger import Ledger

from .test_status import as_json, made

QUICK = ["data.num_images=16", "workload.warmup_steps=1", "workload.measure_steps=2", "workload.min_measure_s=1"]


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Put a command before Slurm's own; what it was called with is in the file that is returned."""

    def install(name: str, body: str) -> Path:
        calls = tmp_path / f"{name}.calls"
        script = tmp_path / "bin" / name
        script.parent.mkdir(exist_ok=True)
        script.write_text(f'#!/bin/sh\necho "$@" >> {calls}\n{body}\n')
        script.chmod(0o755)
        return calls

    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    return install


def words(capsys, *argv: str) -> tuple[int, str]:
    """Exit code and all that a verb says."""
    capsys.readouterr()
    code = app.main(argv)
    said = capsys.readouterr()
    return code, said.out + said.err


class TestAnotherSitesSlurm:
    """This machine has a Slurm, and the sweep was sent to another one."""

    @pytest.fixture
    def folder(self, tmp_path):
        site = SiteConfig(name="delta", connect=ConnectConfig(hostnames=["dt-login.*"]))
        return made(tmp_path / "sweep", ["7_0", "7_1"], site)

    def test_is_not_asked_and_that_witness_is_missing(self, folder, command, capsys):
        asked = [command(name, "exit 0") for name in ("squeue", "sacct", "sbatch")]
        told = as_json(folder, capsys)
        assert told["counts"] == {"unknown": 2}
        assert "is not a machine of delta" in told["points"][0]["message"]
        assert told["witnesses"]["delta"]["silence"].startswith("its Slurm cannot be queried from here")
        assert not any(calls.exists() for calls in asked)

    def test_is_told_to_cancel_nothing(self, folder, command, capsys):
        told = command("scancel", "exit 0")
        code, said = words(capsys, "cancel", str(folder))
        assert code == 2
        assert "its Slurm cannot be reached from here" in said
        assert not told.exists()
        assert not any(record.last.cancelled for record in Ledger(folder).points().values())

    def test_gets_nothing_sent_again_and_rerun_says_why(self, folder, capsys):
        code, said = words(capsys, "rerun", str(folder))
        assert code == 1
        assert "nothing was submitted: the state of 2 points is unknown" in said
        assert "is not a machine of delta" in said
        assert "Nothing to submit" not in said


class TestNames:
    SITE = SiteConfig(name="delta")

    def asked(self, command, squeue: str, sacct: str, **jobs: str) -> query.SlurmReply:
        command("squeue", f"printf '{squeue}'")
        command("sacct", f"printf '{sacct}'")
        return query.query_jobs(self.SITE, {job.lstrip("j"): name for job, name in jobs.items()})

    def test_a_job_that_has_only_the_number_is_no_word_and_nothing_beside_it_is_lost(self, command):
        rows = "7_0|RUNNING|None|n1|1|2|10:00|thesis\\n"
        found = self.asked(command, rows, "", j7_0="inpaint-s-0", j8_0="inpaint-s-1")
        assert found.states == {}
        assert "another job under id 7, named thesis" in found.missing_reason("7_0")
        assert "has other jobs under ids of this sweep (7)" in found.missing_reason("8_0")

    def test_a_job_whose_beginning_the_database_has_not_heard_of_is_not_lost(self, command):
        ended = "7|COMPLETED|0:0|None|n1|allocation\\n8|FAILED|1:0|None|n1|inpaint-s-1\\n"
        found = self.asked(command, "", ended, j7_0="inpaint-s-0", j8="inpaint-s-1", j9_0="inpaint-s-2")
        assert {job: word.state for job, word in found.states.items()} == {"8": "FAILED", "9_0": None}

    def test_a_name_may_hold_the_separator(self, command):
        found = self.asked(command, "7_0|PENDING|Priority||1|2|10:00|a|b\\n", "", j7_0="a|b")
        assert found.states["7_0"].state == "PENDING"


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """Two points that completed on this machine."""
    folder = tmp_path_factory.mktemp("witnesses") / "sweep"
    asked = ["gpu=a40", "batch=2,3", "profile=demo", "telemetry=none", *QUICK, f"hydra.sweep.dir={folder}"]
    assert launch.main(["-m", *asked]) == 0
    return folder


class TestARecordThatIsIncomplete:
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
        for more in ([], ["--repeats", "2"]):
            code, said = words(capsys, "rerun", str(folder), *more)
            assert code == 2
            assert gap in said
            assert "a point could be submitted twice. Restore ledger.jsonl" in said
        assert len(list(folder.glob("*/attempt-*"))) == 2

    def test_without_its_ledger_a_sweep_is_not_rerun(self, copy, capsys):
        (copy / LEDGER).unlink()
        self.refused(copy, capsys, "ledger.jsonl does not record 0/attempt-1, 1/attempt-1, jobs/00-grace-a40")

    def test_without_a_planned_line_a_sweep_is_not_rerun(self, copy, capsys):
        lines = (copy / LEDGER).read_text().splitlines()
        (copy / LEDGER).write_text("\n".join(line for line in lines if '"planned"' not in line) + "\n")
        self.refused(copy, capsys, "ledger.jsonl has no plan of what line 1 is about")

    def test_a_directory_of_an_unknown_attempt_is_enough_to_refuse(self, copy, capsys):
        (copy / "1" / "attempt-1").rename(copy / "1" / "attempt-2")
        self.refused(copy, capsys, "ledger.jsonl does not record 1/attempt-2")

    def test_without_sweep_json_every_command_but_merge_says_what_to_do(self, copy, capsys):
        (copy / SWEEP).unlink()
        for verb in ("status", "rerun", "cancel"):
            code, said = words(capsys, verb, str(copy))
            assert code == 2
            assert "sweep.json is missing, so nobody can tell which jobs were submitted" in said
            assert "launch the sweep again; `merge` reads the runs without it" in said

    def test_a_new_sweep_is_not_mixed_with_what_is_left(self, copy, capsys):
        (copy / SWEEP).unlink()
        assert launch.main(["-m", "gpu=a40", "profile=demo", *QUICK, f"hydra.sweep.dir={copy}"]) == 2
        assert "holds runs of a sweep without its sweep.json" in capsys.readouterr().err

    def test_a_manifest_of_another_run_is_not_told_of_the_attempt(self, copy, capsys):
        path = copy / "0" / "attempt-1" / MANIFEST
        path.write_text(json.dumps(json.loads(path.read_text()) | {"run_id": "r-other"}))
        point = as_json(copy, capsys)["points"][0]
        assert (point["state"], point["reason"]) == ("failed", "lost")
        assert "belongs to run r-other" in point["message"]


class TestADirectoryThatIsAnothersRun:
    def test_is_refused_and_left_as_it_was(self, finished, tmp_path):
        """Regression: a second attempt 1 ran in it, set its manifest aside and wrote its parts beside the first's."""
        shutil.copytree(finished / "0", tmp_path / "0")
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        with composer() as compose:
            point = compose(0, ["gpu=a40", "profile=demo", *QUICK])
            place = {"hydra.sweep.dir": str(tmp_path), "hydra.sweep.subdir": "0/attempt-1"}
            point.composed = point.composed.with_edits({**place, "identity.run_id": "r-second"})
            job = PointJob.of(point, HydraState.capture(compose.context, launch.task), "x")
            with pytest.raises(UserError, match=r"manifest\.json belongs to run r-.*, this is run r-second"):
                job()
        assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before

    def test_is_known_by_its_parts_alone_and_ones_own_is_gone_on_in(self, finished, tmp_path):
        run = tmp_path / "run"
        shutil.copytree(finished / "0" / "attempt-1", run)
        run_id = json.loads((run / MANIFEST).read_text())["run_id"]
        check_owner(run, run_id)
        (run / MANIFEST).unlink()
        check_owner(run, run_id)
        with pytest.raises(UserError, match=rf"part-.*parquet belongs to run {run_id}"):
            check_owner(run, "r-second")


@pytest.mark.testbed
class TestOnSlurm:
    @pytest.fixture(autouse=True)
    def _reach(self, testbed, monkeypatch):
        monkeypatch.setenv("INPAINT_BENCH_TESTBED", str(testbed.state))

    def held(self, testbed, name: str) -> str:
        """A job of this name that waits; its number."""
        asked = ("-p", "cpu", "--hold", "--mem=1", "--parsable", "-o", "/dev/null", "--array=0-1", "-J", name)
        return testbed.run("delta", "sbatch", *asked, "--wrap", "true").stdout.strip()

    def queued(self, testbed, job: str) -> list[str]:
        return testbed.run("delta", "squeue", "-h", "-r", "-j", job, "-o", "%T").stdout.split()

    def test_a_job_of_another_name_is_neither_believed_nor_cancelled(self, testbed, tmp_path, capsys):
        site = SiteConfig(name="delta", connect=ConnectConfig(slurm_conf=str(testbed.conf("delta"))))
        thesis, ours = self.held(testbed, "thesis"), self.held(testbed, "n")
        try:
            folder = made(tmp_path / "sweep", [f"{thesis}_0", "66000000_0", f"{ours}_0"], site)
            told = as_json(folder, capsys)["points"]
            assert [point["state"] for point in told] == ["unknown", "unknown", "queued"]
            assert f"another job under id {thesis}, named thesis" in told[0]["message"]
            code, said = words(capsys, "cancel", str(folder))
            assert code == 2
            assert f"job {thesis} is not this sweep's, it is named thesis" in said
            assert self.queued(testbed, thesis) == ["PENDING"] * 2
            assert self.queued(testbed, ours) == ["PENDING"]
        finally:
            testbed.run("delta", "scancel", thesis, ours)

    def test_what_sbatch_refused_is_refused_though_sacct_is_silent_and_a_time_out_is_not(
        self, tmp_path, command, capsys
    ):
        folder = tmp_path / "sweep"
        asked = ["gpu=h200", "profile=testbed", "sites.delta.gpus.h200.partition=nowhere"]
        command("sacct", "echo 'sacct: error: Connection refused' >&2; exit 1")
        assert launch.main(["-m", *asked, *QUICK, f"hydra.sweep.dir={folder}"]) == 1
        (point,) = as_json(folder, capsys)["points"]
        assert (point["state"], point["reason"]) == ("failed", "never_started")
        assert "nvalid partition" in point["message"]

        failed = "Batch job submission failed: Socket timed out on send/recv operation"
        command("sbatch", f"echo 'sbatch: error: {failed}' >&2; exit 1")
        assert app.main(["rerun", str(folder), "sites.delta.gpus.h200.partition=gpuH200x8"]) == 1
        told = as_json(folder, capsys)
        (point,) = told["points"]
        assert point["state"] == "unknown"
        assert "submission unconfirmed: sacct did not answer (Connection refused)" in point["message"]
        assert "Socket timed out" in point["message"]
        assert told["witnesses"]["delta"]["squeue"] == "ok"
        assert "delta squeue ok, sacct did not answer" in words(capsys, "status", str(folder))[1]
        code, said = words(capsys, "rerun", str(folder))
        assert code == 1
        assert "the state of 1 point is unknown (sacct did not answer" in said
        (tmp_path / "bin" / "sacct").unlink()
        assert as_json(folder, capsys)["points"][0]["reason"] == "never_started"
