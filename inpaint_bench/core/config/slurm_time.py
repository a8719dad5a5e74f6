"""Durations as Slurm writes and reads them."""

from __future__ import annotations

import math
import re
from typing import Final

UNLIMITED: Final = frozenset({"unlimited", "infinite"})
FORMATS: Final = "MIN, MIN:SEC, HOUR:MIN:SEC, DAY-HOUR, DAY-HOUR:MIN or DAY-HOUR:MIN:SEC"  # forms of sbatch --time


def duration_s(text: str) -> float | None:
    """Parse [days-]hours:minutes:seconds, days-hours, minutes:seconds or minutes; None for UNLIMITED and the like."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if not match:
        return None
    first, second, third = (int(group or 0) for group in match.groups()[1:])
    if match[1] is None and match[4] is None:  # it starts with minutes, else with hours
        return 60.0 * first + second
    return 86400.0 * int(match[1] or 0) + 3600.0 * first + 60.0 * second + third


def limit_min(text: str) -> int | None:
    """Parse a time limit into minutes, rounded up as Slurm does; None for any other text, UNLIMITED included.

    Nor are 1:90:00 and 1-30 accepted, which Slurm takes: a part that exceeds its unit is a slip of the pen.
    """
    seconds = duration_s(text)
    parts = [int(part) for part in re.split("[-:]", text)[1:]] if seconds is not None else []
    largest = [23, 59, 59] if "-" in text else [59, 59]
    if seconds is None or any(part > limit for part, limit in zip(parts, largest, strict=False)):
        return None
    return math.ceil(seconds / 60)
