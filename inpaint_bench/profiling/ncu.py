"""Run a command under Nsight Compute and say in one sentence why no counter could be read."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from inpaint_bench.core import child
from inpaint_bench.core.config.site import SiteConfig
from inpaint_bench.core.errors import UnavailableError, UserError
from inpaint_bench.core.kernels import METRICS

from .record import ATTACHED

SETUP_S = 1800  # a run may take this long beyond its own limit: building, compiling, printing


def find() -> str:
    """Return the path of ncu. Raises UnavailableError where there is none."""
    if path := shutil.which("ncu"):
        return path
    raise UnavailableError(
        "profile=ncu needs Nsight Compute, and no `ncu` is on PATH: it comes with the CUDA toolkit "
        "(a module of the site: sites.<name>.environment.modules)"
    )


def command(ncu: str, functions: Sequence[str], launches: int, output: Path, application: Sequence[str]) -> list[str]:
    """Return the command that counts the kernels of these functions between cudaProfilerStart and cudaProfilerStop."""
    return [
        ncu,
        *("--target-processes", "application-only"),  # no workers of a loader or a compiler
        *("--profile-from-start", "off"),
        *("--graph-profiling", "node"),  # kernels in a CUDA graph one by one
        *("--clock-control", "none"),  # the card's clocks are left alone
        *("--kernel-name-base", "function", "--kernel-name", f"regex:^({'|'.join(functions)})$"),
        *("--launch-count", str(launches)),
        *("--metrics", ",".join(METRICS.values())),
        *("--csv", "--page", "raw", "--print-units", "base", "--print-kernel-base", "mangled"),
        *("--log-file", str(output)),
        *application,
    ]


def run(arguments: Sequence[str], limit_s: float) -> tuple[str, int]:
    """Run the command; return what it and the application printed, and its exit code. Raises UserError if it hangs."""
    # Two profilers cannot share a process.
    environment = {name: value for name, value in os.environ.items() if name not in ATTACHED}
    try:
        done = child.run(arguments, timeout_s=limit_s + SETUP_S, env=environment)
    except subprocess.TimeoutExpired:
        raise UserError(f"ncu did not end within {limit_s + SETUP_S:g} s") from None
    return (done.stdout + done.stderr).decode(errors="replace"), done.returncode


def check(text: str, returncode: int, site: SiteConfig) -> None:
    """Raise for an output without counters: UnavailableError where the machine gives none, else UserError."""
    if "ERR_NVGPUCTRPERM" in text:
        raise UnavailableError(f"this job may not read the GPU's performance counters (ERR_NVGPUCTRPERM): {_way(site)}")
    if "driver resource was unavailable" in text:
        raise UnavailableError(
            "the GPU's performance counters are in use by another tool, such as DCGM, which the site can pause"
        )
    if "Failed to initialize the profiler" in text:
        raise UnavailableError(f"the driver gives Nsight Compute no counters here: {_last_error(text)}")
    if returncode != 0:
        raise UserError(f"ncu ended with {returncode}: {_last_error(text)}")
    if "No kernels were profiled" in text:
        raise UserError("ncu saw none of the kernels of the profile before it: does the recipe run on the GPU?")


def _way(site: SiteConfig) -> str:
    if not site.connection.has_slurm:
        return "set the option NVreg_RestrictProfilingToAdminUsers=0 of the driver, or run as root"
    if site.counter_features:
        features = "&".join(site.counter_features)
        return f"jobs of `launch` at {site.name} ask for nodes that allow it, --constraint={features}"
    return f"ask the site which feature of its nodes allows it, and set sites.{site.name}.counter_features=[...]"


def _last_error(text: str) -> str:
    errors = re.findall(r"^==ERROR== (.+)$", text, re.MULTILINE)
    # The last is "An error occurred", the application's own last line says more than "returned an error code".
    telling = [line for line in errors if not line.startswith(("An error", "The application returned"))]
    lines = telling or [line for line in text.splitlines() if line.strip() and not line.startswith("==")] or errors
    return lines[-1].strip()[:300] if lines else "it printed nothing"
