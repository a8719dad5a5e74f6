"""`launch`: one sweep to every site; without -m one point on this machine."""

from __future__ import annotations

import argparse
import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import hydra

from inpaint_bench.cli.exit_codes import guarded
from inpaint_bench.core.errors import PointsFailedError, UserError
from inpaint_bench.core.hydra_support import register
from inpaint_bench.core.paths import conf_dir
from inpaint_bench.run.task import task  # older pickles of jobs name it here


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    register()
    if any(argument.split("=")[0] == "--plan" for argument in arguments):
        return guarded(lambda: _run_plan(arguments))
    sys.argv = ["launch", *arguments]
    return guarded(_launch)


def _launch() -> None:
    """What was asked for, and of `repeats=auto` whose points were waited for the repetitions that it still needs."""
    from launchers.submit.plugin import SweepLauncher

    SweepLauncher.ended_auto_sweeps.clear()
    failed: PointsFailedError | None = None
    try:
        hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="config")(task)()
    except PointsFailedError as error:
        failed = error
    for folder in SweepLauncher.ended_auto_sweeps:
        from inpaint_bench.cli.repeats import add_repetitions

        try:
            add_repetitions(folder, task, wait=True)
        except PointsFailedError as error:
            failed = failed or error
    if failed:
        raise failed


def _run_plan(arguments: list[str]) -> None:
    from launchers.submit.rerun import run_plan

    parser = argparse.ArgumentParser(prog="launch", description="Send the points of a plan file from this machine.")
    file = "plan.<site>.yaml of a sweep, or plan.<site>.tar, which brings the code that runs it"
    parser.add_argument("--plan", type=Path, required=True, metavar="FILE", help=file)
    folder = "configuration files beside the project's own, as --config-dir of the launch (default: where that was)"
    parser.add_argument("--config-dir", type=Path, metavar="DIR", help=folder)
    parser.add_argument("--dry-run", action="store_true", help="show and write the scripts, submit nothing")
    parser.add_argument("--wait", action="store_true", help="return when all points have ended")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    if options.plan.suffix == ".tar":
        _run_packed(options)
        return
    run_plan(options.plan, task, config_dir=options.config_dir, dry_run=options.dry_run, wait=options.wait)


def _run_packed(options: argparse.Namespace) -> None:
    """In another process, which imports the code of the plan's own snapshot."""
    from launchers.remote.plan_file import unpacked
    from launchers.slurm.environment import python_path

    with unpacked(options.plan) as (plan, code):
        words = [sys.executable, "-m", "inpaint_bench.launch", "--plan", str(plan)]
        words += ["--config-dir", str(options.config_dir)] if options.config_dir else []
        words += ["--dry-run"] * options.dry_run + ["--wait"] * options.wait
        done = subprocess.run(words, env=os.environ | {"PYTHONPATH": python_path(code), "PYTHONSAFEPATH": "1"})
    if done.returncode == UserError.exit_code:
        raise UserError(f"{options.plan}: was not sent, as said above")
    if done.returncode:
        raise PointsFailedError(f"{options.plan}: not all of its points were sent or completed, as said above")


if __name__ == "__main__":
    from . import launch  # under its own name, so that a job imports the task

    sys.exit(launch.main())
