"""An archive gives back what was put in, or an error: truncated, changed and malicious ones are refused."""

import io
import subprocess
import tarfile
from pathlib import Path

import pytest

from inpaint_bench.core.files import replace_bytes
from launchers.remote.archive import CHECKSUMS, ArchiveError, read_archive, write_archive

FILES = {"6/attempt-1/steps/part-000000.parquet": b"rows" * 400, "logs/g/77_0_0_log.out": b"line\n", "empty.json": b""}


def archived(files: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    write_archive(out, files.items())
    return out.getvalue()


def forged(members: list[tuple[tarfile.TarInfo, bytes]]) -> io.BytesIO:
    """Return an archive that another program wrote."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for member, content in members:
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return io.BytesIO(out.getvalue())


def extracted(source: io.BytesIO, folder: Path) -> dict[str, bytes]:
    read_archive(source, lambda name, content, _: replace_bytes(folder / name, content))
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_files_come_out_as_they_went_in(tmp_path):
    assert extracted(io.BytesIO(archived(FILES)), tmp_path) == FILES


def test_tar_and_sha256sum_read_an_archive(tmp_path):
    (tmp_path / "a.tar").write_bytes(archived(FILES))
    subprocess.run(["tar", "-xf", "a.tar"], cwd=tmp_path, check=True)
    subprocess.run(["sha256sum", "--check", "--strict", CHECKSUMS], cwd=tmp_path, check=True, capture_output=True)


def test_a_changed_byte_of_a_file_is_noticed(tmp_path):
    content = archived(FILES)
    start = content.index(b"rows")
    for position in (start, start + 1599, content.index(b"line\n")):
        changed = bytearray(content)
        changed[position] ^= 1
        with pytest.raises(ArchiveError, match="damaged"):
            extracted(io.BytesIO(changed), tmp_path)


def test_an_archive_that_is_truncated_anywhere_is_refused(tmp_path):
    content = archived(FILES)
    end = content.index(CHECKSUMS.encode())
    for length in (*range(0, end, 97), end + 600):
        with pytest.raises(ArchiveError, match="truncated"):
            extracted(io.BytesIO(content[:length]), tmp_path)


@pytest.mark.parametrize("files", [{"x": b"x", CHECKSUMS: b""}, {CHECKSUMS: b"0123  x\n"}])
def test_a_file_that_was_added_or_removed_is_noticed(files, tmp_path):
    with pytest.raises(ArchiveError, match="damaged"):
        extracted(forged([(tarfile.TarInfo(name), content) for name, content in files.items()]), tmp_path)


@pytest.mark.parametrize("name", ["../up.json", "a/../../up.json", "/etc/passwd"])
def test_a_path_out_of_the_folder_is_refused_or_stays_inside(name, tmp_path):
    folder = tmp_path / "a" / "b"
    folder.mkdir(parents=True)
    with pytest.raises(ArchiveError):
        extracted(forged([(tarfile.TarInfo(name), b"x")]), folder)
    assert [path for path in tmp_path.rglob("*") if path.is_file() and folder not in path.parents] == []


@pytest.mark.parametrize(
    "kind",
    [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE],
)
def test_links_devices_and_folders_are_refused(kind, tmp_path):
    member = tarfile.TarInfo("a.json")
    member.type, member.linkname = kind, "b.json"
    with pytest.raises(ArchiveError):
        extracted(forged([(member, b"")]), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_unprintable_name_is_not_printed(tmp_path):
    member = tarfile.TarInfo("\x1b[31m" + "x" * 1000)
    member.type = tarfile.FIFOTYPE
    with pytest.raises(ArchiveError) as caught:
        extracted(forged([(member, b"")]), tmp_path)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 400


def test_a_file_that_grows_is_archived_as_it_was_and_one_that_is_gone_is_left_out(tmp_path):
    log = tmp_path / "a.out"
    log.write_bytes(b"first\n")

    def files():
        yield "gone.out", tmp_path / "gone.out"
        yield "a.out", log

    out = io.BytesIO()
    write_archive(out, files())
    with log.open("ab") as more:
        more.write(b"second\n")
    out.seek(0)
    (tmp_path / "to").mkdir()
    assert extracted(out, tmp_path / "to") == {"a.out": b"first\n"}


@pytest.mark.parametrize("content", [b"", b"hello", b"PK\x03\x04" + bytes(600), b"\x1f\x8b" + bytes(600), bytes(2048)])
def test_any_other_file_is_refused(content, tmp_path):
    with pytest.raises(ArchiveError, match=r"not an archive|truncated"):
        extracted(io.BytesIO(content), tmp_path)
