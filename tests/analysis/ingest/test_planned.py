"""Points of a sweep without a run are counted by the merge and named by merge and report."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from analysis import merge
from analysis.dataset import open_dataset
from inpaint_bench.cli import app
from inpaint_bench.core import schema
from launchers.sweep.attempt import Attempt
from launchers.sweep.sweep_record import SweepRecord
from tests.analysis.build import write_run


def write_sweep(folder: Path, points: range, *runs: int, sweep_id: str = "s1") -> Path:
    """Write a sweep with these points, of which some have a run."""
    for num in runs:
        run = write_run(folder, f"{sweep_id}-{num}")
        (folder / str(num)).mkdir()
        run.rename(folder / str(num) / "attempt-1")
    specs = [Attempt(point=num, overrides=[], gpu="a40", batch=8, site="grace") for num in points]
    folder.mkdir(exist_ok=True)
    SweepRecord(sweep_id=sweep_id, sites={"grace": {}}, points=specs).write(folder)
    return folder


def without_run(tmp_path: Path, *roots: Path) -> Any:
    return merge.merge(list(roots), tmp_path / "ds")["points_without_run"]


def test_points_without_a_run_directory_are_counted_until_they_have_one(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path / "in" / "sweep", range(12), 0, 1, 11)
    assert without_run(tmp_path, tmp_path / "in") == [{"sweep": str(sweep), "points": 9}]
    assert without_run(tmp_path, sweep, sweep / "1") == [{"sweep": str(sweep), "points": 9}]
    for num in range(2, 11):
        shutil.copytree(sweep / "0", sweep / str(num))
    assert without_run(tmp_path, tmp_path / "in") == []


def test_a_point_of_the_sweep_alone_lacks_no_other(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path / "sweep", range(3), 0, 1)
    assert without_run(tmp_path, sweep / "0") == []


def test_points_that_another_site_ran_from_a_plan_file_are_not_missing(tmp_path: Path) -> None:
    grace = write_sweep(tmp_path / "grace", range(4), 0)
    delta = write_sweep(tmp_path / "s1-delta", range(2, 4), 2)
    assert without_run(tmp_path, grace, delta) == [{"sweep": str(grace), "points": 2}]
    assert without_run(tmp_path, delta, grace) == [
        {"sweep": str(delta), "points": 1},
        {"sweep": str(grace), "points": 1},
    ]


def test_two_sweeps_are_counted_apart(tmp_path: Path) -> None:
    write_sweep(tmp_path / "in" / "a", range(2), 0, 1, sweep_id="a")
    other = write_sweep(tmp_path / "in" / "b", range(5), 0, sweep_id="b")
    assert without_run(tmp_path, tmp_path / "in") == [{"sweep": str(other), "points": 4}]


@pytest.mark.parametrize("content", ["", "[]", '{"sweep_id": "s1"}', '{"sweep_id": "s1", "points": [{"point": "a"}]}'])
def test_a_damaged_record_is_listed_and_the_runs_are_merged(tmp_path: Path, content: str) -> None:
    sweep = write_sweep(tmp_path / "sweep", range(3), 0)
    (sweep / schema.SWEEP).write_text(content)
    assert without_run(tmp_path, sweep) == []
    dataset = open_dataset(tmp_path / "ds")
    assert dataset.runs.height == 1
    assert dataset.skipped.select("path", "code").rows() == [(str(sweep / schema.SWEEP), "damaged")]


def test_merge_and_report_say_which_commands_tell_the_reason_and_submit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = write_sweep(tmp_path / "my sweep", range(10), 0)
    dataset, out = tmp_path / "ds", tmp_path / "report"
    assert app.main(["merge", str(sweep), "-o", str(dataset)]) == 0
    printed = capsys.readouterr().err
    assert f"{sweep}: no run of 9 planned points" in printed
    assert f"`inpaint-bench status '{sweep}'`" in printed
    assert f"`inpaint-bench rerun '{sweep}'`" in printed
    assert app.main(["merge", str(sweep), "-o", str(dataset), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["points_without_run"] == [{"sweep": str(sweep), "points": 9}]
    assert app.main(["report", str(dataset), "-o", str(out), "--export", "none"]) == 0
    assert "no run of 9 planned points" in " ".join(capsys.readouterr().out.split())
    for name in ("report.md", "report.html"):
        text = (out / name).read_text()
        assert "no run of 9 planned points" in text
        assert "Planned points without a run" in text


def test_a_sweep_without_any_run_is_refused_with_the_commands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = write_sweep(tmp_path / "sweep", range(3))
    assert app.main(["merge", str(sweep), "-o", str(tmp_path / "ds")]) == 2
    printed = capsys.readouterr().err
    assert "No run directory below" in printed
    assert f"no run of 3 planned points: waiting, refused, cancelled or lost. `inpaint-bench status {sweep}`" in printed
