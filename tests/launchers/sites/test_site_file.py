"""SiteFile: values are written, nothing else in the file changes, and only the user's own files are written."""

from __future__ import annotations

import datetime
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from inpaint_bench.core.errors import UserError
from inpaint_bench.core.paths import PACKAGE, conf_dir
from inpaint_bench.core.schema import SNAPSHOT
from launchers.sites.site_file import SiteFile, as_yaml, not_writable

TEXT = """\
# Ours.
name: mine
account:
  value: null # none yet
  pattern: '\\d{12}' # digits
gpus:
  a40: {partition: gpu, max_minutes: 60}   # in one line
  a100:
    partition: gpu
    # four days
    max_minutes: 5760
    source: a page
    checked_on: 2026-11-20

    # what follows belongs to the next
  h200: {}
limits:
  max_array_size: 1001
"""


@pytest.fixture
def site_file(tmp_path: Path) -> SiteFile:
    path = tmp_path / "mine.yaml"
    path.write_text(TEXT)
    return SiteFile(path)


@pytest.mark.parametrize(
    ("key", "value", "before", "after"),
    [
        ("gpus.a100.max_minutes", 2880, "max_minutes: 5760", "max_minutes: 2880"),
        ("gpus.a40.max_minutes", 2880, "max_minutes: 60}   # in", "max_minutes: 2880} # in"),
        ("gpus.a40.verified", True, "max_minutes: 60}   # in", "max_minutes: 60, verified: true} # in"),
        ("gpus.h200.partition", "big", "h200: {}", "h200:\n    partition: big"),
        ("account.value", "0123", "value: null #", "value: '0123' #"),
        ("account.pattern", "a: b", "'\\d{12}' # digits", "'a: b'   # digits"),
        ("gpus.a100.verified", True, "2026-11-20\n", "2026-11-20\n    verified: true\n"),
        ("gpus.a100.checked_on", datetime.date(2026, 12, 1), "2026-11-20\n", "2026-12-01\n"),
        ("limits.verified", True, "1001\n", "1001\n  verified: true\n"),
        ("preempt.grace_s", 300, "1001\n", "1001\npreempt:\n  grace_s: 300\n"),
    ],
)
def test_one_value_changes_and_nothing_else(site_file: SiteFile, key: str, value: Any, before: str, after: str):
    assert TEXT.count(before) == 1
    assert site_file.edited({key: value}) == TEXT.replace(before, after)


def test_several_values_change_at_once(site_file: SiteFile):
    changes = {"gpus.a100.max_minutes": 1, "limits.max_array_size": 2, "limits.verified": True, "qos": None}
    text = site_file.edited(changes)
    values = yaml.safe_load(text)
    assert (values["gpus"]["a100"]["max_minutes"], values["limits"]) == (1, {"max_array_size": 2, "verified": True})
    assert values["qos"] is None
    assert [line for line in TEXT.splitlines() if "#" in line] == [line for line in text.splitlines() if "#" in line]


def test_every_site_file_of_the_repository_keeps_its_text():
    for path in sorted((conf_dir() / "site").glob("*.yaml")):
        file, original = SiteFile(path), path.read_text()
        assert file.edited({}) == original
        blocks = [name for name, value in yaml.safe_load(original).items() if isinstance(value, dict)]
        blocks = [name for name in blocks if file.get(f"{name}.checked_on")]
        text = file.edited({f"{block}.verified": True for block in blocks})
        added = [line for line in text.splitlines() if line not in original.splitlines()]
        assert all(line.strip() == "verified: true" for line in added)
        assert all(yaml.safe_load(text)[block]["verified"] is True for block in blocks)


def test_file_without_a_final_newline_keeps_its_last_line(tmp_path: Path):
    path = tmp_path / "short.yaml"
    path.write_text("limits:\n  max_array_size: 5")
    assert SiteFile(path).edited({"limits.verified": True}) == "limits:\n  max_array_size: 5\n  verified: true\n"


def test_duplicate_keys_are_refused(tmp_path: Path):
    path = tmp_path / "odd.yaml"
    path.write_text("limits:\n  max_array_size: 4\nlimits:\n  max_array_size: 5\n")
    with pytest.raises(UserError, match="cannot be read as YAML"):
        SiteFile(path)


def test_line_of_a_key(site_file: SiteFile):
    assert site_file.line("gpus.a100.max_minutes") == TEXT.splitlines().index("    max_minutes: 5760") + 1
    assert site_file.line("gpus.a100.cpus_per_gpu") is None
    assert site_file.line("gpus.b200.partition") is None


def test_invalid_yaml_is_a_user_error(tmp_path: Path):
    path = tmp_path / "broken.yaml"
    path.write_text("a: [1")
    with pytest.raises(UserError, match="cannot be read as YAML"):
        SiteFile(path)


def test_writing_keeps_the_mode_and_follows_a_symlink(site_file: SiteFile, tmp_path: Path):
    site_file.path.chmod(0o640)
    link = tmp_path / "link.yaml"
    link.symlink_to(site_file.path)
    file = SiteFile(link)
    file.write(file.edited({"name": "other"}))
    assert link.is_symlink()
    assert (site_file.path.read_text().splitlines()[1], site_file.path.stat().st_mode & 0o777) == ("name: other", 0o640)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["link.yaml", "mine.yaml"]


def test_file_changed_since_it_was_read_is_not_written(site_file: SiteFile):
    text = site_file.edited({"name": "other"})
    site_file.path.write_text("name: changed\n")
    with pytest.raises(UserError, match="has changed since"):
        site_file.write(text)
    assert site_file.path.read_text() == "name: changed\n"


def test_only_the_users_own_files_are_written(site_file: SiteFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert not_writable(site_file.path) is None
    assert "installation" in (not_writable(PACKAGE / "_data" / "conf" / "site" / "delta.yaml") or "")
    kept = tmp_path / "code" / "abc" / "conf" / "site"
    kept.mkdir(parents=True)
    (kept / "mine.yaml").write_text(TEXT)
    (kept.parents[1] / SNAPSHOT).write_text("{}")
    assert "code snapshot of a sweep" in (not_writable(kept / "mine.yaml") or "")
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anything
    assert "no permission to write" in (not_writable(site_file.path) or "")


@pytest.mark.parametrize(
    ("value", "text"),
    [(True, "true"), (None, "null"), (2880, "2880"), (0.5, "0.5"), ("gpu", "gpu"), ("012", "'012'"), ([], "[]")],
)
def test_values_are_formatted_as_yaml(value: Any, text: str):
    assert as_yaml(value) == text
