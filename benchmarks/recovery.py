"""What a kill -9 costs: kills sidecars at random moments, and compares what is recovered with what they wrote.

usage: python benchmarks/recovery.py [--runs 200] [--parallel 4] [--journal-s 0.5] [--part-s 1.5] [--max-run-s 3.5]

No GPU: the sidecar plays a capture. It is the real one, except that every row is also appended to a log of this
script's own, which outlives the process, before the sidecar takes it. journal_s is 5 s in a run, and shorter here so
that many kills fit; the promise is the same: at most journal_s of rows are lost. Prints n, the largest and the median
loss in seconds and rows. Exit code 1 if a row was lost that should not be, or differs.
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

from inpaint_bench.core.config.bench import TelemetryConfig
from inpaint_bench.core.tables import SCHEMAS
from inpaint_bench.telemetry.report import SidecarSpec
from inpaint_bench.telemetry.storage.parts import recover_run

CAPTURE = "h200-synthetic"
ROW_LOG = "rows.jsonl"
TABLES = ("samples_fast", "samples_slow", "samples_gpm")


@dataclass
class Outcome:
    """One kill. Lost seconds are from the last recovered row to the last written one."""

    written: int = 0
    recovered: int = 0
    lost_rows: int = 0  # rows lost from all tables
    lost_fast_rows: int = 0
    lost_s: float = 0.0  # time lost from samples_fast
    longest_gap_s: float = 0.0  # between two 10-Hz rows, or the last and the kill: delays by the machine
    since_last_row_s: float = 0.0  # from the last recovered row of samples_fast to the kill
    journals: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


def run_logged_sidecar(spec_json: str) -> int:
    """Run the real sidecar, with a log of its rows."""
    from inpaint_bench.telemetry import runtime

    runtime.block_signals()
    from inpaint_bench.telemetry import process
    from inpaint_bench.telemetry.storage.background import BackgroundSaver

    log = os.open(Path(json.loads(spec_json)["run_dir"]) / ROW_LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    append = BackgroundSaver.append

    def log_and_append(self: Any, table: str, row: dict[str, Any]) -> None:
        """Write the row to the log before the sidecar gets it."""
        os.write(log, (json.dumps([table, row]) + "\n").encode())
        append(self, table, row)

    BackgroundSaver.append = log_and_append  # type: ignore[method-assign,assignment]
    return process.run_sidecar(spec_json)


def kill_sidecar(folder: Path, number: int, options: argparse.Namespace) -> Outcome:
    """Start a sidecar, kill it at a random moment, and compare what is recovered."""
    run_dir = folder / f"run-{number:04d}"
    run_dir.mkdir()
    rng = random.Random(options.seed + number)
    settings = TelemetryConfig(
        name="recovery", source="replay", capture=CAPTURE, part_s=options.part_s, journal_s=options.journal_s
    )
    spec = SidecarSpec(
        run_id=f"r-{number:04d}",
        run_dir=str(run_dir),
        settings=settings,
        parent=os.getpid(),
    )
    command = [sys.executable, __file__, "--sidecar", msgspec.json.encode(spec).decode()]
    with (run_dir / "sidecar.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)
    assert process.stdout is not None
    first_line = json.loads(process.stdout.readline() or "{}")
    outcome = Outcome()
    if first_line.get("type") != "ready":
        process.kill()
        process.wait()
        outcome.faults.append(f"run {number} did not start: {first_line.get('error') or run_dir / 'sidecar.log'}")
        return outcome
    time.sleep(rng.uniform(0.0, options.max_run_s))
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
    """Recover a run directory and compare its tables with the log of rows."""
    written: dict[str, list[dict[str, Any]]] = {table: [] for table in TABLES}
    for line in (run_dir / ROW_LOG).read_bytes().splitlines(keepends=True):
        if line.endswith(b"\n"):  # otherwise the kill came within the line
            table, row = json.loads(line)
            written.setdefault(table, []).append(row)
    for record in recover_run(run_dir):
        outcome.journals["truncated" if record.truncated else record.outcome] += 1
    if recover_run(run_dir):
        outcome.faults.append("a second recovery found a journal")
    if leftovers := [str(path.relative_to(run_dir)) for path in run_dir.glob("*/.*")]:
        outcome.faults.append(f"left over: {', '.join(leftovers)}")
    for table in TABLES:
        _compare_table(run_dir, table, written[table], killed_ns, journal_s, outcome)


def _compare_table(
    run_dir: Path, table: str, written: list[dict[str, Any]], killed_ns: int, journal_s: float, outcome: Outcome
) -> None:
    schema = SCHEMAS[table]
    parts = [pq.read_table(path, partitioning=None) for path in sorted((run_dir / table).glob("part-*.parquet"))]
    if not all(part.schema.equals(schema) for part in parts):
        outcome.faults.append(f"{table}: a part has another schema")
        return
    recovered = [row for part in parts for row in part.to_pylist()]
    outcome.written += len(written)
    outcome.recovered += len(recovered)
    ticks = [row["tick_seq"] for row in recovered]
    if any(later <= earlier for earlier, later in itertools.pairwise(ticks)):
        outcome.faults.append(f"{table}: tick_seq repeats or decreases")
    if recovered != _with_table_types(written[: len(recovered)], schema, run_dir):
        outcome.faults.append(f"{table}: {len(recovered)} recovered rows are not the first {len(recovered)} written")
    lost = len(written) - len(recovered)
    outcome.lost_rows += lost
    last = recovered[-1] if recovered else written[0] if written else None
    lost_s = (written[-1]["t_mono_ns"] - last["t_mono_ns"]) / 1e9 if lost and last else 0.0
    max_lost_rows = 1 + journal_s / (0.1 if table == "samples_fast" else 1.0)  # a tick may fall on each edge
    if lost > max_lost_rows or (table == "samples_fast" and lost_s > journal_s):
        outcome.faults.append(f"{table}: {lost} rows lost, {lost_s:.3f} s")
    if table == "samples_fast":
        outcome.lost_fast_rows, outcome.lost_s = lost, lost_s
        times = [row["t_mono_ns"] for row in written] + [killed_ns]
        outcome.longest_gap_s = max((b - a) / 1e9 for a, b in itertools.pairwise(times)) if written else 0.0
        outcome.since_last_row_s = (killed_ns - last["t_mono_ns"]) / 1e9 if last else 0.0


def _with_table_types(rows: list[dict[str, Any]], schema: pa.Schema, run_dir: Path) -> list[dict[str, Any]]:
    """Return logged rows with the types of the table: float32, omitted columns null."""
    run_id = f"r-{run_dir.name.removeprefix('run-')}"
    columns = [
        pa.array([run_id if f.name == "run_id" else row.get(f.name) for row in rows], type=f.type) for f in schema
    ]
    typed: list[dict[str, Any]] = pa.Table.from_arrays(columns, schema=schema).to_pylist()
    return typed


def main() -> int:
    """Run the kills and print what was lost."""
    if sys.argv[1:2] == ["--sidecar"]:
        return run_logged_sidecar(sys.argv[2])
    parser = argparse.ArgumentParser(description="Kill sidecars and count what is lost.")
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--parallel", type=int, default=4)
    parser.add_argument("--journal-s", type=float, default=0.5)
    parser.add_argument("--part-s", type=float, default=1.5)
    parser.add_argument("--max-run-s", type=float, default=3.5, help="latest kill after the start")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    start_s = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="recovery-"))
    with concurrent.futures.ThreadPoolExecutor(options.parallel) as pool:
        outcomes = list(pool.map(lambda number: kill_sidecar(folder, number, options), range(options.runs)))
    faults = [fault for outcome in outcomes for fault in outcome.faults]
    print(f"n = {len(outcomes)} kills, {options.parallel} in parallel, {time.monotonic() - start_s:.0f} s")
    print(f"journal_s {options.journal_s:g}, part_s {options.part_s:g}, killed within {options.max_run_s:g} s")
    _print_losses(outcomes)
    print(f"faults: {len(faults)}", *faults, sep="\n  ")
    if faults:
        print(f"runs with faults are in {folder}")
    else:
        folder.rmdir()
    return 1 if faults else 0


def _print_losses(outcomes: list[Outcome]) -> None:
    lost_s = [outcome.lost_s for outcome in outcomes]
    fast = [outcome.lost_fast_rows for outcome in outcomes]
    rows = [outcome.lost_rows for outcome in outcomes]
    since_s = [outcome.since_last_row_s for outcome in outcomes]
    gaps = [outcome.longest_gap_s for outcome in outcomes]
    journals = sum((outcome.journals for outcome in outcomes), Counter())
    print(f"rows written {sum(o.written for o in outcomes)}, recovered {sum(o.recovered for o in outcomes)}")
    print(
        f"lost of 10-Hz rows: largest {max(lost_s):.3f} s and {max(fast)} rows, "
        f"median {statistics.median(lost_s):.3f} s and {statistics.median(fast):g} rows"
    )
    print(f"lost of all tables: largest {max(rows)} rows, median {statistics.median(rows):g} rows")
    print(
        f"last recovered row before the kill: largest {max(since_s):.3f} s, median {statistics.median(since_s):.3f} s"
    )
    print(f"longest gap between 10-Hz ticks: {max(gaps):.3f} s, in {sum(gap > 0.2 for gap in gaps)} runs over 0.2 s")
    print(f"journals: {', '.join(f'{count} {kind}' for kind, count in sorted(journals.items()))}")


if __name__ == "__main__":
    sys.exit(main())
