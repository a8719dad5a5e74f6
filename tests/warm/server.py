"""The server: `python -P tests/warm/server.py SOCKET`. It loads torch when the first program comes, and forks for each.

When it forks no thread runs and torch has computed nothing, because a forked process has none of its parent's threads.
It ends when its standard input is closed: with the process that started it.
"""

from __future__ import annotations

import _imp
import atexit
import gc
import importlib
import io
import itertools
import json
import logging
import multiprocessing.resource_tracker
import multiprocessing.spawn
import multiprocessing.util
import os
import re
import runpy
import selectors
import signal
import socket
import sys
import threading
import traceback
import types
from contextlib import suppress
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[2]
LENGTH_BYTES = 8  # before a request
# Read once, when a library is loaded: a program with other values starts by itself.
READ_ONCE = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TRITON_INTERPRET", "HF_HOME", "HF_HUB_OFFLINE", "LD_PRELOAD")
# Neither this project, which a job imports from the snapshot of its sweep, nor pyarrow and polars, which start threads.
LIBRARIES = """
import numpy, omegaconf, hydra, msgspec, submitit.core.submission, cloudpickle, PIL.Image, scipy.stats, triton, yaml
import torch, torch._dynamo, torch.distributed.fsdp, torch.distributed.optim, torch.distributed.tensor.parallel
import safetensors.torch, torch.utils.data, peft
from diffusers import AutoencoderKL, DDIMScheduler, DDPMScheduler, DPMSolverMultistepScheduler, PNDMScheduler
from diffusers import UNet2DConditionModel
from transformers import CLIPModel, CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer
"""


class Server:
    """One socket, and a connection and a process per program."""

    def __init__(self, address: str) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(address)
        self._listener.listen(128)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(sys.stdin, selectors.EVENT_READ, lambda: os._exit(0))
        self._loaded = False

    def serve(self) -> NoReturn:
        """Serve until the standard input is closed."""
        while True:
            for key, _ in self._selector.select():
                if key.fd in self._selector.get_map():  # not closed by the event before
                    key.data()

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        request, files = _receive(connection)
        if not request or request["prefix"] != sys.prefix or _differs(request["environment"]):
            for file in files:
                os.close(file)
            with suppress(OSError):
                connection.sendall(b"null\n")
            connection.close()
            return
        if not self._loaded:
            _load()
            self._loaded = True
        pid = os.fork()
        if pid == 0:
            for key in list(self._selector.get_map().values()):
                if key.fd:
                    os.close(key.fd)
            self._selector.close()
            connection.close()
            _run(request, files)
        for file in files:
            os.close(file)
        ended = os.pidfd_open(pid)
        self._selector.register(ended, selectors.EVENT_READ, lambda: self._end(connection, ended, pid))
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._signal(connection, pid))

    def _signal(self, connection: socket.socket, pid: int) -> None:
        """Pass on the signals that the client received; SIGKILL where it is gone."""
        try:
            numbers = connection.recv(64)
        except OSError:
            numbers = b""
        for number in numbers or [signal.SIGKILL]:
            os.kill(pid, number)
        if not numbers:
            self._selector.unregister(connection)

    def _end(self, connection: socket.socket, ended: int, pid: int) -> None:
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with suppress(KeyError):
            self._selector.unregister(connection)
        self._selector.unregister(ended)
        os.close(ended)
        with suppress(OSError):  # the client is gone
            connection.sendall(f"{status}\n".encode())
        connection.close()


def _load() -> None:
    exec(LIBRARIES, {})
    loaded = {name.partition(".")[0] for name in sys.modules}
    assert not loaded & {"inpaint_bench", "launchers", "analysis", "hydra_plugins", "pyarrow"}, loaded
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "a library started a thread"
    gc.collect()
    gc.freeze()  # else a collection in a forked process copies every page


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Return a client's request and its standard streams; nothing where it died meanwhile."""
    try:
        length, files, _, _ = socket.recv_fds(connection, LENGTH_BYTES, 3, socket.MSG_WAITALL)
        return json.loads(connection.recv(int.from_bytes(length, "big"), socket.MSG_WAITALL)), files
    except (OSError, ValueError):
        return {}, []


def _differs(environment: dict[str, str]) -> bool:
    return any(environment.get(name) != os.environ.get(name) for name in READ_ONCE)


