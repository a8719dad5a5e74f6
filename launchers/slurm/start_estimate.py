"""Slurm's own estimates of when scripts would start (`sbatch --test-only`)."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from inpaint_bench.core import child
from inpaint_bench.core.config.site import SiteConfig

from .environment import slurm_environment

MAX_ESTIMATES = 20  # per site and command: its controller computes every estimate
UNKNOWN = "not known"
_START = re.compile(r"to start at (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)")


def estimate_starts(site: SiteConfig, scripts: Sequence[Path]) -> list[float | str]:
    """Return when Slurm would start each script: Unix seconds, or why there are none. `--test-only` submits nothing.

    The time is that of an array's first task, if nothing is submitted before it.
    """
    estimates: list[float | str] = [UNKNOWN] * len(scripts)
    environment, timeout_s = slurm_environment(site), site.limits.command_timeout_s
    for index, script in enumerate(scripts[:MAX_ESTIMATES]):
        try:
            done = child.run(["sbatch", "--test-only", str(script)], env=environment, timeout_s=timeout_s)
        except (OSError, subprocess.TimeoutExpired):
            break  # a controller that is down or busy is not queried again
        # "sbatch: Job 123 to start at 2026-11-20T10:00:00 using 16 processors on nodes ..."
        stderr = done.stderr.decode(errors="replace")
        if match := _START.search(stderr):
            estimates[index] = datetime.fromisoformat(match[1]).timestamp()
        elif done.returncode:
            lines = stderr.strip().splitlines()
            estimates[index] = f"refused: {re.sub(r'^.*?(error|failure): ', '', lines[-1])}" if lines else "refused"
    return estimates
