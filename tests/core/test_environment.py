"""The fingerprint of where a run happens."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from inpaint_bench.core import environment


@pytest.mark.subprocess
def test_fingerprint_names_machine_and_packages() -> None:
    found = environment.fingerprint()
    assert None not in (found.cores, found.cpu, found.hostname, found.hydra_core, found.python, found.torch)


@pytest.mark.subprocess
def test_failing_probe_gives_null(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> str:
        raise OSError("no name")

    monkeypatch.setattr("socket.gethostname", broken)
    monkeypatch.setenv("PATH", "")  # no git either
    assert environment.fingerprint().hostname is None


@pytest.mark.parametrize(
    ("url", "clean"),
    [
        ("https://me:secret@host.org/a/b.git?token=x", "https://host.org/a/b.git"),
        ("git@host.org:a/b.git", "host.org:a/b.git"),
        ("/srv/git/b.git", "/srv/git/b.git"),
    ],
)
def test_credentials_are_removed_from_remotes(url: str, clean: str) -> None:
    assert environment.without_credentials(url) == clean


def test_code_state_comes_from_the_snapshot_if_there_is_one(tmp_path: Path) -> None:
    record = {"content_sha256": "abc", "git": {"commit": "123", "dirty": False, "remote": None}}
    (tmp_path / "snapshot.json").write_text(json.dumps(record))
    state = environment.code_state(tmp_path)
    assert state == {"commit": "123", "dirty": False, "remote": None, "content_sha256": "abc"}


@pytest.mark.subprocess
def test_photographs_in_a_checkout_are_no_change_of_its_code(tmp_path: Path) -> None:
    def dirty() -> bool | None:
        state = environment.git_state(tmp_path)
        assert state is not None
        return state["dirty"]

    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    assert dirty() is False
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "one.jpg").write_bytes(b"photograph")
    assert dirty() is False
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "mine.yaml").write_text("name: mine")
    assert dirty() is True


def test_folder_without_checkout_has_no_commit(tmp_path: Path) -> None:
    assert environment.git_state(tmp_path) is None


def test_slurm_ids_are_null_outside_of_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert environment.slurm() is None
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    found = environment.slurm()
    assert found is not None
    assert (found.job_id, found.array_task_id, found.restart_count) == ("42", 3, None)
