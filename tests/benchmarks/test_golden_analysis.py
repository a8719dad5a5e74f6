"""What `golden_analysis` keeps of a merge, and which differences of two outputs it prints."""

from __future__ import annotations

import shutil
from pathlib import Path

import polars as pl
import pytest

from benchmarks import golden_analysis
from tests.analysis.build import write_run


def test_a_merge_is_kept_once_for_each_content(tmp_path: Path) -> None:
    write_run(tmp_path / "in", "r-1", window_s=2.0)
    for options in ({}, {}, {"allow_mixed": ["driver"]}):
        golden_analysis.keep([tmp_path / "in"], tmp_path / "kept", options)
    cases = sorted((tmp_path / "kept").iterdir())
    assert len(cases) == 2
    assert {(case / "0" / "run-r-1" / "manifest.json").is_file() for case in cases} == {True}


def test_each_difference_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = tmp_path / "old" / "case", tmp_path / "new" / "case"
    old.mkdir(parents=True)
    pl.DataFrame({"run_id": ["r-1", "r-2"], "valid": [True, True]}).write_parquet(old / "runs.parquet")
    (old / "report.md").write_text("# Report\n1 of 1 runs are valid.\n")
    shutil.copytree(old, new)
    assert golden_analysis.compare(old.parent, new.parent) == 0
    pl.DataFrame({"run_id": ["r-1", "r-2"], "valid": [True, False]}).write_parquet(new / "runs.parquet")
    (new / "report.md").write_text("# Report\n0 of 1 runs are valid.\n")
    assert golden_analysis.compare(old.parent, new.parent) == 1
    printed = capsys.readouterr().out
    assert "runs.parquet: row 1: valid\n  - True\n  + False" in printed
    assert "-1 of 1 runs are valid.\n+0 of 1 runs are valid." in printed
    assert printed.endswith("1 compared, 1 differ\n")
