"""A plain tar file to carry between machines, with the SHA-256 checksums of its files as the last member.

The checksums reveal a damaged or truncated file. They do not prove who wrote it.
"""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO

from inpaint_bench.core.console import sanitize
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.files import replacing

CHECKSUMS = "SHA256SUMS"  # as `sha256sum` writes and checks them
CHUNK_BYTES = 1 << 20


class ArchiveError(UserError):
    """The file is not an archive of this project, or it is damaged."""


def write_archive(out: IO[bytes], files: Iterable[tuple[str, Path | bytes]]) -> None:
    """Write files, or contents, by name as a tar stream. A file that no longer exists is left out.

    Raises ArchiveError where a file shrinks while it is read.
    """
    checksums = ""
    with tarfile.open(fileobj=out, mode="w|", format=tarfile.GNU_FORMAT) as archive:
        for name, source in files:
            member = tarfile.TarInfo(name)
            try:
                content = io.BytesIO(source) if isinstance(source, bytes) else source.open("rb")
            except FileNotFoundError:
                continue
            with content:
                if isinstance(source, Path):
                    member.mtime = int(os.fstat(content.fileno()).st_mtime)
                member.size = content.seek(0, os.SEEK_END)  # what is appended from here on is not copied
                content.seek(0)
                reader = _HashingReader(content)
                try:
                    archive.addfile(member, reader)
                except OSError as error:
                    raise ArchiveError(f"{name}: changed while it was read ({error}); try again") from None
            checksums += f"{reader.sha256.hexdigest()}  {name}\n"
        member = tarfile.TarInfo(CHECKSUMS)
        member.size = len(checksums.encode())
        archive.addfile(member, io.BytesIO(checksums.encode()))


def read_archive(source: IO[bytes], target_of: Callable[[str], Path | None]) -> list[tarfile.TarInfo]:
    """Read and verify a tar stream, extract the files that have a target, and return all members.

    An extracted file gets its name when it is complete. Raises ArchiveError for anything but plain files with relative
    paths, and where the checksums at the end are missing or do not match.
    """
    members, checksums, expected = [], "", None
    try:
        with tarfile.open(fileobj=source, mode="r|") as archive:
            for entry in archive:
                member = tarfile.data_filter(entry, "/nonexistent")  # refuses absolute paths and ".."
                content = archive.extractfile(member) if member.isreg() and not member.issparse() else None
                if content is None:
                    raise ArchiveError(f"{sanitize(member.name)[:200]}: not a plain file")
                if member.name == CHECKSUMS:
                    expected = content.read().decode()
                    continue
                members.append(member)
                checksums += f"{_extract(content, target_of(member.name), member.mtime)}  {member.name}\n"
    except (tarfile.TarError, UnicodeDecodeError) as error:
        raise ArchiveError(f"not an archive, or truncated ({sanitize(str(error))[:200]})") from None
    if expected is None:
        raise ArchiveError(f"truncated: it ends before {CHECKSUMS}")
    if expected != checksums:
        raise ArchiveError(f"damaged: its files do not match {CHECKSUMS}")
    return members


def _extract(content: IO[bytes], target: Path | None, mtime: float) -> str:
    """Write a file, where it has a target, and return its SHA-256."""
    if target is None:
        return hashlib.file_digest(content, "sha256").hexdigest()  # type: ignore[arg-type]
    target.parent.mkdir(parents=True, exist_ok=True)
    reader = _HashingReader(content)
    with replacing(target) as out:
        while chunk := reader.read(CHUNK_BYTES):
            out.write(chunk)
    os.utime(target, (mtime, mtime))
    return reader.sha256.hexdigest()


class _HashingReader(io.RawIOBase):
    """Hashes what is read through it."""

    def __init__(self, content: IO[bytes]) -> None:
        self._content = content
        self.sha256 = hashlib.sha256()

    def read(self, size: int = -1, /) -> bytes:
        """Read as `content` does."""
        chunk = self._content.read(size)
        self.sha256.update(chunk)
        return chunk
