"""The user's own file: what it may set, and what is refused by line."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from inpaint_bench.core.config.config_hash import _LEFT_OUT
from inpaint_bench.core.config.user_file import user_file, user_overrides
from inpaint_bench.core.config.yaml_file import ConfigFileError

CONTENT = """
sites.delta.account.value: abcd-delta-gpu
sites:
  grace:
    account: {value: '0123'}
    environment: {container: {image: /images/it's.sif, binds: [/a, "/b:/c"], nv: false}}
notify.mail: me@example.org
track: wandb
budget: 500
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("INPAINT_BENCH_CONFIG", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    path = tmp_path / "inpaint_bench/config.yaml"
    path.parent.mkdir()
    return path


def test_keys_with_dots_and_blocks_become_overrides(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (user_file(), user_overrides([])) == (None, [])
    file.write_text(CONTENT)
    lines = user_overrides([])
    assert lines == [
        "sites.delta.account.value='abcd-delta-gpu'",
        "sites.grace.account.value='0123'",
        "sites.grace.environment.container.image='/images/it\\'s.sif'",
        "sites.grace.environment.container.binds=['/a','/b:/c']",
        "sites.grace.environment.container.nv=false",
        "notify.mail='me@example.org'",
        "track=wandb",
        "budget=500",
    ]
    assert {line.partition("=")[0].partition(".")[0] for line in lines} <= _LEFT_OUT  # of config_hash
    assert capsys.readouterr().err == f"{file} sets {' '.join(lines)}\n"


def test_what_is_typed_wins_and_a_run_without_a_sweep_takes_only_the_tracker(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text("track: wandb\ntrack.online: true\nnotify.mail: me\nsites.delta.account.value: abcd-delta-gpu\n")
    assert user_overrides(["track=none", "sites.delta.account.value=a,b"]) == ["notify.mail='me'"]
    assert user_overrides(["+sites.delta={qos: x}", "notify.mail=you"]) == ["track=wandb", "track.online=true"]
    assert user_overrides([], multirun=False) == ["track=wandb", "track.online=true"]
    monkeypatch.setenv("INPAINT_BENCH_CONFIG", "")
    assert user_overrides([]) == []
    monkeypatch.setenv("INPAINT_BENCH_CONFIG", str(file.parent / "other.yaml"))
    with pytest.raises(ConfigFileError, match=r"other\.yaml: cannot be read \(No such file or directory\)"):
        user_overrides([])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("budget: 5\nbatch: 8", ": batch: cannot stand here; docs/sites.md lists the keys that can"),
        ("sites.delta.gpus.a100.partition: x", ": sites.delta.gpus.a100.partition: cannot stand here"),
        (
            "sites: {delta: {account: me}}",
            ": sites.delta.account: cannot stand here; docs/sites.md lists the keys that can. Did you",
        ),
        ("recipe: tuned", ": recipe: cannot stand here"),
        (
            "sites.grace.account.value: 0123",
            ":1: sites.grace.account.value=0123: is read as 123; put it in quotes",
        ),
        ("sites.grace.account.value: 1_200_34", ":1: sites.grace.account.value=1_200_34: is read as 120034; put it in"),
        ("budget: 1\nbudget: 2", ":2: budget: is given twice, first in line 1; keep one of them"),
        ("notify.mail: a\nnotify: {mail: b}", ": notify.mail: is given twice; keep one of them"),
        ("budget: 1\nnotify: [", ":2: not YAML (expected the node content, but found '<stream end>')"),
        ("- budget", ":1: needs keys and values at the top"),
    ],
)
def test_a_wrong_line_is_refused_with_the_file(file: Path, text: str, message: str) -> None:
    file.write_text(text)
    with pytest.raises(ConfigFileError) as refused:
        user_overrides([])
    assert str(refused.value).startswith(f"{file}{message}")


def refusal() -> str:
    with pytest.raises(ConfigFileError) as refused:
        user_overrides([])
    assert "secret" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("mode", [0o666, 0o664, 0o602, 0o620, 0o777, 0o1777])
def test_a_file_that_others_can_write_is_refused_with_the_chmod_that_helps(
    file: Path, monkeypatch: pytest.MonkeyPatch, mode: int, named: bool
) -> None:
    file.write_text("budget: secret\n")
    if named:
        monkeypatch.setenv("INPAINT_BENCH_CONFIG", str(file))
    file.chmod(mode)
    message = refusal()
    assert message.startswith(f"{file}: others can write {file} (mode {mode:04o}), and it names programs that run as")
    command = message.partition("`")[2].partition("`")[0]
    subprocess.run(command, shell=True, check=True)
    assert user_overrides([]) == ["budget='secret'"]


@pytest.mark.parametrize("mode", [0o600, 0o644, 0o444, 0o755])
def test_a_file_that_others_can_only_read_is_used(file: Path, mode: int) -> None:
    file.write_text("budget: 5\n")
    file.chmod(mode)
    assert user_overrides([]) == ["budget=5"]


def test_a_file_in_a_folder_that_others_can_write_is_refused_unless_they_can_replace_none(file: Path) -> None:
    file.write_text("budget: secret\n")
    for mode in (0o777, 0o775):
        file.parent.chmod(mode)
        assert f"others can write {file.parent} (mode {mode:04o})" in refusal()
    file.parent.chmod(0o1777)
    assert user_overrides([]) == ["budget='secret'"]


def test_a_link_counts_as_the_file_that_it_leads_to(file: Path, tmp_path: Path) -> None:
    target = tmp_path / "it's mine" / "own.yaml"
    target.parent.mkdir()
    target.write_text("budget: secret\n")
    file.symlink_to(target)
    assert user_overrides([]) == ["budget='secret'"]
    target.chmod(0o606)
    target.parent.chmod(0o757)
    message = refusal()
    assert f"others can write {target} (mode 0606) and {target.parent} (mode 0757)" in message
    subprocess.run(message.partition("`")[2].partition("`")[0], shell=True, check=True)
    assert user_overrides([]) == ["budget='secret'"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_the_file_of_another_user_is_refused_and_none_of_it_is_quoted(file: Path, tmp_path: Path) -> None:
    target = tmp_path / "theirs.yaml"
    target.write_text("secret: secret\n")
    os.chown(target, 65534, -1)
    file.symlink_to(target)
    assert refusal().startswith(f"{file}: {target} belongs to user 65534 and not to you")
    file.unlink()
    file.write_text("secret\n")
    os.chown(file, 65534, -1)
    assert refusal().startswith(f"{file}: {file} belongs to user 65534 and not to you")
    os.chown(file, 0, -1)
    os.chown(file.parent, 65534, -1)
    assert refusal().startswith(f"{file}: {file.parent} belongs to user 65534 and not to you")


def test_what_is_no_plain_file_gets_no_chmod(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INPAINT_BENCH_CONFIG", "/dev/null")
    assert refusal() == "/dev/null: is not a file with text"
    monkeypatch.setenv("INPAINT_BENCH_CONFIG", str(file.parent))
    assert "chmod" not in refusal()
