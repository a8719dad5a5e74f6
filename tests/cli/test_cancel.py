"""`cancel` beside a command that is still submitting from the same sweep."""

import subprocess
import threading
import time
from dataclasses import asdict

import pytest

from inpaint_bench.cli import app
from inpaint_bench.core.config.site import ConnectConfig, SiteConfig
from launchers.slurm.local_executor import machine
from launchers.sweep.ledger import Ledger
from tests.launchers import sweeps
from tests.launchers.sweeps import a_point, plan, sweep_of_jobs


@pytest.fixture
def job():
    """Yield a process like submitit's: a shell, and below it the process that the signal is for."""
    process = subprocess.Popen(["bash", "-c", "sleep 60 & wait  # submitit"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def busy(tmp_path):
    """Yield a ledger, an event that releases its lock, and a list of functions to call before that."""
    ledger, free, locked = Ledger(sweep_of_jobs(tmp_path / "sweep", [])), threading.Event(), threading.Event()
    last = []

    def hold() -> None:
        with ledger.lock():
            locked.set()
            free.wait(30)
            for call in last:
                call()

    thread = threading.Thread(target=hold)
    thread.start()
    locked.wait()
    yield ledger, free, last
    free.set()
    thread.join()


def submit(ledger: Ledger, job: subprocess.Popen) -> None:
    point = a_point(0, site="local")
    sweeps.add_point(ledger, point)
    plan(ledger, [point])
    sweeps.submit(ledger, [0], job_id=f"pid:{job.pid}@{machine()}")


def test_cancel_stops_jobs_submitted_after_its_first_poll(busy, job, capsys):
    ledger, free, last = busy
    last.append(lambda: submit(ledger, job))
    threading.Timer(5, free.set).start()  # long after the first poll, on a busy machine too
    assert app.main(["cancel", str(ledger.folder)]) == 0
    out = capsys.readouterr().out
    assert "Another command is submitting from this sweep" in out
    assert "local: 1 point cancelled" in out
    assert job.wait(60) is not None
    assert ledger.points()[0].last.cancelled


def test_cancel_stops_known_jobs_and_reports_a_command_that_does_not_end(busy, job, capsys, monkeypatch):
    ledger, _, _ = busy
    submit(ledger, job)
    monkeypatch.setattr("inpaint_bench.cli.sweeps.BUSY_TIMEOUT_S", 0.3)
    start = time.monotonic()
    assert app.main(["cancel", str(ledger.folder)]) == 2
    assert time.monotonic() - start < 30  # without the change above, a minute
    assert "has not ended: cancel again when it has" in capsys.readouterr().err
    assert job.wait(60) is not None


def test_cancel_of_a_point_of_this_machine_waits_for_no_other_command(busy, job, capsys):
    """Regression: it was cancelled at once, and the command waited a minute for `launch` and failed."""
    ledger, _, _ = busy
    submit(ledger, job)
    assert app.main(["cancel", str(ledger.folder), "--point", "0"]) == 0
    assert "Another command" not in capsys.readouterr().out
    assert job.wait(60) is not None
    assert ledger.points()[0].last.cancelled


def test_points_that_wait_in_a_plan_were_never_submitted_and_cancel_says_so(tmp_path, capsys):
    site = {"delta": asdict(SiteConfig(name="delta", connect=ConnectConfig(method="bundle")))}
    ledger = sweeps.a_sweep(tmp_path / "sweep", [a_point(0), a_point(1)], site)
    sweeps.defer(ledger, [0, 1])
    assert app.main(["cancel", str(ledger.folder)]) == 0
    out = capsys.readouterr().out
    assert f"{ledger.folder}/plan.delta.yaml: nothing of it (2 points) was submitted from here" in out
    assert "delete the file to keep them from being submitted" in out


def test_points_that_were_submitted_from_a_plan_are_not_recorded_as_cancelled(tmp_path, capsys):
    site = {"delta": asdict(SiteConfig(name="delta", connect=ConnectConfig(method="bundle")))}
    ledger = sweeps.a_sweep(tmp_path / "sweep", [a_point(0)], site)
    sweeps.plan(ledger, [a_point(0)], carried=True)
    sweeps.submit(ledger, [0])
    assert app.main(["cancel", str(ledger.folder)]) == 2
    assert "delta: its points were submitted there from a plan file; cancel them there" in capsys.readouterr().err
    assert not ledger.points()[0].last.cancelled
