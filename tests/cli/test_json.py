"""`--json` and `-q`: what programs read, and nothing else on standard output."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from inpaint_bench.cli import app
from inpaint_bench.core import console
from inpaint_bench.core.paths import ROOT
from tests.analysis.build import write_run

pytestmark = pytest.mark.slow

DATASET = ROOT / "benchmarks/results/2026-11-21-h200-batches"


@pytest.fixture(autouse=True)
def output_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console.output, "quiet", False)
    monkeypatch.setattr(console.output, "as_json", False)


def test_dry_run_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["launch", "-m", "gpu=a40,h200", "batch=8,16", "--dry-run", "--json", f"out={tmp_path}"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert [(array["site"], len(array["points"])) for array in plan["arrays"]] == [("grace", 2), ("delta", 2)]
    assert {point["batch"] for array in plan["arrays"] for point in array["points"]} == {8, 16}


def test_merge_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "grace", "r-01")
    assert app.main(["merge", str(tmp_path / "grace"), "-o", str(tmp_path / "dataset"), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["runs"], printed["runs_valid"], printed["skipped"]) == (1, 1, [])


def test_report_as_json_has_the_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["report", str(DATASET), "-o", str(tmp_path / "report"), "--export", "csv", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert Path(printed["report"]).is_file()
    assert any(rows for rows in printed["tables"].values())


def test_quiet_dry_run_prints_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["launch", "-q", "-m", "gpu=a40", "--dry-run", f"out={tmp_path}"]) == 0
    assert capsys.readouterr().out == ""
