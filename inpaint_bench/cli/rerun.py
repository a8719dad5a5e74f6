"""`rerun`: submit again what a sweep still lacks, or add repetitions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from inpaint_bench.commands.repetitions import add_repetitions
from inpaint_bench.core.console import output
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.schema import Reason
from launchers.submit.rerun import rerun


def run_rerun(
    sweep: Path,
    changes: Sequence[str] | None,
    *,
    only: str | None,
    repeats: str | None,
    dry_run: bool,
    wait: bool,
    as_json: bool,
) -> None:
    """Submit again what the sweep lacks. Raises UserError, and PointsFailedError for points of unknown state."""
    changes = changes or []
    if as_json:
        if not dry_run:
            raise UserError("--json: only together with --dry-run; `status --json` tells what was submitted")
        output.as_json = True
        output.adjust_log()
    if repeats is not None:
        if only is not None:
            raise UserError("--only selects points to submit again, and --repeats submits none again: use one of them")
        target = _repetitions(repeats)
        add_repetitions(sweep, target=target, changes=changes, dry_run=dry_run, wait=wait)
        return
    rerun(sweep, only=_reasons(only), changes=changes, dry_run=dry_run, wait=wait)


def _repetitions(text: str) -> int | None:
    """Parse --repeats; None for auto."""
    if text == "auto":
        return None
    if not (text.isdecimal() and int(text) > 0):
        raise UserError(f"--repeats {text}: must be a whole number above 0, or auto")
    return int(text)


def _reasons(text: str | None) -> frozenset[Reason] | None:
    """Parse --only; None for no selection."""
    if text is None:
        return None
    names = {name.strip() for name in text.split(",")}
    if "oom" in names:
        names = names - {"oom"} | {Reason.OOM_GPU, Reason.OOM_HOST}
    try:
        return frozenset(Reason(name) for name in names)
    except ValueError:
        raise UserError(f"--only {text}: no such reason; have: {', '.join(Reason)}, oom") from None
