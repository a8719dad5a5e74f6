"""The verbs of `doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from inpaint_bench.cli.exit_codes import unwind_on_signals
from inpaint_bench.cli.options import STYLE, ConfigDir, Overrides, examples

doctor = typer.Typer(help="Check this machine, a site file or a GPU.", **STYLE)


@doctor.callback(invoke_without_command=True)
def _machine_by_default(ctx: typer.Context) -> None:
    if ctx.invoked_subcommand is None:
        doctor_machine()


@doctor.command("machine")
def doctor_machine(overrides: Overrides = None, config_dir: ConfigDir = None) -> None:
    """List this machine's software, GPUs and reachable sites."""
    from .machine import run_machine

    run_machine(overrides or [], config_dir)


@doctor.command("site", epilog=examples("doctor site delta --write"))
def doctor_site(
    site: Annotated[str, Argument(metavar="NAME|all", help="Name of the site file, or all of them.")],
    overrides: Overrides = None,
    config_dir: ConfigDir = None,
    write: Annotated[bool, Option("--write", help="Write the corrections into the site file.")] = False,
) -> int:
    """Compare a site file with its live Slurm.

    Prints the corrections; --write also dates the checked blocks. The exit code is 1 where something differs.
    """
    from .site_report import run_site

    with unwind_on_signals():
        return int(not run_site(site, overrides or [], config_dir=config_dir, write=write))


@doctor.command("gpu", epilog=examples("doctor gpu --out card.json.gz"))
def doctor_gpu(
    uuid: Annotated[str | None, Option(metavar="GPU-...", help="Which GPU; needed if there are several.")] = None,
    seconds: Annotated[float, Option(metavar="S", help="Length of the examination.")] = 20.0,
    out: Annotated[Path | None, Option(metavar="FILE.json.gz", help="Save a recording for telemetry=replay.")] = None,
    note: Annotated[str, Option(help="What the GPU was doing, kept in the recording.")] = "",
) -> None:
    """Examine a GPU through NVML.

    Prints which values it supports, how often they change and what a call costs. Only reads, and needs no root.
    """
    from .gpu_report import run_gpu

    with unwind_on_signals():
        run_gpu(uuid, seconds, out, note)
