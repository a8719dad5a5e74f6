"""Where compiled kernels are kept between runs: a folder for each card, driver and set of versions.

Triton, inductor and FlashAttention-4 write a file under another name and rename it, so that processes may share the
folder and may be killed. Each process holds a shared lock beside its folder; one that holds it alone may remove the
folder. This module loads no torch.
"""

import fcntl
import hashlib
import logging
import os
import platform
import re
import shutil
import tempfile
import time
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path

from inpaint_bench.core import __version__
from inpaint_bench.core.config.site import Storage
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.files import expand_path

INDUCTOR = "TORCHINDUCTOR_CACHE_DIR"
GIVEN = os.environ.get(INDUCTOR)  # by who started this process: PyTorch's compiler sets it later
VARIABLES = {
    "TRITON_CACHE_DIR": "{}/triton",
    INDUCTOR: "{}/inductor",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": "{}/flash4",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1",
}
LIMIT_BYTES = 10 * 2**30
CHECK_S = 86400.0  # the size is looked up so often
PACKAGES = ("torch", "triton", "flash-attn-4", "nvidia-cutlass-dsl", "quack-kernels")

log = logging.getLogger(__name__)


@cache
def use(roots: tuple[Path, ...], card: str, facts: tuple[str, ...]) -> Path | None:
    """Let this process keep compiled kernels in the first of these folders that it can write, and return the folder.

    None: each compiler keeps its kernels where it does by itself. `facts` are what they depend on beside the card and
    the installed packages. Raises UserError for a folder of the environment, as `check_given` does.
    """
    check_given("TRITON_CACHE_DIR", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR")
    packages = [f"{name} {_version(name)}" for name in PACKAGES]
    own = (__version__, platform.machine(), platform.python_version())
    digest = hashlib.sha256("\n".join((card, *facts, *packages, *own)).encode()).hexdigest()[:12]
    for root in roots:
        folder = root / f"{re.sub(r'[^A-Za-z0-9]+', '-', card)}-{digest}"
        try:
            _open(root, folder)
        except OSError as error:
            problem = error.strerror or error
            log.warning("%s: compiled kernels cannot be kept here (%s); see storage.kernels of the site", root, problem)
            continue
        for variable, value in VARIABLES.items():
            wanted = value.format(folder)
            if variable == INDUCTOR and GIVEN is None:
                os.environ[variable] = wanted
            if (given := os.environ.setdefault(variable, wanted)) != wanted:
                log.info("%s=%s of the environment is used", variable, given)
        return folder
    return None


def check_given(*variables: str) -> None:
    """Raise UserError for a folder of the environment that a compiler cannot write: it would end the run.

    Without arguments: inductor's, which is opened when diffusers is imported.
    """
    for name in variables or (INDUCTOR,):
        if (folder := os.environ.get(name)) is not None:
            try:
                os.makedirs(folder, exist_ok=True)  # noqa: PTH103 (an empty one would be the working directory)
                tempfile.TemporaryFile(dir=folder).close()
            except OSError as error:
                how = "name a folder that can be written, or unset it"
                raise UserError(f"{name}={folder}: kernels cannot be kept there ({error.strerror}); {how}") from None


def roots(storage: Storage) -> tuple[Path, ...]:
    """Return the folder of the site, and the user's own in case that one cannot be written."""
    own = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "inpaint-bench" / "kernels"
    folder = storage.kernels or (storage.scratch and f"{storage.scratch}/inpaint-bench/kernels")
    return (expand_path(folder), own) if folder else (own,)


def _open(root: Path, folder: Path) -> None:
    """Make the folder, and hold its lock to the end of the process. Raises OSError."""
    if not root.is_absolute():
        raise OSError("a variable in it is not set, or it is not an absolute path")
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    if root.stat().st_uid != os.getuid() or root.stat().st_mode & 0o022:  # what lies there is executed
        raise OSError("it is not yours, or others can write in it")
    _limit(root, folder)
    if _lock(folder, fcntl.LOCK_SH) is None:  # inductor and FlashAttention-4 would fail
        raise OSError("no file can be locked in it")
    folder.mkdir(mode=0o700, exist_ok=True)
    tempfile.TemporaryFile(dir=folder).close()
    os.utime(folder)


def _lock(folder: Path, how: int) -> int | None:
    """Lock the file beside a folder, and return its descriptor; None if that is refused."""
    handle = os.open(folder.with_name(f"{folder.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, how)
    except OSError:
        os.close(handle)
        return None
    return handle


def _limit(root: Path, own: Path) -> None:
    """Remove folders that no process holds until all are within the limit: `own` last, the least recently used first.

    At most once a day, as it looks at every file.
    """
    checked = root / ".checked"
    if checked.exists() and time.time() - checked.stat().st_mtime < CHECK_S:
        return
    checked.touch()
    folders = sorted(filter(Path.is_dir, root.iterdir()), key=lambda path: (path == own, path.stat().st_mtime))
    sizes = {folder: _size(folder) for folder in folders}
    for folder in folders:
        if sum(sizes.values()) > LIMIT_BYTES and (handle := _lock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)) is not None:
            shutil.rmtree(folder, ignore_errors=True)
            sizes[folder] = 0
            os.close(handle)


def _size(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):  # another process has renamed it
            total += path.lstat().st_blocks * 512
    return total


def _version(package: str) -> str | None:
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None
