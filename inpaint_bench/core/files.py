"""Atomic replacement of files and folders, and bounded reading: no link, pipe or endless file surprises a command."""

import errno
import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from .errors import UNREACHABLE, UserError
from .signals import defer_signals

S = TypeVar("S")
T = TypeVar("T")
LFS_POINTER = b"version https://git-lfs"
IS_POINTER = "is a Git LFS pointer: run `git lfs pull` there"
READERS = 16  # files read at once: on a network file system each read waits for the server
MAX_RECORD_BYTES = 2**28  # largest file that is read as a whole; a ledger of 100,000 attempts has 2**26


def expand_path(text: str) -> Path:
    """Return a path of the configuration with `~` and `$VARIABLE` replaced, as the machine that reads it has them."""
    return Path(os.path.expanduser(os.path.expandvars(text)))  # noqa: PTH111 - pathlib raises for an unknown user


def open_plain(path: Path, flags: int = os.O_RDONLY, *, follow_links: bool = False, mode: int = 0o666) -> int:
    """Open a plain file and return its descriptor; wait at no pipe, follow no link unless told to. Raises OSError."""
    flags |= os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow_links else os.O_NOFOLLOW)
    try:
        handle = os.open(path, flags, mode)
    except OSError as error:
        if error.errno == errno.ELOOP and not follow_links:
            raise OSError(errno.ELOOP, "is a link, which is not followed", str(path)) from None
        if error.errno == errno.ENXIO:  # a pipe that nobody reads, or a socket
            raise OSError(errno.ENXIO, "is not a plain file", str(path)) from None
        raise
    kind = os.fstat(handle).st_mode
    if not stat.S_ISREG(kind):
        os.close(handle)
        code = errno.EISDIR if stat.S_ISDIR(kind) else errno.ENXIO
        raise OSError(code, os.strerror(code) if code == errno.EISDIR else "is not a plain file", str(path))
    return handle


def read_plain(path: Path, *, follow_links: bool = False, max_bytes: int | None = MAX_RECORD_BYTES) -> bytes:
    """Return the content of a plain file. Raises OSError also for a link and for a file of more than `max_bytes`."""

    def read() -> bytes:
        with os.fdopen(open_plain(path, follow_links=follow_links), "rb") as source:
            if max_bytes is not None and os.fstat(source.fileno()).st_size > max_bytes:
                raise OSError(errno.EFBIG, f"larger than {max_bytes:,} bytes, so it is not read", str(path))
            content = source.read()
        if content.startswith(LFS_POINTER):
            raise OSError(errno.ENXIO, IS_POINTER, str(path))
        return content

    try:
        return try_twice(read)
    except OSError as error:
        error.filename = error.filename or str(path)  # an error of `read` itself does not name the file
        raise


def check_plain(path: Path) -> None:
    """Raise OSError unless a path is that of a plain file, or a link to one, and for a Git LFS pointer."""
    with os.fdopen(open_plain(path, follow_links=True), "rb") as file:
        if file.read(len(LFS_POINTER)) == LFS_POINTER:
            raise OSError(errno.ENXIO, IS_POINTER, str(path))


def try_twice(read: Callable[[], T]) -> T:
    """Return what `read` returns; call it again if its file system does not answer for a moment. Raises OSError."""
    try:
        return read()
    except OSError as error:
        if error.errno not in UNREACHABLE:
            raise
    time.sleep(0.2)
    return read()


def names_in(folder: Path) -> list[str]:
    """Return the names in a folder, none if it is missing, a file or closed. Raises OSError if it cannot be read."""
    with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
        return try_twice(lambda: [path.name for path in folder.iterdir()])
    return []


def in_threads(function: Callable[[S], T], items: Iterable[S]) -> list[T]:
    """Return the results by threads, or by this one alone if a limit of the machine allows no other."""
    items = list(items)
    with suppress(RuntimeError), ThreadPoolExecutor(READERS) as pool:  # "can't start new thread"
        return list(pool.map(function, items))
    return [function(item) for item in items]


