"""`rerun`: send again what a sweep still lacks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from inpaint_bench.core.console import pluralize, sanitize
from inpaint_bench.core.errors import PointsFailedError, UserError
from inpaint_bench.core.schema import Reason


def run_rerun(
    sweep: Path, changes: Sequence[str], *, only: str | None, repeats: str | None, dry_run: bool, wait: bool
) -> None:
    """Resubmit what `sweep` lacks, or further replicates if `repeats` is given.

    Raises UserError for impossible options, PointsFailedError where the state of a point is unknown.
    """
    from inpaint_bench.run.task import task
    from launchers.submit.rerun import rerun

    if repeats is not None:
        if only is not None:
            raise UserError("--only chooses what is sent again, and --repeats sends nothing again: take one of them")
        _repeat(sweep, repeats, changes=changes, dry_run=dry_run, wait=wait)
        return
    done = rerun(sweep, task, only=_reasons(only), changes=changes, dry_run=dry_run, wait=wait)
    if done.unknown:
        why = "; ".join(dict.fromkeys(standing.message for standing in done.unknown))
        points = f"{pluralize(len(done.unknown), 'point')} {'is' if len(done.unknown) == 1 else 'are'}"
        sent = "" if done.sent else "nothing was sent again: "
        raise PointsFailedError(sanitize(f"{sent}{points} unknown ({why}); rerun when that is told"))
    if not done.sent:
        print("Nothing to send again.")


def _repeat(sweep: Path, repeats: str, *, changes: Sequence[str], dry_run: bool, wait: bool) -> None:
    from inpaint_bench.run.task import task

    from .repeats import repeat

    if repeats != "auto" and not (repeats.isdecimal() and int(repeats) > 0):
        raise UserError(f"--repeats {repeats}: must be a whole number above 0, or auto")
    wanted = None if repeats == "auto" else int(repeats)
    repeat(sweep, task, wanted=wanted, changes=changes, dry_run=dry_run, wait=wait)


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
