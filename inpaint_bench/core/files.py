"""Atomic file replacement: a file has its old content or its new content, also after a crash."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO


def fsync_folder(folder: Path) -> None:
    """Make a rename inside `folder` survive a power cut, where the file system supports that."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:  # some network file systems cannot sync a folder
        pass
    finally:
        os.close(handle)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a file that becomes `path` when the block ends, synced; if the block raises, nothing is left."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as out:
            yield out
            out.flush()
            os.fsync(out.fileno())
        temporary.replace(path)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError) and error.filename == str(temporary):
            error.filename = str(path)  # the name that the user knows
        raise
    fsync_folder(path.parent)


def replace_text(path: Path, text: str) -> None:
    """Replace the file by `text`, and make the folders above it."""
    replace_bytes(path, text.encode())


def replace_bytes(path: Path, content: bytes) -> None:
    """Replace the file by `content`, and make the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as out:
        out.write(content)


def replace_json(path: Path, value: Any) -> None:
    """Replace the file by JSON with the keys in their order. Raises ValueError for NaN, which is not JSON."""
    replace_text(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


def read_json(path: Path) -> Any | None:
    """Return the file's value, or None where there is no such file. Raises ValueError for a damaged one."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from None
