"""Who can write, and read, what a launch and its jobs create."""

import logging
import os
import struct
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from inpaint_bench import launch
from inpaint_bench.core.files import note_readers
from inpaint_bench.core.schema import LEDGER, SWEEP
from launchers.sweep import lock, private_dirs
from launchers.sweep.secrets import find_secret

QUICK = ["profile=demo", "gpu=a40", "data.num_images=16", "workload.warmup_steps=1", "workload.measure_steps=2"]
QUICK += ["workload.min_measure_s=1"]
EVERYBODY = 0xFFFFFFFF
ACL = [(0x01, 7, EVERYBODY), (0x02, 7, 65534), (0x04, 7, EVERYBODY), (0x10, 7, EVERYBODY), (0x20, 7, EVERYBODY)]


@pytest.fixture
def everybodys() -> Path:
    """A folder that everybody can enter; the parents of `tmp_path` are private."""
    with TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.fixture(params=["umask", "default ACL"])
def shared(request, everybodys) -> Path:
    """A folder in which everything that is created is open to its group, or to a named user and everybody."""
    folder = everybodys / "shared"
    folder.mkdir()
    if request.param == "default ACL":
        value = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in ACL)
        try:
            os.setxattr(folder, "system.posix_acl_default", value)
        except OSError:
            pytest.skip("this file system has no ACLs")
    before = os.umask(0)
    yield folder
    os.umask(before)


def open_to_others(folder: Path, bits: int) -> list[str]:
    paths = [path for path in (folder, *folder.rglob("*")) if not path.is_symlink()]
    return [f"{path} {path.stat().st_mode:o}" for path in paths if path.stat().st_mode & bits]


@pytest.mark.slow
def test_nobody_else_can_write_to_a_sweep_and_its_runs(shared, capsys):
    folder = shared / "day" / "sweep"
    assert launch.main(["-m", *QUICK, "batch=2", f"hydra.sweep.dir={folder}"]) == 0
    assert list(folder.glob("0/attempt-1/manifest.json"))
    assert open_to_others(folder, 0o022) == []
    assert folder.parent.stat().st_mode & 0o1777 == 0o1777  # shared as before, and others cannot rename the sweep
    assert (folder / SWEEP).stat().st_mode & 0o044  # a colleague can look at it
    assert f"other users can read {folder}, with the values of all overrides" in capsys.readouterr().out


@pytest.mark.slow
def test_a_sweep_with_a_secret_is_hidden(shared, capsys):
    folder = shared / "sweep"
    secret = "+sites.local.environment.variables={WANDB_API_KEY: 0123456789abcdef}"
    assert launch.main(["-m", *QUICK, "batch=2", secret, f"hydra.sweep.dir={folder}"]) == 0
    assert "WANDB_API_KEY looks like a secret: only you can read" in capsys.readouterr().out
    assert open_to_others(folder, 0o077) == []


def test_readers_are_noted_unless_a_folder_keeps_them_out(everybodys):
    (everybodys / "private" / "run").mkdir(parents=True)
    assert "`chmod 700` prevents it" in str(note_readers(everybodys / "private" / "run"))
    (everybodys / "private").chmod(0o700)
    assert note_readers(everybodys / "private" / "run") is None


def test_a_rerun_with_a_secret_hides_the_records_of_the_launch(tmp_path):
    for name in (SWEEP, LEDGER):
        (tmp_path / name).touch(mode=0o644)
    before = os.umask(0o022)
    try:
        private_dirs.hide(tmp_path)
        (tmp_path / "new").touch()
    finally:
        os.umask(before)
    assert open_to_others(tmp_path, 0o077) == []


def test_a_sweep_directory_that_others_could_write_into_is_closed_with_a_warning(tmp_path, caplog):
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep").chmod(0o777)
    with caplog.at_level(logging.WARNING), lock.sweep_lock(tmp_path / "sweep"):
        pass
    assert "others could write there until now (mode 0777)" in caplog.text
    assert open_to_others(tmp_path / "sweep", 0o022) == []


def test_a_sticky_directory_of_everybody_stays_as_it_is(tmp_path):
    tmp_path.chmod(0o1777)
    private_dirs.make_sweep(tmp_path)
    assert tmp_path.stat().st_mode & 0o7777 == 0o1777


@pytest.mark.parametrize(
    ("mode", "warning"), [(0o777, "every user of this machine can replace"), (0o1777, None), (0o755, None)]
)
def test_parents_in_which_others_can_rename_are_named(mode, warning, tmp_path):
    (tmp_path / "parent" / "sweep").mkdir(parents=True)
    (tmp_path / "parent").chmod(mode)
    found = private_dirs.who_can_replace(tmp_path / "parent" / "sweep")
    assert found is None if warning is None else warning in found


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change owner and group")
def test_parents_of_a_shared_group_or_another_user_are_named(tmp_path):
    parent = tmp_path / "parent"
    (parent / "sweep").mkdir(parents=True)
    parent.chmod(0o2775)
    assert private_dirs.who_can_replace(parent / "sweep") is None  # the group that only this user is in
    os.chown(parent, -1, 65534)
    assert "its group can replace" in private_dirs.who_can_replace(parent / "sweep")
    os.chown(parent, 65534, -1)
    assert "belongs to user 65534" in private_dirs.who_can_replace(parent / "sweep")


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ("sites.delta.environment.variables.WANDB_API_KEY=abc", "sites.delta.environment.variables.WANDB_API_KEY"),
        ("+x={HF_TOKEN: 'hf_x', B: 2}", "HF_TOKEN"),
        ("export DB_PASSWORD=x", "DB_PASSWORD"),
        ("export AWS_SECRET_ACCESS_KEY=x", "AWS_SECRET_ACCESS_KEY"),
        ("+a.secret=x", "a.secret"),
        ("+a.credentials=/x", "a.credentials"),
        ("data.root=https://me:pass@host/x", "https://me..."),
        ("+note=hf_abcdefghijklmnopqrst", "hf_..."),
    ],
)
def test_secrets_are_recognized(line, key):
    assert find_secret(["batch=8", line]) == key


def test_ordinary_overrides_are_no_secrets():
    lines = ["batch=8,16", "model.location_tokens=4", "data.root=/scratch/keys", "+note=monkey", "budget=100"]
    lines += ["track.uri=http://node:9400/metrics", "model.unet.num_key_value_heads=3", "x.token=null"]
    lines += ["workload.keep_checkpoints=2", "name=token", "study=levers"]
    assert find_secret(lines) is None
