"""Run one point as a job, and send signals from the moment at which its manifest is final to the end."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

from inpaint_bench.core.files import read_json
from inpaint_bench.run.worker import run

from .support import compose


def disturb(manifest: Path) -> None:
    while (read_json(manifest) or {}).get("status") != "completed":
        time.sleep(0.0005)
    while True:
        for signum in (signal.SIGUSR2, signal.SIGTERM):
            os.kill(os.getpid(), signum)
        time.sleep(0.0005)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    threading.Thread(target=disturb, args=(folder / "manifest.json",), daemon=True).start()
    run(compose(), folder, [], is_job=True)
    time.sleep(0.5)
    print("ended")
