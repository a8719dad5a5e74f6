"""A folder of photographs: every unusable image is listed with its reason, and the others are used."""

from __future__ import annotations

import csv
import hashlib
import json
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from PIL.TiffImagePlugin import IFDRational

from inpaint_bench.cli import app
from inpaint_bench.core.config.bench import DataConfig
from inpaint_bench.core.errors import UserError
from inpaint_bench.data import geotags, transform
from inpaint_bench.data.folder import OTHER_FILES, FolderSource
from inpaint_bench.data.geotags import MetadataRow, PositionError
from tests.run.support import photo

from .support import SMALL, batches, open_prepared, samples, take

NO_CAPTION = OTHER_FILES[".txt"]


def folder(root: Path, num_images: int | None = None) -> FolderSource:
    """Open a folder at 32 px."""
    return FolderSource(DataConfig(kind="folder", root=str(root), num_images=num_images, resolution_px=32))


def describe(root: Path, *rows: dict[str, Any]) -> None:
    """Write metadata.jsonl; rows without a position get one in Lund."""
    lines = (json.dumps({"latitude": 55.7, "longitude": 13.2, **row}) for row in rows)
    (root / "metadata.jsonl").write_text("\n".join(lines))


def reasons(source: FolderSource) -> dict[str, str]:
    """Return the reason for every skipped file."""
    return {image.file: image.reason for image in source.inventory.skipped}


def save(root: Path, *images: tuple[str, Image.Image]) -> None:
    """Save images with metadata for each."""
    for name, image in images:
        image.save(root / name)
    describe(root, *({"file_name": name} for name, _ in images))


def grey(value: int, size: tuple[int, int] = (40, 40)) -> Image.Image:
    """Return a uniform image."""
    return Image.new("L", size, value)


def test_captions_are_the_first_line_of_the_text_beside_an_image(tmp_path: Path) -> None:
    names = ["a.png", "b.png", "c.png", "d.png", "e.png"]
    save(tmp_path, *((name, grey(20 * number)) for number, name in enumerate(names)))
    describe(tmp_path, *({"file_name": name, "text": "of the row" if name == "b.png" else ""} for name in names))
    (tmp_path / "a.txt").write_text("\ufeff  a brick house, two floors \nsecond line\n")
    (tmp_path / "b.txt").write_text("of the file")
    (tmp_path / "c.txt").touch()
    (tmp_path / "d.txt").write_bytes(b"caf\xe9 noir")
    (tmp_path / "notes.txt").write_text("of no image")
    source = folder(tmp_path)
    assert dict(zip(source.names, source.texts, strict=True)) == {
        "a.png": "a brick house, two floors",
        "b.png": "of the row",
        "c.png": "",
        "e.png": "",
    }
    assert reasons(source) == {
        "d.png": "its caption d.txt cannot be read: line 1: byte 0xe9 is not UTF-8; save it as UTF-8",
        "notes.txt": NO_CAPTION,
    }
    identity = source.identity
    # As earlier versions made it: checkpoints of trainings on such a folder stay usable.
    rows = [
        f"Photo(name={name!r}, latitude=55.7, longitude=13.2, text={text!r}, mask=None, sha256={digest!r})"
        for name, text in zip(source.names, source.texts, strict=True)
        for digest in [hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()]
    ]
    assert identity == hashlib.sha256("\n".join(rows).encode()).hexdigest()
    (tmp_path / "a.txt").write_text("a wooden house")
    assert folder(tmp_path).identity != identity


