"""A dataset that `prepare` wrote, read in one of its formats; see prepared.py for its files."""

import fcntl
import hashlib
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from filelock import FileLock, Timeout
from PIL import Image

from inpaint_bench.core.config.bench import DataConfig
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.files import expand_path
from inpaint_bench.data import prepared, transform
from inpaint_bench.data.prepared import ArrayReader, DatasetManifest, Entry
from inpaint_bench.data.source import Mask, Pixels, Source

_ARRAYS = {"memmap": prepared.PIXELS_NPY, "hdf5": prepared.PIXELS_H5}


class PreparedSource(Source):
    """Images, positions, texts, masks and split of a prepared dataset."""

    def __init__(self, config: DataConfig, format: str = "files", stage_to: str = "none") -> None:
        """Check the manifest, the index and the sizes of the files of `format`, and stage them.

        Raises UserError for a folder that `prepare` did not write, a format that is missing, damage that sizes and
        the index's hash show, and settings that are not the dataset's.
        """
        root, manifest = check_prepared(config, format)
        # `images` are the masks and the files of the format: what is read again and again, and therefore staged.
        _, *images = prepared.list_entries(manifest, format)
        staged = stage(root, images, stage_to) if stage_to != "none" else None  # the index is read only once
        self.root, self.manifest, self.format = root, manifest, format
        self.identity = manifest.identity
        self.resolution_px = manifest.resolution_px
        self.inventory = manifest.inventory
        index = read_index(root, manifest)
        self.names: list[str] = index["file_name"].to_pylist()
        self.texts: list[str] = index["text"].to_pylist()
        self.positions = np.stack([index["latitude"].to_numpy(), index["longitude"].to_numpy()], axis=1)
        self.validation = np.array(index["split"].to_pylist()) == "validation"
        self._masks: list[str | None] = index["mask"].to_pylist()
        self._staged = staged
        self.staging: dict[str, Any] = staged.facts if staged else {"effective": "none"}  # for the run's manifest
        self._read_root = staged.root if staged else root  # root of the masks and of the files of `format`
        shape = (len(self.names), self.resolution_px, self.resolution_px, 3)
        array = ArrayReader(self._read_root / _ARRAYS[format], shape) if format in _ARRAYS else None
        self._pixels: Callable[[int], Pixels] = array.__getitem__ if array else self._decode

    def pixels(self, index: int) -> Pixels:
        """Return an image, the same in every format. Format `webdataset` reads images/: tars have no random access."""
        return self._pixels(index)

    def jpeg(self, index: int) -> bytes:
        """Return the encoded image."""
        return self.path(index).read_bytes()

    def path(self, index: int) -> Path:
        """Return the file in images/ that `jpeg` reads; staged with format `files`."""
        return (self._read_root if self.format == "files" else self.root) / prepared.IMAGE_PATTERN.format(index)

    def own_mask(self, index: int) -> Mask | None:
        name = self._masks[index]
        if name is None:
            return None
        path = self._read_root / name
        with transform.naming(path), Image.open(path) as mask:
            return (np.asarray(mask) > 127).astype(np.uint8)

    def shards(self, indices: npt.NDArray[np.int64]) -> list[Path]:
        """Return the tar files of format `webdataset` that hold at least one image of `indices`."""
        written = self.manifest.formats["webdataset"]
        numbers = np.unique(indices // (written.shard_images or len(self)))
        return [self._read_root / written.files[number].path for number in numbers]

    def close(self) -> None:
        if self._staged:
            self._staged.close()

    def _decode(self, index: int) -> Pixels:
        with transform.naming(self.path(index)):
            return prepared.decode_jpeg(self.jpeg(index))


def check_prepared(config: DataConfig, format: str) -> tuple[Path, DatasetManifest]:
    """Return `data.root` and its manifest. Raises UserError as `PreparedSource` does."""
    root = expand_path(config.root or "")
    if not root.is_dir():
        what = "is a file, not a folder" if root.exists() else "no such folder"
        raise UserError(f"data.root={root}: {what}")
    manifest = prepared.read_manifest(root)
    if manifest is None:
        raise UserError(
            f"data.root={root}: has no {prepared.MANIFEST}, so `prepare` did not write it; "
            "photographs are read with data=folder"
        )
    _check_settings(config, manifest)
    if format not in manifest.formats:
        raise UserError(
            f"recipe.format={format}: {root} was prepared as {', '.join(manifest.formats)}; this adds it: "
            f"inpaint-bench prepare {prepared.usage_overrides(root)} prepare.formats=[{format}]"
        )
    prepared.check_sizes(root, prepared.list_entries(manifest, format))
    return root, manifest


def _check_settings(config: DataConfig, manifest: DatasetManifest) -> None:
    """Raise UserError if the configuration differs from the dataset: results are filed under the configuration."""
    # data.num_images=null accepts as many images as were prepared.
    stored = manifest.settings() | ({"num_images": manifest.num_images} if config.num_images else {})
    wrong = {name: value for name, value in stored.items() if getattr(config, name) != value}
    if wrong:
        differences = ", ".join(f"data.{n}={getattr(config, n):g} (prepared: {wrong[n]:g})" for n in wrong)
        keys = " and ".join(f"data.{name}" for name in wrong)
        raise UserError(
            f"data.root={config.root}: not what was prepared: {differences}; leave out {keys}, which data=prepared "
            "takes from the dataset, or prepare another one"
        )


def read_index(root: Path, manifest: DatasetManifest) -> pa.Table:
    """Return the index. Raises UserError if it is not, to the bit, the one that was written."""
    path = root / prepared.INDEX
    if Entry.of(root, prepared.INDEX) != manifest.index:
        raise UserError(f"{path}: not as it was written (other content); prepare the dataset again")
    if (index := pq.read_table(path)).num_rows != manifest.num_images:
        problem = f"says {manifest.num_images} images, {prepared.INDEX} has {index.num_rows}"
        raise UserError(f"{root / prepared.MANIFEST}: {problem}; prepare the dataset again")
    return index


# --- copies on the node's local disk or in its memory --------------------------------------------

# A copy appears complete or not at all. Processes of one user on one node share it: the second one waits for the copy
# and copies nothing, and the last one that closes it removes it. A killed process leaves its copy for the next run,
# which removes it when it ends; batch systems clear the rest.
#
# The copy lies below $TMPDIR (/tmp without it) or /dev/shm. Memory there counts against the job's own limit, which the
# check of free space does not see.
SHARED_MEMORY = Path("/dev/shm")
COPY_THREADS = 8
CLOSE_TIMEOUT_S = 10.0


class StagedDataset:
    """The copy at `root`, in use until `close` or the end of the process that made this object."""

    def __init__(self, root: Path, facts: dict[str, Any], users_fd: int) -> None:
        self.root = root
        self.facts = facts  # for the run's manifest
        self.close = weakref.finalize(self, _stop_using, root, users_fd, os.getpid())


def stage(source: Path, entries: Sequence[Entry], where: str) -> StagedDataset:
    """Copy `entries` of the dataset at `source` to tmp or shm, unless they are there. Raises UserError for no space."""
    start = time.monotonic()
    base = _user_folder(where)
    # Named by a hash of its entries: another dataset, or another format of this one, is another copy.
    target = base / hashlib.sha256(msgspec.json.encode(entries)).hexdigest()[:16]
    # Two locks: this one is held only while the copy is made or removed, the shared one on the copy's folder for as
    # long as the copy is in use. With one lock for both, a process could wait for the end of another's training.
    with FileLock(_lock_path(target)):
        copied = bool(prepared.find_damaged(target, entries))  # or missing
        if copied:
            _copy(source, entries, target, where)
        users_fd = os.open(target, os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(users_fd, fcntl.LOCK_SH)
    facts = {
        "effective": where,
        "path": str(target),
        "bytes": sum(entry.bytes for entry in entries),
        "copied": copied,  # False: another process had done it
        "stage_s": round(time.monotonic() - start, 3),
    }
    return StagedDataset(target, facts, users_fd)


def _stop_using(target: Path, users_fd: int, owner_pid: int) -> None:
    """Remove the copy unless other processes use it. Do nothing in a forked process: its parent owns the copy."""
    if os.getpid() != owner_pid:
        return
    # Not without a timeout: the garbage collector may call this inside `stage`, which then holds the lock itself.
    with suppress(BlockingIOError, Timeout), FileLock(_lock_path(target), timeout=CLOSE_TIMEOUT_S):
        # Fails while another process holds its shared lock: then the last of them removes the copy.
        fcntl.flock(users_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(target, ignore_errors=True)
    os.close(users_fd)


def _lock_path(target: Path) -> Path:
    return target.with_name(f".{target.name}.lock")  # empty, and never removed: others may be waiting for it


def _user_folder(where: str) -> Path:
    parent = SHARED_MEMORY if where == "shm" else Path(tempfile.gettempdir())
    if not parent.is_dir():
        raise UserError(f"recipe.stage_to={where}: this machine has no {parent}")
    folder = parent / f"inpaint_bench-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise UserError(f"recipe.stage_to={where}: {folder} cannot be made ({error.strerror})") from None
    # /tmp and /dev/shm are writable for all users: another user may have created this folder first.
    if folder.stat().st_uid != os.getuid():
        raise UserError(f"recipe.stage_to={where}: {folder} belongs to another user")
    return folder


def _copy(source: Path, entries: Sequence[Entry], target: Path, where: str) -> None:
    partial = target.with_name(f"{target.name}.partial")
    for remains in (partial, target):  # left by a killed process
        shutil.rmtree(remains, ignore_errors=True)
    needed, free = sum(entry.bytes for entry in entries), shutil.disk_usage(target.parent).free
    size = f"the data needs {needed / 1e6:,.1f} MB on {target.parent}, {free / 1e6:,.1f} MB are free"
    if needed > free:
        raise UserError(f"recipe.stage_to={where}: {size}")
    try:
        for folder in {(partial / entry.path).parent for entry in entries}:
            folder.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(COPY_THREADS, thread_name_prefix="stage") as pool:
            copies = [pool.submit(shutil.copyfile, source / entry.path, partial / entry.path) for entry in entries]
            for copy in copies:
                copy.result()
        prepared.check_sizes(partial, entries)
        # The name appears only now, when all files are complete.
        partial.rename(target)
    except OSError as error:
        raise UserError(f"recipe.stage_to={where}: {size} ({error})") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
