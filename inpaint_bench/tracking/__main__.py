"""The tracker's process: `python -m inpaint_bench.tracking RUN_DIR '<TrackConfig as JSON>'`.

A line on stdin, or its end if the worker has died, ends it after a last reading. Exit code 0; 1: the tracker failed,
tracking.json says why.
"""

from __future__ import annotations

import os
import signal
import sys

NICENESS = 10  # the run's own processes come first if cores are few


def main() -> int:
    """Follow a run to its end and return the exit code."""
    os.nice(NICENESS)
    # Slurm signals every process of a step. What the worker makes of it must still be read.
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
        signal.signal(signum, signal.SIG_IGN)
    from .process import follow

    return follow(*sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
