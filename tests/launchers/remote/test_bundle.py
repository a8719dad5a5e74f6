"""A carried file gives back what was put in, or nothing: cut, changed and hostile ones are refused."""

import hashlib
import io
import json
import tarfile
from pathlib import Path

import pytest

from launchers.remote import bundle
from launchers.remote.bundle import BundleError, ChangedError, CutError, Source

from .bundles import RUN, packed


def unpacked(content: bytes) -> dict[str, bytes]:
    stream, files = io.BytesIO(content), {}
    index = bundle.read_index(stream)
    bundle.read_files(stream, index, lambda member, chunks: files.update({member.path: b"".join(chunks)}))
    return files


def forged(entries: list[tuple[tarfile.TarInfo, bytes]], listed: list[list]) -> bytes:
    """A tar whose list says `listed` and is in order, and which holds `entries`."""
    text = json.dumps({"head": {"kind": "test"}, "files": listed}).encode()
    name = f"bundle.{hashlib.sha256(text).hexdigest()}.json"
    out = io.BytesIO(bundle._header(name, len(text)) + text + bytes(-len(text) % 512))
    out.seek(0, io.SEEK_END)
    for info, content in entries:
        info.size = len(content) if info.isreg() else 0
        out.write(info.tobuf(tarfile.PAX_FORMAT) + content + bytes(-len(content) % 512))
    out.write(bytes(1024))
    return out.getvalue()


def entry(path: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(path)
    info.type, info.linkname, info.mode = kind, link, 0o600
    return info


def line(path: object, content: bytes = b"x", size: object = None) -> list:
    return [path, len(content) if size is None else size, hashlib.sha256(content).hexdigest()]


def test_what_was_put_in_comes_out_and_any_tar_can_list_it():
    content = packed(RUN | {"empty.json": b"", "block.json": b"b" * 512})
    assert unpacked(content) == RUN | {"empty.json": b"", "block.json": b"b" * 512}
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        assert archive.getnames()[1:] == [*RUN, "empty.json", "block.json"]


def test_the_same_files_make_the_same_bundle():
    assert packed(RUN) == packed(RUN)


def test_no_byte_can_be_changed_unnoticed(tmp_path):
    content = packed(RUN)
    for place in range(0, len(content), 7):
        changed = bytearray(content)
        changed[place] ^= 1
        (tmp_path / "b.tar").write_bytes(changed)
        with pytest.raises(BundleError):
            bundle.verify(tmp_path / "b.tar")


def test_a_bundle_that_was_cut_anywhere_says_so():
    content = packed(RUN)
    for length in (*range(0, len(content), 97), len(content) - 1):
        with pytest.raises(CutError, match="cut off"):
            unpacked(content[:length])


def test_what_follows_the_last_file_is_refused(tmp_path):
    (tmp_path / "b.tar").write_bytes(packed(RUN) + b"more")
    with pytest.raises(BundleError, match="follows its last file"):
        bundle.verify(tmp_path / "b.tar")
    with pytest.raises(BundleError, match="follows its last file"):
        unpacked(packed(RUN)[:-1024] + b"m" * 1024)


@pytest.mark.parametrize(
    "path",
    [
        *("/etc/passwd", "../up.json", "a/../../up.json", "a/./b", "a//b", "a/", "", ".", "..", "a/..."),
        *("a\\b", "a\nb", "a b", "a:b", "-rf", "x" * 241, "\x00", "ä.json", None, 7, ["a"]),
    ],
)
def test_a_path_that_is_not_plainly_below_its_root_is_refused(path):
    with pytest.raises(BundleError):
        unpacked(forged([(entry("a.json"), b"x")], [line(path)]))


@pytest.mark.parametrize(
    "kind",
    [
        *(tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE),
        *(tarfile.GNUTYPE_SPARSE, tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE, tarfile.AREGTYPE),
    ],
)
def test_links_devices_folders_and_every_other_kind_of_entry_are_refused(kind):
    with pytest.raises(BundleError, match="not what the list says"):
        unpacked(forged([(entry("a.json", kind, "/etc/passwd"), b"")], [line("a.json", b"")]))


@pytest.mark.parametrize("size", [-1, True, 1.5, "1", None, 1 << 33])
def test_a_size_that_cannot_be_is_refused(size):
    listed = [["a.json", size, hashlib.sha256(b"x").hexdigest()]]
    with pytest.raises(BundleError):
        unpacked(forged([(entry("a.json"), b"x")], listed))


def test_a_file_is_listed_once_and_is_where_the_list_says():
    twice = [(entry("a.json"), b"x"), (entry("a.json"), b"x")]
    with pytest.raises(BundleError, match="twice"):
        unpacked(forged(twice, [line("a.json"), line("a.json")]))
    with pytest.raises(BundleError, match="not what the list says"):
        unpacked(forged([(entry("b.json"), b"x")], [line("a.json")]))


def test_nothing_lies_in_what_is_a_file():
    with pytest.raises(BundleError, match=r"a\.json/b/c\.json: lies in what it lists as a file"):
        unpacked(forged([], [line("a.json"), line("a.json/b/c.json")]))


def test_a_name_without_end_is_not_printed_whole():
    with pytest.raises(BundleError) as caught:
        unpacked(forged([], [line("\x1b[31m" + "x" * 100_000)]))
    assert len(str(caught.value)) < 400
    assert str(caught.value).isprintable()


def test_of_a_file_that_grows_what_was_listed_is_sent(tmp_path):
    log = tmp_path / "a.out"
    log.write_bytes(b"first\n")
    contents, out = bundle.listed([Source(path="a.out", file=log)]), io.BytesIO()
    with log.open("ab") as more:
        more.write(b"second\n")
    bundle.write(out, {}, contents)
    assert unpacked(out.getvalue()) == {"a.out": b"first\n"}


@pytest.mark.parametrize("change", [lambda f: f.write_bytes(b"1"), lambda f: f.write_bytes(b"other!"), Path.unlink])
def test_a_file_that_is_not_what_was_listed_makes_no_bundle(tmp_path, change):
    file = tmp_path / "a.out"
    file.write_bytes(b"first\n")
    contents, out = bundle.listed([Source(path="a.out", file=file)]), io.BytesIO()
    change(file)
    with pytest.raises(ChangedError, match=r"a\.out: .*try again"):
        bundle.write(out, {}, contents)
    with pytest.raises(BundleError):
        unpacked(out.getvalue())


def test_a_list_larger_than_memory_is_not_read():
    name = f"bundle.{'0' * 64}.json"
    with pytest.raises(BundleError, match="does not begin with its list"):
        unpacked(bundle._header(name, bundle.MAX_INDEX_BYTES + 1))


@pytest.mark.parametrize("content", [b"", b"hello", b"PK\x03\x04" + bytes(600), b"\x1f\x8b" + bytes(600), bytes(2048)])
def test_any_other_file_is_no_bundle(content, tmp_path):
    (tmp_path / "b.tar").write_bytes(content)
    with pytest.raises(BundleError, match=r"b\.tar: (not a bundle|it was cut off)"):
        bundle.verify(tmp_path / "b.tar")
