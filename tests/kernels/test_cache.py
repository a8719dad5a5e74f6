"""The folder of compiled kernels: its key, its limit, and who may use it."""

import fcntl
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from inpaint_bench.core.config.site import Storage
from inpaint_bench.core.errors import UserError
from inpaint_bench.kernels import cache

VARIABLES = list(cache.VARIABLES)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # restored afterwards, whatever the test sets
        monkeypatch.delenv(name)
    cache.use.cache_clear()


def use(root: Path, card: str = "NVIDIA H200", *facts: str, others: tuple[Path, ...] = ()) -> Path | None:
    cache.use.cache_clear()
    return cache.use((root, *others), card, facts)


def test_each_card_and_driver_has_a_folder_which_a_later_run_finds(tmp_path: Path) -> None:
    root = tmp_path / "kernels"
    folders = [use(root), use(root, "NVIDIA H100"), use(root, "NVIDIA H200", "driver 580"), use(root)]
    assert folders[0] == folders[3]
    assert len(set(folders)) == 3
    assert all(folder and folder.is_dir() and folder.stat().st_mode & 0o077 == 0 for folder in folders)


def test_compilers_are_told_unless_the_user_told_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    mine = str(tmp_path / "mine")
    monkeypatch.setenv("TRITON_CACHE_DIR", mine)
    folder = use(tmp_path / "kernels")
    found = {name: os.environ[name] for name in VARIABLES}
    assert found == {
        "TRITON_CACHE_DIR": mine,
        "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
        "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": f"{folder}/flash4",
        "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1",
    }
    assert f"TRITON_CACHE_DIR={mine} of the environment is used" in caplog.text


def test_the_default_that_pytorch_sets_when_it_is_imported_is_no_wish_of_the_user(tmp_path: Path) -> None:
    """Regression: inductor's kernels stayed in /tmp, and the log called that a choice of the environment."""
    code = f"""
import os
from pathlib import Path
from inpaint_bench.kernels import cache
from torch._inductor.runtime import cache_dir_utils
default = cache_dir_utils.cache_dir()
folder = cache.use((Path("{tmp_path}"),), "NVIDIA H200", ())
assert default != cache_dir_utils.cache_dir() == f"{{folder}}/inductor", os.environ[cache.INDUCTOR]
"""
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


def test_a_folder_of_the_environment_that_cannot_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "/proc/x")
    with pytest.raises(UserError, match="TRITON_CACHE_DIR=/proc/x: kernels cannot be kept there"):
        use(tmp_path / "kernels")


@pytest.mark.parametrize("name", ["/proc/kernels", "$NOT_SET/kernels"])
def test_a_folder_that_cannot_be_written_is_named_and_the_next_one_taken(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = use(Path(name), others=(tmp_path / "own",))
    assert folder is not None
    assert folder.parent == tmp_path / "own"
    assert caplog.text.count("compiled kernels cannot be kept here") == 1
    assert name in caplog.text


def test_a_folder_in_which_others_can_write_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    assert use(tmp_path / "open") is None
    assert "others can write in it" in caplog.text
    assert not os.environ.get("TRITON_CACHE_DIR")


def test_a_file_system_without_locks_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Inductor and FlashAttention-4 lock files there, and would end the run."""

    def refuse(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert use(tmp_path / "kernels") is None
    assert not {name for name in VARIABLES if name in os.environ}
    assert "no file can be locked in it" in caplog.text


def test_beyond_the_limit_the_least_recently_used_goes_and_never_one_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "kernels"
    old, held, recent = (root / name for name in ("old", "held", "recent"))
    for age, folder in ((1e6, held), (1e5, old), (1e4, recent)):
        (folder / "triton").mkdir(parents=True)
        (folder / "triton" / "kernel.so").write_bytes(os.urandom(64 * 1024))
        os.utime(folder, (time.time() - age,) * 2)
    root.chmod(0o700)
    monkeypatch.setattr(cache, "LIMIT_BYTES", 160 * 1024)
    handle = cache._lock(held, fcntl.LOCK_SH)
    assert handle is not None
    own = use(root)
    assert own is not None
    assert (old.exists(), held.exists(), recent.exists()) == (False, True, True)
    # Not before a day has passed.
    monkeypatch.setattr(cache, "LIMIT_BYTES", 0)
    use(root)
    assert recent.exists()
    os.utime(root / ".checked", (time.time() - 2 * cache.CHECK_S,) * 2)
    use(root)
    assert (held.exists(), recent.exists(), own.exists()) == (True, False, True)
    os.close(handle)


def test_default_is_the_scratch_of_the_site_then_the_users_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/home/me/cache")
    monkeypatch.setenv("SCRATCH", "/scratch/me")
    own = Path("/home/me/cache/inpaint-bench/kernels")
    assert cache.roots(Storage()) == (own,)
    assert cache.roots(Storage(scratch="/scratch")) == (Path("/scratch/inpaint-bench/kernels"), own)
    assert cache.roots(Storage(scratch="/x", kernels="$SCRATCH/k")) == (Path("/scratch/me/k"), own)
