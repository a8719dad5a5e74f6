"""The last line of defence of a run directory: what lies in one is of one run, and no other begins in it.

Whoever sends attempts gives each a directory of its own. Where that goes wrong (its record was deleted, two copies of a
sweep were sent from), the second run would set the first one's manifest aside and write its parts beside the first's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from inpaint_bench.core.errors import UserError
from inpaint_bench.core.files import read_json
from inpaint_bench.core.schema import MANIFEST, TABLES


def check(run_dir: Path, run_id: str) -> None:
    """Raises UserError where another run left something here. A requeued job finds its own, and goes on."""
    for path, owner in _left(run_dir):
        if owner != run_id:
            raise UserError(
                f"{run_dir}: holds {path.relative_to(run_dir)} of run {owner}, and this is run {run_id}; nothing was "
                "run, so that the two are not mixed. `rerun` sends the point into a directory of its own"
            )


def _left(run_dir: Path) -> Iterator[tuple[Path, str]]:
    """The manifest and one part of each table, with the run that they are of; what cannot be read tells nothing."""
    with suppress(OSError, ValueError):
        manifest = read_json(run_dir / MANIFEST)
        if isinstance(manifest, dict) and manifest.get("run_id"):
            yield run_dir / MANIFEST, str(manifest["run_id"])
    for table in TABLES:
        for part in sorted((run_dir / table).glob("part-*.parquet"))[:1]:
            with suppress(OSError, pa.ArrowException):
                if owner := (pq.read_schema(part).metadata or {}).get(b"run_id"):
                    yield part, owner.decode()
