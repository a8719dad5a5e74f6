"""Directories with pickles belong to the user alone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from inpaint_bench.core.errors import UserError
from launchers import entry
from launchers.sweep import private_dirs


def test_private_directories_are_made_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        folder = private_dirs.make(tmp_path / "jobs" / "00")
    finally:
        os.umask(before)
    assert [oct(path.stat().st_mode & 0o777) for path in (folder, folder.parent)] == ["0o700", "0o700"]
    private_dirs.check(folder)


@pytest.mark.parametrize("which", ["jobs", "jobs/00"])
def test_directory_that_others_can_enter_is_refused(tmp_path, which):
    folder = private_dirs.make(tmp_path / "jobs" / "00")
    (tmp_path / which).chmod(0o770)
    with pytest.raises(UserError, match=r"mode 0770 lets others in.*chmod 700"):
        private_dirs.check(folder)
    with pytest.raises(UserError, match="mode 0770"):
        private_dirs.make(folder)


def test_link_is_refused(tmp_path):
    target = private_dirs.make(tmp_path / "elsewhere" / "00")
    (tmp_path / "jobs").symlink_to(target.parent)
    with pytest.raises(UserError, match="no link"):
        private_dirs.make(tmp_path / "jobs" / "00")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change owners")
def test_directory_of_another_user_is_refused(tmp_path):
    folder = private_dirs.make(tmp_path / "jobs" / "00")
    os.chown(folder, 65534, 65534)
    with pytest.raises(UserError, match="belongs to user 65534"):
        private_dirs.check(folder)


def test_job_loads_nothing_from_a_directory_that_others_can_enter(tmp_path):
    """The pickle there would create a file when loaded."""
    folder = private_dirs.make(tmp_path / "jobs" / "00")
    (folder / "7_submitted.pkl").write_bytes(b"cposix\nsystem\n(S'touch " + bytes(tmp_path / "loaded") + b"'\ntR.")
    job = {"SUBMITIT_EXECUTOR": "slurm", "SLURM_JOB_ID": "7", "SLURM_PROCID": "0"}
    environment = {**os.environ, **job, "PYTHONPATH": str(Path(entry.__file__).parents[1])}
    command = ["bash", "-c", entry.command(sys.executable, folder)]
    folder.chmod(0o777)
    refused = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "mode 0777 lets others in" in refused.stderr
    assert not (tmp_path / "loaded").exists()
    folder.chmod(0o700)
    subprocess.run(command, env=environment, capture_output=True, check=False)
    assert (tmp_path / "loaded").exists(), "from a private directory the same pickle is loaded"
