"""`time_min=auto`: a time limit from how long earlier runs of the same cell took."""

from __future__ import annotations

import math
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from inpaint_bench.core.console import pluralize
from inpaint_bench.core.records import decode_record
from inpaint_bench.core.schema import MANIFEST, SWEEP, Reason, Status

AUTO = "auto"
DEFAULT_MIN = 60  # without earlier runs; the default of `time_min`
MARGIN = 1.5  # over the longest run: cold caches, another node, a busy file system
STARTUP_MIN = 10  # from the start of the job to that of the run: modules, imports, login scripts
ROUND_TO_MIN = 5
MAX_SWEEPS = 100  # newest sweeps that are read

Cell = tuple[str, str, str]  # site, GPU, config hash


class _Run(msgspec.Struct):
    """The part of a manifest that tells how long which cell ran."""

    site: str
    gpu: str
    config_hash: str
    status: Status
    reason: str | None
    resumed: list[Any] | None
    started_unix_ns: int
    ended_unix_ns: int


class RunHistory:
    """Durations of the runs below folders of sweeps. A folder is read at its first use."""

    def __init__(self) -> None:
        self._minutes = cache(_read_minutes)

    def limit(self, out: str, cell: Cell, max_minutes: int) -> tuple[int, str]:
        """Return the time limit of the cell's next run, at most `max_minutes`, and in words where it comes from."""
        if not (minutes := self._minutes(Path(out)).get(cell)):
            return min(DEFAULT_MIN, max_minutes), f"default, no such run in {out}"
        estimate = MARGIN * max(minutes) + STARTUP_MIN
        limit = min(ROUND_TO_MIN * math.ceil(estimate / ROUND_TO_MIN), max_minutes)
        return limit, f"{pluralize(len(minutes), 'earlier run')}, {max(minutes):.3g} min at most"


def _read_minutes(out: Path) -> dict[Cell, list[float]]:
    """Read the manifests of the newest sweeps. Damaged ones are skipped: a limit too short costs one rerun."""
    # A launch makes <out>/<date>/<time>-<name>, a plan file <out>/<sweep id>-<site>.
    records = [*out.glob(f"*/{SWEEP}"), *out.glob(f"*/*/{SWEEP}")]
    newest = sorted(records, key=lambda record: record.stat().st_mtime, reverse=True)
    minutes: dict[Cell, list[float]] = {}
    for record in islice(newest, MAX_SWEEPS):
        for file in record.parent.glob(f"*/attempt-*/{MANIFEST}"):
            try:
                run = decode_record(file.read_bytes(), _Run)
            except (OSError, ValueError):
                continue
            # One that ran in one go to its end, or, which gives a lower bound, to its time limit.
            if (run.status is Status.COMPLETED and not run.resumed) or run.reason == Reason.TIMEOUT:
                cell = (run.site, run.gpu, run.config_hash)
                minutes.setdefault(cell, []).append((run.ended_unix_ns - run.started_unix_ns) / 60e9)
    return minutes
