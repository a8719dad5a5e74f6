"""Start the fork server of a session, and let tests do without it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ADDRESS = "INPAINT_BENCH_TESTS_WARM"

_server: subprocess.Popen[bytes] | None = None


def pytest_configure(config: pytest.Config) -> None:
    """Start the server, once for all workers of a session; it costs nothing until the first program comes."""
    global _server
    if hasattr(config, "workerinput") or config.getoption("--quick") or config.option.collectonly:
        return
    folder = Path(tempfile.mkdtemp(prefix="warm-"))  # not pytest's tmp_path: a socket needs a short path
    here = Path(__file__).parent
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-P", str(here / "server.py"), str(folder / "socket")]
    _server = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, start_new_session=True)
    os.environ[ADDRESS] = str(folder / "socket")
    site = [str(here / "site"), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(site)


def pytest_unconfigure() -> None:
    global _server
    if _server is not None:
        assert _server.stdin is not None
        _server.stdin.close()
        _server.wait()
        _server = None
        shutil.rmtree(Path(os.environ.pop(ADDRESS)).parent)


@pytest.fixture
def real_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every interpreter of the test run its program itself."""
    monkeypatch.delenv(ADDRESS, raising=False)
