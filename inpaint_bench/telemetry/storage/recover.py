"""After a kill -9: what the journals of a run still hold becomes parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from inpaint_bench.core.schema import TABLES

from .parts import recover_folder


def recover(run_dir: Path) -> list[dict[str, Any]]:
    """Recover every table of a run directory; one record per journal found, none the second time.

    A record has table, writer, outcome (recovered, empty, already_closed, in_use), part, rows, and for
    recovered ones whole (False: the journal ended in a half-written message). Raises OSError.
    """
    return [record for table in TABLES for record in recover_folder(run_dir / table)]
