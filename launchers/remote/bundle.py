"""A file to carry between machines: a plain tar that lists its own content first, with sizes and checksums.

Read without trust. The list's checksum is its name, the list names every other member, and each header must be, byte
for byte, the one that we would have written: so there is no way to say a link, a device, a sparse or a compressed
file, and no parser to mislead. What was cut or changed is refused. A checksum is no signature: whoever can write the
file can write another one that is whole, so what a bundle may touch is for its reader to limit.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from inpaint_bench.core.errors import UserError

BLOCK = 512  # tar's
CHUNK = 1 << 20
MAX_FILES = 1_000_000
MAX_INDEX_BYTES = 128 << 20  # about 130 bytes a file
MAX_FILE_BYTES = (8 << 30) - 1  # what a plain tar header can say

_INDEX_NAME = re.compile(r"bundle\.([0-9a-f]{64})\.json")
_NAME = re.compile(r"(?!\.+$)[A-Za-z0-9_.][A-Za-z0-9_.+=,@-]{0,98}")
SHA256 = re.compile(r"[0-9a-f]{64}")


class BundleError(UserError):
    """What was read is no bundle of ours, or was changed."""


class CutError(BundleError):
    """It ended too early."""


class ChangedError(BundleError):
    """A file was not, when it was sent, what it was when it was listed."""


class Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


@dataclass(frozen=True, kw_only=True)
class Member:
    path: str  # relative, with /
    size: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Source:
    """A file to put in: its bytes, or where they lie."""

    path: str
    content: bytes | None = None
    file: Path | None = None

    def open(self) -> BinaryIO:
        if self.content is not None:
            return io.BytesIO(self.content)
        assert self.file is not None
        return self.file.open("rb")


@dataclass(frozen=True, kw_only=True)
class Index:
    head: dict[str, Any]  # what the writer says of the whole
    members: tuple[Member, ...]
    sha256: str  # of the list, and so of all


Content = tuple[Source, Member]


def measure(source: Source, beat: Callable[[], None] = lambda: None) -> Member:
    """Reads it. What a file that grows gets meanwhile is not of it; `beat` is called for every piece."""
    with source.open() as content:
        left = size = content.seek(0, os.SEEK_END)
        content.seek(0)
        sha256 = hashlib.sha256()
        while left and (chunk := content.read(min(left, CHUNK))):
            sha256.update(chunk)
            left -= len(chunk)
            beat()
    return Member(path=source.path, size=size - left, sha256=sha256.hexdigest())


def listed(sources: Iterable[Source]) -> list[Content]:
    return [(source, measure(source)) for source in sources]


def write(out: BinaryIO, head: dict[str, Any], contents: Sequence[Content]) -> Index:
    """Raises BundleError where a name cannot be carried, ChangedError where a file is not what was listed."""
    content = {"head": head, "files": [[m.path, m.size, m.sha256] for _, m in contents]}
    text = json.dumps(content, allow_nan=False, separators=(",", ":")).encode()
    index = parse(text, hashlib.sha256(text).hexdigest())
    _put(out, f"bundle.{index.sha256}.json", len(text), io.BytesIO(text))
    for source, member in contents:
        try:
            content_of = source.open()
        except OSError as error:
            raise ChangedError(f"{source.file}: {error.strerror}, and it was there a moment ago; try again") from None
        with content_of:
            if _put(out, member.path, member.size, content_of) != member.sha256:
                raise ChangedError(f"{source.file or source.path}: changed while it was being read; try again")
    out.write(bytes(2 * BLOCK))
    return index


def read_index(stream: Readable, *, max_bytes: int = MAX_INDEX_BYTES) -> Index:
    """The list at the front, at most so long. Raises BundleError."""
    block = _exactly(stream, BLOCK)
    try:
        info = tarfile.TarInfo.frombuf(block, "ascii", "strict")
    except (tarfile.TarError, UnicodeDecodeError, ValueError):
        raise BundleError("not a bundle (no tar header at its start)") from None
    found = _INDEX_NAME.fullmatch(info.name)
    if not found or not 0 < info.size <= max_bytes or block != _header(info.name, info.size):
        raise BundleError("not a bundle (it does not begin with its list)")
    text = _exactly(stream, info.size)
    _skip_padding(stream, info.size)
    if hashlib.sha256(text).hexdigest() != found[1]:
        raise BundleError("its list was changed: the checksum does not fit")
    return parse(text, found[1])


def parse(text: bytes, sha256: str) -> Index:
    """Check a list's every field. Raises BundleError."""
    try:
        content = json.loads(text)
        head, files = content["head"], content["files"]
        if not isinstance(head, dict) or not isinstance(files, list):
            raise TypeError
        members = tuple(Member(path=path, size=size, sha256=digest) for path, size, digest in files)
    except (ValueError, KeyError, TypeError, RecursionError):
        raise BundleError("its list cannot be read") from None
    if len(members) > MAX_FILES or len(text) > MAX_INDEX_BYTES:
        raise BundleError(f"it lists {len(members):,} files; at most {MAX_FILES:,} are taken")
    for member in members:
        _check(member)
    paths = {member.path for member in members}
    if len(paths) != len(members):
        raise BundleError("it lists a file twice")
    for path in paths:
        folder = path
        while folder := folder.rpartition("/")[0]:
            if folder in paths:
                raise BundleError(f"{path}: lies in what it lists as a file")
    return Index(head=head, members=members, sha256=sha256)