def why_unreadable(path: Path, max_bytes: int | None = None) -> str | None:
    """Return why a file cannot be read, None if it can. Links are followed."""
    try:
        with os.fdopen(open_plain(path, follow_links=True)) as file:
            if max_bytes is not None and os.fstat(file.fileno()).st_size > max_bytes:
                return f"is larger than {max_bytes:,} bytes"
    except OSError as error:
        return error.strerror
    return None


def check_can_be_made(folder: Path) -> None:
    """Raise UserError if a folder cannot be made: mkdir would not name it, and of /proc say that it is missing."""
    nearest = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(path))
    if not nearest.exists():
        raise UserError(f"{folder}: {nearest} is a link to what does not exist; remove it, or name another folder")
    try:
        tempfile.TemporaryDirectory(dir=nearest).cleanup()
    except OSError as error:
        problem = "takes no files" if folder.absolute() == nearest else f"cannot be made in {nearest}"
        raise UserError(f"{folder}: {problem} ({error.strerror}); name another folder") from None


def fsync_path(path: Path) -> None:
    """Make a file, or a rename inside a folder, survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:
        if not path.is_dir():  # some network file systems cannot sync a folder
            raise
    finally:
        os.close(handle)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a file that becomes `path` when the block ends, synced; if the block raises, nothing is left."""
    # Hidden from readers of the folder, and with the process id, because two processes may write the same file.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with suppress(FileNotFoundError):
        temporary.unlink()  # left by a process that was killed
    try:
        # O_EXCL: a link that somebody has put at this name is not followed.
        with temporary.open("x+b") as out:
            yield out
            out.flush()
            os.fsync(out.fileno())
        temporary.replace(path)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError) and error.filename in (None, str(temporary)):  # None: a full disk
            error.filename = str(path)  # the name that the user knows
        raise
    # The rename survives a power cut only after the folder is synced too.
    fsync_path(path.parent)


def replace_bytes(path: Path, content: bytes) -> None:
    """Replace the file by `content`, and make the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as out:
        out.write(content)


def replace_json(path: Path, value: Any) -> None:
    """Replace the file by JSON with the keys in their order. Raises ValueError for NaN, which is not JSON."""
    replace_bytes(path, json.dumps(value, indent=1, allow_nan=False).encode() + b"\n")


def read_json(path: Path) -> Any | None:
    """Return the file's value, or None if there is no such file. Raises ValueError for a damaged one."""
    try:
        return json.loads(read_plain(path, follow_links=True).decode())
    except FileNotFoundError:
        return None
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from None


@contextmanager
def replacing_folder(folder: Path, marker: str, *, sync: bool = True) -> Iterator[Path]:
    """Yield an empty folder to fill; it becomes `folder` when the block ends, with `sync` every file synced.

    What is at `folder`, or where it points as a symlink, is replaced only if it is empty or holds the file `marker`,
    else UserError. A block that raises leaves it untouched. Killed between the two renames, old and new lie beside it
    under hidden names.
    """
    folder = folder.resolve()
    missing = [path for path in folder.parents if not os.path.lexists(path)]
    new, old = (folder.with_name(f".{folder.name}.{os.getpid()}.{suffix}") for suffix in ("new", "old"))
    try:
        if folder.is_mount():
            raise UserError(f"{folder}: a mount point cannot be replaced; name a folder in it")
        if folder.exists() and not (folder.is_dir() and ((folder / marker).is_file() or not any(folder.iterdir()))):
            raise UserError(f"{folder}: already exists and holds no {marker}; it is not replaced, name another folder")
        check_can_be_made(folder)
        new.mkdir(parents=True)
        yield new
        for path in [new, *new.rglob("*")] if sync else ():
            fsync_path(path)
        # A signal between the two renames would leave no folder of this name.
        with defer_signals():
            if folder.exists():
                folder.rename(old)
            new.rename(folder)
            fsync_path(folder.parent)
            shutil.rmtree(old, ignore_errors=True)
    except BaseException as error:
        shutil.rmtree(new, ignore_errors=True)
        for path in missing:
            with suppress(OSError):  # not made, or another process has put something there
                path.rmdir()
        # Libraries that write files themselves raise errors of their own for a full disk.
        if isinstance(error, OSError) or "No space left on device" in str(error):
            raise UserError(f"{folder}: cannot be written ({getattr(error, 'strerror', None) or error})") from error
        raise
