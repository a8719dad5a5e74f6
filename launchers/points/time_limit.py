"""How long runs of the same cell took in earlier sweeps, and the time limit that follows for the next one."""

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
WITHOUT_HISTORY_MIN = 60  # as `time_min` where nothing is said
MARGIN = 1.5  # over the longest run: caches that are cold, another node, a file system that is busy
BEFORE_MIN = 10  # from the start of the job to that of the run: modules, imports, and what a login does
ROUND_MIN = 5
SWEEPS = 100  # newest ones that are looked at


@dataclass(frozen=True, kw_only=True)
class Limit:
    """A time limit, and in words where it comes from."""

    minutes: int
    basis: str


class History:
    """Durations of the runs below a folder of sweeps, by site, GPU and hash of what was executed. Read at first use."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self._minutes: dict[tuple[str, str, str], list[float]] | None = None

    def limit(self, *, site: str, gpu: str, config_hash: str, most: int) -> Limit:
        """No more than `most`, the partition's own."""
        if self._minutes is None:
            self._minutes = _read(self._out)
        known = self._minutes.get((site, gpu, config_hash), [])
        if not known:
            return Limit(minutes=min(WITHOUT_HISTORY_MIN, most), basis=f"default, no such run in {self._out}")
        wanted = MARGIN * max(known) + BEFORE_MIN
        minutes = min(ROUND_MIN * math.ceil(wanted / ROUND_MIN), most)
        runs = pluralize(len(known), "run")
        return Limit(minutes=minutes, basis=f"{runs}, {max(known):.3g} min at most")


class Histories(dict[str, History]):
    """By folder, made when first asked for."""

    def __missing__(self, out: str) -> History:
        self[out] = History(Path(out))
        return self[out]


def _read(out: Path) -> dict[tuple[str, str, str], list[float]]:
    """Files that cannot be read are left out: a limit may then be shorter, which `rerun` knows how to mend."""
    records = [*out.glob(f"*/{SWEEP}"), *out.glob(f"*/*/{SWEEP}")]
    newest = sorted(records, key=lambda record: record.stat().st_mtime, reverse=True)
    found: dict[tuple[str, str, str], list[float]] = {}
    for record in islice(newest, SWEEPS):
        for file in record.parent.glob(f"*/attempt-*/{MANIFEST}"):
            try:
                manifest: dict[str, Any] = read_json(file) or {}
                minutes = _minutes(manifest)
                key = (manifest["site"], manifest["gpu"], manifest["config_hash"])
            except (OSError, ValueError, LookupError, TypeError):
                continue
            if minutes is not None:
                found.setdefault(key, []).append(minutes)
    return found


def _minutes(manifest: dict[str, Any]) -> float | None:
    """None where a run did not say how long the whole takes. One that its time limit cut off says: at least so long."""
    whole = manifest["status"] == Status.COMPLETED and not manifest["resumed"]
    if not whole and manifest["reason"] != Reason.TIMEOUT:
        return None
    started, ended = manifest["started_unix_ns"], manifest["ended_unix_ns"]
    return (ended - started) / 60e9 if isinstance(started, int) and isinstance(ended, int) else None
