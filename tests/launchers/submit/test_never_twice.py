"""`rerun` submits nothing that Slurm may have, although Slurm does not list it or the record does not name it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from inpaint_bench import launch
from inpaint_bench.cli import app
from launchers.submit import rerun
from launchers.sweep.ledger import Ledger
from tests.launchers.sweeps import age

pytestmark = pytest.mark.subprocess

ACCEPTS = "echo Submitted batch job 7"
LONG = "Priority||N/A|N/A|1:00:00|"  # the other columns of the survey
TIMES_OUT = "echo 'sbatch: error: Batch job submission failed: Socket timed out on send/recv operation' >&2; exit 1"


class Slurm:
    """A sweep of two points at a site whose Slurm is three shell scripts."""

    def __init__(self, folder: Path, command: Callable[[str, str], Path]) -> None:
        self.folder = folder
        self.command = command
        self.calls = command("sbatch", ACCEPTS)
        self.lists()

    def lists(self, array: int | None = None, name: str = "", state: str = "PENDING") -> None:
        """Let squeue list both tasks of an array, or nothing, and sacct nothing."""
        script = "exit 0"
        if array is not None:
            tasks = [f"{array}_{task}|{state}" for task in range(2)]
            short, long = (" ".join(f"'{task}|{more}{name}'" for task in tasks) for more in ("", LONG))
            script = f"""case "$*" in
            *'%F|%j') echo '{array}|{name}';;
            *'%i|%T|%j') printf '%s\\n' {short};;
            *) printf '%s\\n' {long};;
            esac"""
        self.command("squeue", script)
        self.command("sacct", "exit 0")

    def launch(self) -> int:
        (self.folder.parent / "slurm.conf").touch()
        overrides = [f"sites.delta.connect.slurm_conf={self.folder.parent / 'slurm.conf'}", "gpu=h200", "seed=0,1"]
        overrides += ["sites.delta.account.value=bbxx-delta-gpu", f"hydra.sweep.dir={self.folder}"]
        return launch.main(["-m", *overrides])

    def submissions(self) -> int:
        return len(self.calls.read_text().splitlines())

    def name(self) -> str:
        """Name of the only array."""
        (event,) = [json.loads(line) for line in self.ledger.read_text().splitlines() if '"planned"' in line]
        return str(event["job_name"])

    @property
    def ledger(self) -> Path:
        return self.folder / "ledger.jsonl"

    def rerun(self, *options: str) -> int:
        return app.main(["rerun", str(self.folder), "--only", "lost,never_started", *options])


@pytest.fixture
def slurm(tmp_path: Path, fake_command: Callable[[str, str], Path]) -> Slurm:
    return Slurm(tmp_path / "sweep", fake_command)


@pytest.fixture
def launched(slurm: Slurm) -> Slurm:
    assert slurm.launch() == 0
    return slurm


def test_job_that_slurm_does_not_list_yet_is_unknown_and_not_lost(
    launched: Slurm, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launched.rerun() == 1
    assert "neither squeue nor sacct lists it yet" in capsys.readouterr().err
    assert launched.submissions() == 1


def test_job_that_slurm_has_forgotten_is_lost_and_submitted_again(launched: Slurm) -> None:
    age(Ledger(launched.folder), 301)
    assert launched.rerun() == 0
    assert launched.submissions() == 2


def test_clock_of_this_machine_does_not_count(launched: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ledger was written by another login node."""
    monkeypatch.setattr(time, "time", lambda: 2.0**32)
    assert launched.rerun() == 1
    assert launched.submissions() == 1


