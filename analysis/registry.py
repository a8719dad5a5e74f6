"""A registry: a folder of published datasets, on this machine or at any address that fsspec opens.

FOLDER/NAME holds a dataset as `merge` wrote it; FOLDER/index.json lists the datasets with their seals. dataset.json is
copied last, so a reader never takes half a dataset for a whole one.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import re
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
import msgspec
import polars as pl

from inpaint_bench.core import files, records, schema, seal
from inpaint_bench.core.console import list_some
from inpaint_bench.core.errors import UserError

from . import comparability
from .dataset import open_dataset
from .ingest import untrusted

INDEX = "index.json"
_NAME = re.compile(r"[A-Za-z0-9][\w.+-]{0,99}")


class Entry(msgspec.Struct, kw_only=True):
    """A dataset in the index."""

    seal: str
    published_at: str


class LeftOutError(Exception):
    """A dataset that is not pulled: foreign, damaged, not comparable or other content; and the reason."""


class Registry:
    """A folder of a file system of fsspec."""

    def __init__(self, address: str) -> None:
        """Open a path or an address such as s3://bucket/results. Raises UserError where fsspec cannot."""
        self.address = address.rstrip("/")
        try:
            self._fs, root = fsspec.core.url_to_fs(address)
            self._fs.exists(root)
        # An unknown protocol, a package that is missing, and whatever a store raises without credentials.
        except Exception as error:
            raise UserError(f"{address}: cannot be opened ({untrusted.describe(error)})") from None
        self._root = root.rstrip("/")

    def index(self) -> dict[str, Entry]:
        """Return the entries by name. Raises UserError for a damaged index."""
        try:
            return records.decode_record(self._fs.cat_file(f"{self._root}/{INDEX}"), dict[str, Entry])
        except FileNotFoundError:
            return {}
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise UserError(f"{self.address}/{INDEX}: {error}; restore it, or publish into another folder") from None

    def publish(self, source: Path, name: str | None = None) -> bool:
        """Copy a dataset into the folder and return whether it was new. Raises UserError for one that has changed."""
        name = name or source.resolve().name
        if not _NAME.fullmatch(name) or name == INDEX:
            raise UserError(f"{name!r}: a published dataset needs a name of letters, digits and . _ + -; give --name")
        metadata = open_dataset(source).metadata
        if not (sealed := metadata.get("seal")):
            raise UserError(f"{source}: older code merged it and did not seal it; merge the run directories again")
        entry, published = self.index().get(name), self._metadata(name)
        if (entry and entry.seal != sealed) or (published is not None and published.get("seal") != sealed):
            raise UserError(f"{self.address}/{name}: is another dataset; give this one another name with --name")
        if published is None:
            self._copy(source, f"{self._root}/{name}")
        if entry is None:
            entry = Entry(seal=sealed, published_at=dt.datetime.now(dt.UTC).isoformat(timespec="microseconds"))
            # Read again: another dataset may have been published during the copy.
            self._replace(f"{self._root}/{INDEX}", records.encode_record({**self.index(), name: entry}))
            return True
        return published is None

    def _copy(self, source: Path, place: str) -> None:
        try:
            self._fs.makedirs(place)
        except FileExistsError:
            raise UserError(f"{place}: holds something else or half a dataset; remove it, and publish again") from None
        try:
            for file in seal.files_of(source):
                self._fs.makedirs(f"{place}/{file}".rpartition("/")[0], exist_ok=True)
                self._fs.put_file(str(source / file), f"{place}/{file}")
            self._replace(f"{place}/{schema.DATASET}", (source / schema.DATASET).read_bytes())
        except BaseException:
            self._fs.rm(place, recursive=True)
            raise

    def _replace(self, path: str, content: bytes) -> None:
        """Replace a file by one rename."""
        temporary = f"{path}.{os.getpid()}.tmp"
        self._fs.pipe_file(temporary, content)
        self._fs.mv(temporary, path)

    def _metadata(self, name: str) -> dict[str, Any] | None:
        """Return the content of dataset.json, None where there is none. What is no JSON object gives an empty one."""
        try:
            content = json.loads(self._fs.cat_file(f"{self._root}/{name}/{schema.DATASET}"))
        except FileNotFoundError:
            return None
        except (ValueError, RecursionError):
            return {}
        return content if isinstance(content, dict) else {}

    def pull(self, target: Path, allow_mixed: Collection[str] = ()) -> Iterator[tuple[str, str, str]]:
        """Copy the datasets into folders of `target`, the first published first.

        Yield the name of each, the outcome, and why it was left out. Every dataset is checked by its seal, and against
        those that are kept already by the gate of `merge`.
        """
        comparability.check_attributes(allow_mixed)
        if not self._fs.isdir(self._root):
            raise UserError(f"{self.address} does not exist; `inpaint-bench publish` makes it")
        index, listed = self.index(), self._fs.ls(self._root, detail=True)
        folders = {each["name"].rstrip("/").rpartition("/")[2] for each in listed if each["type"] == "directory"}
        if not (names := folders | index.keys()):
            raise UserError(f"{self.address} holds no dataset; `inpaint-bench publish` adds one")
        kept: list[pl.DataFrame] = []
        for name in sorted(names, key=lambda name: (index[name].published_at if name in index else "", name)):
            try:
                yield name, self._pull(name, index.get(name), target / name, kept, allow_mixed), ""
            except LeftOutError as error:
                yield name, *error.args

    def _pull(
        self, name: str, entry: Entry | None, place: Path, kept: list[pl.DataFrame], allow_mixed: Collection[str]
    ) -> str:
        if entry is None or not _NAME.fullmatch(name):
            raise LeftOutError("foreign", f"is not in {INDEX}: `publish` did not write it")
        if (metadata := self._metadata(name)) is None:
            raise LeftOutError("damaged", f"{schema.DATASET} is missing")
        if problem := schema.version_problem(metadata.get("schema_version")):
            raise LeftOutError("foreign", problem)
        if metadata.get("seal") != entry.seal:
            raise LeftOutError("damaged", "is not the dataset that was published under this name")
        if place.exists():
            there = None
            with suppress(ValueError, OSError):
                there = files.read_json(place / schema.DATASET)
            if not isinstance(there, dict) or there.get("seal") != entry.seal:
                raise LeftOutError("other content", f"{place} holds something else; move it away")
            kept.append(_checked(place, kept, allow_mixed))
            return "unchanged"
        with files.replacing_folder(place, schema.DATASET) as new:
            self._fs.get(f"{self._root}/{name}/", f"{new}/", recursive=True)
            kept.append(_checked(new, kept, allow_mixed))
        return "pulled"


def _checked(folder: Path, kept: list[pl.DataFrame], allow_mixed: Collection[str]) -> pl.DataFrame:
    """Return the runs. Raises LeftOutError where the dataset was changed, or its runs differ from comparable ones."""
    try:
        # Before the tables are opened: a broken file has a name here.
        if changes := list(seal.changes(folder, files.read_json(folder / schema.DATASET) or {"seal": None})):
            raise LeftOutError("damaged", list_some(changes))
        runs = open_dataset(folder).runs
    except (UserError, ValueError) as error:
        raise LeftOutError("damaged", str(error).replace(str(folder), "it")) from None
    before = pl.concat([runs[:0], *kept], how="diagonal")
    # What a dataset mixes by itself, its merge was told to.
    known, alone, together = (
        {(name, text.partition(":")[0]): text for name, text in comparability.find_conflicts(frame)}
        for frame in (before, runs, pl.concat([before, runs], how="diagonal"))
    )
    ignored = known.keys() | alone.keys()
    if new := [text for key, text in together.items() if key not in ignored and key[0] not in allow_mixed]:
        raise LeftOutError("not comparable", list_some(new))
    return runs
