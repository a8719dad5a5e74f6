"""A report of everything, made once for the tests that look at what it wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from analysis.report.report import FORMATS, write_report
from inpaint_bench.cli import app

from .build import write_levers, write_run, write_study

HOSTILE = r"\input{/etc/passwd} 50% of $x_1 & y^2 #3 {a} ~ <b> [c] -- ''d'' |e|"
UNBROKEN = "/a/very/long/path/without/a/blank" * 12


@pytest.fixture(scope="session")
def whole_report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """report.html with all exports beside it: nine runs over two sites, a ladder of three steps, two failed runs.

    The dataset is `ds`, beside the report's folder.
    """
    folder = tmp_path_factory.mktemp("whole")
    write_study(folder / "in" / "grace", folder / "in" / "delta")
    driver = {"driver": "570.172.08"}  # that of the study's H200
    write_levers(folder / "in" / "levers", "ladder", ["tf32", "compile"], repeats=2, environment=driver)
    write_run(folder / "in", "r-hostile", status="failed", reason="app_error", message=HOSTILE, windows=False)
    write_run(folder / "in", "r-oom", status="failed", reason="oom_gpu", message=UNBROKEN, windows=False)
    assert app.main(["merge", str(folder / "in"), "-o", str(folder / "ds")]) == 0
    return write_report(folder / "ds", folder / "out", formats=FORMATS)
