"""Start, show and stop the test bed: `python -m tests.testbed`."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from . import packages, suites
from .bed import Bed
from .errors import BedError, PackagesError
from .plan import DEFAULT_PORT, SITES, Plan

DEFAULT_STATE = Path(__file__).parents[2] / ".testbed"


def _up(asked: argparse.Namespace) -> int:
    plan = Plan(
        state=asked.state,
        sites=tuple(asked.sites.split(",")),
        light=asked.light or bool(asked.gpus),
        gpus=asked.gpus,
        port=asked.port,
    )
    if Plan.load(asked.state) == plan and Bed(plan).is_up():
        print(f"already up ({plan.variant}) in {plan.state}")
        return 0
    start = time.monotonic()
    Bed(plan).up()
    sites = ", ".join(f"{site} ({len(plan.nodes(site))} nodes)" for site in plan.sites)
    print(f"up in {time.monotonic() - start:.1f} s ({plan.variant}): {sites}; state in {plan.state}")
    for site in plan.sites:
        print(f"  {site}: . {plan.home(site) / 'env.sh'}")
    return 0


def _down(asked: argparse.Namespace) -> int:
    if Plan.load(asked.state) is None:
        print(f"no bed in {asked.state}")
        return 0
    start = time.monotonic()
    Bed.at(asked.state).down(keep=asked.keep)
    kept = f"; logs kept in {asked.state}" if asked.keep else ""
    print(f"down in {time.monotonic() - start:.1f} s{kept}")
    return 0


def _status(asked: argparse.Namespace) -> int:
    """Print the daemons. Return 0 if all of them run, else 1."""
    bed = Bed.at(asked.state)
    for name, pid in bed.daemons().items():
        print(f"{name:<24} {f'pid {pid}' if pid else 'NOT RUNNING'}")
    if not bed.is_up():
        print(f"not up (or not all of it): {bed.state}")
        return 1
    for site in bed.sites:
        print(f"\n== {site}: SLURM_CONF={bed.conf(site)}")
        print(bed.run(site, "sinfo", "-N", "-o", "%N %P %t %G %c %m").stdout, end="")
        print(bed.run(site, "squeue").stdout, end="")
    return 0


def _env(asked: argparse.Namespace) -> int:
    print(Bed.at(asked.state).exports(asked.site), end="")
    return 0


def _kill_node(asked: argparse.Namespace) -> int:
    Bed.at(asked.state).kill_node(asked.site, asked.node, at_once=not asked.unnoticed)
    return 0


def _start_node(asked: argparse.Namespace) -> int:
    Bed.at(asked.state).start_node(asked.site, asked.node)
    return 0


def _nudge(asked: argparse.Namespace) -> int:
    bed = Bed.at(asked.state)
    while True:
        for job in bed.nudge(asked.site):
            print(f"{job} may start", flush=True)
        if not asked.follow or not bed.is_up():
            return 0
        time.sleep(1)


def _install(asked: argparse.Namespace) -> int:
    if asked.suite:
        folder = suites.install(asked.suite, asked.folder)
        print(f"Debian {asked.suite} with Slurm {suites.SUITES[asked.suite]} is in {folder}.")
        return 0
    print(packages.install(light=asked.light))
    return 0


def _make(asked: argparse.Namespace) -> int:
    return suites.make(asked.version, asked.targets, asked.folder)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.testbed", description=sys.modules[__package__].__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    state = argparse.ArgumentParser(add_help=False)
    state.add_argument(
        "--state",
        type=lambda text: Path(text).absolute(),
        default=Path(os.environ.get("INPAINT_BENCH_TESTBED") or DEFAULT_STATE).absolute(),
        help="the bed's folder (default: $INPAINT_BENCH_TESTBED, else .testbed in the repository)",
    )

    up = commands.add_parser("up", parents=[state], help="start it; returns when all nodes are idle")
    up.add_argument("--light", action="store_true", help="no database; a stand-in answers for sacct")
    up.add_argument("--gpus", type=int, default=0, metavar="N", help="delta as one node with N real GPUs, light")
    up.add_argument("--sites", default=",".join(SITES), help="which clusters (default: %(default)s)")
    up.add_argument("--port", type=int, default=DEFAULT_PORT, help="first port (default: %(default)s)")
    up.set_defaults(do=_up)

    down = commands.add_parser("down", parents=[state], help="stop everything and remove the folder")
    down.add_argument("--keep", action="store_true", help="leave logs and accounting")
    down.set_defaults(do=_down)

    commands.add_parser("status", parents=[state], help="daemons, nodes, queue").set_defaults(do=_status)

    install = commands.add_parser("install", help="apt-get what is missing")
    install.add_argument("--light", action="store_true", help="without the database's packages")
    install.add_argument("--suite", choices=suites.SUITES, help="a Debian with its Slurm and Python, in a folder")
    install.add_argument("--folder", type=Path, help="of that suite (default: .suites/SUITE in the repository)")
    install.set_defaults(do=_install)

    make = commands.add_parser("make", help="run make with another Slurm; `make faults SLURM=24.11` calls it")
    make.add_argument("--folder", type=Path, help="of that suite (default: .suites/SUITE in the repository)")
    make.add_argument("version", metavar="VERSION", help=", ".join(suites.SUITES.values()))
    make.add_argument("targets", metavar="TARGET", nargs="+")
    make.set_defaults(do=_make)

    for name, do, about in (
        ("env", _env, "print shell exports: eval $(... env grace)"),
        ("nudge", _nudge, "let requeued jobs start without the 120 s wait"),
        ("kill-node", _kill_node, "a node loses power"),
        ("start-node", _start_node, "and comes back"),
    ):
        command = commands.add_parser(name, parents=[state], help=about)
        command.add_argument("site", metavar="SITE", choices=SITES)
        if name.endswith("-node"):
            command.add_argument("node", metavar="NODE")
        if name == "kill-node":
            command.add_argument("--unnoticed", action="store_true", help="let slurmctld find out (25 s)")
        if name == "nudge":
            command.add_argument("--follow", action="store_true", help="once a second until the bed is down")
        command.set_defaults(do=do)
    return parser


def main() -> int:
    asked = _parser().parse_args()
    try:
        return int(asked.do(asked))
    except PackagesError as error:
        print(error, file=sys.stderr)
        return 2
    except BedError as error:
        print(f"testbed: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
