"""Pipeline folders: read by diffusers and by us, replaced only by whole ones, refused where they are not."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL, DDPMScheduler, StableDiffusionInpaintPipeline, UNet2DConditionModel
from diffusers.utils import logging as diffusers_logging
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers.utils import logging as transformers_logging

from inpaint_bench.core.errors import UserError
from inpaint_bench.models import pipeline_folder
from inpaint_bench.models.location import LocationEncoder
from inpaint_bench.models.pipeline_folder import save_pipeline
from tests.quality.support import CENTRE, listening, loaded, noise, tiny
from tests.run.support import bench


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline saved from random weights; not to be changed."""
    path = tmp_path_factory.mktemp("weights") / "trained"
    save_pipeline(listening(), path)
    return path


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """A saved pipeline to damage."""
    save_pipeline(listening(), tmp_path / "trained")
    return tmp_path / "trained"


def same(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Equal but for rounding: a file's tensors lie elsewhere in memory, and kernels differ by alignment."""
    return torch.allclose(ours, theirs, atol=1e-5)


class TestASavedPipeline:
    def test_is_loaded_and_run_by_diffusers(self, folder: Path) -> None:
        pipeline: Any = StableDiffusionInpaintPipeline.from_pretrained(folder, safety_checker=None)
        pipeline.set_progress_bar_config(disable=True)
        picture, mask = Image.new("RGB", (64, 64), "red"), Image.new("L", (64, 64), 255)
        (restored,) = pipeline("a Café, 12th street", picture, mask, num_inference_steps=2, height=64, width=64).images
        assert restored.size == (64, 64)
        assert pipeline.unet.config.in_channels == 9

    def test_is_written_and_read_without_a_word_in_the_log(
        self, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        """Regression: transformers drew bars for a second of work, `Writing model shards`, `Loading weights`."""
        nets = listening()
        shown = transformers_logging.is_progress_bar_enabled(), diffusers_logging.is_progress_bar_enabled()
        capfd.readouterr()
        save_pipeline(nets, tmp_path / "trained")
        loaded(tmp_path / "trained")
        assert capfd.readouterr() == ("", "")
        assert (transformers_logging.is_progress_bar_enabled(), diffusers_logging.is_progress_bar_enabled()) == shown

    def test_predicts_without_positions_in_diffusers_what_it_did_with_the_gate_at_zero(self, tmp_path: Path) -> None:
        nets = tiny()
        save_pipeline(nets, tmp_path / "trained")
        pipeline: Any = StableDiffusionInpaintPipeline.from_pretrained(tmp_path / "trained", safety_checker=None)
        nets.location, nets.unet = None, pipeline.unet
        assert same(noise(nets), noise(tiny()))

    def test_predicts_the_same_when_loaded_again_wherever_it_is_told_the_centre_is(self, folder: Path) -> None:
        again = loaded(folder)
        assert again.location is not None
        assert again.location.centre == CENTRE
        assert same(noise(again), noise(listening()))
        assert not same(noise(again, 55.71), noise(again))

    def test_can_be_trained_on_without_positions(self, folder: Path) -> None:
        assert loaded(folder, "model.location_tokens=0").location is None

    def test_has_a_tokenizer_for_any_text_within_the_vocabulary(self, folder: Path) -> None:
        ids = loaded(folder).tokenize(["", "Ab", "ab", "Zürich, 東京 🏠", "long " * 100])
        assert ids.shape == (5, 77)
        assert ids[0].tolist() == [998] + [999] * 76
        assert torch.equal(ids[1], ids[2])
        assert len(set(ids[3].tolist())) > 10
        assert 0 <= ids.min() <= ids.max() < 1000

    def test_is_saved_again_with_the_tokenizer_it_came_with(self, folder: Path, tmp_path: Path) -> None:
        save_pipeline(loaded(folder), tmp_path / "again")
        for name in ("vocab.json", "merges.txt"):
            assert (tmp_path / "again/tokenizer" / name).read_bytes() == (folder / "tokenizer" / name).read_bytes()

    def test_holds_no_pickles(self, folder: Path) -> None:
        files = [path for path in folder.rglob("*") if path.is_file()]
        assert {path.suffix for path in files} == {".json", ".txt", ".safetensors"}

    def test_is_saved_from_any_memory_layout(self, tmp_path: Path) -> None:
        nets = tiny()
        nets.unet.to(memory_format=torch.channels_last)
        save_pipeline(nets, tmp_path / "trained")
        assert same(noise(loaded(tmp_path / "trained")), noise(tiny()))

    def test_replaces_an_older_one_and_leaves_nothing_beside_it(self, mine: Path) -> None:
        save_pipeline(tiny(seed=5), mine)
        assert same(noise(loaded(mine)), noise(tiny(seed=5)))
        assert [path.name for path in mine.parent.iterdir()] == ["trained"]

    def test_that_fails_half_way_leaves_the_older_one(self, mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(pipeline_folder, "save_file", full)
        with pytest.raises(UserError, match=r"trained: cannot be written .*No space left"):
            save_pipeline(tiny(seed=5), mine)
        assert same(noise(loaded(mine)), noise(listening()))
        assert [path.name for path in mine.parent.iterdir()] == ["trained"]

    def test_never_replaces_what_is_no_pipeline(self, tmp_path: Path) -> None:
        (tmp_path / "thesis.tex").write_text("years of work")
        with pytest.raises(UserError, match=r"holds no model_index\.json; it is not replaced"):
            save_pipeline(tiny(), tmp_path)
        assert (tmp_path / "thesis.tex").read_text() == "years of work"

    def test_needs_a_vocabulary_with_a_place_for_every_byte(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="vocab_size=400: saving a pipeline needs at least 514 ids"):
            save_pipeline(tiny("model.text_encoder.vocab_size=400"), tmp_path / "trained")


class TestADamagedFolder:
    def refused(self, folder: Path, sentence: str, *overrides: str) -> None:
        with pytest.raises(UserError, match=sentence) as error:
            loaded(folder, *overrides)
        assert "\n" not in str(error.value)

    @pytest.mark.parametrize("part", ["unet", "vae", "text_encoder", "location"])
    def test_with_truncated_weights_names_the_part(self, mine: Path, part: str) -> None:
        (file,) = (mine / part).glob("*.safetensors")
        file.write_bytes(file.read_bytes()[:-1000])
        self.refused(mine, f"{part} cannot be loaded")

    @pytest.mark.parametrize("part", ["unet", "vae", "text_encoder"])
    def test_with_a_tensor_missing_is_not_filled_with_random_numbers(self, mine: Path, part: str) -> None:
        (file,) = (mine / part).glob("*.safetensors")
        tensors = load_file(file)
        dropped = sorted(tensors)[0]
        save_file({name: tensor for name, tensor in tensors.items() if name != dropped}, file, {"format": "pt"})
        self.refused(mine, f"{part} is incomplete, 1 of its tensors are missing")

    @pytest.mark.parametrize("part", ["unet", "vae", "text_encoder"])
    def test_with_pickled_weights_only_is_refused_unread(self, mine: Path, part: str) -> None:
        (file,) = (mine / part).glob("*.safetensors")
        file.rename(file.with_suffix(".bin"))
        self.refused(mine, f"{part} holds pickled weights only")

    @pytest.mark.parametrize("part", ["unet", "vae", "text_encoder", "scheduler"])
    def test_with_a_description_that_is_no_json_names_the_part(self, mine: Path, part: str) -> None:
        (file,) = (path for path in (mine / part).glob("*config.json") if "generation" not in path.name)
        file.write_text("{")
        self.refused(mine, f"{part} cannot be loaded")

    def test_with_a_broken_tokenizer_says_so(self, mine: Path) -> None:
        (mine / "tokenizer/vocab.json").write_text("[]")
        self.refused(mine, "the tokenizer cannot be loaded")

    def test_with_another_models_tokenizer_says_so(self, mine: Path) -> None:
        file = mine / "tokenizer/vocab.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "<|endoftext|>": 49407}))
        self.refused(mine, "the tokenizer ends a text with id 49407, the text encoder has 1000 ids")

    def test_without_a_part_names_it(self, mine: Path) -> None:
        (mine / "vae").rename(mine / "other")
        self.refused(mine, "not a diffusers folder, vae missing")

    def test_with_another_number_of_location_tokens_says_which_to_set(self, mine: Path) -> None:
        self.refused(mine, r"has tokens 4, not 6; set model\.location_tokens", "model.location_tokens=6")

    def test_with_location_features_of_another_make_is_refused(self, mine: Path) -> None:
        file = mine / "location/config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "shortest_m": 20.0}))
        self.refused(mine, r"location encoder has shortest_m 20\.0, not 10\.0")
        file.write_text('{"tokens": 4}')
        self.refused(mine, r"config\.json: .*missing required field `width`")
        file.write_text("[]")
        self.refused(mine, r"config\.json: Expected `object`, got `array`")


class TestAnotherModel:
    """A folder that is whole, and not SD 1.5 inpainting."""

    @pytest.mark.parametrize(
        ("part", "changes", "sentence"),
        [
            ("vae", {"latent_channels": 16}, "vae.latent_channels is 16, SD 1.5 inpainting needs 4"),
            ("unet", {"in_channels": 5}, "unet.in_channels is 5, SD 1.5 inpainting needs 9"),
            ("unet", {"out_channels": 8}, "unet.out_channels is 8, SD 1.5 inpainting needs 4"),
            ("unet", {"cross_attention_dim": 48}, "unet.cross_attention_dim is 48, SD 1.5 inpainting needs 32"),
            ("unet", {"num_class_embeds": 10}, "unet.num_class_embeds is 10, SD 1.5 inpainting needs none"),
            (
                "unet",
                {
                    "addition_embed_type": "text_time",
                    "addition_time_embed_dim": 8,
                    "projection_class_embeddings_input_dim": 64,
                },
                "unet.addition_embed_type is text_time, SD 1.5 inpainting needs none",
            ),
            ("scheduler", {"prediction_type": "v_prediction"}, "scheduler.prediction_type is v_prediction, SD 1.5"),
        ],
        ids=lambda value: "",
    )
    def test_is_told_by_what_was_found_and_what_is_needed(
        self, mine: Path, part: str, changes: dict[str, Any], sentence: str
    ) -> None:
        model = bench().model
        kinds = {"unet": UNet2DConditionModel, "vae": AutoencoderKL, "scheduler": DDPMScheduler}
        kinds[part](**{**getattr(model, part), **changes}).save_pretrained(mine / part)
        with pytest.raises(UserError, match=re.escape(sentence)) as error:
            loaded(mine)
        assert "\n" not in str(error.value)


class TestTheLocationEncoder:
    """A city of 10 km around the centre; metres by the sphere's radius, as the encoder counts them."""

    def features(self, east_m: torch.Tensor, north_m: torch.Tensor) -> torch.Tensor:
        encoder = LocationEncoder(4, 32, CENTRE)
        degree = 111_195.08
        turn = degree * torch.tensor(CENTRE[0]).deg2rad().cos()
        return encoder.features(CENTRE[0] + north_m / degree, CENTRE[1] + east_m / turn)

    def test_tells_houses_20_m_apart_from_a_jitter_of_half_a_metre_anywhere_in_a_city(self) -> None:
        random = torch.Generator().manual_seed(0)
        east, north = (torch.rand(2, 2000, generator=random, dtype=torch.float64) - 0.5) * 10_000
        angle = torch.rand(2000, generator=random, dtype=torch.float64) * 2 * torch.pi
        here = self.features(east, north)

        def moved(metres: float) -> torch.Tensor:
            return (self.features(east + metres * angle.cos(), north + metres * angle.sin()) - here).norm(dim=1)

        assert moved(20.0).min() > 7 * moved(0.5).max()

    def test_gives_no_two_places_of_a_city_the_same_features(self) -> None:
        random = torch.Generator().manual_seed(1)
        east, north = (torch.rand(2, 1500, generator=random, dtype=torch.float64) - 0.5) * 10_000
        apart = torch.cdist(torch.stack([east, north], 1), torch.stack([east, north], 1))
        features = self.features(east, north).double()
        unlike = torch.cdist(features, features)
        jitter = (self.features(east + 0.5, north) - features).norm(dim=1).max()
        assert unlike[apart > 20].min() > 2 * jitter

    def test_changes_nothing_at_step_zero_wherever_the_picture_was_taken(self) -> None:
        plain, nets = tiny("model.location_tokens=0"), tiny()
        for latitude, longitude in ((55.7, 13.2), (-33.9, 151.2), (90.0, 180.0)):
            assert torch.equal(noise(nets, latitude, longitude), noise(plain))
