"""`rerun`: send again what a sweep still lacks."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from .command import parser, run
from .contract import Reason
from .errors import UserError


def main(argv: Sequence[str] | None = None) -> int:
    does = "Send the points of a sweep that failed, were cancelled or lost, or never started once more, and only those."
    options = parser("rerun", does, "runs/2026-11-21/08-30-00-inpaint time_min=120 --only timeout")
    options.add_argument("sweep", type=Path, help="the folder that `launch -m` printed")
    options.add_argument(
        "changes", nargs="*", metavar="KEY=VALUE", help="what is to differ this time, e.g. time_min=120"
    )
    options.add_argument("--only", metavar="REASONS", help=f"of {', '.join(Reason)}; separated by commas")
    options.add_argument("--dry-run", action="store_true", help="show and write the scripts, submit nothing")
    options.add_argument("--wait", action="store_true", help="return when all points have ended")
    return run(options, _rerun, argv)


def _rerun(options: argparse.Namespace) -> None:
    from launchers.again import rerun

    from .launch import task

    count = rerun(
        options.sweep,
        task,
        only=_reasons(options.only),
        changes=options.changes,
        dry_run=options.dry_run,
        wait=options.wait,
    )
    if not count:
        print("Nothing to send again.")


def _reasons(text: str | None) -> set[Reason] | None:
    if text is None:
        return None
    try:
        return {Reason(word.strip()) for word in text.split(",")}
    except ValueError:
        raise UserError(f"--only {text}: not reasons; have: {', '.join(Reason)}") from None


if __name__ == "__main__":
    from inpaint_bench import rerun as command  # under its own name, so that a job imports the task

    sys.exit(command.main())
