"""Hold a CUDA context on one GPU until stdin closes: `CUDA_VISIBLE_DEVICES=GPU-... python -m ...context`.

A process that the probe can look for in NVML's process list, which holds only those that compute. Through
the driver's library, so that it needs no CUDA toolkit. Prints one line: "ready", or why not.
"""

from __future__ import annotations

import ctypes
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_START_S: Final = 30.0  # the first context after a boot without persistence mode takes several seconds


@contextmanager
def holding(uuid: str) -> Iterator[tuple[int, str]]:
    """The id of a child that holds a context on the GPU, and its line: "ready", or why it holds none."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": uuid}
    child = subprocess.Popen(
        [sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        answered = select.select([child.stdout], [], [], _START_S)[0]
        line = child.stdout.readline().strip() if answered else f"no answer within {_START_S:g} s"
        yield child.pid, line or "it ended without a word"
    finally:
        child.kill()
        child.wait()
        child.stdin.close()
        child.stdout.close()


def main() -> int:
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        print("libcuda.so.1 is not here", flush=True)
        return 1
    device, context = ctypes.c_int(), ctypes.c_void_p()
    calls = {
        "cuInit": lambda: cuda.cuInit(0),
        "cuDeviceGet": lambda: cuda.cuDeviceGet(ctypes.byref(device), 0),
        "cuDevicePrimaryCtxRetain": lambda: cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device),
    }
    for name, call in calls.items():
        if code := call():
            print(f"{name} failed with CUDA error {code}", flush=True)
            return 1
    print("ready", flush=True)
    sys.stdin.read()
    return 0


if __name__ == "__main__":
    sys.exit(main())
