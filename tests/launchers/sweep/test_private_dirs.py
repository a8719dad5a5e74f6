"""What jobs run belongs to the user alone."""

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
        folder = private_dirs.make(tmp_path / "points")
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o777 == 0o700
    private_dirs.check(folder)


def test_link_is_refused(tmp_path):
    private_dirs.make(tmp_path / "elsewhere")
    (tmp_path / "points").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="no link"):
        private_dirs.make(tmp_path / "points")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change owners")
def test_directory_of_another_user_is_refused(tmp_path):
    folder = private_dirs.make(tmp_path / "points")
    os.chown(folder, 65534, 65534)
    with pytest.raises(UserError, match="belongs to user 65534"):
        private_dirs.check(folder)


@pytest.mark.parametrize(("mode", "code", "error"), [(0o777, 2, "mode 0777 lets others in"), (0o700, 1, "0.yaml")])
def test_job_reads_nothing_from_a_directory_that_others_can_write_into(tmp_path, mode, code, error):
    (folder := private_dirs.make(tmp_path / "points")).chmod(mode)
    environment = {**os.environ, "PYTHONPATH": str(Path(entry.__file__).parents[1])}
    command = ["bash", "-c", entry.command(sys.executable, folder, [folder / "0.yaml"])]
    refused = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert refused.returncode == code
    assert error in refused.stderr
