"""`launch`: submit a sweep to every site; without -m run one point on this machine."""

import filecmp
import functools
import logging
import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import hydra

from inpaint_bench.commands import launch_arguments
from inpaint_bench.commands.exit_codes import guarded, refuse_paths
from inpaint_bench.core.composed_file import find_secret
from inpaint_bench.core.config import doubts
from inpaint_bench.core.config.parse import parse_unchecked
from inpaint_bench.core.config.user_file import user_overrides
from inpaint_bench.core.config.validation import override_key
from inpaint_bench.core.console import echo, output
from inpaint_bench.core.errors import PointsFailedError, UserError
from inpaint_bench.core.files import check_can_be_made
from inpaint_bench.core.hydra_support import refuse_hidden_files, refuse_wrong_overrides, register
from inpaint_bench.core.paths import conf_dir
from inpaint_bench.run.task import task
from inpaint_bench.telemetry.driver import DriverError
from inpaint_bench.telemetry.nvml.real import RealNvml


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return the exit code of the process."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    register()
    if find_secret(arguments):
        os.umask(0o077)  # nobody else can read what this process writes, also without a sweep
    return guarded(lambda: _run(arguments))


def _run(arguments: list[str]) -> None:
    refuse_paths(arguments)
    # The points of a plan file are composed from the overrides in it: Hydra's command line is not involved.
    if any(argument.split("=")[0] == "--plan" for argument in arguments):
        _launch_plan(arguments)
    else:
        _launch(arguments)


def _launch(arguments: list[str]) -> None:
    """Run Hydra, then add the repetitions that `repeats=auto` still needs to the sweeps that have ended."""
    from launchers.points.hydra_internals import args_parser
    from launchers.submit.plugin import SweepLauncher

    if not arguments or {"--help", "-h"} & set(arguments):
        launch_arguments.print_help(arguments)
        return
    # Hydra answers a wrong option with a page of usage, and takes no options between overrides.
    typed = launch_arguments.read(arguments, args_parser())
    folders = [conf_dir()]
    if typed.config_dir:
        if not typed.config_dir.is_dir():
            raise UserError(f"--config-dir {typed.config_dir}: no such folder")
        folders.append(typed.config_dir)
        if (root := typed.config_dir / "config.yaml").exists() and not filecmp.cmp(root, conf_dir() / root.name, False):
            echo(f"{root}: is not read, since conf/config.yaml is the root; +experiment=NAME adds keys", error=True)
    if not typed.config_path:
        refuse_hidden_files(folders)
    refuse_wrong_overrides(typed.overrides, folders, multirun=typed.multirun)
    own = user_overrides(typed.overrides, multirun=typed.multirun)
    sys.argv = ["launch", *typed.options, *own, *typed.overrides]  # where Hydra reads them
    if typed.runs and not typed.multirun:
        _check_single(typed, [*own, *typed.overrides])
    SweepLauncher.ended_auto_sweeps.clear()
    errors: list[UserError | PointsFailedError] = []

    @functools.wraps(task)
    def single_run(config: Any) -> Any:
        # Hydra prints a line with all overrides above an error that passes through it.
        try:
            return task(config)
        except (UserError, PointsFailedError) as error:
            errors.append(error)

    # Jobs of a sweep import the function by its name, which a local one does not have.
    function = task if typed.multirun else single_run
    try:
        hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="config")(function)()
    except PointsFailedError as error:
        errors.append(error)  # repetitions of the other points are still added
    except OSError as error:
        if not error.filename:  # a full disk, where Hydra writes its files
            named = (line for line in typed.overrides if line.startswith(("hydra.run.dir=", "out=")))
            error.filename = next(named, "the run directory")
        raise
    for folder in SweepLauncher.ended_auto_sweeps:
        from inpaint_bench.commands.repetitions import add_repetitions

        try:
            add_repetitions(folder, wait=True)
        except PointsFailedError as error:
            errors.append(error)
    if errors:
        raise errors[0]


