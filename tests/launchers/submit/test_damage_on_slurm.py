"""On real Slurm, `rerun` of a sweep whose record is damaged at random submits no point that is still in the queue."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from inpaint_bench import launch
from inpaint_bench.cli import app
from launchers.status import survey
from launchers.submit import rerun
from launchers.sweep.ledger import Ledger
from tests.launchers.mutations import SECRET, Mutator, Planted
from tests.testbed.bed import Bed

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900), pytest.mark.usefixtures("delta_waits")]

NUM_MUTATIONS = 40
OVERRIDES = ["profile=testbed", "gpu=h200", "seed=0,1,2", "sites.delta.limits.max_array_size=2"]


@pytest.fixture
def sweeps(testbed: Bed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Path]]:
    """Two sweeps of three points each, in two arrays, whose jobs wait."""
    monkeypatch.setenv("INPAINT_BENCH_TESTBED", str(testbed.state))
    # What protects a sweep only in its first minutes shall not be what protects it here.
    monkeypatch.setattr(rerun, "CONFIRM_S", 0.0)
    monkeypatch.setattr(survey, "MIN_JOB_AGE_S", 0.0)
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        assert launch.main(["-m", *OVERRIDES, f"hydra.sweep.dir={folder}"]) == 0
    yield folders
    testbed.run("delta", "scancel", "--me")


def tasks(bed: Bed) -> Counter[str]:
    """How many jobs Slurm has of each array task, known by the job's name: running, waiting or ended."""
    listed = bed.run("delta", "squeue", "--me", "-h", "-r", "-t", "all", "-o", "%j %K").stdout.splitlines()
    return Counter(line for line in listed if line.startswith("inpaint-"))


def test_no_mutation_makes_rerun_submit_a_point_twice(
    testbed: Bed, sweeps: list[Path], tmp_path: Path, capsys: Any
) -> None:
    original, donor = sweeps
    before = tasks(testbed)
    names = [Ledger(folder).sweep.sweep_id for folder in sweeps]
    assert [sum(sweep_id in task for task in before.elements()) for sweep_id in names] == [3, 3]
    planted, folder, found = Planted(tmp_path), tmp_path / "sweep", []
    for seed in range(NUM_MUTATIONS):
        shutil.copytree(original, folder, symlinks=True)
        done = Mutator(seed, folder, donor, planted).mutate()
        code = app.main(["rerun", str(folder), "--only", "lost,never_started"])
        printed = "".join(capsys.readouterr())
        if tasks(testbed) != before:
            found.append(f"{seed} {done}: submitted {tasks(testbed) - before}\n{printed}")
            before = tasks(testbed)
        if code not in (0, 1, 2) or "Traceback" in printed or SECRET in printed or planted.marker.exists():
            found.append(f"{seed} {done}: exit code {code}\n{printed}")
        shutil.rmtree(folder)
    assert not found, "\n".join(found)
