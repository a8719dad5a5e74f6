"""The stream of a WebDataset."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

from .support import batches, draws, open_prepared, same, take


class TestShardStream:
    @pytest.mark.parametrize("workers", [0, 2])
    @pytest.mark.parametrize("start", [0, 4, 12, 60, 88])
    def test_stream_started_late_equals_the_rest_for_the_same_workers(
        self, facades: Path, workers: int, start: int
    ) -> None:
        overrides = f"recipe.num_workers={workers}", "recipe.format=webdataset"
        stream = take(batches(open_prepared(facades, "webdataset"), 4, *overrides), 26)
        rest = take(batches(open_prepared(facades, "webdataset"), 4, *overrides, start=start), 3)
        assert same(rest, stream[start // 4 : start // 4 + 3])
        assert draws(rest) == list(range(start, start + 12))

    def test_every_selected_image_comes_once_per_epoch(self, facades: Path) -> None:
        selected = np.arange(0, 60, 3)
        taken = take(batches(open_prepared(facades, "webdataset"), 4, "recipe.format=webdataset", indices=selected), 10)
        indices_read = [int(index) for batch in taken for index in batch["index"]]
        assert sorted(indices_read[:20]) == sorted(indices_read[20:]) == selected.tolist()
        assert indices_read[:20] != indices_read[20:] != selected.tolist()

    def test_pixels_equal_those_of_other_formats(self, facades: Path) -> None:
        plain = open_prepared(facades)
        (batch,) = take(batches(open_prepared(facades, "webdataset"), 8, "recipe.format=webdataset"), 1)
        for number, index in enumerate(batch["index"].tolist()):
            image = (batch["image"][number].permute(1, 2, 0) + 1) * 127.5
            assert np.array_equal(image.round().numpy().astype(np.uint8), plain.pixels(index))

    def test_workers_are_limited_to_the_shards(self, facades: Path, caplog: pytest.LogCaptureFixture) -> None:
        stream = batches(
            open_prepared(facades, "webdataset"),
            2,
            "recipe.num_workers=2",
            "recipe.format=webdataset",
            indices=np.array([8, 9]),
        )
        with caplog.at_level(logging.WARNING):
            assert stream.settings["num_workers"] == {"requested": 2, "effective": 1}
        assert "images are drawn from 1 shard: the loader uses 1" in caplog.text
        assert {index for batch in take(stream, 3) for index in batch["index"].tolist()} == {8, 9}

    def test_shards_without_a_selected_image_are_left_out(self, facades: Path) -> None:
        shards = open_prepared(facades, "webdataset").shards(np.array([59, 7, 8]))
        assert [path.name for path in shards] == ["000000.tar", "000001.tar", "000007.tar"]
