"""What a kill -9 costs: sidecars are killed at random moments, and what is recovered is compared with what they wrote.

usage: python benchmarks/recovery.py [--runs 200] [--at-once 4] [--journal-s 0.5] [--part-s 1.5] [--longest-s 3.5]

No GPU: the sidecar plays a recording. It is the real one; only that every row also goes, before the sidecar keeps
it, as a line into a file of this script's own, which outlives the process. journal_s is 5 s in a run and shorter
here, so that many kills fit; the promise is the same: at most journal_s of rows are lost. Prints n, the largest
and the median loss in seconds and rows; exit code 1 where a row was lost that should not be, or differs.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from inpaint_bench.core import schema as contract
from inpaint_bench.telemetry.spec import SidecarSpec
from inpaint_bench.telemetry.storage.parts import recover_run

CAPTURE = "h200-synthetic"
WITNESS = "witness.jsonl"
READY_S = 60.0
TABLES = ("samples_fast", "samples_slow", "samples_gpm")


@dataclass
class Outcome:
    """One kill. Seconds are of rows: from the last one recovered to the last one written."""

    written: int = 0
    recovered: int = 0
    lost_rows: int = 0  # of all tables
    lost_fast_rows: int = 0
    lost_s: float = 0.0  # the worst of the tables
    longest_gap_s: float = 0.0  # between two 10-Hz rows, or the last and the kill: how long the machine made it wait
    since_kill_s: float = 0.0  # from the last row recovered of samples_fast to the kill
    journals: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


def sidecar(orders: str) -> int:
    """The real sidecar, with a witness of its rows."""
    from inpaint_bench.telemetry import runtime

    runtime.block_signals()
    from inpaint_bench.telemetry import process
    from inpaint_bench.telemetry.storage import sidecar_tables

    file = os.open(Path(json.loads(orders)["run_dir"]) / WITNESS, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    keep = sidecar_tables.SidecarTables.append

    def append(self: Any, table: str, row: dict[str, Any]) -> None:
        os.write(file, (json.dumps([table, row]) + "\n").encode())
        keep(self, table, row)

    sidecar_tables.SidecarTables.append = append  # type: ignore[method-assign,assignment]
    return process.run_sidecar(orders)


def kill_one(folder: Path, number: int, options: argparse.Namespace) -> Outcome:
    run_dir = folder / f"run-{number:04d}"
    run_dir.mkdir()
    rng = random.Random(options.seed + number)
    spec = SidecarSpec(
        run_id=f"r-{number:04d}",
        run_dir=str(run_dir),
        source="replay",
        capture=CAPTURE,
        part_s=options.part_s,
        journal_s=options.journal_s,
        parent=os.getpid(),
    )
    with (run_dir / "sidecar.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, __file__, "--sidecar", msgspec.json.encode(spec).decode()],
            stdout=subprocess.PIPE,
            stderr=log,
        )
    assert process.stdout is not None
    hello = json.loads(process.stdout.readline() or "{}")
    outcome = Outcome()
    if hello.get("type") != "ready":
        process.kill()
        process.wait()
        outcome.faults.append(f"run {number} did not start: {hello.get('error') or run_dir / 'sidecar.log'}")
        return outcome
    time.sleep(rng.uniform(0.0, options.longest_s))
    killed_ns = time.monotonic_ns()
    process.kill()
    process.wait()
    process.stdout.close()
    compare(run_dir, killed_ns, options.journal_s, outcome)
    if outcome.faults:
        gap = f"longest gap between two ticks {outcome.longest_gap_s:.3f} s"
        outcome.faults = [f"run {number}: {fault}, {gap}" for fault in outcome.faults]
    else:
        shutil.rmtree(run_dir)
    return outcome


def compare(run_dir: Path, killed_ns: int, journal_s: float, outcome: Outcome) -> None:
    written: dict[str, list[dict[str, Any]]] = {table: [] for table in TABLES}
    for line in (run_dir / WITNESS).read_bytes().splitlines(keepends=True):
        if line.endswith(b"\n"):  # else the kill came between line and end of line
            table, row = json.loads(line)
            written.setdefault(table, []).append(row)
    for record in recover_run(run_dir):
        kind = "truncated" if record.truncated else record.outcome
        outcome.journals[kind] += 1
    if recover_run(run_dir):
        outcome.faults.append("a second recovery found something")
    if rest := [str(path.relative_to(run_dir)) for path in run_dir.glob("*/.*")]:
        outcome.faults.append(f"left over: {', '.join(rest)}")
    for table, rows in written.items():
        if table in TABLES:
            _compare_table(run_dir, table, rows, killed_ns, journal_s, outcome)


def _compare_table(
    run_dir: Path, table: str, rows: list[dict[str, Any]], killed_ns: int, journal_s: float, outcome: Outcome
) -> None:
    schema = contract.SCHEMAS[table]
    parts = [pq.read_table(path, partitioning=None) for path in sorted((run_dir / table).glob("part-*.parquet"))]
    if not all(part.schema.equals(schema) for part in parts):
        outcome.faults.append(f"{table}: a part has another schema")
        return
    found = [row for part in parts for row in part.to_pylist()]
    outcome.written += len(rows)
    outcome.recovered += len(found)
    ticks = [row["tick_seq"] for row in found]
    if any(later <= earlier for earlier, later in itertools.pairwise(ticks)):
        outcome.faults.append(f"{table}: tick_seq repeats or steps back")
    if found != _as_written(rows[: len(found)], schema, run_dir):
        outcome.faults.append(f"{table}: {len(found)} recovered rows are not the first {len(found)} written")
    lost = len(rows) - len(found)
    outcome.lost_rows += lost
    if not lost:
        lost_s = 0.0
    elif found:
        lost_s = (rows[-1]["t_mono_ns"] - found[-1]["t_mono_ns"]) / 1e9
    else:
        lost_s = (rows[-1]["t_mono_ns"] - rows[0]["t_mono_ns"]) / 1e9
    allowed_rows = 1 + journal_s / (0.1 if table == "samples_fast" else 1.0)  # a tick may fall on each edge
    if lost > allowed_rows or (table == "samples_fast" and lost_s > journal_s):
        outcome.faults.append(f"{table}: {lost} rows lost, {lost_s:.3f} s")
    if table == "samples_fast":
        outcome.lost_fast_rows, outcome.lost_s = lost, lost_s
        last = found[-1] if found else rows[0] if rows else None
        times = [row["t_mono_ns"] for row in rows] + [killed_ns]
        outcome.longest_gap_s = max((b - a) / 1e9 for a, b in itertools.pairwise(times)) if rows else 0.0
        outcome.since_kill_s = (killed_ns - last["t_mono_ns"]) / 1e9 if last else 0.0


def _as_written(rows: list[dict[str, Any]], schema: pa.Schema, run_dir: Path) -> list[dict[str, Any]]:
    """Rows of the witness with the types of the table (float32, absent columns null)."""
    run_id = f"r-{run_dir.name.removeprefix('run-')}"
    columns = [
        pa.array([run_id if f.name == "run_id" else row.get(f.name) for row in rows], type=f.type) for f in schema
    ]
    listed: list[dict[str, Any]] = pa.Table.from_arrays(columns, schema=schema).to_pylist()
    return listed


def main() -> int:
    if sys.argv[1:2] == ["--sidecar"]:
        return sidecar(sys.argv[2])
    parser = argparse.ArgumentParser(description="Kill sidecars and count what is lost.")
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--journal-s", type=float, default=0.5)
    parser.add_argument("--part-s", type=float, default=1.5)
    parser.add_argument("--longest-s", type=float, default=3.5, help="a run is killed so long after its start, or less")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    began_s = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="recovery-"))
    with concurrent.futures.ThreadPoolExecutor(options.at_once) as pool:
        outcomes = list(pool.map(lambda number: kill_one(folder, number, options), range(options.runs)))
    faults = [fault for outcome in outcomes for fault in outcome.faults]
    journals = sum((outcome.journals for outcome in outcomes), Counter())
    lost_s = [outcome.lost_s for outcome in outcomes]
    since_kill_s = [outcome.since_kill_s for outcome in outcomes]
    fast = [outcome.lost_fast_rows for outcome in outcomes]
    rows = [outcome.lost_rows for outcome in outcomes]
    print(f"n = {len(outcomes)} kills, {options.at_once} at once, {time.monotonic() - began_s:.0f} s")
    print(
        f"journal_s {options.journal_s:g}, part_s {options.part_s:g}, killed 0 to {options.longest_s:g} s after ready"
    )
    print(f"rows written {sum(o.written for o in outcomes)}, recovered {sum(o.recovered for o in outcomes)}")
    print(f"lost of 10-Hz rows: largest {max(lost_s):.3f} s and {max(fast)} rows,", end=" ")
    print(f"median {statistics.median(lost_s):.3f} s and {statistics.median(fast):g} rows")
    print(f"lost of all tables: largest {max(rows)} rows, median {statistics.median(rows):g} rows")
    print(f"last row recovered before the kill: largest {max(since_kill_s):.3f} s,", end=" ")
    print(f"median {statistics.median(since_kill_s):.3f} s")
    gaps = [outcome.longest_gap_s for outcome in outcomes]
    print(
        f"longest gap between two 10-Hz ticks: {max(gaps):.3f} s, in {sum(gap > 0.2 for gap in gaps)} runs over 0.2 s"
    )
    print(f"journals: {', '.join(f'{count} {kind}' for kind, count in sorted(journals.items()))}")
    print(f"faults: {len(faults)}", *faults, sep="\n  ")
    if faults:
        print(f"runs with faults are kept in {folder}")
    else:
        folder.rmdir()
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
