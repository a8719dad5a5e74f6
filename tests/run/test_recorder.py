"""A workload with a protocol of its own in the worker: windows, steps, progress, and the row of its run."""

from pathlib import Path

import pytest

from analysis.metrics import run_row
from analysis.metrics.facts import Facts
from inpaint_bench.core.schema import Status
from inpaint_bench.run import worker
from tests.analysis.build import load_run
from tests.run.measuring import CALL_S, CALLS
from tests.run.support import compose

MODULE = "workload.module=tests.run.measuring"


def test_calls_of_uniform_work_give_rates_like_a_training(tmp_path: Path) -> None:
    manifest = worker.run(compose(MODULE, "batch=3"), tmp_path, [])
    assert (manifest.status, manifest.batch) == (Status.COMPLETED, 3)
    run, tables = load_run(tmp_path)
    assert [(window.kind, window.steps, window.images) for window in run.windows] == [
        ("warmup", 2, 6),
        ("measure", CALLS, 3 * CALLS),
    ]
    row = run_row.summarise(Facts(manifest=run.manifest, windows=run.windows, tables=tables))
    assert row["valid"], row["invalid_reason"]
    assert row["images_per_s"] == pytest.approx(3 * row["steps_per_s"])
    assert row["step_ms_p50"] >= 1000 * CALL_S
    assert manifest.progress is not None
    assert (manifest.progress.step, manifest.progress.steps_total) == (2 + CALLS, 2 + CALLS)


def test_rows_of_a_window_that_fails_are_kept(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="after its calls"):
        worker.run(compose(MODULE, "seed=13"), tmp_path, [])
    run, tables = load_run(tmp_path)
    assert run.windows[-1].status == Status.FAILED
    assert tables["steps"].height == 2 + CALLS
