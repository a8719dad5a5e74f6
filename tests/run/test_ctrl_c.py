"""Ctrl-C as a terminal sends it: to every process of the foreground group, of real runs in a pseudo-terminal."""

from __future__ import annotations

import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from inpaint_bench.cli import app
from inpaint_bench.core.files import read_json

pytestmark = [pytest.mark.timeout(1200), pytest.mark.slow, pytest.mark.usefixtures("real_processes")]

WAIT_S = 240  # for a child on a busy machine: importing torch alone may take half a minute
CTRL_C = b"\x03"
TINY = [
    *("gpu=a40", "demonstration=true", "telemetry=replay", "model=tiny_inpaint", "recipe=cpu", "batch=2"),
    *("data.resolution_px=64", "data.num_images=20", "workload.train_steps=100000", "workload.warmup_steps=1"),
]


class Terminal:
    """A command in the foreground of a terminal of its own."""

    def __init__(self, command: list[str]) -> None:
        self.pid, self._terminal = pty.fork()
        if not self.pid:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # `nohup make test &` ignores it
            os.execv(command[0], command)
        self._output = b""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with suppress(OSError):  # the last process has closed it
            while content := os.read(self._terminal, 4096):
                self._output += content

    @property
    def output(self) -> str:
        return self._output.decode(errors="replace").replace("\r\n", "\n")

    def type(self, keys: bytes) -> None:
        os.write(self._terminal, keys)

    def exit_code(self) -> int:
        """Wait for the command, and for every process that holds its terminal."""
        _, status = os.waitpid(self.pid, 0)
        self.pid = 0
        self._reader.join(WAIT_S)
        assert not self._reader.is_alive(), "a process has outlived the command"
        return os.waitstatus_to_exitcode(status)


@contextmanager
def running(*arguments: str) -> Iterator[Terminal]:
    terminal = Terminal([sys.executable, "-m", "inpaint_bench", "launch", *arguments])
    try:
        yield terminal
    finally:
        if terminal.pid:
            os.kill(terminal.pid, signal.SIGKILL)
            os.waitpid(terminal.pid, 0)


def wait_until(reached: Callable[[], Any], terminal: Terminal) -> None:
    deadline = time.monotonic() + WAIT_S
    while not reached():
        assert time.monotonic() < deadline, terminal.output
        time.sleep(0.05)


def steps(run_dir: Path) -> int:
    manifest = read_json(run_dir / "manifest.json") or {}
    return manifest["progress"]["step"] if manifest.get("progress") else 0


def manifest(run_dir: Path) -> dict[str, Any]:
    found: dict[str, Any] = read_json(run_dir / "manifest.json")
    return found


def checkpoints(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def test_training_saves_a_checkpoint_and_says_how_to_go_on(tmp_path: Path) -> None:
    """With worker processes and a sidecar, which get Ctrl-C too; the command that is printed goes on."""
    run_dir = tmp_path / "run"
    with running(*TINY, "recipe.num_workers=1", f"hydra.run.dir={run_dir}") as terminal:
        wait_until(lambda: steps(run_dir), terminal)
        terminal.type(CTRL_C)
        assert terminal.exit_code() == 130
    output, left = terminal.output, manifest(run_dir)
    assert "Traceback" not in output
    assert "a second Ctrl-C quits" in output
    [checkpoint] = checkpoints(run_dir)
    assert (left["status"], left["reason"]) == ("interrupted", "cancelled")
    assert left["message"] == f"received SIGINT; resumes from {checkpoint}"
    assert left["telemetry"]["status"] == read_json(run_dir / "telemetry.json")["status"] == "complete"
    [command] = re.findall(r"To go on: inpaint-bench launch (.*)", output)
    with running(*shlex.split(command)) as terminal:
        wait_until(lambda: steps(run_dir) > int(checkpoint[5:]), terminal)
        assert manifest(run_dir)["resumed"] == [
            {"step": int(checkpoint[5:]), "checkpoint": f"checkpoints/{checkpoint}"}
        ]


def test_second_ctrl_c_quits_without_a_checkpoint(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    slow_validation = ["workload.module=tests.run.slow_validation", "workload.validate_every=3"]
    with running(*TINY, *slow_validation, f"hydra.run.dir={run_dir}") as terminal:
        wait_until(lambda: steps(run_dir) >= 3, terminal)
        wait_until(lambda: read_json(run_dir / "windows.json")[-1]["kind"] == "validation", terminal)
        terminal.type(CTRL_C)
        wait_until(lambda: "a second Ctrl-C quits" in terminal.output, terminal)
        terminal.type(CTRL_C)
        assert terminal.exit_code() == 130, "before the validation ends"
    left = manifest(run_dir)
    assert "Traceback" not in terminal.output
    assert (left["status"], left["reason"], left["message"]) == (
        "interrupted",
        "cancelled",
        "received SIGINT; nothing was saved after a second Ctrl-C",
    )
    assert left["telemetry"]["status"] == "complete"
    assert "There is no checkpoint yet. To start over: inpaint-bench launch" in terminal.output
    assert not (run_dir / "checkpoints").exists()


@pytest.mark.parametrize("name", ["SIGINT", pytest.param("SIGTERM", marks=pytest.mark.faults)])
def test_sweep_on_this_machine_saves_its_running_point_and_names_the_others(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C reaches every process, SIGTERM the command alone."""
    folder = tmp_path / "sweep"
    run_dir = folder / "0" / "attempt-1"
    with running("-m", *TINY, "site=local", "seed=0,1,2", f"hydra.sweep.dir={folder}") as terminal:
        wait_until(lambda: steps(run_dir), terminal)
        terminal.type(CTRL_C) if name == "SIGINT" else os.kill(terminal.pid, signal.SIGTERM)
        assert terminal.exit_code() == 128 + signal.Signals[name]
    output = terminal.output
    assert "Traceback" not in output
    [checkpoint] = checkpoints(run_dir)
    assert manifest(run_dir)["message"].endswith(f"resumes from {checkpoint}")
    # After a Ctrl-C the command sends SIGTERM to its jobs, which one that is busy may take first.
    received = {"SIGINT": "SIG(INT|TERM)", "SIGTERM": "SIGTERM"}[name]
    assert re.search(rf"point 0: received {received}; resumes from {checkpoint}\b", output)
    assert "points 1, 2 did not start" in output
    assert f"inpaint-bench rerun {folder}" in output
    assert app.main(["status", str(folder)]) != 2
    assert "running" not in capsys.readouterr().out


def test_run_directory_that_is_a_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").touch()
    assert app.main(["launch", *TINY, f"hydra.run.dir={tmp_path / 'run'}"]) == 2
    assert f"error: {tmp_path}/run: takes no files (Not a directory)" in capsys.readouterr().err


@pytest.mark.parametrize("module", ["inpaint_bench", "inpaint_bench.launch"])
@pytest.mark.usefixtures("real_processes")
def test_ctrl_c_before_the_command_begins_prints_no_traceback(module: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-X", "importtime", "-m", module, "--help"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # `nohup make test &` ignores it
    )
    with process:
        assert process.stderr
        read = ""
        while "inpaint_bench.core.errors\n" not in read:
            read += process.stderr.readline()
        process.send_signal(signal.SIGINT)
        read += process.stderr.read()
    assert process.returncode == -signal.SIGINT  # 130 in a shell
    assert "Traceback" not in read