def read_files(stream: Readable, index: Index, each: Callable[[Member, Iterator[bytes]], None]) -> None:
    """Hand every file to `each`, which must take all of its bytes; after the last of them the checksum is known.

    The iterator of bytes raises BundleError at its end where they are not those that the list names, so a reader that
    puts a file into place after its last byte never puts a wrong one there. What follows the bundle is not read.
    """
    for member in index.members:
        if _exactly(stream, BLOCK) != _header(member.path, member.size):
            raise BundleError(f"{member.path}: its header is not what the list says")
        each(member, _verified(stream, member))
    if any(_exactly(stream, 2 * BLOCK)):
        raise BundleError("something follows its last file")


def verify(path: Path) -> Index:
    """The whole file read once, nothing written. Raises BundleError, with the file's name."""
    try:
        with path.open("rb") as stream:
            index = read_index(stream)
            read_files(stream, index, lambda _, chunks: skip_over(chunks))
            if stream.read(1):
                raise BundleError("something follows its last file")
    except BundleError as error:
        raise BundleError(f"{path}: {error}") from None
    except OSError as error:
        raise BundleError(f"{path}: {error.strerror}") from None
    return index


def skip_over(chunks: Iterator[bytes]) -> None:
    """Read, and so verify, what is not wanted."""
    for _ in chunks:
        pass


def unfit(path: Any, size: Any) -> str | None:
    """Why a bundle cannot hold such a file, in a sentence that no name can spoil."""
    names = path.split("/") if isinstance(path, str) else []
    said = ascii(path)[:260]
    if not names or len(path) > 240 or not all(_NAME.fullmatch(name) for name in names):
        return f"{said}: not a path that a bundle may hold"
    if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= MAX_FILE_BYTES:
        return f"{path}: its size is {ascii(size)[:40]}, a bundle takes files up to {MAX_FILE_BYTES:,} bytes"
    try:
        _header(path, size)
    except ValueError as error:
        return f"{path}: {error}"
    return None


def _check(member: Member) -> None:
    if why := unfit(member.path, member.size):
        raise BundleError(why)
    if not isinstance(member.sha256, str) or not SHA256.fullmatch(member.sha256):
        raise BundleError(f"{member.path}: has no SHA-256")


def _header(path: str, size: int) -> bytes:
    """The one header of this file: plain ustar, no owner, no time, readable by its owner alone. Raises ValueError."""
    info = tarfile.TarInfo(path)
    info.size, info.mode = size, 0o600
    return info.tobuf(tarfile.USTAR_FORMAT, "ascii", "strict")


def _put(out: BinaryIO, path: str, size: int, content: BinaryIO) -> str:
    """Writes just `size` bytes; returns their SHA-256, or that of fewer where there were no more."""
    out.write(_header(path, size))
    sha256, left = hashlib.sha256(), size
    while left and (chunk := content.read(min(left, CHUNK))):
        out.write(chunk)
        sha256.update(chunk)
        left -= len(chunk)
    out.write(bytes(left + -size % BLOCK))
    return sha256.hexdigest()


def _verified(stream: Readable, member: Member) -> Iterator[bytes]:
    sha256, left = hashlib.sha256(), member.size
    while left:
        chunk = _exactly(stream, min(left, CHUNK))
        sha256.update(chunk)
        left -= len(chunk)
        yield chunk
    _skip_padding(stream, member.size)
    if sha256.hexdigest() != member.sha256:
        raise BundleError(f"{member.path}: its checksum does not fit; it was changed, perhaps while it was being read")


def _skip_padding(stream: Readable, size: int) -> None:
    if any(_exactly(stream, -size % BLOCK)):
        raise BundleError("something lies between its files")


def _exactly(stream: Readable, size: int) -> bytes:
    parts, left = [], size
    while left:
        part = stream.read(left)
        if not part:
            raise CutError("it was cut off: not all of its files arrived")
        parts.append(part)
        left -= len(part)
    return b"".join(parts)
