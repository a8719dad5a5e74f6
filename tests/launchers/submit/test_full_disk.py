"""A disk that is full: one true sentence, nothing half written, and what was submitted stays known."""

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from inpaint_bench import launch
from inpaint_bench.cli import app
from inpaint_bench.core.config.site import ConnectConfig, SiteConfig
from inpaint_bench.core.schema import LEDGER
from launchers.sweep.events import Cancelled, Event, Submitted
from launchers.sweep.ledger import Ledger
from tests.launchers.sweeps import sweep_of_jobs

ACCOUNT = "sites.delta.account.value=bbxx-delta-gpu"


@pytest.fixture
def disk(tmp_path) -> Iterator[Path]:
    """A file system with room for the code of a sweep and little more."""
    mount = tmp_path / "disk"
    mount.mkdir()
    if os.geteuid() or shutil.which("mount") is None:
        pytest.skip("only root can mount a small file system")
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(mount)], check=False).returncode:
        pytest.skip("tmpfs cannot be mounted here")
    try:
        yield mount
    finally:
        subprocess.run(["umount", "--lazy", str(mount)], check=True)


def fill(disk: Path) -> None:
    with (disk / "ballast").open("wb", buffering=0) as out:
        try:
            while out.write(b"x" * 4096):
                pass
        except OSError:
            pass


def test_a_launch_onto_a_full_disk_is_one_sentence(disk, capsys):
    fill(disk)
    assert launch.main(["-m", "gpu=h200", "batch=2", "profile=demo", f"hydra.sweep.dir={disk / 'sweep'}"]) == 2
    error = capsys.readouterr().err
    assert "No space left on device" in error
    assert str(disk) in error
    assert error.count("\n") == 1


@pytest.fixture
def full_after_sbatch(monkeypatch) -> None:
    """Let writing fail as on a disk that becomes full at this moment, which no test can time."""
    append = Ledger.append

    def fail(ledger: Ledger, event: Event) -> None:
        if isinstance(event, Submitted):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(ledger.folder / LEDGER))
        append(ledger, event)

    monkeypatch.setattr(Ledger, "append", fail)


@pytest.mark.usefixtures("full_after_sbatch")
def test_site_with_a_full_disk_after_sbatch_does_not_refuse_the_plan(tmp_path, fake_command, capsys):
    """Exit code 2 without a reply would be a refusal, after which `rerun` submits the points again."""
    sweep, there = tmp_path / "sweep", tmp_path / "there"
    away = [ACCOUNT, "sites.delta.connect.hostnames=[nowhere]", "gpu=h200", "batch=2,3"]
    launch.main(["-m", *away, f"hydra.sweep.dir={sweep}"])
    fake_command("squeue", "")
    fake_command("sacct", "")
    command = ["launch", "--plan", str(sweep / "plan.delta.yaml"), "--folder", str(there), "--json"]
    calls = fake_command("sbatch", "echo Submitted batch job 77")
    capsys.readouterr()
    assert app.main(command) == 1
    printed = capsys.readouterr()
    assert "array 77 was submitted, and that could not be recorded" in printed.err
    assert printed.out == ""
    assert len(calls.read_text().splitlines()) == 1


@pytest.mark.usefixtures("full_after_sbatch")
def test_an_array_that_could_not_be_recorded_is_named_and_found_by_its_name(tmp_path, fake_command, capsys):
    calls = fake_command("sbatch", "echo Submitted batch job 77")
    sweep = tmp_path / "sweep"
    at_delta = [ACCOUNT, "sites.delta.connect.hostnames=['.*']", "gpu=h200", "batch=2,3", "workload.min_measure_s=1"]
    assert launch.main(["-m", *at_delta, f"hydra.sweep.dir={sweep}"]) == 2
    error = capsys.readouterr().err
    assert "delta: array 77 was submitted, and that could not be recorded" in error
    assert "No space left on device" in error
    assert len(calls.read_text().splitlines()) == 1
    (name,) = {attempt.job_name for record in Ledger(sweep).points().values() for attempt in record.attempts}
    listed = f"*%F*) echo '77|{name}';; *) for t in 0 1; do echo \"77_$t|PENDING|Priority||N/A|N/A|1:00|{name}\"; done"
    fake_command("squeue", f'case "$*" in {listed};; esac')
    fake_command("sacct", "")
    assert app.main(["status", str(sweep)]) == 3
    assert "2 queued" in capsys.readouterr().out
    assert app.main(["rerun", str(sweep)]) == 0
    assert len(calls.read_text().splitlines()) == 1


def test_cancel_on_a_full_disk_cancels(disk, fake_command, capsys):
    site = SiteConfig(name="delta", connect=ConnectConfig(hostnames=[".*"]))
    sweep = sweep_of_jobs(disk / "sweep", ["7_0"], site)
    before = (sweep / LEDGER).read_bytes()
    fill(disk)
    with pytest.raises(OSError, match="No space left"):
        Ledger(sweep).append(Cancelled(attempts=[(0, 1)] * 2000))
    assert (sweep / LEDGER).read_bytes() == before  # no half of a line
    fake_command("sbatch", "")
    fake_command("squeue", "echo '7_0|RUNNING|None|n1|N/A|N/A|1:00|inpaint-s1-g'")
    fake_command("sacct", "")
    scancel = fake_command("scancel", "")
    # What still fits into the last block of the file may be written.
    code, error = app.main(["cancel", str(sweep)]), capsys.readouterr().err
    assert scancel.exists(), error
    assert scancel.read_text() == "7_0\n"
    assert code == 0 or "the cancellation is not recorded" in error
    assert app.main(["status", str(sweep)]) == 3
