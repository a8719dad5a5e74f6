"""What befalls the command on the login node: whatever it leaves is told as it is, and one more command heals it.

Mostly nothing runs: the partitions are down, so that what was submitted waits and can be counted.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from inpaint_bench import launch
from inpaint_bench.cli import app
from launchers.slurm.submitit_internals import ArrayExecutor
from launchers.status.survey import poll_sweep
from launchers.sweep.ledger import Ledger
from tests.testbed.bed import Bed

from .support import ROOT, SHORT, WORKLOAD, decided, nothing_to_send, reasons, told

pytestmark = [pytest.mark.faults, pytest.mark.timeout(400)]

DOWN_S = 60.0


@pytest.fixture(autouse=True)
def _waiting(testbed: Bed, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("INPAINT_BENCH_TESTBED", str(testbed.state))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    places = [("delta", "gpuH200x8"), ("grace", "gpu")]
    for site, partition in places:
        testbed.run(site, "scontrol", "update", f"partitionname={partition}", "state=down")
    try:
        yield
    finally:
        for site, partition in places:
            testbed.run(site, "scancel", "--me")
            testbed.run(site, "scontrol", "update", f"partitionname={partition}", "state=up")


def launching(folder: Path, *overrides: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "inpaint_bench.launch", "-m", *WORKLOAD, *overrides, f"hydra.sweep.dir={folder}"]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def rerunning(folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "inpaint_bench", "rerun", str(folder)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def records(folder: Path, kind: str) -> list[dict[str, Any]]:
    """Whole lines of the ledger, as they are now."""
    try:
        lines = (folder / "ledger.jsonl").read_text().split("\n")[:-1]
    except FileNotFoundError:
        return []
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def held(bed: Bed, site: str, folder: Path) -> int:
    """Tasks of the sweep in the queue, by Slurm's own count."""
    sweep_id = Ledger(folder).sweep.sweep_id
    names = bed.run(site, "squeue", "--me", "-h", "-r", "-o", "%j").stdout.split()
    return sum(name.startswith(f"inpaint-{sweep_id}-") for name in names)


def test_a_launch_killed_amid_300_points_and_two_reruns_at_once_send_each_of_them_once(
    testbed: Bed, tmp_path: Path, capsys: Any
) -> None:
    folder = tmp_path / "sweep"
    first = launching(folder, "gpu=h200", "seed=range(0,300)", "sites.delta.limits.max_array_size=50")
    testbed.wait(lambda: len(records(folder, "submitted")) >= 2, what="two of six arrays to be submitted")
    first.kill()
    first.wait()
    assert len(records(folder, "submitted")) < 6, "it was killed too late to show anything"
    states = Counter(point["state"] for point in told(folder, capsys))
    assert states == {"queued": held(testbed, "delta", folder), "planned": 300 - states["queued"]}
    assert states["planned"] > 0

    both = [rerunning(folder), rerunning(folder)]
    said = [process.communicate(timeout=200)[0] for process in both]
    for process, words in zip(both, said, strict=True):
        late = process.returncode == 0 and "Nothing to submit" in words
        told_off = process.returncode == 2 and "another command is submitting" in words
        assert late or told_off or process.returncode == 0, words
    assert held(testbed, "delta", folder) == 300
    points = told(folder, capsys)
    assert {point["state"] for point in points} == {"queued"}
    assert len({point["job_id"] for point in points}) == 300
    assert app.main(["rerun", str(folder)]) == 0
    assert "Nothing to submit" in capsys.readouterr().out
    assert app.main(["cancel", str(folder)]) == 0
    assert held(testbed, "delta", folder) == 0


