"""Metadata files and captions: what is beyond their expected form is refused or said, never dropped or converted."""

from __future__ import annotations

import codecs
import json
import re
import subprocess
import sys
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from inpaint_bench.core.errors import UserError
from inpaint_bench.data import geotags
from inpaint_bench.data.folder import TABLE_REASON
from tests.run.support import photo

from .support import SMALL
from .test_folder import folder, grey, reasons, save

HEADER = "file_name,latitude,longitude,text\n"


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Return a folder with a.png and b.png, without positions."""
    for value, name in enumerate("ab"):
        grey(50 * value).save(tmp_path / f"{name}.png")
    return tmp_path


def texts(root: Path, content: str | bytes) -> dict[str, str]:
    """Return the text of every usable image under a metadata.csv."""
    (root / "metadata.csv").write_bytes(content if isinstance(content, bytes) else content.encode())
    source = folder(root)
    return dict(zip(source.names, source.texts, strict=True))


class TestCsv:
    @pytest.mark.parametrize(
        ("rows", "reason"),
        [
            ("a.png,55,13,a brick house, red, with, trees\n", "row 1: has 7 fields, the header 4"),
            ("b.png,55,13,fine\na.png,55,13,a house, red\n", "row 2: has 5 fields, the header 4"),
            ("a.png,55,13\n", "row 1: has 3 fields, the header 4"),
            ('a.png,55,13,"The Swan" inn\nb.png,55,13,house\n', "row 1: ',' expected after '\"'"),
            ('a.png,55,13,"The Swan\nb.png,55,13,house\n', "row 1: unexpected end of data"),
            ('a.png,55,13,"The Swan\nb.png,55,13,"The Lion"\n', "row 1: ',' expected after '\"'"),
            ('a.png,55,13,"The Swan\nb.png,55,13,The Lion"\n', "row 1: has a text that goes on over the next row"),
            ('"The Swan,a.png,55,13\nb",b.png,55,13\n', "row 1: has a text that goes on over the next row"),
        ],
    )
    def test_row_that_does_not_fit_the_header_is_refused(self, images: Path, rows: str, reason: str) -> None:
        with pytest.raises(UserError, match=rf"metadata\.csv: cannot be read \({re.escape(reason)}; a text with ','"):
            texts(images, HEADER + rows)

    @pytest.mark.parametrize(
        "content",
        [
            "file_name, latitude , longitude,  text\na.png, 55, 13, a house\n",
            HEADER + "a.png,55,13,a house\n,,,\n , , ,\n\n",
            "\n\n" + HEADER + "\na.png,55,13,a house\n",
            HEADER + "a.png,55,13,a house,,,\n",
            "file_name,latitude,longitude,text,,\na.png,55,13,a house,,\n",
            HEADER.replace("\n", "\r\n") + "a.png,55,13,a house\r\n",
            HEADER.replace("\n", "\r") + "a.png,55,13,a house\r",
            HEADER.replace(",", ";") + "a.png;55;13;a house\n",
            "sep=;\r\n" + HEADER.replace(",", ";") + "a.png;55;13;a house\n",
            HEADER + "a.png,55,13,a house\na.png,55,13,a house\n",
            HEADER.replace(",", "\t") + "a.png\t55\t13\ta house\n",
            '"file_name","latitude","longitude","text"\n"a.png","55","13","a house"\n',
            codecs.BOM_UTF8 + HEADER.encode() + b"a.png,55,13,a house\n",
            (HEADER + "a.png,55,13,a house\n").encode("utf-16"),
            codecs.BOM_UTF16_BE + (HEADER + "a.png,55,13,a house\n").encode("utf-16-be"),
        ],
        ids=range(15),
    )
    def test_forms_that_spreadsheets_write_are_read(self, images: Path, content: str | bytes) -> None:
        assert texts(images, content) == {"a.png": "a house"}

    def test_quoted_texts_keep_commas_quotation_marks_and_lines(self, images: Path) -> None:
        rows = 'a.png,55,13,"a ""red"" house, two floors"\nb.png,55,14,"first,\nas in a.png, third"\n'
        assert texts(images, HEADER + rows) == {
            "a.png": 'a "red" house, two floors',
            "b.png": "first,\nas in a.png, third",
        }

    def test_utf16_without_a_byte_order_mark_is_refused(self, images: Path) -> None:
        with pytest.raises(UserError, match="has NUL characters; a text in UTF-16 begins with a byte order mark"):
            texts(images, (HEADER + "a.png,55,13,a house\n").encode("utf-16-le"))

    def test_digits_with_underscores_are_no_position(self, images: Path) -> None:
        assert texts(images, HEADER + "a.png,5_5,13,a house\nb.png,55,13,another\n") == {"b.png": "another"}

    def test_decimal_comma_is_named(self, images: Path) -> None:
        with pytest.raises(UserError, match=r"2 latitude has a decimal comma; write a point, such as 55\.6988"):
            texts(images, HEADER.replace(",", ";") + "a.png;55,1;13,2;x\nb.png;55,1;13,3;y\n")

    @pytest.mark.parametrize("name", ["A.PNG", "/photos/a.png", "sub\\a.png", "a"])
    def test_name_that_nearly_fits_is_named(self, images: Path, name: str) -> None:
        if "sub" in name:
            (images / "sub").mkdir()
            (images / "a.png").rename(images / "sub" / "a.png")
        with pytest.raises(UserError, match=r"folder \(.*\); '.*' may be '(sub/)?a\.png', as the folder has it"):
            texts(images, HEADER + f"{name},55,13,a house\n")

    def test_letter_with_an_accent_is_one_whatever_its_form(self, images: Path) -> None:
        """As macOS names files, and programs write tables."""
        (images / "a.png").rename(images / unicodedata.normalize("NFD", "gäta.png"))
        rows = HEADER + "gäta.png,55,13,a house\n" + "b.png,55,14,another\n"
        assert sorted(texts(images, rows).values()) == ["a house", "another"]

    def test_other_encodings_are_refused(self, images: Path) -> None:
        with pytest.raises(UserError, match=r"metadata\.csv: cannot be read \(line 2: byte 0xe9 is not UTF-8"):
            texts(images, (HEADER + "a.png,55,13,café\n").encode("latin-1"))


def test_git_lfs_pointers_are_named(images: Path) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
    (images / "a.png").write_bytes(pointer)
    with pytest.raises(UserError, match="is a Git LFS pointer: run `git lfs pull` there"):
        texts(images, pointer)
    with pytest.raises(UserError, match="1 cannot be read: is a Git LFS pointer"):
        texts(images, HEADER + "a.png,55,13,a house\n")


class TestColumns:
    def test_unused_ones_are_named(self, images: Path, caplog: pytest.LogCaptureFixture) -> None:
        photo(images / "c.jpg")
        assert texts(images, "file_name,lat,lon,caption,empty\nc.jpg,55,13,a house,\n") == {"c.jpg": ""}
        assert "metadata.csv: columns that are not used: 'lat', 'lon', 'caption'; used are file_name" in caplog.text
        assert "empty" not in caplog.text

    def test_images_without_a_row_are_counted(self, images: Path, caplog: pytest.LogCaptureFixture) -> None:
        photo(images / "c.jpg")
        assert texts(images, HEADER + "a.png,55,13,a house\n") == {"a.png": "a house", "c.jpg": ""}
        assert "1 of 2 images have no row in the metadata file: c.jpg" in caplog.text
        assert reasons(folder(images))["b.png"].startswith("no row in the metadata file; no position")

    @pytest.mark.parametrize("form", ["csv", "jsonl", "parquet"])
    def test_doubled_names_are_refused(self, images: Path, form: str) -> None:
        path = images / f"metadata.{form}"
        if form == "csv":
            path.write_text("file_name,latitude,longitude,text,text \na.png,55,13,a house,another\n")
        elif form == "jsonl":
            path.write_text('{"file_name": "a.png", "text": "a house", "text": "another"}\n')
        else:
            columns = [pa.array([value]) for value in ("a.png", "a house", "another")]
            pq.write_table(pa.Table.from_arrays(columns, ["file_name", "text", "text"]), path)
        with pytest.raises(UserError, match=r"cannot be read \(has 'text' more than once"):
            folder(images)

    @pytest.mark.parametrize("form", ["jsonl", "parquet"])
    @pytest.mark.parametrize("column", ["text", "mask"])
    @pytest.mark.parametrize("value", [["a house", "red"], {"en": "a house"}, 5, True, b"a house"], ids=str)
    def test_value_that_is_no_text_is_refused(self, images: Path, form: str, column: str, value: Any) -> None:
        row = {"file_name": "a.png", "latitude": 55.0, "longitude": 13.0, column: value}
        if form == "parquet":
            pq.write_table(pa.Table.from_pylist([row]), images / "metadata.parquet")
        elif isinstance(value, bytes):
            pytest.skip("JSON has no bytes")
        else:
            (images / "metadata.jsonl").write_text(json.dumps(row))
        with pytest.raises(UserError, match=f"entry 1: {column}={re.escape(repr(value))} must be one text"):
            folder(images)

    @pytest.mark.parametrize(
        "kind", [pa.timestamp("ns"), pa.timestamp("ms"), pa.timestamp("s", "Mars/Phobos"), pa.date32()], ids=str
    )
    def test_column_that_is_not_used_may_be_of_any_type(
        self, images: Path, kind: pa.DataType, caplog: pytest.LogCaptureFixture
    ) -> None:
        row = {"file_name": ["a.png"], "latitude": [55.0], "longitude": [13.0], "text": ["a house"]}
        value = 2**30 if kind == pa.date32() else 2**62 + 1 if kind == pa.timestamp("ns") else 2**45
        others = {"taken": pa.array([value], kind), "empty": pa.array([None], kind)}
        pq.write_table(pa.table({**row, **others}), images / "metadata.parquet")
        assert folder(images).texts == ["a house"]
        assert "columns that are not used: 'taken'; used are" in caplog.text

    @pytest.mark.parametrize(
        ("second", "reason"),
        [
            ('{"file_name": "b.png",}', "line 2, column 23: Expecting property name"),
            ('{"file_name": "b.png"},', "line 2, column 23: Extra data"),
            ("[]", "line 2: every line must be a JSON object"),
            ("[" * 100_000, "maximum recursion depth"),
        ],
        ids=range(4),
    )
    def test_line_that_is_no_object_is_named(self, images: Path, second: str, reason: str) -> None:
        (images / "metadata.jsonl").write_text(f'{{"file_name": "a.png"}}\n{second}\n')
        with pytest.raises(UserError, match=rf"metadata\.jsonl: cannot be read \({reason}"):
            folder(images)

    def test_nan_and_none_are_no_text(self, images: Path) -> None:
        rows = {"file_name": ["a.png", "b.png"], "latitude": [55.0, 56.0], "longitude": [13.0, 13.0]}
        pq.write_table(
            pa.table({**rows, "text": [float("nan")] * 2, "mask": [None, "NaN"]}), images / "metadata.parquet"
        )
        assert folder(images).texts == ["", ""]
        (images / "metadata.parquet").unlink()
        lines = (
            {"file_name": name, "latitude": 55, "longitude": 13, "text": float("nan")} for name in ("a.png", "b.png")
        )
        (images / "metadata.jsonl").write_text("\n\n".join(map(json.dumps, lines)), encoding="utf-16")
        assert folder(images).texts == ["", ""]

    def test_prepare_counts_texts_and_masks(self, images: Path, tmp_path: Path) -> None:
        (images / "m").mkdir()
        Image.fromarray(np.full((40, 40), 255, np.uint8)).save(images / "m/b.png")
        table = "file_name,latitude,longitude,text,mask,caption\na.png,55,13,a house,,red\nb.png,56,13,,m/b.png,green\n"
        (images / "metadata.csv").write_text(table)
        out = tmp_path.parent / f"{tmp_path.name}-set"
        command = [sys.executable, "-m", "inpaint_bench", "prepare", "data=folder", f"data.root={images}", *SMALL]
        done = subprocess.run([*command, f"prepare.out={out}"], capture_output=True, text=True, check=True)
        assert "\n2 with a position, 1 with a text, 1 with a mask\n" in done.stdout
        assert "metadata.csv: columns that are not used: 'caption'; used are" in done.stdout + done.stderr


class TestCaptions:
    @pytest.mark.parametrize("suffix", [".txt", ".caption"])
    @pytest.mark.parametrize(
        "content",
        [b"a house\n", b"\n\r\n  \n a house \nred\n", "a house\r\n".encode("utf-16"), codecs.BOM_UTF8 + b"a house"],
    )
    def test_first_line_that_is_not_empty_is_read(self, tmp_path: Path, suffix: str, content: bytes) -> None:
        save(tmp_path, ("a.png", grey(1)))
        (tmp_path / f"a{suffix}").write_bytes(content)
        source = folder(tmp_path)
        assert source.texts == ["a house"]
        assert not source.inventory.skipped

    def test_text_that_is_read_for_no_image_is_named(self, tmp_path: Path) -> None:
        save(tmp_path, ("a.png", grey(1)), ("b.png", grey(2)))
        (tmp_path / "a.TXT").write_text("a house")
        (tmp_path / "b.txt").write_bytes("a house".encode("utf-16-le"))
        assert reasons(folder(tmp_path)) == {
            "a.TXT": "text of no image: a caption of NAME.jpg is NAME.txt or NAME.caption",
            "b.png": "its caption b.txt cannot be read: "
            "has NUL characters; a text in UTF-16 begins with a byte order mark",
        }

    def test_two_captions_of_one_image_are_listed(self, tmp_path: Path) -> None:
        save(tmp_path, ("a.png", grey(1)), ("b.png", grey(2)))
        for suffix in ("txt", "caption"):
            (tmp_path / f"a.{suffix}").write_text(suffix)
        assert reasons(folder(tmp_path)) == {"a.png": "it has the captions a.txt and a.caption; keep one of them"}


class TestMisplacedMetadata:
    @pytest.mark.parametrize(
        "name",
        [
            *(
                "sub/metadata.csv",
                "Metadata.csv",
                "metadata.json1",
                "metadata.csv.txt",
                "metadata.json",
                "METADATA.CSV",
            ),
            *("metadata (1).csv", "captions.tsv", "labels.xlsx", "metadata"),
        ],
    )
    def test_is_named_as_what_it_probably_is(self, tmp_path: Path, name: str) -> None:
        photo(tmp_path / "a.jpg")
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(HEADER + "a.jpg,55,13,a house\n")
        assert reasons(folder(tmp_path)) == {name: TABLE_REASON}
        assert TABLE_REASON.startswith("perhaps the metadata file, which must be metadata.csv or")

    def test_metadata_that_is_no_file_is_refused(self, images: Path) -> None:
        path = images / "metadata.csv"
        path.symlink_to(images / "gone.csv")
        with pytest.raises(UserError, match=r"metadata\.csv: cannot be read \(.*No such file"):
            geotags.read_metadata(images)
        path.unlink()
        path.mkdir()
        with pytest.raises(UserError, match=r"metadata\.csv: cannot be read"):
            geotags.read_metadata(images)