def _check_single(typed: Namespace, overrides: list[str]) -> None:
    """Raise UserError for a run that cannot work on this machine, before Hydra makes its directory."""
    from launchers.points.compose import Composer
    from launchers.points.hydra_internals import initialized
    from launchers.points.site_catalog import refuse_unused_keys
    from launchers.submit.checks import check_packages, check_points
    from launchers.submit.estimates import estimate, leave_out
    from launchers.sweep.sweep_record import LaunchContext, refuse_mixed

    extra, name = [str(typed.config_dir.absolute())] if typed.config_dir else [], typed.config_name or "config"
    of_hydra = [line for line in overrides if override_key(line).startswith("hydra")]
    # The point of a sweep with site=local, which a single run is
    own = ["site=local", *(line for line in overrides if line not in of_hydra and not line.startswith("site="))]
    with initialized(str(Path(typed.config_path or conf_dir()).absolute()), extra) as loader:
        config = hydra.compose(name, overrides, return_hydra_config=True)
        _check_config(config)
        refuse_unused_keys(parse_unchecked(config).site, overrides)
        compose = Composer(
            lambda lines: hydra.compose(name, [*of_hydra, *lines], return_hydra_config=True),
            loader=loader,
            config_name=name,
            hydra_overrides=of_hydra,
        )
        point, folder = compose(0, own), Path(config.hydra.run.dir)
    refuse_mixed("hydra.run.dir", folder)
    check_packages([point])
    check_points([point], folder, LaunchContext())
    leave_out([point], estimate([point]))
    try:
        # Torch would take seconds to say so.
        with RealNvml() if point.bench.recipe.device != "cpu" else nullcontext():
            check_can_be_made(folder)
        for warning in doubts.warnings([(None, point.bench, point.site)]):
            echo(warning, error=True)
    except DriverError as error:
        advice = "with -m the run is submitted to a site, and gpu=cpu recipe=cpu runs here"
        raise UserError(f"gpu={point.bench.gpu.name}: this machine has no NVIDIA GPU ({error}); {advice}") from None


def _check_config(config: Any) -> None:
    """Raise UserError for keys that only a sweep reads."""
    folder = config.hydra.run.dir
    for key, value in {"hydra.run.dir": folder, "out": config.out}.items():
        if not value:  # as `out=$OUT` if the shell has no such variable
            raise UserError(f"{key}: is empty; name a folder")
    only_in_sweeps = {
        "dry_run=true": config.dry_run,
        f"repeats={config.repeats}": config.repeats != 1,
        "notify": config.notify.mail,
        f"study={config.study.name}": config.study.grid,
        f"site={config.site.name}": config.site.name not in ("auto", "local"),
    }
    if refused := [key for key, given in only_in_sweeps.items() if given]:
        raise UserError(f"{refused[0]} needs -m: without it, launch runs one point here and now")


def _launch_plan(arguments: list[str]) -> None:
    from launchers.submit.submit import run_plan, run_sent_plan

    parser = launch_arguments.Parser(
        prog="inpaint-bench launch", description="Submit the points of a plan file from this machine."
    )
    parser.add_argument(
        "--plan", type=Path, required=True, metavar="FILE", help="plan.<site>.yaml of a sweep; -: standard input"
    )
    folder = "further configuration files, as --config-dir of the launch (default: the folder that the plan names)"
    parser.add_argument("--config-dir", type=Path, metavar="DIR", help=folder)
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--dry-run", action="store_true", help="print the plan and write the scripts, submit nothing")
    ways.add_argument("--wait", action="store_true", help="return when all points have finished")
    folder = "submit into this sweep directory what it does not have yet, as a site over ssh does"
    ways.add_argument("--folder", type=Path, metavar="DIR", help=folder)
    parser.add_argument("--json", action="store_true", help="with --dry-run or --folder: print JSON")
    options, others = parser.parse_known_args(arguments)
    if others:
        keys = (
            "; a plan has the keys of its points: set them in the launch that writes it, or a site's in its file there"
        )
        raise UserError(f"{others[0]}: --plan takes no such argument{keys if '=' in others[0] else ''}")
    if options.plan.suffix == ".tar":
        raise UserError(f"{options.plan}: plans are no longer packed; copy plan.SITE.yaml and this commit to the site")
    if options.json and not (options.dry_run or options.folder):
        raise UserError("--json: only together with --dry-run or --folder")
    _refuse_another_users(options.plan)
    output.as_json = options.json
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr if options.json else sys.stdout)
    if options.folder:
        run_sent_plan(options.plan, options.folder, config_dir=options.config_dir)
    else:
        run_plan(options.plan, config_dir=options.config_dir, dry_run=options.dry_run, wait=options.wait)


def _refuse_another_users(plan: Path) -> None:
    """Raise UserError for the plan of another user, because a plan can name configuration files."""
    try:
        owner = plan.stat().st_uid
    except OSError:
        return  # reading it says why
    if owner != os.geteuid():
        raise UserError(f"{plan}: belongs to user {owner}, and would run as you; copy it if you trust its author")


if __name__ == "__main__":
    sys.exit(main())
