"""sbatch is called neither in a burst, nor again where Slurm gave no answer."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from inpaint_bench import launch
from inpaint_bench.cli import app
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


def launched(tmp_path: Path, *more: str, sweep_dir: str = "") -> int:
    """Launch to delta, as many arrays as points; return the exit code."""
    (tmp_path / "slurm.conf").touch()
    overrides = [
        f"sites.delta.connect.slurm_conf={tmp_path / 'slurm.conf'}",
        "sites.delta.account.value=bbxx-delta-gpu",
    ]
    overrides += [
        "gpu=h200",
        "sites.delta.limits.max_array_size=1",
        f"hydra.sweep.dir={sweep_dir or tmp_path / 'sweep'}",
    ]
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
@pytest.mark.parametrize("cause", ["Unable to contact slurm controller", "Protocol authentication error"])
def test_no_further_array_is_submitted_after_one_without_an_answer(cause, sbatch, tmp_path, capsys):
    """The reply to an accepted job may fail authentication too: munge's credentials expire, and clocks differ."""
    sbatch(f"echo 'sbatch: error: Batch job submission failed: {cause}' >&2; exit 1")
    assert launched(tmp_path, "seed=0,1,2") == 1
    assert sbatch.calls() == 1
    printed = capsys.readouterr()
    assert "Slurm may have accepted it nevertheless" in printed.out
    assert "3 of 3 points not accepted, or no answer came" in printed.err
    first, *others = (record.last.refused for record in Ledger.open(tmp_path / "sweep").points().values())
    assert cause in first
    assert ["was not submitted" in message for message in others] == [True, True]


@pytest.mark.subprocess
def test_bytes_of_another_encoding_do_not_hide_the_id(sbatch, tmp_path):
    sbatch(r"printf 'Willkommen in Z\374rich \377\376\n'; printf 'M\374nchen\n' >&2; echo Submitted batch job 7")
    assert launched(tmp_path, "seed=0,1,2") == 0
    assert sbatch.calls() == 3
    assert [record.last.job_id for record in Ledger.open(tmp_path / "sweep").points().values()] == ["7_0"] * 3


@pytest.mark.subprocess
def test_refused_array_stops_no_other_and_bytes_of_another_encoding_are_question_marks(sbatch, tmp_path):
    sbatch(r"printf 'sbatch: error: Z\374rich: no\nsbatch: error: Batch job submission failed: x\n' >&2; exit 1")
    assert launched(tmp_path, "seed=0,1,2") == 1
    assert sbatch.calls() == 3
    refused = {
        record.last.refused.partition("h200: ")[2] for record in Ledger.open(tmp_path / "sweep").points().values()
    }
    assert refused == {"Z?rich: no; Batch job submission failed: x"}


ANSWERS = {  # what sbatch prints and its exit code, and the job and cluster
    ("Submitted batch job 7\nSubmitted batch job 7", 0): ("7_0", None),
    ("job_submit: the last was: Submitted batch job 5 days ago\nSubmitted batch job 7", 0): ("7_0", None),
    ("\033[32mSubmitted batch job 7\033[0m on", 0): ("7_0", None),
    ("Submitted batch job 7 on cluster far.", 0): ("7_0", "far"),
    ("Welcome.\nSubmitted batch job 7 on cluster far-2.gpu\nBye", 0): ("7_0", "far-2.gpu"),
    ("Submitted batch job 7 on cluster $(id)", 0): ("7_0", None),
    ("7;far", 0): ("7_0", "far"),
    ("7", 0): ("7_0", None),
    ("Submitted batch job 7", 1): ("7_0", None),
}


@pytest.mark.subprocess
def test_id_is_recorded_if_sbatch_prints_one(sbatch, tmp_path):
    """Regression: an id in a site's text was taken, and one beside the exit code of --wait was not."""
    for call, (printed, code) in enumerate(ANSWERS, 1):
        (tmp_path / f"answer-{call}").write_text(f"{printed}\n")
        (tmp_path / f"code-{call}").write_text(str(code))
    sbatch(f"cd {tmp_path}; call=$(($(wc -l < calls))); cat answer-$call; exit $(cat code-$call)")
    assert launched(tmp_path, f"seed=range(0,{len(ANSWERS)})") == 0
    records = [record.last for record in Ledger.open(tmp_path / "sweep").points().values()]
    assert [(record.job_id, record.cluster) for record in records] == [*ANSWERS.values()]
    assert not any(record.refused_for_certain for record in records)


@pytest.mark.subprocess
@pytest.mark.parametrize(
    "printed",
    [
        "Submitted batch job 7\\nSubmitted batch job 8",
        "Submitted batch job 0",
        "Submitted batch job 99999999999999999999999",
        "Submitted batch job -7",
    ],
)
def test_what_sbatch_prints_instead_of_an_id_is_no_answer(sbatch, tmp_path, printed):
    sbatch(f"printf '{printed}\\n'")
    assert launched(tmp_path) == 1
    (record,) = Ledger.open(tmp_path / "sweep").points().values()
    assert (record.last.job_id, record.last.cluster) == (None, None)
    assert not record.last.refused_for_certain


@pytest.mark.subprocess
@pytest.mark.parametrize(
    "text", ["Unspecified error", "No error", "No route to host", "Network is unreachable", "Input/output error"]
)
def test_error_that_does_not_say_who_failed_is_no_certain_refusal(sbatch, tmp_path, text):
    sbatch(f"echo 'sbatch: error: Batch job submission failed: {text}' >&2; exit 1")
    assert launched(tmp_path) == 1
    (record,) = Ledger.open(tmp_path / "sweep").points().values()
    assert record.last.is_unconfirmed


