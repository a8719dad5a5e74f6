"""A column is one row of analysis/columns.py."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest

from tests.analysis.build import write_run

ROOT = Path(__file__).parents[2]
ROW = """
    Column("s_per_image", REAL, "seconds for one image", derive=lambda images_per_s: 1 / images_per_s,
           bounds=(0, 0.05), label="Time per image", unit="s", shown=("throughput", 8)),
"""
SCRIPT = """
import sys
from pathlib import Path
sys.path.append("docs")
import site_pages
from analysis import merge
from analysis.report import report
merge.merge([Path("run")], Path("dataset"))
report.write_report(Path("dataset"), Path("report"), formats=())
Path("columns.md").write_text("\\n".join(site_pages._columns()))
"""


@pytest.mark.slow
def test_one_row_adds_a_column_to_dataset_bounds_documentation_and_report(tmp_path: Path) -> None:
    for folder in ("analysis", "docs"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    columns = tmp_path / "analysis" / "columns.py"
    before, after = columns.read_text().split("\n)  # fmt: skip\nSCHEMA")
    columns.write_text(f"{before}{ROW})  # fmt: skip\nSCHEMA{after}")
    write_run(tmp_path / "run", "r-01")
    write_run(tmp_path / "run", "r-02", steps_per_s=4.0)
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr

    rows = pl.read_parquet(tmp_path / "dataset" / "runs.parquet").sort("run_id").to_dicts()
    assert [row["s_per_image"] for row in rows] == pytest.approx([1 / 16, 1 / 32])
    assert [row["invalid_reason"] for row in rows] == ["s_per_image is 0.0625, outside 0 to 0.0500", None]
    assert "| `s_per_image` | Float64 | seconds for one image | 0 to 0.05 |" in (tmp_path / "columns.md").read_text()
    assert "| Time per image \\[s\\] |" in (tmp_path / "report" / "report.md").read_text()
