"""Check on a login node the program that runs the container of a site; paths.py looks for the image."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Iterator

from inpaint_bench.core import child
from inpaint_bench.core.config.site import SiteConfig
from launchers.remote.ssh import login_bash, strip_startup
from launchers.slurm.environment import slurm_environment

from .findings import Finding


def compare_container(site: SiteConfig) -> Iterator[Finding]:
    """Yield a finding for the program that runs the container; none for a site without one."""
    container = site.environment.container
    if not container.image:
        return
    program = Finding("environment.container.command", container.command)
    if found := _program(site, container.command):
        yield program.same(found)
    else:
        yield program.unknown("not found here, also with the modules of a job; look for it on a compute node")


def _program(site: SiteConfig, name: str) -> str | None:
    """Return the path of a program as a job finds it: in a login shell, with the job's modules."""
    environment = site.environment
    lines = ["module reset"] * environment.modules_reset + ["module purge"] * environment.modules_purge
    lines += [f"module load {shlex.quote(module)}" for module in environment.modules]
    lines = [f"{{ {line}; }} >/dev/null 2>&1" for line in lines]
    script = "; ".join([*lines, f"command -v {name}"])
    try:
        done = child.run(login_bash(script), env=slurm_environment(site), timeout_s=site.limits.command_timeout_s)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = done.stdout.decode(errors="replace").split("\n") if strip_startup(done) else []
    return next((line for line in found if line.startswith("/")), None) if done.returncode == 0 else None
