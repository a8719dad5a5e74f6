"""Folders as people have them: each image that cannot be used is named with its reason, and the rest is used."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from inpaint_bench.cli import app
from inpaint_bench.core.config import DataConfig
from inpaint_bench.data.folder import FolderSource
from tests.run.support import photo

from .support import SMALL, batches, opened, samples, take


def folder(root: Path) -> FolderSource:
    return FolderSource.open(DataConfig(kind="folder", root=str(root), resolution_px=32))


def describe(root: Path, *rows: dict[str, Any]) -> None:
    """metadata.jsonl; a row without a position lies in Lund."""
    lines = (json.dumps({"latitude": 55.7, "longitude": 13.2, **row}) for row in rows)
    (root / "metadata.jsonl").write_text("\n".join(lines))


def reasons(source: FolderSource) -> dict[str, str]:
    return {one.file: one.reason for one in source.account.skipped}


def save(root: Path, *images: tuple[str, Image.Image]) -> None:
    for name, image in images:
        image.save(root / name)
    describe(root, *({"file_name": name} for name, _ in images))


def grey(value: int, size: tuple[int, int] = (40, 40)) -> Image.Image:
    return Image.new("L", size, value)


class TestOddModes:
    @pytest.mark.parametrize(
        ("name", "image", "expected"),
        [
            ("cmyk.jpg", Image.new("CMYK", (40, 40), (0, 255, 255, 0)), (255, 0, 0)),
            ("palette.png", Image.new("RGB", (40, 40), (10, 200, 30)).quantize(4), (10, 200, 30)),
            ("bilevel.png", Image.new("1", (40, 40), 1), (255, 255, 255)),
            ("deep.png", Image.fromarray(np.full((40, 40), 128 * 257, np.uint16)), (128, 128, 128)),
            ("clear.png", Image.new("RGBA", (40, 40), (200, 0, 0, 0)), (255, 255, 255)),
            ("opaque.png", Image.new("RGBA", (40, 40), (200, 0, 0, 255)), (200, 0, 0)),
            ("grey_alpha.png", Image.new("LA", (40, 40), (50, 255)), (50, 50, 50)),
            ("webp.webp", Image.new("RGB", (40, 40), (10, 20, 200)), (10, 20, 200)),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_become_rgb_with_the_colours_that_people_see(
        self, tmp_path: Path, name: str, image: Image.Image, expected: Sequence[int]
    ) -> None:
        save(tmp_path, (name, image))
        pixels = folder(tmp_path).pixels(0)
        assert pixels.shape == (32, 32, 3)
        assert np.abs(pixels.astype(int) - expected).max() <= 4

    def test_a_picture_too_thin_to_show_anything_is_skipped(self, tmp_path: Path) -> None:
        save(tmp_path, ("good.png", grey(9)), ("line.png", grey(9, (1, 400))), ("dot.png", grey(9, (1, 1))))
        assert reasons(folder(tmp_path)) == {
            "line.png": "too small: 1 x 400 px, the shorter side needs 16",
            "dot.png": "too small: 1 x 1 px, the shorter side needs 16",
        }


class TestFilesThatCannotBeRead:
    def test_a_symlink_to_nothing_is_found_and_skipped(self, tmp_path: Path) -> None:
        photo(tmp_path / "good.jpg")
        (tmp_path / "lost.jpg").symlink_to(tmp_path / "gone.jpg")
        source = folder(tmp_path)
        assert reasons(source) == {"lost.jpg": "cannot be read: No such file or directory"}
        assert (source.account.found, source.account.used) == (2, 1)

    def test_a_value_of_another_type_in_exif_costs_that_image_alone(self, tmp_path: Path) -> None:
        """Regression: Pillow writes EXIF anew when it turns an image, and raised TypeError or struct.error."""
        orientation, resolution = struct.pack("<HHIHH", 0x0112, 3, 1, 6, 0), struct.pack("<HHI4s", 0x011A, 2, 3, b"72")
        exif = b"Exif\0\0II*\0" + struct.pack("<IH", 8, 2) + orientation + resolution + bytes(4)
        save(tmp_path, ("good.png", grey(1)), ("turned.jpg", grey(2)))
        grey(2).save(tmp_path / "turned.jpg", exif=exif)
        assert reasons(folder(tmp_path)) == {"turned.jpg": "damaged image: bad operand type for abs(): 'str'"}


class TestMetadata:
    def test_a_name_given_twice_is_skipped_with_both_entries(self, tmp_path: Path) -> None:
        save(tmp_path, ("a.png", grey(1)), ("b.png", grey(2)))
        describe(tmp_path, {"file_name": "a.png"}, {"file_name": "b.png"}, {"file_name": "./a.png", "latitude": 1.0})
        source = folder(tmp_path)
        assert reasons(source) == {"a.png": "named more than once in the metadata file (entries 1, 3)"}
        assert (source.account.found, source.account.used) == (2, 1)

    def test_rows_without_a_file_and_files_without_a_row_are_named(self, tmp_path: Path) -> None:
        save(tmp_path, ("a.png", grey(1)), ("b.png", grey(2)))
        describe(tmp_path, {"file_name": "a.png"}, {"file_name": "gone.png"})
        source = folder(tmp_path)
        assert reasons(source)["gone.png"].startswith("named in the metadata file, but no image")
        assert reasons(source)["b.png"].startswith("no row in the metadata file; no position")
        assert (source.account.found, source.account.used) == (3, 1)

    def test_names_and_texts_that_are_no_unicode_are_legible_in_the_account(self, tmp_path: Path) -> None:
        save(tmp_path, ("a.png", grey(1)), ("b.png", grey(2)))
        describe(tmp_path, {"file_name": "a.png"}, {"file_name": "b.png", "text": "half of a pair: \ud83d"})
        photo(tmp_path / "c.jpg").rename(tmp_path / os.fsdecode(b"caf\xe9.jpg"))
        why = "its name, its text or its mask's name is not valid Unicode"
        assert reasons(folder(tmp_path)) == {"b.png": why, "caf\\udce9.jpg": why}

    def test_missing_and_impossible_positions_are_told_apart(self, tmp_path: Path) -> None:
        names = ["good", "half", "north", "east", "word", "nan"]
        save(tmp_path, *((f"{name}.png", grey(number)) for number, name in enumerate(names)))
        describe(
            tmp_path,
            {"file_name": "good.png"},
            {"file_name": "half.png", "longitude": None},
            {"file_name": "north.png", "latitude": 90.5},
            {"file_name": "east.png", "longitude": -180.5},
            {"file_name": "word.png", "latitude": "here"},
            {"file_name": "nan.png", "latitude": "inf"},
        )
        assert reasons(folder(tmp_path)) == {
            "half.png": "longitude is missing",
            "north.png": "position out of range: latitude 90.5 is not within -90..90",
            "east.png": "position out of range: longitude -180.5 is not within -180..180",
            "word.png": "latitude='here' is not a number",
            "nan.png": "position out of range: latitude inf is not within -90..90",
        }

    def test_numbers_that_are_no_degrees_are_told_apart_from_those_out_of_range(self, tmp_path: Path) -> None:
        save(tmp_path, *((f"{name}.png", grey(number)) for number, name in enumerate(("good", "long", "true", "zero"))))
        describe(
            tmp_path,
            {"file_name": "good.png"},
            {"file_name": "long.png", "latitude": 10**400},
            {"file_name": "true.png", "latitude": True},
            {"file_name": "zero.png", "latitude": 0, "longitude": -0.0},
        )
        assert reasons(folder(tmp_path)) == {
            "long.png": "position out of range: latitude has 401 digits",
            "true.png": "latitude=True is not a number",
            "zero.png": "position is 0, 0: what cameras and tables write for none",
        }

    def test_an_image_that_another_row_names_as_its_mask_is_no_image_and_says_so(self, tmp_path: Path) -> None:
        save(tmp_path, ("a.png", grey(1)), ("b.png", grey(255)))
        describe(tmp_path, {"file_name": "a.png", "mask": "b.png"}, {"file_name": "b.png"})
        source = folder(tmp_path)
        assert reasons(source) == {"b.png": "named as a mask too in the metadata file, so it is not used as an image"}
        assert (source.account.found, source.account.used) == (2, 1)

    def test_a_blank_that_pandas_wrote_as_nan_counts_as_missing(self, tmp_path: Path) -> None:
        save(tmp_path, ("a.png", grey(1)), ("b.png", grey(2)))
        (tmp_path / "metadata.jsonl").unlink()
        rows = {"file_name": ["a.png", "b.png"], "latitude": [1.0, float("nan")], "longitude": [2.0, 3.0]}
        pq.write_table(pa.table(rows), tmp_path / "metadata.parquet")
        assert reasons(folder(tmp_path)) == {"b.png": "latitude is missing"}


class TestOwnMasks:
    @pytest.fixture
    def masked(self, tmp_path: Path) -> Path:
        """a: lower half; b: none; c..h: each wrong in its way."""
        root = tmp_path / "photos"
        (root / "m").mkdir(parents=True)
        half = np.zeros((40, 60), np.uint8)
        half[20:] = 255
        Image.fromarray(half).save(root / "m" / "a.png")
        Image.fromarray(half[:, :40]).save(root / "m" / "square.png")
        grey(0, (60, 40)).save(root / "m" / "black.png")
        (root / "m" / "empty.png").touch()
        (root / "m" / "words.png").write_text("no image")
        (tmp_path / "outside.png").write_bytes((root / "m" / "a.png").read_bytes())
        masks = {"a": "m/a.png", "b": None, "c": "m/gone.png", "d": "m/square.png", "e": "m/black.png"}
        masks |= {"f": "m/empty.png", "g": "m/words.png", "h": "../outside.png"}
        for name in masks:
            photo(root / f"{name}.jpg")
        describe(root, *({"file_name": f"{name}.jpg", "mask": mask} for name, mask in masks.items()))
        return root

    def test_win_over_drawn_ones_and_those_that_cannot_be_used_are_named(self, masked: Path) -> None:
        source = folder(masked)
        assert source.names == ["a.jpg", "b.jpg"]
        why = reasons(source)
        assert why["c.jpg"] == "its mask m/gone.png is missing"
        assert why["d.jpg"] == "its mask has 40 x 40 px, the image 60 x 40"
        assert why["e.jpg"] == "its mask repaints nothing"
        assert why["f.jpg"] == "its mask m/empty.png is an empty file"
        assert "m/words.png cannot be read" in why["g.jpg"]
        assert why["h.jpg"] == "its mask ../outside.png lies outside the folder"
        assert source.account.found == 8
        mask = source.own_mask(0)
        assert mask is not None
        assert not mask[:16].any()
        assert mask[16:].all()
        assert source.own_mask(1) is None
        assert samples(source)[0, 0]["mask"][0].numpy().tolist() == samples(source)[0, 99]["mask"][0].numpy().tolist()
        assert samples(source)[0, 0]["mask"][0].numpy().tolist() == mask.tolist()

    def test_of_half_the_size_are_enlarged_by_the_images_own_crop(self, masked: Path) -> None:
        with Image.open(masked / "m" / "a.png") as mask:
            mask.resize((30, 20), Image.Resampling.NEAREST).save(masked / "m" / "a.png")
        mask_small = folder(masked).own_mask(0)
        assert mask_small is not None
        assert not mask_small[:16].any()
        assert mask_small[16:].all()

    @pytest.mark.parametrize("format", ["files", "memmap", "webdataset"])
    def test_travel_with_a_prepared_dataset(self, masked: Path, tmp_path: Path, format: str) -> None:
        words = ["data=folder", f"data.root={masked}", f"prepare.out={tmp_path / 'set'}", *SMALL]
        assert app.main(["prepare", *words, "data.validation_share=0"]) == 0
        before, after = folder(masked), opened(tmp_path / "set", format, "tmp", validation_share=0)
        assert np.array_equal(after.own_mask(0), before.own_mask(0))
        assert after.own_mask(1) is None
        (batch,) = take(batches(after, 2, f"recipe.format={format}"), 1)
        where = batch["index"].tolist().index(0)
        assert np.array_equal(batch["mask"][where, 0].numpy(), before.own_mask(0))
        after.close()


def test_a_folder_of_bad_images_is_prepared_without_them_and_the_account_names_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    photos = tmp_path / "photos"
    photos.mkdir()
    for number in range(3):
        photo(photos / f"good{number}.jpg", position=(55.0 + number, 13.0))
    whole = photo(photos / "truncated.jpg", size=(400, 400)).read_bytes()
    (photos / "truncated.jpg").write_bytes(whole[: len(whole) // 2])
    for name in "abcde":
        (photos / f"empty_{name}.jpg").touch()
    assert app.main(["prepare", "data=folder", f"data.root={photos}", f"prepare.out={tmp_path / 'set'}", *SMALL]) == 0
    account = json.loads((tmp_path / "set" / "prepared.json").read_text())["account"]
    assert (account["found"], account["used"], len(account["skipped"])) == (9, 3, 6)
    assert {one["file"] for one in account["skipped"]} == {"truncated.jpg", *(f"empty_{name}.jpg" for name in "abcde")}
    source = opened(tmp_path / "set")
    assert source.names == ["good0.jpg", "good1.jpg", "good2.jpg"]
    assert len(source.account.skipped) == 6
