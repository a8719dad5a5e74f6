"""A plain tar file to carry between machines, with the SHA-256 checksums of its files as the last member.

The checksums reveal a damaged or truncated file. They do not prove who wrote it. Memory is bounded by the largest file.
"""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO

from inpaint_bench.core.console import sanitize
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.files import read_plain

CHECKSUMS = "SHA256SUMS"  # as `sha256sum` writes and checks them


class ArchiveError(UserError):
    """The file is not an archive of this project, or it is damaged."""


def write_archive(out: IO[bytes], files: Iterable[tuple[str, Path | bytes]]) -> None:
    """Write files, or contents, by name as a tar stream. A file that no longer exists is left out."""
    checksums = ""
    # "w|" and "r|" never seek, so that `out` and `source` may be pipes.
    with tarfile.open(fileobj=out, mode="w|") as archive:

        def add(name: str, content: bytes, mtime_s: int = 0) -> None:
            """Add a file in memory."""
            member = tarfile.TarInfo(name)
            member.size, member.mtime = len(content), mtime_s
            archive.addfile(member, io.BytesIO(content))

        for name, source in files:
            try:
                # The time first: a file that changes meanwhile is newer than its copy, so it is copied again.
                mtime_s = 0 if isinstance(source, bytes) else int(source.stat().st_mtime)
                content = source if isinstance(source, bytes) else read_plain(source, max_bytes=None)
            except FileNotFoundError:
                continue
            add(name, content, mtime_s)
            checksums += f"{hashlib.sha256(content).hexdigest()}  {name}\n"
        add(CHECKSUMS, checksums.encode())


def read_archive(source: IO[bytes], receive: Callable[[str, bytes, float], None]) -> None:
    """Read and verify a tar stream; `receive` gets name, content and time of modification of every file.

    Raises ArchiveError for anything but plain files with relative paths, and where the checksums at the end are missing
    or do not match.
    """
    checksums, expected = "", None
    try:
        with tarfile.open(fileobj=source, mode="r|") as archive:
            for entry in archive:
                member = tarfile.data_filter(entry, "/nonexistent")  # refuses absolute paths and ".."
                # Neither links nor devices, which could lead out of the folder.
                reader = archive.extractfile(member) if member.isreg() and not member.issparse() else None
                if reader is None:
                    raise ArchiveError(f"{sanitize(member.name)[:200]}: not a plain file")
                content = reader.read()
                if member.name == CHECKSUMS:
                    expected = content.decode()
                else:
                    checksums += f"{hashlib.sha256(content).hexdigest()}  {member.name}\n"
                    receive(member.name, content, member.mtime)
    except (tarfile.TarError, UnicodeDecodeError) as error:
        raise ArchiveError(f"not an archive, or truncated ({sanitize(str(error))[:200]})") from None
    if expected is None:
        raise ArchiveError(f"truncated: it ends before {CHECKSUMS}")
    if expected != checksums:
        raise ArchiveError(f"damaged: its files do not match {CHECKSUMS}")
