"""Reading and writing beside what somebody else may have put there: links, pipes, endless files, a full disk."""

import os

import pytest

from inpaint_bench.core import files


def test_a_link_a_pipe_and_a_folder_are_not_read(tmp_path):
    (tmp_path / "plain").write_text("x")
    (tmp_path / "link").symlink_to("plain")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    assert files.read_plain(tmp_path / "plain") == b"x"
    assert files.read_plain(tmp_path / "link", follow_links=True) == b"x"
    for name, message in {"link": "is a link", "pipe": "not a plain file", "folder": "Is a directory"}.items():
        with pytest.raises(OSError, match=message) as raised:
            files.read_plain(tmp_path / name)
        assert raised.value.filename == str(tmp_path / name)


def test_a_file_is_read_up_to_a_limit(tmp_path):
    with (tmp_path / "large").open("wb") as out:
        out.truncate(2**40)
    with pytest.raises(OSError, match="larger than 1,024 bytes"):
        files.read_plain(tmp_path / "large", max_bytes=1024)


def test_json_that_is_too_deep_is_damaged_and_no_crash(tmp_path):
    (tmp_path / "deep.json").write_text("[" * 10**6)
    with pytest.raises(ValueError, match="not valid JSON"):
        files.read_json(tmp_path / "deep.json")


def test_a_link_at_the_temporary_name_is_not_written_through(tmp_path):
    target = tmp_path / "target"
    target.write_text("kept")
    (tmp_path / f".record.json.{os.getpid()}.tmp").symlink_to(target)
    files.replace_json(tmp_path / "record.json", [1])
    assert target.read_text() == "kept"
    assert files.read_json(tmp_path / "record.json") == [1]


def test_a_pipe_is_not_opened_for_writing(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="not a plain file"):
        files.open_plain(tmp_path / "pipe", os.O_WRONLY | os.O_CREAT)