def test_an_array_whose_launcher_died_while_sbatch_answered_runs_all_the_same(
    testbed: Bed, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its points lie where the job looks for them before sbatch is called."""
    folder, submit = tmp_path / "sweep", ArrayExecutor._submit_command

    def die(self: ArrayExecutor, command: str) -> None:
        submit(self, command)
        raise KeyboardInterrupt

    monkeypatch.setattr(ArrayExecutor, "_submit_command", die)
    assert launch.main(["-m", *WORKLOAD, "gpu=a40", "site=delta", SHORT, f"hydra.sweep.dir={folder}"]) == 130
    assert not records(folder, "submitted")
    assert told(folder, capsys)[0]["state"] in ("queued", "running")
    testbed.wait(lambda: told(folder, capsys)[0]["state"] not in ("queued", "running"), what="the array to end")
    assert [(point["state"], point["attempt"]) for point in told(folder, capsys)] == [("completed", 1)]


def test_two_launches_into_one_directory_at_once_send_one_sweep(testbed: Bed, tmp_path: Path, capsys: Any) -> None:
    folder = tmp_path / "sweep"
    both = [launching(folder, "gpu=h200", "seed=0,1,2") for _ in range(2)]
    said = [process.communicate(timeout=100)[0] for process in both]
    assert sorted(process.returncode for process in both) == [0, 2], said
    assert held(testbed, "delta", folder) == 3
    assert [point["state"] for point in told(folder, capsys)] == ["queued"] * 3


def test_what_sbatch_refused_is_sent_when_what_was_wrong_is_said_right(
    testbed: Bed, tmp_path: Path, capsys: Any
) -> None:
    folder = tmp_path / "sweep"
    wrong = launching(folder, "gpu=h200", "sites.delta.gpus.h200.partition=nowhere")
    assert "nvalid partition" in wrong.communicate(timeout=100)[0]
    assert wrong.returncode == 1
    (point,) = told(folder, capsys)
    assert (point["state"], point["reason"]) == ("failed", "never_started")
    assert "nvalid partition" in point["message"]
    assert app.main(["rerun", str(folder), "sites.delta.gpus.h200.partition=gpuH200x8"]) == 0
    assert held(testbed, "delta", folder) == 1
    assert [point["state"] for point in told(folder, capsys)] == ["queued"]


def test_an_array_over_the_sites_size_is_told_and_sent_as_several(testbed: Bed, tmp_path: Path, capsys: Any) -> None:
    """A site file that promises more than its Slurm takes, and then one that does not."""
    (allowed,) = re.findall(r"MaxArraySize += (\d+)", testbed.run("delta", "scontrol", "show", "config").stdout)
    folder, points = tmp_path / "sweep", int(allowed) + 2
    wrong = launching(folder, "gpu=h200", f"seed=range(0,{points})", f"sites.delta.limits.max_array_size={10 * points}")
    assert "nvalid job array specification" in wrong.communicate(timeout=120)[0]
    assert wrong.returncode == 1
    states = {(point["state"], point["reason"], point["message"]) for point in told(folder, capsys)}
    ((state, reason, message),) = states
    assert (state, reason) == ("failed", "never_started")
    assert "nvalid job array specification" in message
    right = f"sites.delta.limits.max_array_size={allowed}"
    assert decided(folder, capsys, right).count("submitted with changes") == points
    assert app.main(["rerun", str(folder), right]) == 0
    assert held(testbed, "delta", folder) == points
    assert len({point["job_id"].split("_")[0] for point in told(folder, capsys)}) == 2
    assert nothing_to_send(folder, capsys)


def test_while_sacct_is_down_squeue_and_the_files_tell_and_nothing_is_sent_twice(
    testbed: Bed, tmp_path: Path, capsys: Any
) -> None:
    waits, runs = tmp_path / "waits", tmp_path / "runs"
    assert launching(waits, "gpu=h200", "seed=0,1").wait(100) == 0
    testbed.stop_accounting()
    try:
        names = "workload.name=fine,app_error"
        assert launching(runs, "gpu=a40", "site=delta", names, "workload.min_measure_s=12").wait(100) == 0
        sacct_results = set()

        def ended() -> bool:
            sweep = poll_sweep(Ledger.open(runs))
            sacct_results.update(reply.sacct for reply in sweep.replies.values())
            return not any(point.is_open for point in sweep.points)

        testbed.wait(ended, what="two runs to end")
        assert any(result.startswith("did not answer") for result in sacct_results), sacct_results
        done = [("completed", None), ("failed", "app_error")]
        assert reasons(runs, capsys) == done
        assert reasons(waits, capsys) == [("queued", None)] * 2
        assert "left alone: --only app_error submits it" in decided(runs, capsys)
        assert nothing_to_send(waits, capsys)
    finally:
        testbed.start_accounting()
    assert reasons(runs, capsys) == done
    assert app.main(["rerun", str(runs), "--only", "app_error", SHORT]) == 0
    testbed.wait(lambda: reasons(runs, capsys) == [("completed", None)] * 2, what="the second attempt to end")
    assert reasons(waits, capsys) == [("queued", None)] * 2


def test_slurmctld_down_for_a_minute_is_told_and_loses_or_doubles_nothing(
    testbed: Bed, tmp_path: Path, capsys: Any
) -> None:
    folder, before = tmp_path / "sweep", tmp_path / "before"
    assert launching(before, "gpu=a40", "seed=0,1").wait(100) == 0
    testbed.stop_controller("grace")
    down_s = time.monotonic()
    try:
        sent = launching(folder, "gpu=a40", "seed=0,1,2")
        # what was queued before is not known to be lost, and nobody sends it again
        assert {point["state"] for point in told(before, capsys)} <= {"queued", "unknown"}
        unknown = any(point["state"] == "unknown" for point in told(before, capsys))
        assert app.main(["rerun", str(before)]) == int(unknown)
        said = capsys.readouterr()
        assert (
            "nothing was submitted: the state of 2 points is unknown" in said.err
            if unknown
            else "Nothing to submit" in said.out
        )
        time.sleep(max(0.0, DOWN_S - (time.monotonic() - down_s)))
    finally:
        testbed.start_controller("grace")
    words, _ = sent.communicate(timeout=200)
    states = {point["state"] for point in told(folder, capsys)}
    assert states == ({"queued"} if sent.returncode == 0 else {"failed"}), words
    assert held(testbed, "grace", folder) == (3 if sent.returncode == 0 else 0)
    assert app.main(["rerun", str(folder)]) == 0
    assert held(testbed, "grace", folder) == 3
    assert {point["state"] for point in told(folder, capsys)} == {"queued"}
    assert held(testbed, "grace", before) == 2
