"""Images in Parquet files, as `datasets` writes them."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from inpaint_bench.core.config.bench import DataConfig
from inpaint_bench.core.errors import UserError
from inpaint_bench.data.parquet import ParquetSource

IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def encoded(shade: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (60, 40), (shade, 20, 30)).save(file, "PNG")
    return file.getvalue()


def row(shade: int, **columns: Any) -> dict[str, Any]:
    image = {"bytes": encoded(shade), "path": f"{shade}.png"}
    return {"image": image, "text": f"house {shade}", "latitude": 55.0 + shade / 1000, "longitude": 13.0, **columns}


def write(folder: Path, number: int, rows: list[dict[str, Any]], *, split: str = "train", of: int = 2) -> Path:
    (folder / "data").mkdir(parents=True, exist_ok=True)
    path = folder / "data" / f"{split}-{number:05d}-of-{of:05d}.parquet"
    columns = {name: [one.get(name) for one in rows] for name in rows[0]}
    table = pa.table({**columns, "image": pa.array(columns["image"], IMAGE)})
    pq.write_table(table, path, row_group_size=2)
    return path


def source(root: Path, **keys: Any) -> ParquetSource:
    return ParquetSource(DataConfig(kind="parquet", root=str(root), resolution_px=32, **keys))


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    write(tmp_path, 0, [row(shade) for shade in (10, 20, 30)])
    unusable = [
        row(0, image={"bytes": None, "path": "away.png"}),
        row(0, image={"bytes": encoded(9)[:60], "path": None}),
        row(0, image=None),
        row(50, latitude=None, longitude=None),
    ]
    write(tmp_path, 1, [row(40), *unusable, row(60)])
    return tmp_path


def test_rows_of_all_shards_are_read_in_any_order_and_unusable_ones_are_named(shards: Path) -> None:
    opened = source(shards)
    assert opened.texts == [f"house {shade}" for shade in (10, 20, 30, 40, 60)]
    assert opened.positions[:, 0] == pytest.approx([55.01, 55.02, 55.03, 55.04, 55.06])
    for index in (4, 0, 2, 1, 3):
        expected = (10, 20, 30, 40, 60)[index]
        assert np.array_equal(opened.pixels(index), np.full((32, 32, 3), (expected, 20, 30)))
    assert opened.inventory.found == 9
    name = "data/train-00001-of-00002.parquet row"
    reasons = {image.file: image.reason for image in opened.inventory.skipped}
    assert reasons[f"{name} 1"] == "no image: its bytes are null (path away.png, which is not read)"
    assert "truncated" in reasons[f"{name} 2"] or "damaged" in reasons[f"{name} 2"]
    assert reasons[f"{name} 3"] == "no image: its bytes are null"
    assert reasons[f"{name} 4"].startswith("no position")
    assert source(shards).identity == opened.identity
    assert len(source(shards, num_images=2)) == 2


def test_what_is_no_dataset_of_images_is_refused_with_a_sentence(shards: Path, tmp_path: Path) -> None:
    first = shards / "data" / "train-00000-of-00002.parquet"
    assert len(source(first)) == 3, "one file is a dataset too"
    write(shards, 0, [row(70)], split="test", of=1)
    assert len(source(shards)) == 5, "the split train alone"
    for names in (("train.parquet", "test.parquet"), ("a/train/0000.parquet", "a/test/0000.parquet")):
        for name in names:
            (path := tmp_path / f"named{len(names[0])}" / name).parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(pa.Table.from_pylist([row(len(name))]), path)
        assert source(tmp_path / f"named{len(names[0])}").texts == [f"house {len(names[0])}"]
    names = (
        ("default/partial-train/0000.parquet", "default/partial-test/0000.parquet"),
        ("Train_0.parquet", "Test_0.parquet"),
    )
    for number, (train, test) in enumerate(names):
        for name in (train, test):
            (path := tmp_path / f"hub{number}" / name).parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(pa.Table.from_pylist([row(len(name))]), path)
        assert source(tmp_path / f"hub{number}").texts == [f"house {len(train)}"], "as the Hub names them"
    for number, (train, test) in enumerate(
        (("training/0.parquet", "evaluation/0.parquet"), ("train/data", "test/data"))
    ):
        for name in (train, test):
            path = tmp_path / f"folders{number}" / (name if "." in name else f"{name}-00000-of-00001.parquet")
            path.parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(pa.Table.from_pylist([row(len(name))]), path)
        assert source(tmp_path / f"folders{number}").texts == [f"house {len(train)}"]
    pq.write_table(pa.Table.from_pylist([row(1)]), (tmp_path / "folders0" / "more.parquet"))
    (tmp_path / "folders0" / "training" / "0.parquet").unlink()
    with pytest.raises(UserError, match="has files of the splits evaluation, none; name a folder with one"):
        source(tmp_path / "folders0")
    first.rename(first.with_suffix(".away"))
    with pytest.raises(UserError, match=r"has 1 of the 2 files that train-00001-of-00002\.parquet names"):
        source(shards)
    first.write_bytes(b"PAR1 no more")
    with pytest.raises(UserError, match=r"train-00000-of-00002\.parquet: cannot be read as Parquet"):
        source(shards)
    pq.write_table(pa.table({"image": ["a.png"], "text": ["a house"]}), first)
    with pytest.raises(UserError, match=r"needs a column image with bytes and path.*has image: string"):
        source(shards)
    images = pa.array([row(7)["image"]])
    pq.write_table(pa.Table.from_arrays([images, images], ["image", "image"]), first)
    with pytest.raises(UserError, match="has several columns image; keep one of them"):
        source(shards)
    latin_1 = pa.Array.from_buffers(pa.string(), 1, pa.array([b"\xfc"]).buffers())
    pq.write_table(pa.table({"image": images, "text": latin_1}), first)
    with pytest.raises(UserError, match=r"cannot be read as Parquet .*utf-8"):
        source(shards)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no Parquet file in this folder"):
        source(tmp_path / "empty")
    with pytest.raises(UserError, match="no such folder"):
        source(tmp_path / "nowhere")


def test_files_that_are_left_out_are_named_and_captions_follow_the_rules_of_a_metadata_file(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    for path in (root / "a.parquet", root / "b.PARQUET", root / ".trash" / "old.parquet", elsewhere / "x.parquet"):
        path.parent.mkdir(parents=True, exist_ok=True)
        texts = ["nan", "  ", "a house"] if path.name == "a.parquet" else ["more"]
        rows = [row(len(path.name) * 5 + number, text=text) for number, text in enumerate(texts)]
        pq.write_table(pa.Table.from_pylist(rows), path)
    (root / "._a.parquet").write_bytes(b"what macOS writes beside a file")
    (root / "README.md").write_text("no data")
    (root / "linked").symlink_to(elsewhere)
    opened = source(root)
    assert opened.texts == ["", "", "a house", "more"]
    reasons = {image.file: image.reason for image in opened.inventory.skipped}
    hidden = dict.fromkeys(("._a.parquet", ".trash/old.parquet"), "hidden file")
    assert reasons == {**hidden, "linked": "link to a folder, which is not followed"}
    numbers = [row(number, text=number) for number in (0, 7)]
    pq.write_table(pa.Table.from_pylist(numbers), root / "a.parquet")
    assert [image.reason for image in source(root).inventory.skipped if "row" in image.file] == [
        "its caption must be one text, not int"
    ] * 2


@pytest.mark.parametrize(("make", "reason"), [(os.mkfifo, "is not a plain file"), (None, "is a Git LFS pointer")])
def test_what_is_no_file_of_data_is_refused_at_once(make: Any, reason: str, tmp_path: Path) -> None:
    """Regression: Arrow waited at a pipe, and no signal but SIGKILL ended it."""
    path = tmp_path / "a.parquet"
    if make:
        make(path)
    else:
        path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(UserError, match=rf"a\.parquet: cannot be read as Parquet \({reason}"):
        source(tmp_path)
