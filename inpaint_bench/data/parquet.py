"""Images in Parquet files, in the layout of Hugging Face's `datasets`: a column `image` with bytes and path.

A row is read with its row group, of which `datasets` writes one for 100 images; nothing else stays in memory.
"""

import io
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from inpaint_bench.core.config.bench import DataConfig
from inpaint_bench.core.console import sanitize
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.files import check_plain, expand_path
from inpaint_bench.core.records import SkippedImage

from . import transform
from .folder import FolderSource, Photo, Task, escape_invalid, examine, examine_all, walk, why_left_out
from .geotags import MetadataRow, is_empty
from .source import Pixels

IMAGE, TEXTS, POSITION = "image", ("text", "caption"), ("latitude", "longitude")
SHARD = re.compile(r"(?P<split>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})(-\w+)?")  # the end is a hash, of the Hub's own
# The name of a file or folder: `partial-` and a number are of the Hub's own conversions.
SPLIT = re.compile(
    r"(?:partial-)?(train|training|validation|valid|val|dev|testing|test|evaluation|eval)(?:[-_.]?\d+)?", re.IGNORECASE
)
TRAIN = "train"
ROWS = 32  # read at once when all images are checked
MAX_GROUP_BYTES = 2**31  # read at once for one image

log = logging.getLogger(__name__)


def open_shards(root: str | None) -> tuple[dict[Path, pq.FileMetaData], list[SkippedImage]]:
    """Return the Parquet files of `data.root`, in order, and those that are left out, with the reason.

    Raises UserError for what is no dataset of images.
    """
    folder = expand_path(root or "")
    if not os.path.lexists(folder):
        raise UserError(f"data.root={folder}: no such folder")
    paths, left_out = _list_files(folder) if folder.is_dir() else ([folder], [])
    if not paths:
        others = "".join(f"; left out: {image.file} ({image.reason})" for image in left_out[:1])
        raise UserError(f"data.root={folder}: no Parquet file in this folder (*.parquet){others}")
    splits = sorted({_split(folder, path) or "none" for path in paths})
    if len(splits) > 1 and splits != ["none", TRAIN]:
        if TRAIN not in splits:
            raise UserError(f"data.root={folder}: has files of the splits {', '.join(splits)}; name a folder with one")
        paths = [path for path in paths if _split(folder, path) == TRAIN]
        log.warning("read is the split train, of %s", sanitize(", ".join(splits)))
    shards = {path: match for path in paths if (match := SHARD.fullmatch(path.stem))}
    for path, match in shards.items():
        present = {other["number"] for file, other in shards.items() if file.parent == path.parent}
        if not folder.is_file() and len(present) != int(match["count"]):
            raise UserError(
                f"{path.parent}: has {len(present)} of the {int(match['count'])} files that {path.name} names"
            )
    return {path: _read_footer(path) for path in paths}, left_out


def _list_files(folder: Path) -> tuple[list[Path], list[SkippedImage]]:
    """Return the Parquet files below a folder, and hidden ones and linked folders as left out."""
    paths, left_out = [], []
    for name in sorted(walk(folder), key=lambda name: Path(name).parts):
        is_shard = Path(name).suffix.lower() == ".parquet"
        if (reason := why_left_out(folder, name)) and (is_shard or (folder / name).is_dir()):
            left_out.append(SkippedImage(file=escape_invalid(name), reason=reason))
        elif is_shard:
            paths.append(folder / name)
    return paths, left_out


def _split(folder: Path, path: Path) -> str | None:
    """Return the split of a file, by its name or a folder above it; else what the name of a shard begins with."""
    shard = SHARD.fullmatch(path.stem)
    names = (shard["split"] if shard else path.stem, *reversed(path.relative_to(folder).parts[:-1]))
    known = next((match[1].lower() for name in names if (match := SPLIT.fullmatch(name))), shard and shard["split"])
    return TRAIN if known == "training" else known


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, UnicodeError, pa.ArrowException) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise UserError(f"{path}: cannot be read as Parquet ({reason})") from None