def _run(request: dict[str, Any], files: list[int]) -> NoReturn:
    """Become the program and end as it ends."""
    status = 1
    try:
        _become(request, files)
        try:
            runpy._run_module_as_main(request["words"][0])  # type: ignore[attr-defined]  # what `python -m` calls
            status = 0
        except SystemExit as leaving:
            status = _status(leaving)
        except BaseException as error:
            traceback.print_exc()
            status = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    finally:
        _flush()
        if status < 0:
            signal.signal(-status, signal.SIG_DFL)
            os.kill(os.getpid(), -status)
        os._exit(status)


def _become(request: dict[str, Any], files: list[int]) -> None:
    """Take over what the client got from its own parent."""
    os.setsid()
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    for number in request["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
    os.umask(request["umask"])
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    module, *arguments = request["words"]
    sys.argv, sys.orig_argv = ["-m", *arguments], [sys.executable, "-m", module, *arguments]
    first = [] if request["safe_path"] else [request["folder"]]
    sys.path[:0] = [*first, *filter(None, request["environment"].get("PYTHONPATH", "").split(os.pathsep))]
    importlib.invalidate_caches()
    multiprocessing.util.spawnv_passfds = _forked(multiprocessing.util.spawnv_passfds)
    SourceFileLoader.get_code = _with_code_of_twin(SourceFileLoader.get_code)  # type: ignore[method-assign]
    sys.modules["__main__"] = types.ModuleType("__main__")
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    unbuffered = request["unbuffered"]
    sys.stdout = _text(1, "strict", line_buffering=not unbuffered and os.isatty(1), write_through=unbuffered)
    sys.stderr = _text(2, "backslashreplace", line_buffering=True)


def _forked(start: Any) -> Any:
    """Fork what `spawn` of multiprocessing would start, such as the ranks of a run: each would load torch again.

    A fork keeps the modules. The rest becomes what a new interpreter has: signals, log, files and nothing at its end.
    """

    def started(program: bytes, words: list[Any], files: list[int]) -> int:
        call = re.search(r"spawn_main\(tracker_fd=(\d+), pipe_handle=(\d+)\)", " ".join(map(os.fsdecode, words)))
        if not call or (pid := os.fork()):
            return int(start(program, words, files) if not call else pid)
        status = 1
        try:
            for last, following in itertools.pairwise([2, *sorted(files), os.sysconf("SC_OPEN_MAX")]):
                if last + 1 < following:
                    os.closerange(last + 1, following)
            for number in signal.valid_signals():
                if callable(signal.getsignal(number)):
                    signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
            atexit._clear()
            logging.root.handlers.clear()
            multiprocessing.resource_tracker._resource_tracker._fd = int(call[1])  # type: ignore[attr-defined]
            status = multiprocessing.spawn._main(int(call[2]), os.dup(int(call[2])))  # type: ignore[attr-defined]
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
        except BaseException:
            traceback.print_exc()
        finally:
            _flush()
            os._exit(status)

    return started


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()


def _text(file: int, errors: str, **buffering: bool) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.FileIO(file, "w", closefd=False), "utf-8", errors, **buffering)  # type: ignore[type-var]


def _with_code_of_twin(get_code: Any) -> Any:
    """Let a module of a sweep's code snapshot use the compiled code of the same file in the checkout."""

    def found(loader: SourceFileLoader, name: str) -> types.CodeType | None:
        path = Path(loader.path)
        twin = ROOT.joinpath(*name.split("."))
        twin = twin / "__init__.py" if path.name == "__init__.py" else twin.with_suffix(".py")
        if path == twin or not twin.is_file() or path.read_bytes() != twin.read_bytes():
            code: types.CodeType | None = get_code(loader, name)
            return code
        code = get_code(SourceFileLoader(name, str(twin)), name)
        _imp._fix_co_filename(code, str(path))  # type: ignore[attr-defined]
        return code

    return found


def _status(leaving: SystemExit) -> int:
    """Return the exit code of `sys.exit`."""
    if leaving.code is None or isinstance(leaving.code, int):
        return (leaving.code or 0) & 0xFF
    print(leaving.code, file=sys.stderr)
    return 1


if __name__ == "__main__":
    Server(sys.argv[1]).serve()