class TestFolder:
    def test_exif_positions_reach_the_batch(self, tmp_path: Path) -> None:
        photo(tmp_path / "south.jpg", position=(-33.8568, -151.2153))
        batch = next(batches(folder(tmp_path), 1))
        assert batch["latitude"].item() == pytest.approx(-33.8568, abs=1e-8)
        assert batch["longitude"].item() == pytest.approx(-151.2153, abs=1e-8)

    def test_folder_without_usable_image_is_refused_with_counts(self, tmp_path: Path) -> None:
        photo(tmp_path / "nowhere.jpg", position=None)
        with pytest.raises(
            UserError, match=rf"{tmp_path}: no usable image, 1 found, 1 left out: 1 no position: .* metadata.csv"
        ):
            folder(tmp_path)
        with pytest.raises(UserError, match="no such folder"):
            folder(tmp_path / "missing")
        for name in ("a.heic", "b.txt", "c.mp4", "d.jpg"):
            (tmp_path / name).write_bytes(b"")
        with pytest.raises(UserError, match=r"5 left out: .*; 2 for other reasons"):
            folder(tmp_path)

    @pytest.mark.parametrize("form", ["csv", "jsonl", "parquet"])
    def test_metadata_file_gives_position_and_text(self, tmp_path: Path, form: str) -> None:
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
        (skipped,) = source.inventory.skipped
        assert (skipped.file, source.inventory.found) == ("gone.jpg", 3)
        assert skipped.reason.startswith("named in the metadata file, but no image")

    def test_metadata_without_file_names_is_refused(self, tmp_path: Path) -> None:
        photo(tmp_path / "a.jpg")
        (tmp_path / "metadata.csv").write_text("name,latitude\na.jpg,3\n")
        with pytest.raises(UserError, match="entry 1 names no file in file_name"):
            folder(tmp_path)

    def test_orientation_is_applied_before_cropping(self, tmp_path: Path) -> None:
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

    def test_images_beyond_the_limit_are_counted_but_not_read(self, tmp_path: Path) -> None:
        for number, name in enumerate("abcd"):
            photo(tmp_path / f"{name}.jpg", colour=(50 * number, 0, 0))
        inventory = folder(tmp_path, num_images=3).inventory
        assert (inventory.found, inventory.used, inventory.beyond_limit) == (4, 3, 1)


