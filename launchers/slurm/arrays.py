"""Slurm arrays, an sbatch call each: not in one burst, and no further one to a Slurm that gives no answer.

Slurm's manual asks programs to keep their calls few. A sweep is mostly some ten arrays, which nothing holds up; points
that each have a time limit of their own are as many arrays as points.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from inpaint_bench.core.console import pluralize
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.schema import JOBS
from launchers.points.group import Group
from launchers.sweep import private_dirs
from launchers.sweep.ledger import Ledger, job_name

from . import submit as slurm
from .job import HydraState, PointJob

log = logging.getLogger(__name__)

BURST = 10  # calls to a site; those behind them are limits.submit_pause_s apart


def submit(groups: Sequence[Group], ledger: Ledger, hydra: HydraState, code: Path) -> tuple[int, bool]:
    """Send each group as an array, and write down and tell what became of it.

    An array that sbatch refuses stops no other. After one that Slurm did not answer for, which it may have taken, the
    others of that site are not tried. Returns how many points were not taken as far as is known, and whether that
    is because Slurm gave no answer.
    """
    calls: Counter[str] = Counter()
    silent: set[str] = set()
    missing = 0
    for group in groups:
        site = group.first.site
        pairs = [[p.num, p.attempt] for p in group.points]
        try:
            if site.name in silent:
                raise slurm.RefusedError(f"{site.name}: {group.name} was not sent, for Slurm gave no answer before it")
            if calls[site.name] >= BURST:
                time.sleep(site.limits.submit_pause_s)
            calls[site.name] += 1
            array = _submit(group, ledger, hydra, code)
        except UserError as error:
            missing += len(pairs)
            certain = isinstance(error, slurm.RefusedError)
            ledger.append("refused", group=group.name, points=pairs, message=str(error), certain=certain)
            then = f"`rerun`, with what is to change, sends its {pluralize(len(pairs), 'point')}."
            if isinstance(error, slurm.UnansweredError):
                silent.add(site.name)
                then = "It may have been taken none the less: `status` and `rerun` look for it by its name."
            log.error(f"{error}. {then}")
            continue
        ledger.append("submitted", group=group.name, job_id=f"{array}_%a", points=pairs)
        log.info(f"{site.name}: array {array} with {pluralize(len(pairs), 'point')} in {group.first.request.partition}")
    return missing, bool(silent)


def _submit(group: Group, ledger: Ledger, hydra: HydraState, code: Path) -> str:
    """The id of the array. Raises UserError."""
    return slurm.submit(
        group,
        [PointJob.of(p, hydra, f"{group.name}_{task}") for task, p in enumerate(group.points)],
        folder=private_dirs.make(ledger.folder / JOBS / group.name),
        code=code,
        job_name=job_name(group.name, ledger.sweep["sweep_id"]),
    )
