"""A saved pipeline, to read and to damage."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a pipeline saved from random weights; tests must not change it."""
    from inpaint_bench.models.pipeline_folder import save_pipeline  # loads torch, which `make quick` does without
    from tests.quality.support import listening

    path = tmp_path_factory.mktemp("weights") / "trained"
    save_pipeline(listening(), path)
    return path


@pytest.fixture
def saved_copy(folder: Path, tmp_path: Path) -> Path:
    """Return a copy of the saved pipeline."""
    return Path(shutil.copytree(folder, tmp_path / "trained"))
