"""Pipeline folders: read by diffusers and by us, replaced only by whole ones, refused where they are not."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import StableDiffusionInpaintPipeline
from PIL import Image

from inpaint_bench.core.errors import UserError
from inpaint_bench.models import pipeline_folder
from inpaint_bench.models.architectures.nhwc_unet import NhwcUNet
from inpaint_bench.models.pipeline_folder import save_pipeline
from inpaint_bench.models.weights_folder import weights_digest
from inpaint_bench.workloads import finetune_inpaint
from tests.quality.support import CENTRE, listening, loaded, noise, tiny
from tests.run.support import bench


def same(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Equal but for rounding: a file's tensors lie elsewhere in memory, and kernels differ by alignment."""
    return torch.allclose(ours, theirs, atol=1e-5)


class TestSavedPipeline:
    def test_is_loaded_and_run_by_diffusers(self, folder: Path) -> None:
        pipeline: Any = StableDiffusionInpaintPipeline.from_pretrained(folder, safety_checker=None)
        pipeline.set_progress_bar_config(disable=True)
        picture, mask = Image.new("RGB", (64, 64), "red"), Image.new("L", (64, 64), 255)
        (restored,) = pipeline("a Café, 12th street", picture, mask, num_inference_steps=2, height=64, width=64).images
        assert restored.size == (64, 64)
        assert pipeline.unet.config.in_channels == 9

    def test_nothing_is_logged_when_written_and_read(self, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
        """Regression: transformers drew bars for a second of work, `Writing model shards`, `Loading weights`."""
        nets = listening()
        capfd.readouterr()
        save_pipeline(nets, tmp_path / "trained")
        loaded(tmp_path / "trained")
        assert capfd.readouterr() == ("", "")

    def test_diffusers_predicts_like_the_closed_gate(self, tmp_path: Path) -> None:
        nets = tiny()
        save_pipeline(nets, tmp_path / "trained")
        pipeline: Any = StableDiffusionInpaintPipeline.from_pretrained(tmp_path / "trained", safety_checker=None)
        nets.location, nets.unet = None, pipeline.unet
        assert same(noise(nets), noise(tiny()))

    def test_loaded_again_predicts_the_same_for_any_requested_centre(self, folder: Path) -> None:
        again = loaded(folder)
        assert again.location is not None
        assert again.location.centre == CENTRE
        assert same(noise(again), noise(listening()))
        assert not same(noise(again, 55.71), noise(again))

    def test_can_be_loaded_without_location_encoder(self, folder: Path) -> None:
        assert loaded(folder, "model.location_tokens=0").location is None

    def test_byte_tokenizer_encodes_any_text(self, folder: Path) -> None:
        ids = loaded(folder).tokenize(["", "Ab", "ab", "Zürich, 東京 🏠", "long " * 100])
        assert ids.shape == (5, 77)
        assert ids[0].tolist() == [998] + [999] * 76
        assert torch.equal(ids[1], ids[2])
        assert len(set(ids[3].tolist())) > 10
        assert 0 <= ids.min() <= ids.max() < 1000

    def test_digest_tells_weights_apart_wherever_they_lie(self, folder: Path, tmp_path: Path) -> None:
        copy = shutil.copytree(folder, tmp_path / "copy")
        assert weights_digest(copy) == weights_digest(folder)
        path = copy / "unet" / "diffusion_pytorch_model.safetensors"
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
        assert weights_digest(copy) != weights_digest(folder)
        assert weights_digest(tmp_path) is None

    def test_tokenizer_of_loaded_weights_is_saved_again(self, folder: Path, tmp_path: Path) -> None:
        save_pipeline(loaded(folder), tmp_path / "again")
        for name in ("vocab.json", "merges.txt"):
            assert (tmp_path / "again/tokenizer" / name).read_bytes() == (folder / "tokenizer" / name).read_bytes()

    def test_holds_no_pickles(self, folder: Path) -> None:
        files = [path for path in folder.rglob("*") if path.is_file()]
        assert {path.suffix for path in files} == {".json", ".txt", ".safetensors"}

    def test_any_memory_layout_can_be_saved(self, tmp_path: Path) -> None:
        nets = tiny()
        nets.unet.to(memory_format=torch.channels_last)
        save_pipeline(nets, tmp_path / "trained")
        assert same(noise(loaded(tmp_path / "trained")), noise(tiny()))

    def test_replaces_an_older_pipeline_without_leftovers(self, saved_copy: Path) -> None:
        save_pipeline(tiny(seed=5), saved_copy)
        assert same(noise(loaded(saved_copy)), noise(tiny(seed=5)))
        assert [path.name for path in saved_copy.parent.iterdir()] == ["trained"]

    def test_failed_save_leaves_the_older_pipeline(self, saved_copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(pipeline_folder, "save_file", full)
        with pytest.raises(UserError, match=r"trained: cannot be written .*No space left"):
            save_pipeline(tiny(seed=5), saved_copy)
        assert same(noise(loaded(saved_copy)), noise(listening()))
        assert [path.name for path in saved_copy.parent.iterdir()] == ["trained"]

    def test_folder_that_is_no_pipeline_is_not_replaced(self, tmp_path: Path) -> None:
        (tmp_path / "thesis.tex").write_text("years of work")
        with pytest.raises(UserError, match=r"holds no model_index\.json; it is not replaced"):
            save_pipeline(tiny(), tmp_path)
        assert (tmp_path / "thesis.tex").read_text() == "years of work"

    def test_too_small_vocabulary_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="vocab_size=400: saving a pipeline needs at least 514 ids"):
            save_pipeline(tiny("model.text_encoder.vocab_size=400"), tmp_path / "trained")


class TestTrainedChannelsLast:
    """The UNet of `tuned`, by its reference: what a training leaves is an ordinary pipeline of diffusers."""

    @pytest.mark.parametrize("weights", ["fp32", "bf16_split"])
    def test_is_loaded_by_diffusers(self, tmp_path: Path, weights: str) -> None:
        recipe = ["recipe=[cpu,unet_nhwc]", f"recipe.weights={weights}", "workload.learning_rate=1e-3"]
        config = bench(*recipe, "workload.train_steps=4", "workload.save_weights=true")
        workload = finetune_inpaint.build(config, torch.device("cpu"))
        ours = workload.components.networks.unet
        assert isinstance(ours, NhwcUNet)
        initial = {name: value.float().clone() for name, value in ours.unpack().items()}
        for _ in range(4):
            workload.step(workload.next_batch())
        folder = tmp_path / workload.finish(tmp_path)["weights"]
        workload.close()

        pipeline: Any = StableDiffusionInpaintPipeline.from_pretrained(folder, safety_checker=None)
        saved = pipeline.unet.state_dict()
        trained = {name: value.float() for name, value in ours.unpack().items()}
        assert saved.keys() == trained.keys()
        assert all(torch.equal(saved[name].float(), trained[name]) for name in saved)
        moved = [name for name in trained if not torch.equal(trained[name], initial[name])]
        assert len(moved) > len(trained) / 2, "the training changed the weights"
