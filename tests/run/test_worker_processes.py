"""A process of the loader that dies ends the run, with the cause, and leaves no process."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from inpaint_bench.core.files import read_json
from inpaint_bench.core.paths import ROOT
from tests.data.support import prepared
from tests.warm.fixtures import ADDRESS

pytestmark = pytest.mark.slow

END_S = 30.0
ENDLESS = (
    *("data=prepared", "data.resolution_px=64", "recipe.num_workers=2", "recipe.prefetch_factor=1"),
    *("workload.measure_steps=100000", "data.num_images=null"),
)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return prepared(tmp_path / "data", "data.num_images=40", "data.resolution_px=64", "prepare.formats=[files]")


def start(data: Path, *prefix: str) -> subprocess.Popen[bytes]:
    run = [sys.executable, "-m", "tests.run.child", str(data.parent / "run"), f"data.root={data}", *ENDLESS]
    # A process of its own: that of the warm server has another exit and other children.
    own = {name: value for name, value in os.environ.items() if name != ADDRESS}
    return subprocess.Popen([*prefix, *run], cwd=ROOT, env=own, stderr=subprocess.DEVNULL, start_new_session=True)


def workers_of(process: subprocess.Popen[bytes]) -> list[int]:
    """The forks of a run that is under way."""
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and process.poll() is None:
        listed = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
        if len(listed) >= 2 and (manifest_of(process).get("progress") or {}).get("step"):
            return [int(pid) for pid in listed]
        time.sleep(0.2)
    raise AssertionError(f"no worker: {manifest_of(process)}")


def manifest_of(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    folder = next(Path(word) for word in map(str, process.args) if word.endswith("/run"))  # type: ignore[union-attr, arg-type]
    return read_json(folder / "manifest.json") or {}


def ended(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    """The manifest, once the process and what it started have ended."""
    try:
        assert process.wait(END_S) != 0
        deadline = time.monotonic() + 5
        while subprocess.run(["pgrep", "-s", str(process.pid)], capture_output=True).stdout:
            assert time.monotonic() < deadline, "a process is left"
            time.sleep(0.1)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return manifest_of(process)


def test_file_that_cannot_be_read_any_more(data: Path) -> None:
    process = start(data)
    workers_of(process)
    shutil.rmtree(data / "images")
    manifest = ended(process)
    assert (manifest["status"], manifest["reason"]) == ("failed", "app_error")
    assert manifest["message"].startswith(f"RuntimeError: {data / 'images'}")
    assert ".jpg: cannot be read: [Errno 2] No such file or directory: " in manifest["message"]
    assert "Traceback" not in manifest["message"]


@pytest.mark.faults
@pytest.mark.parametrize(
    ("signum", "words"),
    [
        (signal.SIGBUS, "killed by signal: Bus error. It is possible that dataloader's workers are out"),
        (signal.SIGSEGV, "is killed by signal: Segmentation fault"),
    ],
)
def test_worker_that_is_killed(data: Path, signum: int, words: str) -> None:
    process = start(data)
    os.kill(workers_of(process)[0], signum)
    manifest = ended(process)
    assert (manifest["status"], manifest["reason"]) == ("failed", "app_error")
    assert words in manifest["message"]


def test_signal_of_another_process_ends_no_worker_and_a_kill_the_run(data: Path) -> None:
    process = start(data)
    workers = workers_of(process)
    for pid in workers:
        os.kill(pid, signal.SIGTERM)
    step = manifest_of(process)["progress"]["step"]
    deadline = time.monotonic() + 60
    while manifest_of(process)["progress"]["step"] <= step:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.2)
    os.kill(workers[0], signal.SIGKILL)
    manifest = ended(process)
    assert (manifest["status"], manifest["reason"]) == ("failed", "oom_host")
    assert "is killed by signal: Killed" in manifest["message"]


@pytest.mark.faults
def test_shared_memory_that_is_full(data: Path) -> None:
    mount = 'mount -t tmpfs -o size=100k tmpfs /dev/shm && exec "$@"'
    prefix = ("unshare", "--mount", "sh", "-c", mount, "sh")
    if subprocess.run([*prefix, "true"], capture_output=True).returncode:
        pytest.skip("needs a mount namespace")
    process = start(data, *prefix)
    deadline = time.monotonic() + 90
    while manifest_of(process).get("status", "running") == "running" and time.monotonic() < deadline:
        time.sleep(0.2)
    manifest = ended(process)
    assert manifest["status"] == "failed"
    assert "No space left on device" in manifest["message"] or "out of shared memory" in manifest["message"]
    assert "Traceback" not in manifest["message"]
