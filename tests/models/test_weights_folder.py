"""Weights as the Hugging Face hub's library keeps them: snapshots whose files link to blobs."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from inpaint_bench.core.errors import UserError
from inpaint_bench.models.pipeline_folder import save_pipeline
from inpaint_bench.models.weights_folder import check_hub_id, check_weights_folder, weights_digest, weights_path
from tests.quality.support import listening, loaded, noise

HUB_ID = "stabilityai/stable-diffusion-2-inpainting"
FIRST, SECOND = "a" * 40, "b" * 40


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """`models--OWNER--NAME` with one snapshot, as `hf download` leaves it."""
    save_pipeline(listening(), tmp_path / "saved")
    model = tmp_path / "hub" / f"models--{HUB_ID.replace('/', '--')}"
    (model / "blobs").mkdir(parents=True)
    for number, path in enumerate(sorted(p for p in (tmp_path / "saved").rglob("*") if p.is_file())):
        blob = model / "blobs" / f"{number:064x}"
        path.rename(blob)
        link = model / "snapshots" / FIRST / path.relative_to(tmp_path / "saved")
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(FIRST)
    return model


def check(given: str | Path) -> None:
    check_weights_folder(weights_path(str(given)), str(given))


class TestCache:
    def test_snapshot_and_the_folder_of_its_model_are_loaded(self, model: Path) -> None:
        expected = noise(listening())
        for folder in (model / "snapshots" / FIRST, model):
            check(folder)
            networks = loaded(folder)
            assert noise(networks).allclose(expected, atol=1e-5)
            save_pipeline(networks, model.parent / "again")  # the tokenizer is copied, not linked
            tokenizer = model.parent / "again" / "tokenizer"
            assert not any(path.is_symlink() for path in tokenizer.iterdir())
        assert weights_digest(weights_path(str(model))) == weights_digest(model.parent / "again")

    def test_folder_of_a_model_stands_for_the_snapshot_of_main(self, model: Path) -> None:
        shutil.copytree(model / "snapshots" / FIRST, model / "snapshots" / SECOND, symlinks=True)
        assert weights_path(str(model)) == model / "snapshots" / FIRST
        (model / "refs" / "main").write_text(f"{SECOND}\n")
        assert weights_path(str(model)) == model / "snapshots" / SECOND

    def test_folder_of_a_model_without_main_lists_its_snapshots(self, model: Path) -> None:
        (model / "refs" / "main").unlink()
        with pytest.raises(UserError, match=f"name one yourself: {model}/snapshots/{FIRST}$"):
            check(model)

    def test_snapshot_that_was_copied_without_its_blobs_is_named(self, model: Path) -> None:
        copy = shutil.copytree(model / "snapshots" / FIRST, model.parent / "elsewhere" / "sd", symlinks=True)
        with pytest.raises(UserError, match=r"unet/config.json is a link to .*blobs.*`cp -rL`"):
            check(copy)


class TestId:
    def test_model_in_the_cache_of_this_machine_is_named(self, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HF_HUB_CACHE", str(model.parent))
        with pytest.raises(UserError, match=f"the hub's cache has it: model.weights={model}$"):
            check_hub_id("model.weights", HUB_ID)
        check(model)
