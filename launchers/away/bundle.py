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
import re
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from inpaint_bench.errors import UserError

BLOCK = 512  # tar's
CHUNK = 1 << 20
MAX_INDEX_BYTES = 256 << 20
MAX_FILE_BYTES = (8 << 30) - 1  # what a plain tar header can say
MAX_FILES = 2_000_000

_INDEX_NAME = re.compile(r"bundle\.([0-9a-f]{64})\.json")
_NAME = re.compile(r"(?!\.+$)[A-Za-z0-9_.][A-Za-z0-9_.+=,@-]{0,98}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class BundleError(UserError):
    """What was read is no bundle of ours, or was changed."""


class CutError(BundleError):
    """It ended too early."""


class Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


@dataclass(frozen=True, kw_only=True)
class Member:
    path: str  # relative, with /
    size: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Source:
    """A file to put in: its bytes, or where they lie. Of a file that grows, what it held when it was listed."""

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

    @property
    def total_bytes(self) -> int:
        return sum(member.size for member in self.members)


def write(
    out: BinaryIO, head: dict[str, Any], sources: Sequence[Source], *, skip: dict[str, Any] | None = None
) -> Index:
    """Everything is read twice: for the list, and to be sent. `skip`: [size, sha256] by path of what the reader has.

    Raises BundleError where a name cannot be carried or a file changed meanwhile.
    """
    pairs = [(source, _member(source)) for source in sources]
    pairs = [
        (source, member) for source, member in pairs if (skip or {}).get(member.path) != [member.size, member.sha256]
    ]
    content = {"head": head, "files": [[m.path, m.size, m.sha256] for _, m in pairs]}
    text = json.dumps(content, allow_nan=False, separators=(",", ":")).encode()
    index = parse(text, hashlib.sha256(text).hexdigest())
    _put(out, f"bundle.{index.sha256}.json", len(text), io.BytesIO(text))
    for source, member in pairs:
        with source.open() as content_of:
            if _put(out, member.path, member.size, content_of) != member.sha256:
                raise BundleError(f"{source.file or source.path}: changed while it was being read; try again")
    out.write(bytes(2 * BLOCK))
    return index


def read_index(stream: Readable) -> Index:
    """The list at the front. Raises BundleError."""
    block = _exactly(stream, BLOCK)
    try:
        info = tarfile.TarInfo.frombuf(block, "ascii", "strict")
    except (tarfile.TarError, UnicodeDecodeError, ValueError):
        raise BundleError("not a bundle (no tar header at its start)") from None
    found = _INDEX_NAME.fullmatch(info.name)
    if not found or not 0 < info.size <= MAX_INDEX_BYTES or block != _header(info.name, info.size):
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
    if len(members) > MAX_FILES:
        raise BundleError(f"it lists {len(members):,} files; at most {MAX_FILES:,} are taken")
    for member in members:
        _check(member)
    if len({member.path for member in members}) != len(members):
        raise BundleError("it lists a file twice")
    return Index(head=head, members=members, sha256=sha256)


def read_files(stream: Readable, index: Index, each: Callable[[Member, Iterator[bytes]], None]) -> None:
    """Hand every file to `each`, which must take all of its bytes; after the last of them the checksum is known.

    The iterator of bytes raises BundleError at its end where they are not those that the list names, so a reader that
    puts a file into place after its last byte never puts a wrong one there.
    """
    for member in index.members:
        if _exactly(stream, BLOCK) != _header(member.path, member.size):
            raise BundleError(f"{member.path}: its header is not what the list says")
        each(member, _verified(stream, member))
    if any(_exactly(stream, 2 * BLOCK)) or any(iter(lambda: stream.read(CHUNK), b"")):
        raise BundleError("something follows its last file")


def verify(path: Path) -> Index:
    """The whole file read once, nothing written. Raises BundleError, with the file's name."""
    try:
        with path.open("rb") as stream:
            index = read_index(stream)
            read_files(stream, index, lambda _, chunks: skip_over(chunks))
    except BundleError as error:
        raise BundleError(f"{path}: {error}") from None
    except OSError as error:
        raise BundleError(f"{path}: {error.strerror}") from None
    return index


def skip_over(chunks: Iterator[bytes]) -> None:
    """Read, and so verify, what is not wanted."""
    for _ in chunks:
        pass


def digest(file: BinaryIO) -> tuple[int, str]:
    """Size and SHA-256 of what is left to read."""
    size, sha256 = 0, hashlib.sha256()
    while chunk := file.read(CHUNK):
        size += len(chunk)
        sha256.update(chunk)
    return size, sha256.hexdigest()


def _member(source: Source) -> Member:
    with source.open() as content:
        size, sha256 = digest(content)
    member = Member(path=source.path, size=size, sha256=sha256)
    _check(member)
    return member


def _check(member: Member) -> None:
    path, size = member.path, member.size
    names = path.split("/") if isinstance(path, str) else []
    if not names or len(path) > 240 or not all(_NAME.fullmatch(name) for name in names):
        raise BundleError(f"{path!r}: not a path that a bundle may hold")
    if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= MAX_FILE_BYTES:
        raise BundleError(f"{path}: its size is {size!r}, a bundle takes files up to {MAX_FILE_BYTES:,} bytes")
    if not isinstance(member.sha256, str) or not _SHA256.fullmatch(member.sha256):
        raise BundleError(f"{path}: has no SHA-256")
    _header(path, size)


def _header(path: str, size: int) -> bytes:
    """The one header of this file: plain ustar, no owner, no time, readable by its owner alone."""
    info = tarfile.TarInfo(path)
    info.size, info.mode = size, 0o600
    try:
        return info.tobuf(tarfile.USTAR_FORMAT, "ascii", "strict")
    except ValueError as error:
        raise BundleError(f"{path}: {error}") from None


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
        raise BundleError(f"{member.path}: was changed; its checksum does not fit")


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
