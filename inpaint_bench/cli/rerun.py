"""`rerun`: send again what a sweep still lacks."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from inpaint_bench.core.console import pluralize, sanitize
from inpaint_bench.core.errors import PointsFailedError, UserError
from inpaint_bench.core.schema import Reason

from .command import parser, run


def main(argv: Sequence[str] | None = None) -> int:
    does = (
        "Send the points of a sweep that did not complete once more, each by the policy of its cause (keys rerun.*): "
        "a time limit is made longer, a failed node is avoided, and what the application or its memory failed of "
        "is sent only where --only names it."
    )
    options = parser("rerun", does, "runs/2026-11-21/08-30-00-inpaint time_min=120 --only timeout")
    options.add_argument("sweep", type=Path, help="the folder that `launch -m` printed")
    options.add_argument(
        "changes", nargs="*", metavar="KEY=VALUE", help="what is to differ this time, e.g. time_min=120"
    )
    reasons = f"send these and no others, whatever their policy: {', '.join(Reason)}, or oom; separated by commas"
    options.add_argument("--only", metavar="REASONS", help=reasons)
    repeats = "send further repetitions instead: until every cell has N, or (auto) as repeats_target asks"
    options.add_argument("--repeats", metavar="N|auto", help=repeats)
    options.add_argument("--dry-run", action="store_true", help="show what each policy does, submit nothing")
    options.add_argument("--wait", action="store_true", help="return when all points have ended")
    return run(options, _rerun, argv)


def _rerun(options: argparse.Namespace) -> None:
    from inpaint_bench.run.task import task
    from launchers.submit.rerun import rerun

    if options.repeats is not None:
        _repeat(options)
        return
    done = rerun(
        options.sweep,
        task,
        only=_reasons(options.only),
        changes=options.changes,
        dry_run=options.dry_run,
        wait=options.wait,
    )
    if done.unknown:
        why = "; ".join(dict.fromkeys(standing.verdict.message for standing in done.unknown))
        points = f"{pluralize(len(done.unknown), 'point')} {'is' if len(done.unknown) == 1 else 'are'}"
        sent = "" if done.sent else "nothing was sent again: "
        raise PointsFailedError(sanitize(f"{sent}{points} unknown ({why}); rerun when that is told"))
    if not done.sent:
        print("Nothing to send again.")


def _repeat(options: argparse.Namespace) -> None:
    from inpaint_bench.run.task import task

    from .repeats import repeat

    if options.only is not None:
        raise UserError("--only chooses what is sent again, and --repeats sends nothing again: take one of them")
    wanted = options.repeats
    if wanted != "auto" and not (wanted.isdecimal() and int(wanted) > 0):
        raise UserError(f"--repeats {wanted}: must be a whole number above 0, or auto")
    repeat(
        options.sweep,
        task,
        wanted=None if wanted == "auto" else int(wanted),
        changes=options.changes,
        dry_run=options.dry_run,
        wait=options.wait,
    )


def _reasons(text: str | None) -> frozenset[Reason] | None:
    if text is None:
        return None
    words = {word.strip() for word in text.split(",")}
    if "oom" in words:
        words = words - {"oom"} | {Reason.OOM_GPU, Reason.OOM_HOST}
    try:
        return frozenset(Reason(word) for word in words)
    except ValueError:
        raise UserError(f"--only {text}: not reasons; have: {', '.join(Reason)}, oom") from None


if __name__ == "__main__":
    from . import rerun as command  # under its own name, so that a job imports the task

    sys.exit(command.main())