def _read_footer(path: Path) -> pq.FileMetaData:
    with _naming(path):
        check_plain(path)  # Arrow would wait at a pipe, and heed no signal
        with pq.ParquetFile(path) as file:
            metadata, schema = file.metadata, file.schema_arrow
    if twice := [name for name in (IMAGE, *TEXTS, *POSITION) if schema.names.count(name) > 1]:
        raise UserError(f"{path}: has several columns {twice[0]}; keep one of them")
    kind = schema.field(IMAGE).type if IMAGE in schema.names else None
    content = (
        kind.field("bytes").type if kind and pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0 else None
    )
    if content is None or not (pa.types.is_binary(content) or pa.types.is_large_binary(content)):
        has = f"image: {kind}" if kind else ", ".join(schema.names)
        raise UserError(f"{path}: needs a column image with bytes and path, as `datasets` writes it; has {has}")
    largest = max((metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups)), default=0)
    if largest > MAX_GROUP_BYTES:
        raise UserError(
            f"{path}: has a row group of {largest / 2**30:.1f} GiB, which is read at once; write it with at most "
            "2 GiB, by pyarrow.parquet.write_table(..., row_group_size=100)"
        )
    return metadata


class ParquetSource(FolderSource):
    """The images of Parquet files, each with a position. An image is named by its file and its row, from 0 on."""

    def __init__(self, config: DataConfig) -> None:
        """Check every image and keep the usable ones. Raises UserError if there is none."""
        shards, left_out = open_shards(config.root)
        root = expand_path(config.root or "")
        self._root = root.parent if root.is_file() else root
        self._places: dict[str, tuple[Path, int, int]] = {}  # by name: file, row group, row in it
        self._group: tuple[tuple[Path, int], Any] | None = None  # the last one that was read
        count = sum(metadata.num_rows for metadata in shards.values())
        results = examine_all(self._tasks(shards, config.resolution_px), count)
        self._keep(config, self._root, results, left_out, count)
        self._places = {name: self._places[name] for name in self.names}

    def _tasks(self, shards: dict[Path, pq.FileMetaData], side: int) -> Iterator[list[Task]]:
        for path, metadata in shards.items():
            shard, row = escape_invalid(path.relative_to(self._root).as_posix()), 0
            with _naming(path), pq.ParquetFile(path) as file:
                columns = [name for name in (IMAGE, *TEXTS, *POSITION) if name in file.schema_arrow.names]
                if unused := [name for name in file.schema_arrow.names if name not in columns]:
                    log.warning("%s", sanitize(f"{shard}: columns that are not used: {', '.join(unused)}"))
                for group in range(metadata.num_row_groups):
                    inside = 0
                    for batch in file.iter_batches(ROWS, row_groups=[group], columns=columns, use_threads=False):
                        tasks: list[Task] = []
                        for record in batch.to_pylist():
                            name = f"{shard} row {row}"
                            self._places[name] = path, group, inside
                            tasks.append(partial(_examine, self._root, name, record, side))
                            row, inside = row + 1, inside + 1
                        yield tasks

    def pixels(self, index: int) -> Pixels:
        """Return the image upright, cropped to the centre square and resized."""
        path, group, row = self._places[self.names[index]]
        with transform.naming(self._root / self.names[index]):
            # Loader processes are forked: each opens the file for itself, without Arrow's threads, which they lack.
            if self._group is None or self._group[0] != (path, group):
                with pq.ParquetFile(path) as file:
                    table = file.read_row_group(group, columns=[f"{IMAGE}.bytes"], use_threads=False)
                self._group = (path, group), table[IMAGE]
            content = self._group[1][row].as_py()["bytes"]
            with transform.open_image(io.BytesIO(content)) as image:
                return transform.center_square(transform.upright(image), self.resolution_px)


def _examine(root: Path, name: str, record: dict[str, Any], side: int) -> Photo | SkippedImage:
    image = record[IMAGE] or {}
    if image.get("bytes") is None:
        path = f" (path {escape_invalid(str(image['path']))}, which is not read)" if image.get("path") else ""
        return SkippedImage(file=name, reason=f"no image: its bytes are null{path}")
    text = next((record[column] for column in TEXTS if not is_empty(record.get(column))), "")
    if not isinstance(text, str):
        return SkippedImage(file=name, reason=f"its caption must be one text, not {type(text).__name__}")
    row = MetadataRow(latitude=record.get("latitude"), longitude=record.get("longitude"), text=text)
    return examine(root, name, row, side, content=image["bytes"])
