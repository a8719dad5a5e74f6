"""The tables of estimates are those that the committed datasets give, and near what was measured."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from benchmarks import measured_cells, trace_memory
from inpaint_bench.core.estimates import memory


@pytest.mark.slow
def test_tables_are_current(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -m benchmarks.measured_cells` and `python -m benchmarks.trace_memory --fit` write them."""
    committed = memory.FOLDER
    shutil.copy(committed / "memory.csv", tmp_path)
    monkeypatch.setattr(memory, "FOLDER", tmp_path)
    measured_cells.write_tables()
    trace_memory.fit()
    for path in tmp_path.iterdir():
        assert path.read_text() == (committed / path.name).read_text(), path.name


@pytest.mark.slow
def test_memory_of_every_committed_cell_is_near_what_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert trace_memory.check() == 0  # the median is below 5 %, nothing that fit is refused
    lines = [line for line in capsys.readouterr().out.splitlines() if " %  " in line]
    assert len(lines) > 90
    traced = [line for line in lines if "(fitted" not in line]
    errors = [abs(float(line.split(" %  ")[0].split()[-1])) for line in traced]
    assert max(errors) <= memory.TRACE_ERROR_PCT
