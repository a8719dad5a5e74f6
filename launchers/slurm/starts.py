"""When Slurm would start a script, by `sbatch --test-only`, which submits nothing."""

import re
import subprocess
import time
from dataclasses import dataclass
from subprocess import CompletedProcess

from inpaint_bench.core import child
from inpaint_bench.core.config.site import SiteConfig

from .environment import slurm_environment
from .query import UNKNOWN, cause_of
from .sbatch import NO_ANSWER

COMMAND = ("sbatch", "--test-only")  # reads the script from its standard input
VARIABLES = {"SLURM_TIME_FORMAT": "%s", "LC_ALL": "C"}  # Unix seconds: each site has a time zone of its own
MAX_SKEW_S = 3600  # a start that lies longer ago is none

# "sbatch: Job 123 to start at 1795883031 using 16 processors ...", from 25.05 "... on cluster x a using ..."
_START = re.compile(rb"(?m)^(?:\w+: )?Job \d+ to start at (\d{9,11}) ")
_REFUSED = re.compile("allocation failure: (?!Unspecified error|No error|Success)")  # which do not say what has failed


@dataclass(frozen=True, kw_only=True)
class Start:
    """When Slurm expects to start a script: that of an array's first task, if nothing is submitted before it."""

    wait_s: float | None = None  # from now on; None: it gives no time
    refused: bool = False
    reason: str = ""  # why there is no time

    def __str__(self) -> str:
        return f"refused: {self.reason}" if self.refused else self.reason or UNKNOWN


def ask(site: SiteConfig, script: str) -> Start:
    """Ask the Slurm that this machine reaches for a site."""
    environment, timeout_s = slurm_environment(site) | VARIABLES, site.limits.command_timeout_s
    try:
        done = child.run(COMMAND, stdin=script.encode(), env=environment, timeout_s=timeout_s)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Start(reason=f"sbatch: {getattr(error, 'strerror', f'no answer within {timeout_s} s')}")
    return read_start(done, time.time())


def read_start(done: CompletedProcess[bytes], now_unix: float) -> Start:
    """Return what sbatch has answered; `now_unix` is by the clock of the machine that ran it."""
    times, reason = {int(start) for start in _START.findall(done.stderr)}, cause_of(done.stderr)
    if done.returncode == 0 and len(times) == 1 and (wait_s := times.pop() - now_unix) > -MAX_SKEW_S:
        return Start(wait_s=max(0.0, wait_s))
    text = done.stderr.decode(errors="replace")
    refused = done.returncode > 0 and bool(_REFUSED.search(text)) and not NO_ANSWER.search(text)
    return Start(refused=refused, reason=reason)
