"""sbatch is called neither in a burst, nor again where Slurm gave no answer."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from inpaint_bench import launch
from launchers.slurm import submit
from launchers.sweep.ledger import Ledger


@pytest.fixture
def sbatch(tmp_path, monkeypatch):
    """A program of that name on PATH; it writes down that it is called, and then does as the given script says."""
    calls = tmp_path / "calls"

    def install(script: str) -> None:
        program = tmp_path / "bin" / "sbatch"
        program.parent.mkdir()
        program.write_text(f"#!/bin/sh\necho >> {calls}\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(program.parent), prepend=":")

    install.calls = lambda: len(calls.read_text().splitlines())
    return install


def launched(tmp_path: Path, *words: str) -> int:
    """To delta, as many arrays as points."""
    (tmp_path / "slurm.conf").touch()
    over = [f"sites.delta.connect.slurm_conf={tmp_path / 'slurm.conf'}", "sites.delta.account.value=bbxx-delta-gpu"]
    over += ["gpu=h200", "sites.delta.limits.max_array_size=1", f"hydra.sweep.dir={tmp_path / 'sweep'}"]
    return launch.main(["-m", *over, *words])


def test_ten_arrays_are_sent_at_once_and_those_behind_them_one_by_one(sbatch, tmp_path, monkeypatch):
    sbatch("echo Submitted batch job 7")
    slept = []
    monkeypatch.setattr(submit, "time", SimpleNamespace(sleep=lambda pause_s: slept.append((sbatch.calls(), pause_s))))
    assert launched(tmp_path, "seed=range(0,13)", "sites.delta.limits.submit_pause_s=0.5") == 0
    assert slept == [(10, 0.5), (11, 0.5), (12, 0.5)]
    assert sbatch.calls() == 13


def test_a_slurm_that_gives_no_answer_is_sent_nothing_more(sbatch, tmp_path, capsys):
    sbatch("echo 'sbatch: error: Batch job submission failed: Unable to contact slurm controller' >&2; exit 1")
    assert launched(tmp_path, "seed=0,1,2") == 1
    assert sbatch.calls() == 1
    said = capsys.readouterr()
    assert "Slurm may have accepted it nevertheless" in said.out
    assert "3 of 3 points not accepted, or no answer came" in said.err
    first, *others = (record.last.refused for record in Ledger.open(tmp_path / "sweep").points().values())
    assert "Unable to contact slurm controller" in first
    assert ["was not submitted" in why for why in others] == [True, True]


def test_an_array_that_is_refused_stops_no_other(sbatch, tmp_path):
    sbatch("echo 'sbatch: error: Batch job submission failed: Invalid qos specification' >&2; exit 1")
    assert launched(tmp_path, "seed=0,1,2") == 1
    assert sbatch.calls() == 3