class TestEveryFileIsCounted:
    def test_with_the_reason_why_it_is_left_out(self, tmp_path: Path) -> None:
        photo(tmp_path / "good.jpg")
        photo(tmp_path / "twice.jpg")
        (tmp_path / "metadata.jsonl").write_text("")
        (tmp_path / ".cache").mkdir()
        (tmp_path / "folder").mkdir()
        (tmp_path / "linked").symlink_to(tmp_path / "folder", target_is_directory=True)
        os.mkfifo(tmp_path / "pipe.jpg")
        others = ["a.CR2", "b.nef", "c.gif", "c.jfif", "d.xmp", "e.mov", "f"]
        others += [".DS_Store", ".cache/g.jpg", "folder/h.txt"]
        for name in others:
            (tmp_path / name).write_bytes(b"content")
        source = folder(tmp_path)
        assert source.names == ["good.jpg"]
        assert reasons(source) == {
            ".DS_Store": "hidden file",
            ".cache/g.jpg": "hidden file",
            "a.CR2": "RAW file of a camera: export it as JPEG or TIFF",
            "b.nef": "RAW file of a camera: export it as JPEG or TIFF",
            "c.gif": "image of a format that is not read: convert it",
            "c.jfif": "JPEG of another suffix: name it .jpg",
            "d.xmp": "sidecar file of an image",
            "e.mov": "video",
            "f": "not an image",
            "folder/h.txt": NO_CAPTION,
            "linked": "link to a folder, which is not followed",
            "pipe.jpg": "cannot be read: is not a plain file",
            "twice.jpg": "duplicate: an image before it is the same",
        }
        assert (source.inventory.found, source.inventory.used) == (14, 1)

    @pytest.mark.skipif(bool(transform.HEIC), reason="HEIC can be read here")
    def test_heic_names_the_extra_also_under_another_name(self, tmp_path: Path) -> None:
        photo(tmp_path / "good.jpg")
        for name in ("a.HEIC", "b.jpg"):
            (tmp_path / name).write_bytes(bytes.fromhex("00000018") + b"ftypheic" + bytes(100))
        reason = "HEIC, which needs pillow-heif: pip install 'inpaint-bench[heic]'"
        assert reasons(folder(tmp_path)) == {"a.HEIC": reason, "b.jpg": reason}

    def test_control_characters_of_a_name_are_not_printed(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        photo(tmp_path / "good.jpg")
        (tmp_path / "red\x1b[31m.txt").touch()
        folder(tmp_path)
        assert "left out red?[31m.txt: text of no image" in caplog.text

    def test_row_of_a_file_that_is_left_out_is_counted_once(self, tmp_path: Path) -> None:
        photo(tmp_path / "good.jpg")
        (tmp_path / "a.gif").touch()
        describe(tmp_path, {"file_name": "good.jpg"}, {"file_name": "a.gif"})
        assert folder(tmp_path).inventory.found == 2

    def test_home_and_variables_are_replaced(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        photo(tmp_path / "a.jpg")
        monkeypatch.setenv("HOME", str(tmp_path.parent))
        monkeypatch.setenv("SCRATCH", str(tmp_path.parent))
        assert len(folder(Path("~", tmp_path.name))) == len(folder(Path("$SCRATCH", tmp_path.name))) == 1


class TestFormats:
    def test_tiff_and_avif_are_read_with_their_positions(self, tmp_path: Path) -> None:
        photo(tmp_path / "a.avif", colour=(200, 10, 10))
        exif = Image.Exif()
        exif.get_ifd(0x8825).update({1: "S", 2: (33.0, 30.0, 0.0), 3: "E", 4: (151.0, 0.0, 0.0)})
        exif[0x8825] = 0  # for TIFF, Pillow writes only directories that the main one names
        page = Image.new("RGB", (60, 40), (10, 200, 10))
        page.save(tmp_path / "b.TIFF", exif=exif, save_all=True, append_images=[Image.new("RGB", (60, 40))])
        source = folder(tmp_path)
        assert source.names == ["a.avif", "b.TIFF"]
        assert source.positions[1].tolist() == [-33.5, 151.0]
        assert source.pixels(0)[16, 16, 0] > 150
        assert source.pixels(1)[16, 16].tolist() == [10, 200, 10], "the first page"

    def test_animation_bomb_and_postscript_are_left_out(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        frames = [grey(value) for value in (1, 100, 200)]
        save(tmp_path, ("good.png", grey(1)), ("huge.png", grey(2, (400, 400))))
        frames[0].save(tmp_path / "moving.webp", save_all=True, append_images=frames[1:])
        (tmp_path / "script.jpg").write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 99 99\n")
        monkeypatch.setattr(transform, "MAX_PIXELS", 100_000)
        found = reasons(folder(tmp_path))
        assert found["moving.webp"] == "animated: it has several pictures"
        assert found["huge.png"] == "too large: 400 x 400 px, at most 100,000 in all"
        assert found["script.jpg"] == "not an image that can be read"

    @pytest.mark.parametrize(
        ("gps", "reason"),
        [
            ({2: (0.0, 0.0, 0.0), 4: (0.0, 0.0, 0.0)}, "position is 0, 0"),
            ({2: (IFDRational(0, 0),) * 3}, "EXIF position is damaged: nan degrees"),
            ({2: (-33.0, 30.0, 0.0)}, "EXIF position is damaged: -33 degrees"),
            ({2: (151.0, 0.0, 0.0), 4: (33.0, 0.0, 0.0)}, "latitude 151 .* are latitude and longitude swapped?"),
            ({2: 33.5}, "EXIF position is damaged: not degrees"),
            ({1: "X"}, "EXIF position does not say N or S"),
            ({4: (200.0, 0.0, 0.0)}, "longitude 200 is not within"),
            ({2: (33.0, 75.0, 0.0)}, "EXIF position is damaged: 33 degrees, 75 minutes"),
            ({9: "V"}, r"EXIF position is not of a fix \(GPSStatus V\)"),
            ({9: b"v\0"}, r"EXIF position is not of a fix \(GPSStatus V\)"),
            ({4: (IFDRational(0, 0),) * 3}, "EXIF position is damaged: nan degrees"),
            ({3: ""}, "EXIF position does not say E or W"),
            ({2: (91.0, 0.0, 0.0)}, "latitude 91 is not within"),
        ],
        ids=str,
    )
    def test_impossible_exif_position_has_its_reason(self, tmp_path: Path, gps: dict[int, Any], reason: str) -> None:
        right = {1: "N", 2: (33.0, 30.0, 0.0), 3: "E", 4: (151.0, 0.0, 0.0)}
        with pytest.raises(PositionError, match=reason):
            geotags.find_position(MetadataRow(), cast(Image.Image, _WithGps({**right, **gps})))


@pytest.mark.parametrize("status", ["A", b"A\0", "", None])
def test_position_of_a_fix_is_used(status: Any) -> None:
    gps = {1: "N", 2: (33.0, 30.0, 0.0), 3: "E", 4: (151.0, 0.0, 0.0), 9: status}
    position = geotags.find_position(MetadataRow(), cast(Image.Image, _WithGps(gps)))
    assert position == ((33.5, 151.0), "EXIF")


class _WithGps:
    """An image with this EXIF, which Pillow would not write."""

    def __init__(self, gps: dict[int, Any]) -> None:
        self._gps = gps

    def getexif(self) -> _WithGps:
        return self

    def get_ifd(self, _: int) -> dict[int, Any]:
        return self._gps


class TestColourModes:
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
    def test_every_mode_becomes_rgb_with_its_visible_colours(
        self, tmp_path: Path, name: str, image: Image.Image, expected: Sequence[int]
    ) -> None:
        save(tmp_path, (name, image))
        pixels = folder(tmp_path).pixels(0)
        assert pixels.shape == (32, 32, 3)
        assert np.abs(pixels.astype(int) - expected).max() <= 4

    def test_too_small_image_is_skipped(self, tmp_path: Path) -> None:
        save(tmp_path, ("good.png", grey(9)), ("line.png", grey(9, (1, 400))), ("dot.png", grey(9, (1, 1))))
        assert reasons(folder(tmp_path)) == {
            "line.png": "too small: 1 x 400 px, the shorter side needs 16",
            "dot.png": "too small: 1 x 1 px, the shorter side needs 16",
        }


class TestUnreadableFiles:
    def test_broken_symlink_is_counted_and_skipped(self, tmp_path: Path) -> None:
        photo(tmp_path / "good.jpg")
        (tmp_path / "lost.jpg").symlink_to(tmp_path / "gone.jpg")
        source = folder(tmp_path)
        assert reasons(source) == {"lost.jpg": "cannot be read: No such file or directory"}
        assert (source.inventory.found, source.inventory.used) == (2, 1)

    def test_exif_value_of_the_wrong_type_skips_only_that_image(self, tmp_path: Path) -> None:
        """Regression: Pillow writes EXIF anew when it turns an image, and raised TypeError or struct.error."""
        orientation, resolution = struct.pack("<HHIHH", 0x0112, 3, 1, 6, 0), struct.pack("<HHI4s", 0x011A, 2, 3, b"72")
        exif = b"Exif\0\0II*\0" + struct.pack("<IH", 8, 2) + orientation + resolution + bytes(4)
        save(tmp_path, ("good.png", grey(1)), ("turned.jpg", grey(2)))
        grey(2).save(tmp_path / "turned.jpg", exif=exif)
        assert reasons(folder(tmp_path)) == {"turned.jpg": "damaged image: bad operand type for abs(): 'str'"}

    def test_more_pixels_than_pillow_decodes_are_no_damage(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        save(tmp_path, ("good.png", grey(1)), ("panorama.png", Image.new("1", (400, 300))))
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 50_000)
        assert reasons(folder(tmp_path))["panorama.png"].startswith("more pixels than Pillow decodes, scale it down: ")


class TestMetadata:
    def test_image_named_twice_is_skipped_with_both_entries(self, tmp_path: Path) -> None:
        save(tmp_path, ("a.png", grey(1)), ("b.png", grey(2)))
        describe(tmp_path, {"file_name": "a.png"}, {"file_name": "b.png"}, {"file_name": "./a.png", "latitude": 1.0})
        source = folder(tmp_path)
        assert reasons(source) == {"a.png": "named more than once in the metadata file (entries 1, 3)"}
        assert (source.inventory.found, source.inventory.used) == (2, 1)

    def test_missing_and_impossible_positions_have_different_reasons(self, tmp_path: Path) -> None:
        names = ["good", "half", "north", "east", "word", "nan", "long", "true", "zero"]
        save(tmp_path, *((f"{name}.png", grey(number)) for number, name in enumerate(names)))
        describe(
            tmp_path,
            {"file_name": "good.png"},
            {"file_name": "half.png", "longitude": None},
            {"file_name": "north.png", "latitude": 90.5},
            {"file_name": "east.png", "longitude": -180.5},
            {"file_name": "word.png", "latitude": "here"},
            {"file_name": "nan.png", "latitude": "inf"},
            {"file_name": "long.png", "latitude": 10**400},
            {"file_name": "true.png", "latitude": True},
            {"file_name": "zero.png", "latitude": 0, "longitude": -0.0},
        )
        assert reasons(folder(tmp_path)) == {
            "half.png": "longitude is missing",
            "north.png": "position out of range: latitude 90.5 is not within -90..90; "
            "are latitude and longitude swapped?",
            "east.png": "position out of range: longitude -180.5 is not within -180..180",
            "word.png": "latitude='here' is not a number",
            "nan.png": "position out of range: latitude inf is not within -90..90",
            "long.png": "position out of range: latitude has 401 digits",
            "true.png": "latitude=True is not a number",
            "zero.png": "position is 0, 0, which cameras and tables write for an unknown one",
        }

    def test_invalid_unicode_is_escaped_in_the_inventory(self, tmp_path: Path) -> None:
        save(tmp_path, ("a.png", grey(1)), ("b.png", grey(2)))
        describe(tmp_path, {"file_name": "a.png"}, {"file_name": "b.png", "text": "half of a pair: \ud83d"})
        photo(tmp_path / "c.jpg").rename(tmp_path / os.fsdecode(b"caf\xe9.jpg"))
        reason = "its name, its text or its mask's name is not valid Unicode"
        assert reasons(folder(tmp_path)) == {"b.png": reason, "caf\\udce9.jpg": reason}

    def test_image_that_is_another_images_mask_is_not_used(self, tmp_path: Path) -> None:
        save(tmp_path, ("a.png", grey(1)), ("b.png", grey(255)))
        describe(tmp_path, {"file_name": "a.png", "mask": "b.png"}, {"file_name": "b.png"})
        source = folder(tmp_path)
        assert reasons(source) == {"b.png": "also named as a mask in the metadata file, so it is not used as an image"}
        assert (source.inventory.found, source.inventory.used) == (2, 1)

    def test_nan_of_pandas_counts_as_missing(self, tmp_path: Path) -> None:
        save(tmp_path, ("a.png", grey(1)), ("b.png", grey(2)))
        (tmp_path / "metadata.jsonl").unlink()
        rows = {"file_name": ["a.png", "b.png"], "latitude": [1.0, float("nan")], "longitude": [2.0, 3.0]}
        pq.write_table(pa.table(rows), tmp_path / "metadata.parquet")
        assert reasons(folder(tmp_path)) == {"b.png": "latitude is missing"}


class TestOwnMasks:
    @pytest.fixture
    def masked(self, tmp_path: Path) -> Path:
        """Return a folder of images with masks: a has the lower half, b none, c to h unusable ones."""
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

    def test_own_mask_replaces_the_generated_one_and_unusable_masks_are_reported(self, masked: Path) -> None:
        source = folder(masked)
        assert source.names == ["a.jpg", "b.jpg"]
        skipped = reasons(source)
        assert skipped["c.jpg"] == "its mask m/gone.png is missing"
        assert skipped["d.jpg"] == "its mask has 40 x 40 px, the image 60 x 40"
        assert skipped["e.jpg"] == "its mask repaints nothing"
        assert skipped["f.jpg"] == "its mask m/empty.png is an empty file"
        assert "m/words.png cannot be read" in skipped["g.jpg"]
        assert skipped["h.jpg"] == "its mask ../outside.png lies outside the folder"
        assert source.inventory.found == 8
        mask = source.own_mask(0)
        assert mask is not None
        assert not mask[:16].any()
        assert mask[16:].all()
        assert source.own_mask(1) is None
        assert samples(source)[0, 0]["mask"][0].numpy().tolist() == samples(source)[0, 99]["mask"][0].numpy().tolist()
        assert samples(source)[0, 0]["mask"][0].numpy().tolist() == mask.tolist()

    def test_smaller_mask_is_cropped_like_the_image(self, masked: Path) -> None:
        with Image.open(masked / "m" / "a.png") as mask:
            mask.resize((30, 20), Image.Resampling.NEAREST).save(masked / "m" / "a.png")
        mask_small = folder(masked).own_mask(0)
        assert mask_small is not None
        assert not mask_small[:16].any()
        assert mask_small[16:].all()

    @pytest.mark.parametrize("format", ["files", "memmap", "webdataset"])
    def test_own_masks_are_kept_in_a_prepared_dataset(self, masked: Path, tmp_path: Path, format: str) -> None:
        overrides = ["data=folder", f"data.root={masked}", f"prepare.out={tmp_path / 'set'}", *SMALL]
        assert app.main(["prepare", *overrides, "data.validation_share=0"]) == 0
        before, after = folder(masked), open_prepared(tmp_path / "set", format, "tmp", validation_share=0)
        assert np.array_equal(after.own_mask(0), before.own_mask(0))
        assert after.own_mask(1) is None
        (batch,) = take(batches(after, 2, f"recipe.format={format}"), 1)
        position = batch["index"].tolist().index(0)
        assert np.array_equal(batch["mask"][position, 0].numpy(), before.own_mask(0))
        after.close()


def test_prepare_leaves_out_unusable_images_and_lists_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    photos = tmp_path / "photos"
    photos.mkdir()
    for number in range(3):
        photo(photos / f"good{number}.jpg", position=(55.0 + number, 13.0))
    content = photo(photos / "truncated.jpg", size=(400, 400)).read_bytes()
    (photos / "truncated.jpg").write_bytes(content[: len(content) // 2])
    for name in "abcde":
        (photos / f"empty_{name}.jpg").touch()
    assert app.main(["prepare", "data=folder", f"data.root={photos}", f"prepare.out={tmp_path / 'set'}", *SMALL]) == 0
    inventory = json.loads((tmp_path / "set" / "prepared.json").read_text())["inventory"]
    assert (inventory["found"], inventory["used"], len(inventory["skipped"])) == (9, 3, 6)
    skipped = {image["file"]: image["reason"] for image in inventory["skipped"]}
    assert "truncated" in skipped.pop("truncated.jpg")
    assert skipped == {f"empty_{name}.jpg": "empty file" for name in "abcde"}
    source = open_prepared(tmp_path / "set")
    assert source.names == ["good0.jpg", "good1.jpg", "good2.jpg"]
    assert len(source.inventory.skipped) == 6
