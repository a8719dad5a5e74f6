"""`restore`: from a saved pipeline and a folder of images to repainted ones, and every way it says no."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from inpaint_bench.cli import app
from inpaint_bench.models.pipeline_folder import save_pipeline
from tests.run.support import photo

from .support import listening, tiny


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "trained"
    save_pipeline(listening(), path)
    return path


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Three pictures, the last without a position."""
    folder = tmp_path / "photographs"
    (folder / "street").mkdir(parents=True)
    photo(folder / "a.jpg", position=(55.698, 13.195))
    photo(folder / "street/b.png", position=(55.71, 13.21))
    photo(folder / "c.jpg", position=None)
    return folder


def restore(weights: Path, images: Path, out: Path, *options: str) -> int:
    return app.main(["restore", str(weights), str(images), "-o", str(out), "--steps", "2", *options])


def account(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "restore.json").read_text())
    return found


def pixels(path: Path) -> np.ndarray[Any, Any]:
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"))


class TestAFolderOfImages:
    def test_is_restored_with_a_grid_and_an_account(
        self, weights: Path, images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        out = tmp_path / "out"
        assert restore(weights, images, out) == 0
        said = account(out)
        assert [one["output"] for one in said["restored"]] == ["images/a.png", "images/c.png", "images/street/b.png"]
        assert (said["steps"], said["seed"], said["location_tokens"], said["resolution_px"]) == (2, 0, 4, 64)
        assert all(pixels(out / one["output"]).shape == (64, 64, 3) for one in said["restored"])
        assert (out / "grid.png").is_file()
        assert said["restored"][0]["position"] == pytest.approx([55.698, 13.195])
        assert "images: 3 restored, 0 skipped\npositions: 2 known, 1 not known" in capsys.readouterr().out

    def test_of_another_city_is_one_of_unknown_position(self, weights: Path, tmp_path: Path) -> None:
        folder = tmp_path / "elsewhere"
        folder.mkdir()
        photo(folder / "far.jpg", position=(30.625, -96.25))
        assert restore(weights, folder, tmp_path / "out") == 0
        (one,) = account(tmp_path / "out")["restored"]
        assert one["position"] is None
        assert "km from the ground that the weights were trained on" in one["position_from"]

    def test_says_of_each_image_whether_its_position_was_known(
        self, weights: Path, images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (images / "metadata.csv").write_text("file_name,latitude,longitude\nc.jpg,55.72,13.22\na.jpg,here,13.2\n")
        assert restore(weights, images, tmp_path / "out") == 0
        first, third, second = account(tmp_path / "out")["restored"]
        assert (second["position_from"], third["position_from"]) == ("EXIF", "metadata")
        assert first["position"] is None
        assert first["position_from"] == "latitude='here' is not a number"
        assert first["note"] == "restored as of unknown position"
        assert "a.jpg: restored as of unknown position" in capsys.readouterr().err

    def test_gives_the_same_pictures_again_whatever_else_is_in_the_folder(
        self, weights: Path, images: Path, tmp_path: Path
    ) -> None:
        assert restore(weights, images, tmp_path / "first", "--mask-kind", "disaster") == 0
        (images / "c.jpg").unlink()
        assert restore(weights, images, tmp_path / "second", "--mask-kind", "disaster") == 0
        assert restore(weights, images, tmp_path / "third", "--mask-kind", "disaster", "--seed", "1") == 0
        first, second, third = (
            pixels(tmp_path / out / "images/street/b.png").astype(int) for out in ("first", "second", "third")
        )
        assert np.abs(first - second).max() <= 1
        assert np.abs(first - third).max() > 20

    def test_is_repainted_where_it_is_elsewhere_only_in_the_hole(
        self, weights: Path, images: Path, tmp_path: Path
    ) -> None:
        masks = tmp_path / "masks"
        (masks / "street").mkdir(parents=True)
        white = np.zeros((40, 60), np.uint8)
        white[:, 30:] = 255
        for name in ("a.png", "c.jpg", "street/b.png"):
            Image.fromarray(white).save(masks / name)
        assert restore(weights, images, tmp_path / "out", "--masks", str(masks)) == 0
        (images / "metadata.csv").write_text("file_name,latitude,longitude\na.jpg,55.9,13.9\n")
        assert restore(weights, images, tmp_path / "moved", "--masks", str(masks)) == 0
        here, there = (pixels(tmp_path / out / "images/a.png") for out in ("out", "moved"))
        assert np.array_equal(here[:, :28], there[:, :28])
        assert not np.array_equal(here[:, 36:], there[:, 36:]), "the position reaches the picture"
        assert account(tmp_path / "out")["restored"][0]["mask_from"] == str(masks / "a.png")
        assert account(tmp_path / "out")["restored"][0]["mask_share"] == pytest.approx(0.5, abs=0.02)

    def test_loses_only_the_images_that_cannot_be_used_each_with_its_reason(
        self, weights: Path, images: Path, tmp_path: Path
    ) -> None:
        masks = tmp_path / "masks"
        masks.mkdir()
        for name, size, colour in (("a", (60, 40), 255), ("black", (60, 40), 0), ("tall", (40, 60), 255)):
            Image.new("L", size, colour).save(masks / f"{name}.png")
            photo(images / f"{name}.jpg")
        (images / "words.png").write_text("this is no image")
        assert restore(weights, images, tmp_path / "out", "--masks", str(masks)) == 0
        said = account(tmp_path / "out")
        assert [one["file"] for one in said["restored"]] == ["a.jpg"]
        reasons = {one["file"]: one["reason"] for one in said["skipped"]}
        assert reasons["words.png"] == "not an image that can be read"
        assert reasons["black.jpg"] == "its mask repaints nothing"
        assert "40 x 60" in reasons["tall.jpg"]
        assert reasons["c.jpg"] == f"no mask {masks / 'c.jpg'}"

    def test_replaces_an_earlier_result_and_nothing_else(
        self, weights: Path, images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        out = tmp_path / "out"
        assert restore(weights, images, out) == 0
        (images / "c.jpg").unlink()
        assert restore(weights, images, out) == 0
        assert not (out / "images/c.png").exists()
        (tmp_path / "thesis").mkdir()
        (tmp_path / "thesis/thesis.tex").touch()
        assert restore(weights, images, tmp_path / "thesis") == 2
        assert "holds no restore.json; it is not replaced" in capsys.readouterr().err

    def test_named_by_a_symlink_is_replaced_where_it_lies_and_the_link_stays(
        self, weights: Path, images: Path, tmp_path: Path
    ) -> None:
        out = tmp_path / "out"
        out.symlink_to(tmp_path / "elsewhere")
        for _ in range(2):
            assert restore(weights, images, out) == 0
        assert out.is_symlink()
        assert {path.name for path in tmp_path.iterdir()} == {"photographs", "out", "elsewhere"}
        assert account(tmp_path / "elsewhere")["restored"]

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    def test_that_a_signal_ends_leaves_nothing(
        self,
        weights: Path,
        images: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        number: signal.Signals,
    ) -> None:
        monkeypatch.setattr("inpaint_bench.quality.sampling.restore", lambda *_: signal.raise_signal(number))
        assert restore(weights, images, tmp_path / "out") == 128 + number
        assert capsys.readouterr().err == f"Stopped by {number.name}. No partial output is left.\n"
        assert [path.name for path in tmp_path.iterdir()] == ["photographs"]

    def test_skips_names_and_texts_that_are_no_unicode_and_symlinks_to_nothing(
        self, weights: Path, images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        photo(tmp_path / "other.jpg").rename(images / os.fsdecode(b"caf\xe9.jpg"))
        (images / "lost.jpg").symlink_to(tmp_path / "gone.jpg")
        rows = {"file_name": "a.jpg", "text": "half of a pair: \ud83d"}, {"file_name": "c.jpg", "mask": "street/b.png"}
        lines = [json.dumps(row) for row in (*rows, {"file_name": "street/b.png"})]
        (images / "metadata.jsonl").write_text("\n".join(lines))
        assert restore(weights, images, tmp_path / "out") == 0
        said = account(tmp_path / "out")
        assert [one["file"] for one in said["restored"]] == ["c.jpg"]
        assert {one["file"]: one["reason"] for one in said["skipped"]} == {
            "a.jpg": "its name, its text or its mask's name is not valid Unicode",
            "caf\\udce9.jpg": "its name, its text or its mask's name is not valid Unicode",
            "lost.jpg": "cannot be read: No such file or directory",
            "street/b.png": "also named as a mask in the metadata file, so it is not used as an image",
        }

    def test_of_two_endings_gives_two_results(self, weights: Path, tmp_path: Path) -> None:
        (tmp_path / "photographs").mkdir()
        for name in ("a.jpg", "a.png"):
            photo(tmp_path / "photographs" / name)
        assert restore(weights, tmp_path / "photographs", tmp_path / "out") == 0
        outputs = [one["output"] for one in account(tmp_path / "out")["restored"]]
        assert outputs == ["images/a.png", "images/a.png.png"]

    def test_is_restored_without_positions_where_the_weights_know_none(
        self, images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        save_pipeline(tiny("model.location_tokens=0"), tmp_path / "plain")
        assert restore(tmp_path / "plain", images, tmp_path / "out") == 0
        assert "the weights have no location encoder" in capsys.readouterr().out


class TestAMistake:
    def refused(
        self, capsys: pytest.CaptureFixture[str], sentence: str, weights: Path, images: Path, out: Path, *options: str
    ) -> None:
        capsys.readouterr()
        assert restore(weights, images, out, *options) == 2
        (line,) = [one for one in capsys.readouterr().err.splitlines() if one.startswith("error")]
        assert sentence in line
        assert not (out / "restore.json").exists()
        assert not list(out.parent.glob(".*")), "nothing half written"

    def test_in_folders_is_named(
        self, weights: Path, images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        out, empty = tmp_path / "out", tmp_path / "empty"
        empty.mkdir()
        self.refused(capsys, "none: no such folder", tmp_path / "none", images, out)
        self.refused(capsys, "not a diffusers folder", empty, images, out)
        self.refused(capsys, "none: no such folder", weights, tmp_path / "none", out)
        self.refused(capsys, "no image in it (.jpg", weights, empty, out)
        self.refused(capsys, "none: no such folder", weights, images, out, "--masks", str(tmp_path / "none"))
        self.refused(capsys, "lies in the folder of images", weights, images, images / "restored")
        (empty / "words.png").write_text("this is no image")
        self.refused(capsys, "none of 1 images can be used: not an image that can be read", weights, empty, out)

    def test_of_a_mount_point_for_the_results_is_named_before_the_work(
        self,
        weights: Path,
        images: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        out = tmp_path / "disk"
        out.mkdir()
        monkeypatch.setattr(Path, "is_mount", lambda path: path == out)
        self.refused(capsys, "disk: a mount point cannot be replaced", weights, images, out)

    @pytest.mark.parametrize("size", [None, [8, 8]])
    def test_of_weights_whose_side_is_not_one_number_is_named(
        self, images: Path, tmp_path: Path, size: Any, capsys: pytest.CaptureFixture[str]
    ) -> None:
        save_pipeline(tiny(), tmp_path / "sideless")
        config = tmp_path / "sideless/unet/config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), "sample_size": size}))
        sentence = f"sideless: unet.sample_size is {size}, one number of latents is needed"
        self.refused(capsys, sentence, tmp_path / "sideless", images, tmp_path / "out")

    def test_in_numbers_is_named(
        self, weights: Path, images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.refused(
            capsys, "--steps 0: must lie between 1 and 1000", weights, images, tmp_path / "out", "--steps", "0"
        )
        self.refused(capsys, "--seed -1: must not be negative", weights, images, tmp_path / "out", "--seed", "-1")

    def test_of_the_machine_is_named(
        self, weights: Path, images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        if torch.cuda.is_available():
            pytest.skip("this machine has CUDA")
        self.refused(capsys, "no CUDA device here", weights, images, tmp_path / "out", "--device", "cuda")
