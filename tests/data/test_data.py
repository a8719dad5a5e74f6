"""Images, positions, masks and the loader."""

from __future__ import annotations

import csv
import json
import os
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from inpaint_bench.core.config import DataConfig
from inpaint_bench.core.errors import UserError
from inpaint_bench.data.loader import Batches, EndlessShuffle
from inpaint_bench.data.masks import make_mask
from inpaint_bench.data.open_source import open_source
from inpaint_bench.data.samples import Samples
from inpaint_bench.data.source import Source
from inpaint_bench.models.tokenizer import hash_tokenizer
from tests.run.support import bench, photo


def folder(root: Path, num_images: int | None = None) -> Source:
    return open_source(DataConfig(kind="folder", root=str(root), num_images=num_images, resolution_px=32))


def synthetic(count: int = 5, side: int = 32, seed: int = 0) -> Source:
    return open_source(DataConfig(kind="synthetic", num_images=count, resolution_px=side, seed=seed))


def batches(source: Source, batch: int, *overrides: str) -> Batches:
    samples = Samples(source, hash_tokenizer(1000, 77), seed=0, masks="sd", full_mask_share=0.25)
    return Batches(samples, batch, bench(*overrides).recipe, seed=0)


class TestAFolderOfPhotographs:
    def test_exif_positions_reach_the_batch(self, tmp_path: Path) -> None:
        photo(tmp_path / "south.jpg", position=(-33.8568, -151.2153))
        batch = next(batches(folder(tmp_path), 1))
        assert batch["latitude"].item() == pytest.approx(-33.8568, abs=1e-8)
        assert batch["longitude"].item() == pytest.approx(-151.2153, abs=1e-8)

    def test_bad_images_are_named_skipped_and_counted(self, tmp_path: Path) -> None:
        photo(tmp_path / "good.jpg")
        photo(tmp_path / "good.png")
        whole = photo(tmp_path / "truncated.jpg", size=(400, 400)).read_bytes()
        (tmp_path / "truncated.jpg").write_bytes(whole[: len(whole) // 2])
        (tmp_path / "empty.jpg").touch()
        (tmp_path / "words.jpeg").write_text("this is no image")
        photo(tmp_path / "nowhere.jpg", position=None)
        photo(tmp_path / "hemisphere.jpg", references=False)
        photo(tmp_path / "north.jpg", position=(91.5, 13.0))
        (tmp_path / "notes.txt").write_text("not looked at")
        account = folder(tmp_path).account.as_dict()
        assert (account["found"], account["used"], len(account["skipped"])) == (8, 2, 6)
        reasons = {one["file"]: one["reason"] for one in account["skipped"]}
        assert "truncated" in reasons["truncated.jpg"]
        assert reasons["empty.jpg"] == "empty file"
        assert reasons["words.jpeg"] == "not an image that can be read"
        assert reasons["nowhere.jpg"].startswith("no position")
        assert "N or S" in reasons["hemisphere.jpg"]
        assert "91.5" in reasons["north.jpg"]

    def test_no_usable_image_is_an_error_with_root_and_counts(self, tmp_path: Path) -> None:
        photo(tmp_path / "nowhere.jpg", position=None)
        with pytest.raises(UserError, match=rf"{tmp_path}: no usable image, 1 found, 1 skipped"):
            folder(tmp_path)
        with pytest.raises(UserError, match="no such folder"):
            folder(tmp_path / "missing")

    @pytest.mark.parametrize("form", ["csv", "jsonl", "parquet"])
    def test_a_metadata_file_gives_position_and_text(self, tmp_path: Path, form: str) -> None:
        (tmp_path / "sub").mkdir()
        photo(tmp_path / "sub" / "a.jpg", position=None)
        photo(tmp_path / "b.jpg", position=(1.0, 2.0))
        rows = [
            {"file_name": "sub/a.jpg", "latitude": 55.5, "longitude": -13.25, "text": "a red house"},
            {"file_name": "gone.jpg", "latitude": 0.0, "longitude": 0.0, "text": ""},
        ]
        path = tmp_path / f"metadata.{form}"
        if form == "csv":
            with path.open("w", newline="") as out:
                writer = csv.DictWriter(out, list(rows[0]))
                writer.writeheader()
                writer.writerows(rows)
        elif form == "jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        else:
            pq.write_table(pa.Table.from_pylist(rows), path)
        source = folder(tmp_path)
        assert source.texts == ["", "a red house"]
        assert source.positions.tolist() == [[1.0, 2.0], [55.5, -13.25]]
        (skipped,) = source.account.skipped
        assert (skipped.file, source.account.found) == ("gone.jpg", 3)

    def test_a_coordinate_that_is_no_number_is_named(self, tmp_path: Path) -> None:
        photo(tmp_path / "a.jpg")
        photo(tmp_path / "b.jpg")
        (tmp_path / "metadata.csv").write_text("file_name,latitude,longitude\na.jpg,somewhere,3\n")
        assert folder(tmp_path).account.skipped[0].reason == "latitude='somewhere' is not a number"

    def test_metadata_without_file_names_is_an_error(self, tmp_path: Path) -> None:
        photo(tmp_path / "a.jpg")
        (tmp_path / "metadata.csv").write_text("name,latitude\na.jpg,3\n")
        with pytest.raises(UserError, match="entry 1 has no file_name"):
            folder(tmp_path)

    def test_orientation_is_applied_before_the_centre_is_cut_out(self, tmp_path: Path) -> None:
        path = photo(tmp_path / "a.png", orientation=6)
        with Image.open(path) as image:
            pixels = np.asarray(image).copy()
            exif = image.getexif()
        pixels[:, :30], pixels[:, 30:] = 0, 255  # dark left, which 90 degrees clockwise makes the top
        Image.fromarray(pixels).save(path, exif=exif)
        upright = folder(tmp_path).pixels(0)
        assert upright.shape == (32, 32, 3)
        assert upright[:12].max() < 40
        assert upright[-12:].min() > 215

    def test_a_limit_leaves_the_rest_unread_and_counted(self, tmp_path: Path) -> None:
        for name in "abcd":
            photo(tmp_path / f"{name}.jpg")
        account = folder(tmp_path, num_images=3).account
        assert (account.found, account.used, account.beyond_limit) == (4, 3, 1)

    def test_real_photographs_are_all_usable(self) -> None:
        root = os.environ.get("INPAINT_BENCH_PHOTOS")
        if not root:
            pytest.skip("INPAINT_BENCH_PHOTOS names no folder of photographs")
        source = folder(Path(root))
        assert source.account.used == source.account.found > 0
        assert np.ptp(source.positions, axis=0).max() < 1


class TestSyntheticFacades:
    def test_an_image_depends_on_seed_and_index_alone(self) -> None:
        first, again, other = synthetic(), synthetic(), synthetic(seed=1)
        assert np.array_equal(first.pixels(3), again.pixels(3))
        assert not np.array_equal(first.pixels(3), first.pixels(2))
        assert not np.array_equal(first.pixels(3), other.pixels(3))

    @pytest.mark.parametrize("side", [32, 64, 512])
    def test_any_resolution_is_drawn(self, side: int) -> None:
        source = synthetic(40, side)
        assert all(source.pixels(index).shape == (side, side, 3) for index in range(40))

    def test_every_house_has_its_own_address_in_one_city(self) -> None:
        positions = synthetic(2000).positions
        assert len(np.unique(positions, axis=0)) == 2000
        assert np.ptp(positions, axis=0).max() < 0.05

    @pytest.mark.parametrize("seed", [0, 1, 2])
    def test_neighbours_look_alike_and_houses_across_the_city_do_not(self, seed: int) -> None:
        """Regression: looks were drawn apart from the address, so that a position told nothing about a picture."""
        source = synthetic(800, seed=seed)
        colours = np.array([source.pixels(index).reshape(-1, 3).mean(axis=0) for index in range(800)])
        metres = source.positions * 111_320 * np.array([1, np.cos(np.radians(source.positions[0, 0]))])
        apart_m = np.linalg.norm(metres[:, None] - metres, axis=2)
        unlike = np.square(colours[:, None] - colours).sum(axis=2)
        near, far = unlike[(apart_m > 0) & (apart_m < 100)].mean(), unlike[apart_m > 1000].mean()
        assert near < 0.75 * far  # 0.48 to 0.64 for eight seeds; 0.96 to 1.03 where the address decides nothing

    def test_a_house_stays_as_it_is_when_the_city_grows(self) -> None:
        small, large = synthetic(20), synthetic(300)
        assert np.array_equal(small.positions, large.positions[:20])
        assert small.texts == large.texts[:20]
        assert all(np.array_equal(small.pixels(index), large.pixels(index)) for index in range(20))

    def test_pictures_of_an_older_generator_are_another_dataset(self, monkeypatch: pytest.MonkeyPatch) -> None:
        now = synthetic().identity
        monkeypatch.setattr("inpaint_bench.data.synthetic.VERSION", 1)
        assert synthetic().identity != now


class TestBatches:
    def test_have_the_documented_shapes_ranges_and_types(self) -> None:
        batch = next(batches(synthetic(), 4))
        assert batch["image"].shape == batch["masked_image"].shape == (4, 3, 32, 32)
        assert batch["mask"].shape == (4, 1, 32, 32)
        assert batch["tokens"].shape == (4, 77)
        assert batch["latitude"].dtype == torch.float64
        assert -1 <= batch["image"].min() < batch["image"].max() <= 1
        assert set(batch["mask"].unique().tolist()) <= {0.0, 1.0}

    def test_masked_images_are_grey_exactly_under_the_mask(self) -> None:
        for batch in islice(batches(synthetic(), 4), 3):
            hole = batch["mask"].expand_as(batch["image"]).bool()
            assert not batch["masked_image"][hole].any()
            assert torch.equal(batch["masked_image"][~hole], batch["image"][~hole])

    def test_are_the_same_with_and_without_worker_processes(self) -> None:
        alone, helped = batches(synthetic(), 3), batches(synthetic(), 3, "recipe.num_workers=2")
        for ours, theirs in islice(zip(alone, helped, strict=True), 4):
            assert all(torch.equal(ours[name], theirs[name]) for name in ours)
        helped.close()

    def test_a_set_smaller_than_the_batch_is_drawn_over_epochs(self) -> None:
        batch = next(batches(synthetic(3), 8))
        assert batch["image"].shape[0] == 8

    def test_every_epoch_holds_each_image_once_in_another_order(self) -> None:
        drawn = list(islice(EndlessShuffle(np.arange(50), seed=0), 100))
        first, second = [index for index, _ in drawn[:50]], [index for index, _ in drawn[50:]]
        assert sorted(first) == sorted(second) == list(range(50))
        assert first != second
        assert [draw for _, draw in drawn] == list(range(100))

    def test_more_workers_than_cores_are_cut_and_recorded(self, caplog: pytest.LogCaptureFixture) -> None:
        cores = len(os.sched_getaffinity(0))
        settings = batches(synthetic(), 2, f"recipe.num_workers={cores + 1}").settings
        assert settings["num_workers"] == {"requested": cores + 1, "effective": cores}
        assert "CPU cores" in caplog.text

    def test_without_pinned_memory_no_copy_is_called_asynchronous(self) -> None:
        settings = batches(synthetic(), 2, "recipe.non_blocking=true").settings
        assert settings["non_blocking"] == {"requested": True, "effective": False}


class TestMasks:
    def test_a_quarter_repaints_everything_and_the_rest_a_part(self) -> None:
        shares = np.array([make_mask(64, (0, number)).mean() for number in range(1500)])
        full = shares == 1
        assert full.mean() == pytest.approx(0.25, abs=0.045)
        assert 0.2 < shares[~full].mean() < 0.5
        assert shares.min() > 0.005

    def test_coverage_does_not_depend_on_the_resolution(self) -> None:
        small, large = (np.mean([make_mask(side, (0, number)).mean() for number in range(200)]) for side in (64, 512))
        assert small == pytest.approx(large, abs=0.03)

    def test_a_mask_is_fixed_by_its_seed(self) -> None:
        assert np.array_equal(make_mask(64, (1, 2, 3)), make_mask(64, (1, 2, 3)))
        assert any(not np.array_equal(make_mask(64, (1, 2, n)), make_mask(64, (1, 2, 0))) for n in (1, 2, 3))
