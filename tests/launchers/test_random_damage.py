"""Whatever is damaged in a sweep directory: every command ends with a sentence, and executes nothing from it.

`make test` tries 30 of the 500 mutations that `make faults` tries.
"""

from __future__ import annotations

import shutil
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from inpaint_bench import launch
from inpaint_bench.cli import app
from tests.seeds import sample

from .mutations import SECRET, Mutator, Planted

pytestmark = [pytest.mark.slow, pytest.mark.subprocess, pytest.mark.timeout(1200)]

NUM_MUTATIONS = 500
HANG_S = 60  # a command takes half a second on an idle machine
QUICK = ["data.num_images=16", "workload.warmup_steps=1", "workload.measure_steps=2", "workload.min_measure_s=0"]
# Two points here, of which one fails; two more wait in a plan file.
BROKEN = "workload.module=inpaint_bench.workloads.finetune_inpaint,inpaint_bench.missing"
POINTS = ["profile=demo", "gpu=a40,h200", BROKEN, "sites.delta.connect.method=slurm"]


@pytest.fixture(scope="module")
def sweeps(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two sweeps without their code snapshots, which no command of this module reads."""
    folders = [tmp_path_factory.mktemp("sweeps") / name for name in ("first", "second")]
    for folder in folders:
        assert launch.main(["-m", *POINTS, *QUICK, f"hydra.sweep.dir={folder}"]) == 1
        shutil.rmtree(folder / "code")
    return folders


class HangError(BaseException):
    """A command did not end."""


@contextmanager
def limited() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise HangError

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(HANG_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def problems_of(arguments: list[str], planted: Planted, capsys: Any) -> list[str]:
    """Run a command and return what is wrong about it."""
    problems = []
    code: int | None = None
    try:
        with limited():
            code = app.main(arguments)
    except HangError:
        problems.append("hangs")
    except Exception:
        problems.append("".join(traceback.format_exception(*sys.exc_info())[-3:]))
    printed = "".join(capsys.readouterr())
    if code not in (None, 0, 1, 2) and not problems:
        problems.append(f"exit code {code}")
    if "Traceback" in printed:
        problems.append("prints a traceback")
    if any(not (char.isprintable() or char in "\n\t") for char in printed):
        problems.append(f"prints control characters: {printed[-300:]!r}")
    if SECRET in printed:
        problems.append("prints a file outside of the sweep")
    if planted.marker.exists():
        problems.append("executes something from the sweep")
        planted.marker.unlink()
    return [f"{arguments[0]}: {problem}" for problem in problems]


@pytest.mark.parametrize(
    "count",
    [pytest.param(30, id="some"), pytest.param(NUM_MUTATIONS, id="all", marks=pytest.mark.faults)],
)
def test_random_mutations(count: int, sweeps: list[Path], tmp_path: Path, capsys: Any) -> None:
    original, donor = sweeps
    planted, folder = Planted(tmp_path), tmp_path / "sweep"
    # Each mutation meets half of the commands: one that composes takes half a second.
    commands = [[["status"], ["rerun", "--dry-run"]], [["status", "--json"], ["cancel"], ["collect"]]]
    found = []
    for seed in sample(range(NUM_MUTATIONS), count):
        shutil.copytree(original, folder, symlinks=True)
        done = Mutator(seed, folder, donor, planted).mutate()
        for verb, *options in commands[seed % 2]:
            for problem in problems_of([verb, str(folder), *options], planted, capsys):
                found.append(f"{seed} {done}: {problem}")
        assert planted.secret.read_text() == SECRET, f"{seed} {done}"
        shutil.rmtree(folder)
    assert not found, f"{len(found)} of {count}:\n" + "\n".join(found[:40])