def test_array_that_slurm_accepts_late_is_found(slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm.calls = slurm.command("sbatch", TIMES_OUT)
    assert slurm.launch() == 1
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        slurm.lists(9, slurm.name())

    monkeypatch.setattr(rerun.time, "sleep", wait)
    assert slurm.rerun() == 0
    assert 0 < waits[0] <= rerun.CONFIRM_S
    assert slurm.submissions() == 1


def test_array_that_slurm_never_accepted_is_submitted_after_a_while(
    slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm.calls = slurm.command("sbatch", TIMES_OUT)
    assert slurm.launch() == 1
    monkeypatch.setattr(rerun, "CONFIRM_S", 0.5)
    slurm.command("sbatch", ACCEPTS)
    assert slurm.rerun() == 0
    assert slurm.submissions() == 2


def test_refusal_is_certain_without_sacct_and_a_timeout_is_not(
    slurm: Slurm, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def points() -> list[dict[str, str]]:
        capsys.readouterr()
        app.main(["status", str(slurm.folder), "--json"])
        shown: list[dict[str, str]] = json.loads(capsys.readouterr().out)["points"]
        return shown

    monkeypatch.setattr(rerun, "CONFIRM_S", 0.5)
    slurm.command("sbatch", "echo 'sbatch: error: Batch job submission failed: Invalid partition name' >&2; exit 1")
    slurm.command("sacct", "echo 'sacct: error: Connection refused' >&2; exit 1")
    assert slurm.launch() == 1
    assert {(point["state"], point["reason"]) for point in points()} == {("failed", "never_started")}
    slurm.command("sbatch", TIMES_OUT)
    assert slurm.rerun() == 1
    unconfirmed = "submission unconfirmed: sacct did not answer (Connection refused)"
    assert {(point["state"], unconfirmed in point["message"]) for point in points()} == {("unknown", True)}
    assert slurm.rerun() == 1
    assert f"the state of 2 points is unknown ({unconfirmed}" in capsys.readouterr().err
    slurm.command("sacct", "exit 0")
    assert {point["reason"] for point in points()} == {"never_started"}


def without(path: Path, kind: str) -> None:
    """Remove the events of a kind from the ledger."""
    path.write_text("".join(line for line in path.read_text().splitlines(keepends=True) if kind not in line))


class TestDamagedRecord:
    @pytest.fixture
    def queued(self, launched: Slurm) -> Slurm:
        """Slurm has the array, of which no trace but its name is left in the sweep directory."""
        launched.lists(7, launched.name())
        for path in sorted(launched.folder.glob("jobs/**/*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        (launched.folder / "jobs").rmdir()
        return launched

    @pytest.mark.parametrize("damage", ["emptied", "removed", "torn"])
    def test_array_that_the_ledger_lost_is_found_in_the_queue(
        self, queued: Slurm, damage: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        match damage:
            case "emptied":
                queued.ledger.write_text("")
            case "removed":
                queued.ledger.unlink()
            case "torn":
                os.truncate(queued.ledger, 40)
        assert queued.rerun() == 2
        assert "does not record job 7_0 (inpaint-s" in capsys.readouterr().err
        assert queued.submissions() == 1

    def test_array_without_its_id_is_found_by_its_name(self, queued: Slurm, capsys: pytest.CaptureFixture[str]) -> None:
        without(queued.ledger, '"submitted"')
        age(Ledger(queued.folder))
        assert queued.rerun() == 0
        assert "Nothing to submit" in capsys.readouterr().out

    def test_id_that_is_not_that_of_the_array_in_the_queue(
        self, queued: Slurm, capsys: pytest.CaptureFixture[str]
    ) -> None:
        queued.ledger.write_text(queued.ledger.read_text().replace("7_%a", "8_%a"))
        age(Ledger(queued.folder))
        assert queued.rerun() == 2
        assert "records array 8 as inpaint-s" in capsys.readouterr().err
        assert queued.submissions() == 1

    def test_site_that_the_record_says_to_be_another_kind(
        self, queued: Slurm, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """The job is not searched for by its name then, but is in the queue that the points would go to."""
        without(queued.ledger, '"submitted"')
        record = json.loads((queued.folder / "sweep.json").read_text())
        record["sites"]["delta"]["connect"]["method"] = "local"
        (queued.folder / "sweep.json").write_text(json.dumps(record))
        assert queued.rerun() == 2
        assert "does not show that delta still has job 7_0" in capsys.readouterr().err
        assert queued.submissions() == 1

    def test_task_that_has_failed_is_submitted_again_while_squeue_lists_it(self, queued: Slurm) -> None:
        queued.lists(7, queued.name(), "FAILED")
        assert queued.rerun() == 0
        assert queued.submissions() == 2

    def test_queue_that_does_not_answer_is_no_empty_queue(
        self, queued: Slurm, capsys: pytest.CaptureFixture[str]
    ) -> None:
        queued.ledger.write_text("")
        queued.command("squeue", "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1")
        assert queued.rerun() == 2
        assert "delta: squeue did not answer (Unable to contact slurm controller)" in capsys.readouterr().err
        assert queued.submissions() == 1

    def test_repetitions_are_refused_too(self, queued: Slurm, capsys: pytest.CaptureFixture[str]) -> None:
        record = json.loads((queued.folder / "sweep.json").read_text())
        record["order"] = {"cells": 2, "repeats": 1, "seed": 0, "order_seed": None}
        (queued.folder / "sweep.json").write_text(json.dumps(record))
        queued.ledger.write_text("")
        assert app.main(["rerun", str(queued.folder), "--repeats", "2"]) == 2
        assert "does not record job 7_0" in capsys.readouterr().err
        assert queued.submissions() == 1


def test_array_without_a_printed_job_id_is_not_called_refused(slurm: Slurm, capsys: pytest.CaptureFixture[str]) -> None:
    slurm.command("sbatch", "echo accepted: 7")
    assert slurm.launch() == 1
    out = capsys.readouterr().out
    assert "sbatch printed no job id (accepted: 7)" in out
    assert "Slurm may have accepted it nevertheless" in out
    assert "refused" not in out


def test_a_sweep_of_an_earlier_version_is_finished_with_that_version(
    launched: Slurm, capsys: pytest.CaptureFixture[str]
) -> None:
    path = launched.folder / "sweep.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format_version": 2}))
    assert launched.rerun() == 2
    assert "finish this sweep with the version that launched it" in capsys.readouterr().err
    assert launched.submissions() == 1