FAILED = "Batch job submission failed:"
POLICY = f"{FAILED} Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)"
LIMITS = {
    "association": f"AssocMaxSubmitJobLimit\nsbatch: error: {POLICY}",
    "QOS": f"QOSMaxSubmitJobPerUserLimit\nsbatch: error: {POLICY}",
    "no name": POLICY,
    "cluster": "Slurm temporarily unable to accept job, sleeping and retrying.\n"
    f"sbatch: error: {FAILED} Resource temporarily unavailable",
    "queue": f"Slurm job queue full, sleeping and retrying.\nsbatch: error: {FAILED} MaxJobCount limit reached",
    "array": f"{FAILED} Invalid job array specification",
}
TAKES = """
last=$(sed -n 's/^#SBATCH --array=0-//p' "$1")
[ "$last" -lt {most} ] && echo Submitted batch job 7 && exit
printf 'sbatch: error: %s\\n' "{text}" >&2
exit 1
"""


@pytest.mark.subprocess
@pytest.mark.parametrize("text", LIMITS.values(), ids=LIMITS.keys())
def test_array_above_a_submit_limit_is_halved_until_it_fits(sbatch, tmp_path, capsys, text):
    sbatch(TAKES.format(most=2, text=text))
    assert launched(tmp_path, "seed=range(0,7)", "sites.delta.limits.max_array_size=100") == 1
    attempts = [record.last for record in Ledger.open(tmp_path / "sweep").points().values()]
    assert [attempt.job_id for attempt in attempts] == ["7_0", *[None] * 6]
    assert [attempt.refused_for_certain for attempt in attempts] == [False, *[True] * 6]
    assert sbatch.calls() == 3
    printed = capsys.readouterr()
    assert (
        "of yours have left the queue. It is tried again with 3 points; `rerun` then submits 4 points of it."
        in printed.out
    )
    assert "6 of 7 points not accepted; `status` shows why" in printed.err


@pytest.mark.subprocess
def test_partition_that_takes_no_more_jobs_is_not_tried_again(sbatch, tmp_path, capsys):
    sbatch(TAKES.format(most=0, text=LIMITS["QOS"]))
    assert launched(tmp_path, "seed=range(0,6)", "sites.delta.limits.max_array_size=3") == 1
    assert sbatch.calls() == 2
    attempts = [record.last for record in Ledger.open(tmp_path / "sweep").points().values()]
    assert all(attempt.refused_for_certain for attempt in attempts)
    assert "as Slurm took no more jobs before" in attempts[5].refused
    assert "no answer came" not in capsys.readouterr().err


@pytest.mark.subprocess
@pytest.mark.parametrize(
    "text",
    [
        f"QOSMaxWallDurationPerJobLimit\nsbatch: error: {POLICY}",
        f"{FAILED} Invalid account or account/partition combination specified",
        "Slurm temporarily unable to accept job, sleeping and retrying.\n"
        f"sbatch: error: {FAILED} Socket timed out on send/recv operation",
    ],
)
def test_array_that_is_refused_for_another_cause_is_not_halved(sbatch, tmp_path, text):
    sbatch(TAKES.format(most=0, text=text))
    assert launched(tmp_path, "seed=range(0,6)", "sites.delta.limits.max_array_size=100") == 1
    assert sbatch.calls() == 1


@pytest.mark.subprocess
def test_stalled_call_is_named_and_status_says_that_a_command_submits(sbatch, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sbatch_calls, "STALLED_S", 0.1)
    seen = tmp_path / "seen"
    status = f"{sys.executable} -m inpaint_bench status {tmp_path / 'sweep'}"
    sbatch(f"[ -e {seen} ] || {status} > {seen} 2>&1\necho Submitted batch job $$")
    assert launched(tmp_path, "seed=0,1") == 0
    assert "has not answered for 0.1 s; it keeps the sweep's lock until it does" in capsys.readouterr().out
    text = " ".join(seen.read_text().split())
    assert "2 points: 2 unknown" in text
    assert "a command is still submitting from this sweep" in text
    assert "resubmits" not in text


@pytest.mark.subprocess
def test_refusal_of_an_excluded_node_names_the_key(sbatch, tmp_path, capsys):
    sbatch(f"echo 'sbatch: error: {FAILED} Invalid node name specified' >&2; exit 1")
    assert launched(tmp_path, "seed=0", "sites.delta.exclude_nodes=[gpua]") == 1
    assert "Invalid node name specified (sites.delta.exclude_nodes=[] excludes none)" in capsys.readouterr().out


@pytest.mark.subprocess
def test_folder_named_by_the_overrides_is_parsed_once(sbatch, tmp_path, capsys):
    sbatch("echo Submitted batch job 7")
    folder = "/by-${hydra.job.override_dirname}"
    style = "hydra.job.config.override_dirname.exclude_keys=[sites.delta.connect.slurm_conf,out]"
    assert launched(tmp_path, "seed=1,2", 'name="a"', style, sweep_dir=f"{tmp_path}{folder}") == 0
    (sweep,) = tmp_path.glob("by-*")
    assert "seed=1,2" in sweep.name
    assert app.main(["rerun", str(sweep), "--dry-run"]) == 1
    assert "nothing was submitted: the state of 2 points is unknown" in capsys.readouterr().err
