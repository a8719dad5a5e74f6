"""`restore`: from saved weights and a folder of images to repainted ones, and its usage errors."""

from __future__ import annotations

import json
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from inpaint_bench.cli import app
from inpaint_bench.models.pipeline_folder import save_pipeline
from tests.quality.support import listening, tiny
from tests.run.support import photo


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a saved pipeline whose result depends on the position."""
    path = tmp_path_factory.mktemp("weights") / "trained"
    save_pipeline(listening(), path)
    return path


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Return a folder of three images, the last without a position."""
    folder = tmp_path / "photographs"
    (folder / "street").mkdir(parents=True)
    photo(folder / "a.jpg", position=(55.698, 13.195))
    photo(folder / "street/b.png", position=(55.71, 13.21))
    photo(folder / "c.jpg", position=None)
    return folder


@dataclass
class Restoring:
    """The command with two steps, over these weights and images unless others are given."""

    weights: Path
    images: Path
    out: Path
    capsys: pytest.CaptureFixture[str]

    def __call__(self, *options: str, **paths: Path) -> int:
        weights, images, out = (str(paths.get(name, getattr(self, name))) for name in ("weights", "images", "out"))
        return app.main(["restore", weights, images, "-o", out, "--steps", "2", *options])

    def refuses(self, sentence: str, *options: str, **paths: Path) -> None:
        self.capsys.readouterr()
        assert self(*options, **paths) == 2
        (line,) = [line for line in self.capsys.readouterr().err.splitlines() if line.startswith("error")]
        assert sentence in line
        out = paths.get("out", self.out)
        assert not (out / "restore.json").exists()
        assert not list(out.parent.glob(".*")), "partial output is left"


