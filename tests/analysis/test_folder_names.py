"""A path is never a pattern: folders whose names a shell, polars or pyarrow would expand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from analysis.dataset import open_dataset
from inpaint_bench.cli import app
from inpaint_bench.core.estimates import rates

from .build import write_run

# With the name of a folder beside it that the first one matches as a pattern.
NAMES = [
    *(("a*b", "axb"), ("ds[1]", "ds1"), ("q?x", "qax"), ("{a,b}", "a")),
    *(("run=9", "run"), ("site=x", "y"), ("~ds", "d")),
]


def merge(runs: Path, dataset: Path) -> None:
    assert app.main(["merge", str(runs), "-o", str(dataset)]) == 0


@pytest.mark.parametrize(("name", "sibling"), NAMES)
def test_dataset_is_the_one_that_was_named(
    tmp_path: Path, name: str, sibling: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder, count in ((name, 2), (sibling, 1)):
        for number in range(count):
            write_run(tmp_path / folder / "runs", f"r-{folder == name:d}{number}", power_w=100.0 * count)
    merge(tmp_path / sibling / "runs", tmp_path / sibling / "ds")
    runs, dataset = tmp_path / name / "runs", tmp_path / name / "ds"
    merge(runs, dataset)
    merge(runs, dataset)  # once more, into the dataset that is there
    assert "runs merged: 2, valid: 2" in capsys.readouterr().out
    opened = open_dataset(dataset)
    assert sorted(opened.runs["run_id"]) == ["r-10", "r-11"]
    assert opened.scan("samples_fast").collect()["power_instant_w"].mean() == pytest.approx(200, rel=0.01)
    assert opened.scan("samples_fast", "r-10").collect()["site"].unique().to_list() == ["grace"]
    assert [cell.n for cell in rates.read_cells(dataset)] == [2]
    out, figures = tmp_path / name / "report", tmp_path / name / "figures"
    assert app.main(["report", str(dataset), "-o", str(out), "--figures", str(figures), "--export", "csv"]) == 0
    assert app.main(["report", str(dataset), "-o", str(out), "--export", "csv", "--json"]) == 0
    printed = capsys.readouterr().out
    assert json.loads(printed[printed.index("{\n") :])["tables"]
    assert app.main(["compare", str(dataset), str(dataset)]) == 0


def test_folder_with_a_tilde_is_not_that_of_a_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "~" / "runs")
    merge(Path("~/runs"), Path("~/ds"))
    dataset = open_dataset("~/ds")
    assert dataset.scan("steps").collect().height == 60
