"""When Slurm expects to start what would be sent now: `sbatch --test-only`, which submits nothing."""

from __future__ import annotations

import re
import subprocess
from datetime import datetime
from pathlib import Path

from inpaint_bench.core.site import SiteConfig

from .environment import for_slurm

TIMEOUT_S = 20.0
AT_MOST = 20  # scripts that a site is asked about in one command: its controller works each out for us
NOT_KNOWN = "not known"
_STARTS = re.compile(r"to start at (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)")


def starts(site: SiteConfig, scripts: list[Path]) -> list[float | str]:
    """For each script Unix seconds, or in words why not: it is not known, or Slurm would refuse it.

    The time is that of an array's first task, if nothing is submitted before it.
    """
    answers: list[float | str] = []
    for script in scripts[:AT_MOST]:
        answer = _start(site, script)
        if answer is None:  # a controller that is down or busy is not asked again
            break
        answers.append(answer)
    return answers + [NOT_KNOWN] * (len(scripts) - len(answers))


def _start(site: SiteConfig, script: Path) -> float | str | None:
    try:
        done = subprocess.run(
            ["sbatch", "--test-only", str(script)],
            env=for_slurm(site),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if found := _STARTS.search(done.stderr):
        return datetime.fromisoformat(found[1]).timestamp()
    if done.returncode == 0:
        return NOT_KNOWN
    lines = done.stderr.strip().splitlines()
    return f"refused: {re.sub(r'^.*?(error|failure): ', '', lines[-1])}" if lines else "refused"
