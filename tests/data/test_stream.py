"""The stream of batches: restricted to a split, and gone on with from any draw."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
import torch

from inpaint_bench.core.config import DataConfig, RecipeConfig
from inpaint_bench.core.errors import UserError
from inpaint_bench.data.open_source import open_source
from inpaint_bench.data.prepared.shards import with_any_of
from inpaint_bench.data.source import Source

from .support import FORMATS, batches, draws, opened, same, samples, take


def synthetic(count: int = 7) -> Source:
    return open_source(DataConfig(kind="synthetic", num_images=count, resolution_px=32))


class TestAStreamThatGoesOn:
    @pytest.mark.parametrize("workers", [0, 2])
    def test_is_the_rest_of_the_stream_from_any_draw(self, workers: int) -> None:
        """Seven images, so that the cuts fall before, on and after the ends of epochs."""
        whole = take(batches(synthetic(), 1), 24)
        for start in range(17):
            rest = take(batches(synthetic(), 1, f"recipe.num_workers={workers}", start=start), 3)
            assert same(rest, whole[start : start + 3]), start

    def test_may_be_cut_into_other_batches(self) -> None:
        ours = take(batches(synthetic(), 3, start=5), 2)
        assert draws(ours) == list(range(5, 11))
        theirs = take(batches(synthetic(), 1), 11)[5:]
        assert torch.equal(torch.cat([b["mask"] for b in ours]), torch.cat([b["mask"] for b in theirs]))

    def test_reaches_a_far_draw_at_once(self) -> None:
        (batch,) = take(batches(synthetic(), 2, start=10**12), 1)
        assert batch["draw"].tolist() == [10**12, 10**12 + 1]


class TestAStreamOfSomeImages:
    def test_draws_only_those_and_each_once_an_epoch(self) -> None:
        chosen = np.array([1, 4, 6])
        taken = take(batches(synthetic(), 3, indices=chosen), 5)
        assert all(sorted(batch["index"].tolist()) == [1, 4, 6] for batch in taken)

    def test_of_no_image_at_all_is_refused(self) -> None:
        with pytest.raises(UserError, match=r"data\.validation_share"):
            batches(synthetic(), 3, indices=np.array([], np.int64))


class TestSamplesWithoutPixels:
    def test_bring_positions_and_texts_and_decode_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        source = synthetic()
        monkeypatch.setattr(source, "pixels", lambda index: pytest.fail("an image was read"))
        without = samples(source, pixels=False)
        one = without[3, 11]
        assert set(one) == {"index", "draw", "latitude", "longitude", "tokens", "text_id"}
        assert (one["index"].item(), one["draw"].item()) == (3, 11)
        assert without.distinct_texts[int(one["text_id"])] == source.texts[3]
        assert torch.equal(without.tokens[one["text_id"]], one["tokens"])


class TestAWebDatasetStream:
    @pytest.mark.parametrize("workers", [0, 2])
    @pytest.mark.parametrize("start", [0, 4, 12, 60, 88])
    def test_goes_on_exactly_for_the_same_workers(self, facades: Path, workers: int, start: int) -> None:
        words = f"recipe.num_workers={workers}", "recipe.format=webdataset"
        whole = take(batches(opened(facades, "webdataset"), 4, *words), 26)
        rest = take(batches(opened(facades, "webdataset"), 4, *words, start=start), 3)
        assert same(rest, whole[start // 4 : start // 4 + 3])
        assert draws(rest) == list(range(start, start + 12))

    def test_brings_every_chosen_image_once_an_epoch(self, facades: Path) -> None:
        chosen = np.arange(0, 60, 3)
        taken = take(batches(opened(facades, "webdataset"), 4, "recipe.format=webdataset", indices=chosen), 10)
        seen = [int(index) for batch in taken for index in batch["index"]]
        assert sorted(seen[:20]) == sorted(seen[20:]) == chosen.tolist()
        assert seen[:20] != seen[20:] != chosen.tolist()

    def test_holds_the_pixels_that_the_other_formats_hold(self, facades: Path) -> None:
        plain = opened(facades)
        (batch,) = take(batches(opened(facades, "webdataset"), 8, "recipe.format=webdataset"), 1)
        for number, index in enumerate(batch["index"].tolist()):
            image = (batch["image"][number].permute(1, 2, 0) + 1) * 127.5
            assert np.array_equal(image.round().numpy().astype(np.uint8), plain.pixels(index))

    def test_uses_no_more_workers_than_shards_and_says_so(
        self, facades: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        stream = batches(
            opened(facades, "webdataset"),
            2,
            "recipe.num_workers=2",
            "recipe.format=webdataset",
            indices=np.array([8, 9]),
        )
        with caplog.at_level(logging.WARNING):
            assert stream.settings["num_workers"] == {"requested": 2, "effective": 1}
        assert "1 shards" in caplog.text
        assert {index for batch in take(stream, 3) for index in batch["index"].tolist()} == {8, 9}

    def test_leaves_out_shards_without_a_chosen_image(self, facades: Path) -> None:
        shards = opened(facades, "webdataset").shards()
        assert [one.first for one in with_any_of(shards, np.array([59, 7, 8]))] == [0, 8, 56]
        assert shards[-1].end == 60


@pytest.mark.parametrize("format", FORMATS)
def test_the_settings_say_which_format_was_read(facades: Path, format: str) -> None:
    stream = batches(opened(facades, format), 2, f"recipe.format={format}")
    assert stream.settings["format"] == {"requested": format, "effective": format}
    assert stream.settings["stage_to"] == {"requested": "none", "effective": "none"}


@pytest.mark.parametrize("words", [{"format": "memmap"}, {"stage_to": "tmp"}])
def test_what_only_prepared_data_has_is_refused_elsewhere(words: dict[str, str]) -> None:
    with pytest.raises(UserError, match=r"needs prepared data: inpaint-bench prepare data=synthetic"):
        open_source(DataConfig(kind="synthetic", num_images=4, resolution_px=32), RecipeConfig(**words))
