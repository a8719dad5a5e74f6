"""sbatch is called neither in a burst, nor again where Slurm gave no answer."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from inpaint_bench import launch
from launchers.slurm import sbatch as sbatch_calls
from launchers.sweep.ledger import Ledger


@pytest.fixture
def sbatch(tmp_path, monkeypatch):
    """Install a program of that name on PATH that counts its calls and runs a script."""
    calls = tmp_path / "calls"

    def install(script: str) -> None:
        program = tmp_path / "bin" / "sbatch"
        program.parent.mkdir()
        program.write_text(f"#!/bin/sh\necho >> {calls}\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(program.parent), prepend=":")

    install.calls = lambda: len(calls.read_text().splitlines())
    return install


def launched(tmp_path: Path, *more: str) -> int:
    """Launch to delta, as many arrays as points; return the exit code."""
    (tmp_path / "slurm.conf").touch()
    overrides = [
        f"sites.delta.connect.slurm_conf={tmp_path / 'slurm.conf'}",
        "sites.delta.account.value=bbxx-delta-gpu",
    ]
    overrides += ["gpu=h200", "sites.delta.limits.max_array_size=1", f"hydra.sweep.dir={tmp_path / 'sweep'}"]
    return launch.main(["-m", *overrides, *more])


@pytest.mark.subprocess
def test_arrays_after_the_tenth_are_submitted_with_pauses(sbatch, tmp_path, monkeypatch):
    sbatch("echo Submitted batch job 7")
    slept = []
    monkeypatch.setattr(
        sbatch_calls, "time", SimpleNamespace(sleep=lambda pause_s: slept.append((sbatch.calls(), pause_s)))
    )
    assert launched(tmp_path, "seed=range(0,13)", "sites.delta.limits.submit_pause_s=0.5") == 0
    assert slept == [(10, 0.5), (11, 0.5), (12, 0.5)]
    assert sbatch.calls() == 13


@pytest.mark.subprocess
def test_no_further_array_is_submitted_after_one_without_an_answer(sbatch, tmp_path, capsys):
    sbatch("echo 'sbatch: error: Batch job submission failed: Unable to contact slurm controller' >&2; exit 1")
    assert launched(tmp_path, "seed=0,1,2") == 1
    assert sbatch.calls() == 1
    printed = capsys.readouterr()
    assert "Slurm may have accepted it nevertheless" in printed.out
    assert "3 of 3 points not accepted, or no answer came" in printed.err
    first, *others = (record.last.refused for record in Ledger.open(tmp_path / "sweep").points().values())
    assert "Unable to contact slurm controller" in first
    assert ["was not submitted" in message for message in others] == [True, True]


@pytest.mark.subprocess
def test_refused_array_does_not_stop_the_others(sbatch, tmp_path):
    sbatch("echo 'sbatch: error: Batch job submission failed: Invalid qos specification' >&2; exit 1")
    assert launched(tmp_path, "seed=0,1,2") == 1
    assert sbatch.calls() == 3


@pytest.mark.subprocess
def test_bytes_of_another_encoding_do_not_hide_the_id(sbatch, tmp_path):
    sbatch(r"printf 'Willkommen in Z\374rich \377\376\n'; printf 'M\374nchen\n' >&2; echo Submitted batch job 7")
    assert launched(tmp_path, "seed=0,1,2") == 0
    assert sbatch.calls() == 3
    assert [record.last.job_id for record in Ledger.open(tmp_path / "sweep").points().values()] == ["7_0"] * 3


@pytest.mark.subprocess
def test_bytes_of_another_encoding_in_a_refusal_are_question_marks(sbatch, tmp_path):
    sbatch(r"printf 'sbatch: error: Z\374rich: no\nsbatch: error: Batch job submission failed: x\n' >&2; exit 1")
    assert launched(tmp_path, "seed=0,1,2") == 1
    assert sbatch.calls() == 3
    refused = {
        record.last.refused.partition("h200: ")[2] for record in Ledger.open(tmp_path / "sweep").points().values()
    }
    assert refused == {"Z?rich: no; Batch job submission failed: x"}


@pytest.mark.subprocess
@pytest.mark.parametrize(
    ("printed", "cluster"),
    [
        ("Submitted batch job 7", None),
        ("Submitted batch job 7 on cluster far", "far"),
        ("Welcome.\nSubmitted batch job 7 on cluster far-2.gpu\nBye", "far-2.gpu"),
        ("Submitted batch job 7 on cluster $(id)", None),
    ],
)
def test_cluster_is_recorded_if_sbatch_names_one(sbatch, tmp_path, printed, cluster):
    sbatch(f"printf '{printed}\\n'")
    assert launched(tmp_path) == 0
    (record,) = Ledger.open(tmp_path / "sweep").points().values()
    assert (record.last.job_id, record.last.cluster) == ("7_0", cluster)
    # A sweep of one cluster has the events that it always had.
    assert ('"cluster"' in (tmp_path / "sweep" / "ledger.jsonl").read_text()) == bool(cluster)
    assert '"cluster":' not in (tmp_path / "sweep" / "sweep.json").read_text().partition('"sites"')[0]
