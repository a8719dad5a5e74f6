"""Check the container of a site on its login node: the image, and the program that runs it."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

from inpaint_bench.core import child
from inpaint_bench.core.config.site import SiteConfig
from launchers.slurm.environment import slurm_environment

from .findings import Finding


def compare_container(site: SiteConfig) -> Iterator[Finding]:
    """Yield a finding each for image and program; none for a site without a container."""
    container = site.environment.container
    if not container.image:
        return
    image, path = Finding("environment.container.image", container.image), Path(container.image)
    if path.exists():
        size = f"{path.stat().st_size / 1e9:.2f} GB" if path.is_file() else "an unpacked image"
        yield image.same(size)
    else:
        yield image.differs("no such file", "build it (docs/installation.md) or correct the path")
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
    script = "; ".join([f"{{ {line}; }} >/dev/null 2>&1" for line in lines] + [f"command -v {name}"])
    try:
        done = child.run(["bash", "-lc", script], env=slurm_environment(site), timeout_s=site.limits.command_timeout_s)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = done.stdout.decode(errors="replace").split("\n")
    return next((line for line in found if line.startswith("/")), None) if done.returncode == 0 else None