@pytest.fixture
def restore(weights: Path, images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Restoring:
    return Restoring(weights, images, tmp_path / "out", capsys)


def report_of(out: Path) -> dict[str, Any]:
    """Return the content of restore.json."""
    report: dict[str, Any] = json.loads((out / "restore.json").read_text())
    return report


def pixels(path: Path) -> np.ndarray[Any, Any]:
    """Return an image file as RGB."""
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"))


class TestRestore:
    def test_folder_is_restored_with_a_grid_and_a_report(self, restore: Restoring) -> None:
        assert restore() == 0
        report = report_of(restore.out)
        assert [image["output"] for image in report["restored"]] == [
            "images/a.png",
            "images/c.png",
            "images/street/b.png",
        ]
        assert (report["steps"], report["seed"], report["location_tokens"], report["resolution_px"]) == (2, 0, 4, 64)
        assert all(pixels(restore.out / image["output"]).shape == (64, 64, 3) for image in report["restored"])
        assert (restore.out / "grid.png").is_file()
        assert report["restored"][0]["position"] == pytest.approx([55.698, 13.195])
        assert "images: 3 restored, 0 skipped\npositions: 2 known, 1 unknown" in restore.capsys.readouterr().out

    def test_position_in_another_city_counts_as_unknown(self, restore: Restoring, tmp_path: Path) -> None:
        folder = tmp_path / "elsewhere"
        folder.mkdir()
        photo(folder / "far.jpg", position=(30.625, -96.25))
        assert restore(images=folder) == 0
        (image,) = report_of(restore.out)["restored"]
        assert image["position"] is None
        assert "km from the area that the weights were trained on" in image["position_from"]

    def test_report_has_the_source_of_every_position(self, restore: Restoring, images: Path) -> None:
        (images / "metadata.csv").write_text("file_name,latitude,longitude\nc.jpg,55.72,13.22\na.jpg,here,13.2\n")
        assert restore() == 0
        first, third, second = report_of(restore.out)["restored"]
        assert (second["position_from"], third["position_from"]) == ("EXIF", "metadata")
        assert first["position"] is None
        assert first["position_from"] == "latitude='here' is not a number"
        assert first["note"] == "restored with the tokens for an unknown position"
        assert "a.jpg: restored with unknown position" in restore.capsys.readouterr().err

    def test_captions_and_tables_are_read_as_prepare_reads_them(self, restore: Restoring, images: Path) -> None:
        (images / "a.txt").write_bytes("\na brick house\n".encode("utf-16"))
        (images / "c.caption").write_text("a wooden house")
        (images / "street/metadata.csv").write_text("file_name,text\nb.png,a house\n")
        photo(images / "d.jpg", size=(200, 200))
        content = (images / "d.jpg").read_bytes()
        (images / "d.jpg").write_bytes(content[: len(content) // 2] + b"\xff\xd9")
        Image.new("RGB", (60, 40)).save(images / "e.png", icc_profile=b"no profile")
        assert restore() == 0
        report = report_of(restore.out)
        assert {image["file"]: image["text"] for image in report["restored"]} == {
            "a.jpg": "a brick house",
            "c.jpg": "a wooden house",
            "e.png": "",
            "street/b.png": "",
        }
        assert {image["file"]: image["reason"][:33] for image in report["skipped"]} == {
            "d.jpg": "damaged image: its data ends early"[:33],
            "street/metadata.csv": "perhaps the metadata file, which ",
        }
        assert "has a colour profile that cannot be used" in report["restored"][2]["note"]

    def test_result_does_not_depend_on_the_other_images(self, restore: Restoring, images: Path, tmp_path: Path) -> None:
        assert restore("--mask-kind", "disaster", out=tmp_path / "first") == 0
        (images / "c.jpg").unlink()
        assert restore("--mask-kind", "disaster", out=tmp_path / "second") == 0
        assert restore("--mask-kind", "disaster", "--seed", "1", out=tmp_path / "third") == 0
        first, second, third = (
            pixels(tmp_path / out / "images/street/b.png").astype(int) for out in ("first", "second", "third")
        )
        assert np.abs(first - second).max() <= 1
        assert np.abs(first - third).max() > 20

    def test_position_changes_the_image_only_under_the_mask(
        self, restore: Restoring, images: Path, tmp_path: Path
    ) -> None:
        masks = tmp_path / "masks"
        (masks / "street").mkdir(parents=True)
        white = np.zeros((40, 60), np.uint8)
        white[:, 30:] = 255
        for name in ("a.png", "c.jpg", "street/b.png"):
            Image.fromarray(white).save(masks / name)
        assert restore("--masks", str(masks)) == 0
        (images / "metadata.csv").write_text("file_name,latitude,longitude\na.jpg,55.9,13.9\n")
        assert restore("--masks", str(masks), out=tmp_path / "moved") == 0
        first, moved = (pixels(tmp_path / out / "images/a.png") for out in ("out", "moved"))
        assert np.array_equal(first[:, :28], moved[:, :28])
        assert not np.array_equal(first[:, 36:], moved[:, 36:]), "the position has no effect"
        assert report_of(restore.out)["restored"][0]["mask_from"] == str(masks / "a.png")
        assert report_of(restore.out)["restored"][0]["mask_share"] == pytest.approx(0.5, abs=0.02)

    def test_unusable_images_are_skipped_with_the_reason(
        self, restore: Restoring, images: Path, tmp_path: Path
    ) -> None:
        masks = tmp_path / "masks"
        masks.mkdir()
        for name, size, colour in (("a", (60, 40), 255), ("black", (60, 40), 0), ("tall", (40, 60), 255)):
            Image.new("L", size, colour).save(masks / f"{name}.png")
            photo(images / f"{name}.jpg")
        (images / "words.png").write_text("this is no image")
        assert restore("--masks", str(masks)) == 0
        report = report_of(restore.out)
        assert [image["file"] for image in report["restored"]] == ["a.jpg"]
        reasons = {image["file"]: image["reason"] for image in report["skipped"]}
        assert reasons["words.png"] == "not an image that can be read"
        assert reasons["black.jpg"] == "its mask repaints nothing"
        assert "40 x 60" in reasons["tall.jpg"]
        assert reasons["c.jpg"] == f"no mask {masks / 'c.jpg'}"

    def test_earlier_results_are_replaced_and_other_folders_refused(
        self, restore: Restoring, images: Path, tmp_path: Path
    ) -> None:
        assert restore() == 0
        (images / "c.jpg").unlink()
        assert restore() == 0
        assert not (restore.out / "images/c.png").exists()
        (tmp_path / "thesis").mkdir()
        (tmp_path / "thesis/thesis.tex").touch()
        restore.refuses("holds no restore.json; it is not replaced", out=tmp_path / "thesis")

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    def test_signal_leaves_nothing_behind(
        self, restore: Restoring, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
    ) -> None:
        monkeypatch.setattr("inpaint_bench.workloads.restore.restore", lambda *_: signal.raise_signal(number))
        assert restore() == 128 + number
        assert restore.capsys.readouterr().err == f"Stopped by {number.name}. No partial output is left.\n"
        assert [path.name for path in tmp_path.iterdir()] == ["photographs"]

    def test_images_that_differ_in_the_suffix_give_two_results(self, restore: Restoring, tmp_path: Path) -> None:
        (tmp_path / "both").mkdir()
        for name in ("a.jpg", "a.png"):
            photo(tmp_path / "both" / name)
        assert restore(images=tmp_path / "both") == 0
        outputs = [image["output"] for image in report_of(restore.out)["restored"]]
        assert outputs == ["images/a.png", "images/a.png.png"]

    def test_weights_without_location_encoder_ignore_positions(self, restore: Restoring, tmp_path: Path) -> None:
        save_pipeline(tiny("model.location_tokens=0"), tmp_path / "plain")
        assert restore(weights=tmp_path / "plain") == 0
        assert "the weights have no location encoder" in restore.capsys.readouterr().out


class TestUsageErrors:
    def test_wrong_folder_is_reported(self, restore: Restoring, weights: Path, images: Path, tmp_path: Path) -> None:
        none, empty = tmp_path / "none", tmp_path / "empty"
        empty.mkdir()
        restore.refuses("none: no such folder", weights=none)
        restore.refuses("not a diffusers folder", weights=empty)
        file = weights / "unet/diffusion_pytorch_model.safetensors"
        restore.refuses("is a file, and a diffusers folder is needed", weights=file)
        restore.refuses("none: no such folder", images=none)
        restore.refuses("no image in it (.jpg", images=empty)
        restore.refuses("none: no such folder", "--masks", str(none))
        restore.refuses("lies in the folder of images", out=images / "restored")
        (empty / "words.png").write_text("this is no image")
        restore.refuses("none of 1 images can be used: not an image that can be read", images=empty)

    @pytest.mark.parametrize("size", [None, [8, 8], 0, -8, True, 100_000])
    def test_weights_with_an_unusable_sample_size_are_refused(
        self, restore: Restoring, tmp_path: Path, size: Any
    ) -> None:
        save_pipeline(tiny(), tmp_path / "sideless")
        config = tmp_path / "sideless/unet/config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), "sample_size": size}))
        sentence = f"sideless: unet.sample_size is {size}, must be one number"
        restore.refuses(sentence, weights=tmp_path / "sideless")

    def test_number_out_of_range_is_reported(self, restore: Restoring) -> None:
        for steps in ("1000", "1001"):
            restore.refuses(f"--steps {steps}: must lie between 1 and 999", "--steps", steps)
        for option, number, least in (("--steps", "0", 1), ("--seed", "-1", 0)):
            sentence = f"{option} {number}: must be at least {least}"
            restore.refuses(sentence, option, number)

    def test_number_of_steps_that_the_schedule_does_not_have_is_reported(
        self, restore: Restoring, tmp_path: Path
    ) -> None:
        save_pipeline(tiny(), tmp_path / "trailing")
        config = tmp_path / "trailing/scheduler/scheduler_config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), "timestep_spacing": "trailing"}))
        sentence = "499 steps of ddim do not fit a schedule of 1000; choose another number"
        restore.refuses(sentence, "--steps", "499", weights=tmp_path / "trailing")

    def test_networks_that_are_not_finite_give_no_images(
        self, restore: Restoring, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        networks = tiny()
        with torch.no_grad():
            networks.unet.conv_out.bias[0] = torch.nan
        save_pipeline(networks, tmp_path / "spoilt")
        sentence = "spoilt: unet: conv_out.bias in diffusion_pytorch_model.safetensors has values that are NaN"
        restore.refuses(sentence, weights=tmp_path / "spoilt")
        # As large weights overflow in half precision.
        monkeypatch.setattr("inpaint_bench.models.pipeline_folder.check_network", lambda *_: None)
        sentence = "spoilt: the networks make pixels that are NaN or infinite"
        restore.refuses(sentence, weights=tmp_path / "spoilt")

    def test_missing_cuda_device_is_reported(self, restore: Restoring) -> None:
        if torch.cuda.is_available():
            pytest.skip("this machine has CUDA")
        restore.refuses("no CUDA device here", "--device", "cuda")
