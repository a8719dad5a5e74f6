"""The list of levers, with what measurements show about them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from inpaint_bench.cli import app
from inpaint_bench.core.paths import ROOT, conf_dir


def test_every_recipe_is_described(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["levers", "--json", str(ROOT / "benchmarks/results/2026-11-21-h200-batches")]) == 0
    levers = {lever["name"]: lever for lever in json.loads(capsys.readouterr().out)}
    assert set(levers) == {path.stem for path in (conf_dir() / "recipe").glob("*.yaml")}
    assert [name for name, lever in levers.items() if not lever["description"]] == []
    assert any(seen.startswith("helps: H200, batch 16") for seen in levers["adamw_fused"]["seen"])


def test_folder_that_is_no_dataset_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["levers", str(tmp_path)]) == 2
    assert "is not a merged dataset" in capsys.readouterr().err
