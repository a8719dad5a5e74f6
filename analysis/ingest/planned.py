"""The points of a sweep that have no run: they wait, were refused or cancelled, or were never submitted.

A sweep names all of its points in sweep.json before it submits any. Why one has no run only `status` can say.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from inpaint_bench.core import schema
from inpaint_bench.core.console import pluralize, shell_command
from inpaint_bench.core.files import read_plain
from inpaint_bench.core.records import decode_record

from . import parts
from .parts import SkippedFile, skipped
from .run_dir import MAX_RECORD_BYTES


class _Point(msgspec.Struct):
    point: int


class _Sweep(msgspec.Struct):
    sweep_id: str
    points: list[_Point]


def points_without_run(
    sweeps: Iterable[Path], run_dirs: Iterable[Path]
) -> tuple[list[dict[str, Any]], list[SkippedFile]]:
    """Return the sweeps that lack runs with the number of those points, and the records that cannot be read.

    A point that another site ran from a plan file has its run in a second folder of the same sweep.
    """
    started: dict[Path, set[int]] = defaultdict(set)
    for run_dir in run_dirs:
        point_dir = run_dir.resolve().parent
        if point_dir.name.isdecimal() and schema.ATTEMPT_NAME.fullmatch(run_dir.name):
            started[point_dir.parent].add(int(point_dir.name))
    planned: dict[str, dict[int, Path]] = defaultdict(dict)  # sweep id: point: folder
    known: dict[str, set[int]] = defaultdict(set)
    skips = []
    for folder in sweeps:
        try:
            content = read_plain(folder / schema.SWEEP, max_bytes=MAX_RECORD_BYTES)
            sweep = decode_record(content, _Sweep)
        except (OSError, ValueError) as error:
            reason = f"its points without a run are not counted ({parts.describe(error)})"
            skips.append(skipped(folder / schema.SWEEP, "damaged", reason))
            continue
        for spec in sweep.points:
            planned[sweep.sweep_id].setdefault(spec.point, folder)
        known[sweep.sweep_id] |= started[folder.resolve()]
    counts = Counter(
        folder for sweep_id, points in planned.items() for num, folder in points.items() if num not in known[sweep_id]
    )
    return [{"sweep": parts.path_text(folder), "points": n} for folder, n in counts.items()], skips


def describe(without_run: Sequence[dict[str, Any]]) -> list[str]:
    """Return a sentence for each sweep that lacks runs, with the commands that tell the reason and submit them."""
    sentences = []
    for entry in without_run:
        why, submit = (shell_command(verb, entry["sweep"]) for verb in ("status", "rerun"))
        points = pluralize(entry["points"], "planned point")
        state = f"{entry['sweep']}: no run of {points}: waiting, refused, cancelled or lost"
        sentences.append(f"{state}. `{why}` says which, `{submit}` submits those of this machine; then merge again.")
    return sentences
