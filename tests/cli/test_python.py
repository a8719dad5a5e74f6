"""The package from Python: light to import, and the same answers as the commands."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import polars as pl
import pytest
from nbclient import NotebookClient

import inpaint_bench
from inpaint_bench.cli import app
from inpaint_bench.core.paths import ROOT

COMMITTED = ROOT / "benchmarks" / "results" / "2026-11-23-h200-finetune"


def test_importing_the_package_loads_no_library() -> None:
    code = "import sys, inpaint_bench; print(sorted({name.partition('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = ast.literal_eval(done.stdout)
    assert not {"polars", "pyarrow", "numpy", "msgspec", "omegaconf", "hydra", "torch"} & set(loaded)


def test_dataset_gives_polars_frames() -> None:
    dataset = inpaint_bench.open_dataset(str(COMMITTED))
    assert isinstance(dataset, inpaint_bench.Dataset)
    fastest = dataset.runs.filter("valid").group_by("batch").agg(pl.col("images_per_s").max()).sort("batch")
    assert fastest["batch"].to_list() == [4, 16, 32]
    run_id = dataset.runs["run_id"][0]
    power = dataset.scan("samples_fast", run_id).select("t_mono_ns", "power_instant_w").collect()
    assert power.height > 100


def test_charts_are_those_of_the_report() -> None:
    charts = inpaint_bench.charts(inpaint_bench.open_dataset(COMMITTED))
    assert {"fig-images_per_s", "fig-pareto"} <= set(charts)
    assert charts["fig-pareto"].to_dict(validate=False)["config"]["background"] == "#ffffff"


def test_a_wrong_name_is_answered() -> None:
    dataset: Any = inpaint_bench.open_dataset(COMMITTED)
    for call, message in {
        lambda: dataset.scan("sample_fast"): "sample_fast: not one of samples_fast",
        lambda: dataset.rows("nope"): "nope: not one of samples_fast",
        lambda: dataset.scan("steps", "nope"): "nope: no run of ",
        lambda: inpaint_bench.charts(str(COMMITTED)): "charts: takes a dataset",
        lambda: inpaint_bench.build_cells(dataset): "build_cells: takes the runs of a dataset",
    }.items():
        with pytest.raises(inpaint_bench.UserError, match=f"^{re.escape(message)}"):
            call()


def test_notebook_runs_and_shows_what_it_shows_in_the_docs() -> None:
    path = ROOT / "docs" / "notebook.ipynb"
    notebook = nbformat.read(path, as_version=4)
    shown = [_texts(cell) for cell in notebook.cells]
    executed = NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(path.parent)}}).execute()
    assert [_texts(cell) for cell in executed.cells] == shown
    assert (
        sum("image/png" in output.get("data", {}) for cell in executed.cells for output in cell.get("outputs", [])) == 3
    )


def _texts(cell: Any) -> list[str]:
    return [output.data["text/plain"] for output in cell.get("outputs", []) if "data" in output]


def test_what_is_no_dataset_or_sweep_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(inpaint_bench.UserError, match="is not a merged dataset"):
        inpaint_bench.open_dataset(tmp_path)
    with pytest.raises(inpaint_bench.UserError, match=str(tmp_path)):
        inpaint_bench.status(tmp_path)


def test_status_is_that_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = tmp_path / "sweep"
    line = ["-m", "gpu=cpu", "site=local", "model=tiny_inpaint", "recipe=cpu", "telemetry=none", "batch=1"]
    line += ["data.num_images=4", "data.resolution_px=32", "workload.warmup_steps=1", "workload.measure_steps=1"]
    line += ["workload.min_measure_s=0", "wait=true", f"hydra.sweep.dir={sweep}"]
    assert app.main(["launch", *line]) == 0
    capsys.readouterr()
    assert app.main(["status", str(sweep), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    status = inpaint_bench.status(str(sweep))
    assert [point["state"] for point in status["points"]] == ["completed"]
    for result in (status, printed):  # the time of the question
        result["polled_at"] = result["records"][0]["artifacts"]["manifest_age_s"] = None
    assert status == printed


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'no_such'"):
        _ = inpaint_bench.no_such
