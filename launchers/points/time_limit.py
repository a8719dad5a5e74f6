"""`time_min=auto`: a time limit from how long earlier runs of the same cell took."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from inpaint_bench.core.console import pluralize
from inpaint_bench.core.files import read_json
from inpaint_bench.core.schema import MANIFEST, SWEEP, Reason, Status

AUTO = "auto"
DEFAULT_MIN = 60  # without earlier runs; the default of `time_min`
MARGIN = 1.5  # over the longest run: cold caches, another node, a busy file system
STARTUP_MIN = 10  # from the start of the job to that of the run: modules, imports, login scripts
ROUND_TO_MIN = 5
MAX_SWEEPS = 100  # newest sweeps that are read


@dataclass(frozen=True, kw_only=True)
class TimeLimit:
    """A time limit, and in words where it comes from."""

    minutes: int
    basis: str


class RunHistory:
    """Durations of the runs below a folder of sweeps, by site, GPU and config hash. Read at first use."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self._minutes: dict[tuple[str, str, str], list[float]] | None = None

    def limit(self, *, site: str, gpu: str, config_hash: str, max_minutes: int) -> TimeLimit:
        """Return a limit for the next run of this cell, at most `max_minutes`."""
        if self._minutes is None:
            self._minutes = _read_durations(self._out)
        durations = self._minutes.get((site, gpu, config_hash), [])
        if not durations:
            return TimeLimit(minutes=min(DEFAULT_MIN, max_minutes), basis=f"default, no such run in {self._out}")
        estimate = MARGIN * max(durations) + STARTUP_MIN
        minutes = min(ROUND_TO_MIN * math.ceil(estimate / ROUND_TO_MIN), max_minutes)
        return TimeLimit(
            minutes=minutes, basis=f"{pluralize(len(durations), 'earlier run')}, {max(durations):.3g} min at most"
        )


class RunHistories(dict[str, RunHistory]):
    """Run histories by folder, made at first use."""

    def __missing__(self, out: str) -> RunHistory:
        self[out] = RunHistory(Path(out))
        return self[out]


def _read_durations(out: Path) -> dict[tuple[str, str, str], list[float]]:
    """Read the manifests of the newest sweeps. Damaged ones are skipped: a limit too short costs one rerun."""
    records = [*out.glob(f"*/{SWEEP}"), *out.glob(f"*/*/{SWEEP}")]
    newest = sorted(records, key=lambda record: record.stat().st_mtime, reverse=True)
    durations: dict[tuple[str, str, str], list[float]] = {}
    for record in islice(newest, MAX_SWEEPS):
        for file in record.parent.glob(f"*/attempt-*/{MANIFEST}"):
            try:
                manifest: dict[str, Any] = read_json(file) or {}
                minutes = _duration_min(manifest)
                key = (manifest["site"], manifest["gpu"], manifest["config_hash"])
            except (OSError, ValueError, LookupError, TypeError):
                continue
            if minutes is not None:
                durations.setdefault(key, []).append(minutes)
    return durations


def _duration_min(manifest: dict[str, Any]) -> float | None:
    """Return a run's duration; of one that its time limit cut, a lower bound. None where it did not run in one go."""
    complete = manifest["status"] == Status.COMPLETED and not manifest["resumed"]
    if not complete and manifest["reason"] != Reason.TIMEOUT:
        return None
    started, ended = manifest["started_unix_ns"], manifest["ended_unix_ns"]
    return (ended - started) / 60e9 if isinstance(started, int) and isinstance(ended, int) else None
