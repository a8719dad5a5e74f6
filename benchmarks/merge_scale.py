"""Measure time and memory of `merge` and `report` over many runs, compared with duckdb on the same files.

usage: python benchmarks/merge_scale.py OUT [--runs 10 100] [--samples 100000] [--part-rows 6000] [--repeats 3]

Writes run directories below OUT, measures, and removes them again. The samples of each run are drawn at 10 Hz, in 12
cells (3 GPUs by 4 batches), with the resolution of NVML. Per run: --samples fast rows, a tenth as many slow rows and
steps, parts of --part-rows rows.

Measured in turns, --repeats times, each in a process of its own with the files in the page cache: merge (without an
older dataset; again with nothing new; again with one run of ten changed), report, and, if the optional `duckdb` can
be imported (pip install duckdb), the same figures by one query: mean power, energy difference and utilisation in each
run's measure window, over the parts and over the merged dataset, the latter by polars too; and rewriting all parts
into one partition per run, which is what a merge does besides hashing and auditing. With duckdb the CPU seconds of
every command are also given relative to its query and its rewriting, turn by turn.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from inpaint_bench.core import schema as contract
from inpaint_bench.core.records import Device, Manifest, TelemetryState, Window, write_record
from inpaint_bench.core.schema import Status, WindowKind
from inpaint_bench.core.tables import SCHEMAS

HZ, S = 10, 1_000_000_000
UNIX0 = 1_600_000_000 * S  # so that thousands of runs, one after the other, ended before today
CARDS = {"a40": ("NVIDIA A40", 300.0), "a100": ("NVIDIA A100-PCIE-40GB", 250.0), "h200": ("NVIDIA H200", 700.0)}
BATCHES = (4, 8, 16, 32)
LEAST_FREE = 8 * 2**30
QUERY, WRITE = "duckdb: figures from the parts", "duckdb: parts into partitions"
RAW = "{root}/*/samples_fast/part-*.parquet"
MERGED = "{out}/ds/samples_fast/site=*/gpu=*/run=*/part-*.parquet"
FIGURES = """
    SELECT run_id, avg(power_instant_w), (max(energy_mj) - min(energy_mj)) / 1000.0, avg(gpu_util_pct)
    FROM read_parquet('{files}', hive_partitioning = false) JOIN ({windows}) USING (run_id)
    WHERE t_mono_ns BETWEEN t0 AND t1 GROUP BY run_id ORDER BY run_id
"""
RAW_WINDOWS = """
    SELECT split_part(filename, '/', -2) AS run_id, t_start_mono_ns AS t0, t_end_mono_ns AS t1
    FROM read_json('{root}/*/windows.json', filename = true) WHERE kind = 'measure'
"""
MERGED_WINDOWS = """
    SELECT run_id, t_start_mono_ns AS t0, t_end_mono_ns AS t1 FROM read_parquet('{out}/ds/windows.parquet')
    WHERE kind = 'measure'
"""
REWRITE = """
    COPY (SELECT *, run_id AS run FROM read_parquet('{files}', hive_partitioning = false))
    TO '{out}/duck/{table}' (FORMAT parquet, PARTITION_BY (run), COMPRESSION zstd)
"""
POLARS = """
import sys, polars as pl
from pathlib import Path
from analysis.dataset import open_dataset
ds = open_dataset(Path(sys.argv[1]))
spans = ds.windows.lazy().filter(kind="measure").select("run_id", t0="t_start_mono_ns", t1="t_end_mono_ns")
rows = ds.scan("samples_fast").join(spans, on="run_id").filter(pl.col("t_mono_ns").is_between("t0", "t1"))
energy = (pl.col("energy_mj").max() - pl.col("energy_mj").min()) / 1000
rows.group_by("run_id").agg(pl.col("power_instant_w").mean(), energy, pl.col("gpu_util_pct").mean()).sort(
    "run_id"
).collect(engine="streaming")
"""


@dataclass(kw_only=True)
class Measured:
    """Costs of one command, a value per repeat."""

    seconds: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    peak_mib: list[float] = field(default_factory=list)


def main() -> int:
    """Measure every size in turn and print a table for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="a folder that does not exist yet")
    parser.add_argument("--runs", type=int, nargs="+", default=[10, 100])
    parser.add_argument("--samples", type=int, default=100_000, help="fast rows per run")
    parser.add_argument("--part-rows", type=int, default=6000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--skip", nargs="*", default=[], help="leave out commands whose name begins with one of these")
    options = parser.parse_args()
    out = options.out.absolute()
    out.mkdir(parents=True)
    try:
        for runs in options.runs:
            _measure(out, runs, options)
    finally:
        shutil.rmtree(out, ignore_errors=True)
    return 0


def _measure(out: Path, runs: int, options: argparse.Namespace) -> None:
    root = out / "runs"
    if shutil.disk_usage(out).free < LEAST_FREE:
        sys.exit(f"{out}: less than {LEAST_FREE >> 30} GiB free")
    start_s = time.monotonic()
    folders = make(root, runs, options.samples, options.part_rows)
    size = sum(path.stat().st_size for path in root.rglob("*.parquet"))
    cores = len(os.sched_getaffinity(0))
    print(
        f"\n{runs * options.samples:,} fast rows in {runs} runs, {size / 2**20:,.0f} MiB in parts of "
        f"{options.part_rows} rows, {cores} cores; made in {time.monotonic() - start_s:.0f} s",
        flush=True,
    )
    results: dict[str, Measured] = {}
    for _ in range(options.repeats):
        for name, command in _commands(out, root, folders, cores):
            if not any(name.startswith(prefix) for prefix in options.skip):
                _run(command, results.setdefault(name, Measured()))
    metadata = json.loads((out / "ds" / contract.DATASET).read_text())
    print(f"{metadata['runs_valid']} of {metadata['runs']} runs valid")
    references = [name for name in (QUERY, WRITE) if name in results]
    ratios = "".join(f" CPU over {name} |" for name in references)
    print(f"\n| command | s, median (least to most) | CPU s | peak MiB | n |{ratios}")
    print("|---|---|---|---|---|" + "---|" * len(references))
    for name, measured in results.items():
        least, most = min(measured.seconds), max(measured.seconds)
        spread = f"{statistics.median(measured.seconds):.2f} ({least:.2f} to {most:.2f})"
        cost = f"{statistics.median(measured.cpu_s):.2f} | {max(measured.peak_mib):,.0f} | {len(measured.seconds)}"
        relative = "".join(f" {_ratio(measured, results[other])} |" for other in references)
        print(f"| {name} | {spread} | {cost} |{relative}", flush=True)
    shutil.rmtree(root)
    shutil.rmtree(out / "ds", ignore_errors=True)


def _ratio(measured: Measured, other: Measured) -> str:
    """Return the ratio of CPU seconds, turn by turn: other load on the machine affects both."""
    turns = [a / b for a, b in zip(measured.cpu_s, other.cpu_s, strict=True)]
    return f"{statistics.median(turns):.2f} ({min(turns):.2f} to {max(turns):.2f})"


def _commands(out: Path, root: Path, folders: list[Path], cores: int) -> Iterator[tuple[str, list[str]]]:
    """Yield the commands of one round; their inputs are prepared and outputs removed between the measurements."""
    shutil.rmtree(out / "ds", ignore_errors=True)
    merge = [sys.executable, "-m", "inpaint_bench", "merge", str(root), "-o", str(out / "ds")]
    if _has_duckdb():
        windows = RAW_WINDOWS.format(root=root)
        query = FIGURES.format(files=RAW.format(root=root), windows=windows)
        yield QUERY, _duckdb(cores, query)
    yield "merge, no older dataset", merge
    yield "merge again, nothing new", merge
    for folder in folders[::10]:
        os.utime(folder / contract.TELEMETRY, ns=(UNIX0, time.time_ns() - 3600 * S))
    yield "merge again, every tenth run changed", merge
    yield "report", [sys.executable, "-m", "inpaint_bench", "report", str(out / "ds"), "-o", str(out / "report")]
    shutil.rmtree(out / "report", ignore_errors=True)
    yield "polars: figures from the dataset", [sys.executable, "-c", POLARS, str(out / "ds")]
    if _has_duckdb():
        windows = MERGED_WINDOWS.format(out=out)
        query = FIGURES.format(files=MERGED.format(out=out), windows=windows)
        yield "duckdb: figures from the dataset", _duckdb(cores, query)
        tables = [table for table in contract.TABLES if (folders[0] / table).is_dir()]
        rewrite = [REWRITE.format(files=f"{root}/*/{table}/part-*.parquet", out=out, table=table) for table in tables]
        (out / "duck").mkdir()
        yield WRITE, _duckdb(cores, *rewrite)
        shutil.rmtree(out / "duck")


def _has_duckdb() -> bool:
    from importlib.util import find_spec

    return find_spec("duckdb") is not None


def _duckdb(cores: int, *queries: str) -> list[str]:
    code = (
        "import duckdb, sys\nduckdb.sql('SET threads = ' + sys.argv[1])\n"
        "for query in sys.argv[2:]:\n    found = duckdb.sql(query)\n    found and found.fetchall()"
    )
    return [sys.executable, "-c", code, str(cores), *queries]


def _run(command: list[str], measured_costs: Measured) -> None:
    """Run a command and append its seconds, CPU seconds and peak MiB.

    The peak is not getrusage's: that of a child starts at what its parent used when it forked.
    """
    start_s = time.monotonic()
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    peak_kib = 0
    while True:
        pid, status, usage = os.wait4(child.pid, os.WNOHANG)
        if pid:
            break
        with suppress(OSError):
            status_lines = Path(f"/proc/{child.pid}/status").read_text()
            peak_kib = max(peak_kib, int((status_lines.partition("VmHWM:")[2].split() or ["0"])[0]))
        time.sleep(0.02)
    measured_costs.seconds.append(time.monotonic() - start_s)
    measured_costs.cpu_s.append(usage.ru_utime + usage.ru_stime)
    measured_costs.peak_mib.append(peak_kib / 2**10)
    if status:
        sys.exit(f"{command}: exit status {os.waitstatus_to_exitcode(status)}")


def make(root: Path, runs: int, samples: int, part_rows: int) -> list[Path]:
    """Write run directories below `root`, each with an id of its own."""
    cells = [(gpu, batch) for gpu in CARDS for batch in BATCHES]
    folders = []
    for index in range(runs):
        # One run after the other: two on a GPU at one time would not be valid.
        start_ns = index * round(samples / HZ + 60) * S
        manifest, window, tables = _run_of(*cells[index % len(cells)], samples, start_ns, np.random.default_rng(index))
        run_id = f"r-{index:06d}"
        folder = root / run_id
        folder.mkdir(parents=True)
        own = msgspec.structs.replace(manifest, run_id=run_id, point=index, seed=index, overrides=[f"seed={index}"])
        write_record(folder / contract.MANIFEST, own)
        write_record(folder / contract.WINDOWS, [window])
        (folder / contract.TELEMETRY).write_text(json.dumps({"status": "complete", "source": "nvml"}))
        for table, rows in tables.items():
            _write(folder / table, table, rows, run_id, part_rows)
        folders.append(folder)
    old_ns = time.time_ns() - 3600 * S
    for path in root.rglob("*"):
        os.utime(path, ns=(old_ns, old_ns))
    return folders


def _write(folder: Path, table: str, rows: pa.Table, run_id: str, part_rows: int) -> None:
    folder.mkdir()
    schema = SCHEMAS[table]
    ids = pa.DictionaryArray.from_arrays(np.zeros(rows.num_rows, np.int32), [run_id])
    rows = pa.Table.from_arrays([ids, *rows.columns], schema=schema)
    kinds = {field.name: field.type for field in schema}
    strings = [name for name, kind in kinds.items() if pa.types.is_dictionary(kind) or pa.types.is_string(kind)]
    for part, start in enumerate(range(0, rows.num_rows, part_rows)):
        path = folder / contract.PART_PATTERN.format(part)
        pq.write_table(rows.slice(start, part_rows), path, compression="zstd", use_dictionary=strings)


def _run_of(
    gpu: str, batch: int, samples: int, start_ns: int, rng: np.random.Generator
) -> tuple[Manifest, Window, dict[str, pa.Table]]:
    """Return manifest, measure window and tables of a run of one GPU and batch, without its id."""
    name, limit = CARDS[gpu]
    uuid = f"GPU-{sum(gpu.encode()):08x}-0000-0000-0000-000000000000"
    seconds = samples / HZ
    start, end = start_ns + 1000 * S, start_ns + round((1000 + 0.9 * seconds) * S)
    first = round(start - 0.05 * seconds * S)
    steps = max(1, round((end - start) / S))
    window = Window(
        window_id="w-1",
        kind=WindowKind.MEASURE,
        status=Status.COMPLETED,
        t_start_mono_ns=start,
        t_end_mono_ns=end,
        t_start_unix_ns=start + UNIX0,
        t_end_unix_ns=end + UNIX0,
        steps=steps,
        images=steps * batch,
    )
    manifest = Manifest(
        schema_version=contract.SCHEMA_VERSION,
        producer=contract.PRODUCER,
        run_id="",
        sweep_id="s-01",
        attempt=1,
        status=Status.COMPLETED,
        workload="finetune_inpaint",
        recipe="baseline",
        model="sd15_inpaint",
        site="delta" if gpu == "h200" else "grace",
        gpu=gpu,
        gpus=1,
        batch=batch,
        demonstration=True,
        config_hash="0123456789ab",
        started_unix_ns=first + UNIX0,
        ended_unix_ns=end + UNIX0,
        devices=[Device(uuid=uuid, name=name, index_visible=0, power_limit_w=limit)],
        telemetry=TelemetryState(source="nvml", hz=HZ, status="complete"),
    )

    tick = np.arange(samples)
    late = rng.normal(0, 200_000, samples).astype(np.int64)  # 0.2 ms
    t = first + tick * (S // HZ) + late
    power = np.round(0.8 * limit + rng.normal(0, 0.02 * limit, samples), 3)  # NVML gives mW
    energy = 5_000_000 + np.concatenate([[0], np.cumsum((power[1:] + power[:-1]) / 2 * np.diff(t) / 1e6)])
    head = {"gpu_uuid": uuid, "source": "nvml"}
    fast = {
        **head,
        "tick_seq": tick,
        "t_mono_ns": t,
        "t_unix_ns": t + UNIX0,
        "read_us": np.round(rng.gamma(9, 20, samples), 1),
        "power_instant_w": power,
        "power_avg1s_w": np.round(np.convolve(power, np.ones(10) / 10, "same"), 3),
        "energy_mj": energy.astype(np.int64),
        "gpu_util_pct": np.clip(np.round(97 + rng.normal(0, 2, samples)), 0, 100),
        "mem_active_pct": np.clip(np.round(45 + rng.normal(0, 5, samples)), 0, 100),
    }
    few = slice(0, None, HZ)
    count = len(tick[few])
    slow = {
        **head,
        "tick_seq": np.arange(count),
        "t_mono_ns": t[few],
        "t_unix_ns": t[few] + UNIX0,
        "read_us": np.round(rng.gamma(9, 80, count), 1),
        "sm_clock_mhz": 1410 + 15 * rng.integers(-3, 4, count),
        "mem_clock_mhz": np.full(count, 1593),
        "throttle_reasons": np.zeros(count, np.int64),
        "throttle_power_cap_ns": np.zeros(count, np.int64),
        "throttle_sw_thermal_ns": np.zeros(count, np.int64),
        "throttle_hw_thermal_ns": np.zeros(count, np.int64),
        "throttle_power_brake_ns": np.zeros(count, np.int64),
        "temp_gpu_c": np.round(62 + rng.normal(0, 1, count)),
        "vram_total_mib": np.full(count, 40960.0),
        "vram_reserved_mib": np.full(count, 600.0),
        "vram_used_mib": np.round(20000 + rng.normal(0, 20, count)),
        "vram_free_mib": np.full(count, 20360.0),
        "nulls": "temp_mem_c=not_supported;power_mem_avg_w=not_supported",
    }
    length = (end - start) / steps
    step = np.arange(steps)
    taken = {
        "window_id": "w-1",
        "step": step,
        "t_start_mono_ns": (start + step * length).astype(np.int64),
        "t_end_mono_ns": (start + (step + 1) * length).astype(np.int64),
        "data_wait_ns": rng.integers(10_000_000, 30_000_000, steps),
        "device_ms": length / 1e6 * (1 + rng.normal(0, 0.01, steps)),
        "images": np.full(steps, batch),
        "loss": rng.gamma(4, 0.03, steps),
        "lr": np.full(steps, 1e-5),
    }
    named = {"samples_fast": fast, "samples_slow": slow, "steps": taken}
    return manifest, window, {table: _table(table, columns) for table, columns in named.items()}


def _table(table: str, columns: dict[str, Any]) -> pa.Table:
    """Return a table without its run id; scalars are repeated, missing columns are null."""
    rows = max(len(v) for v in columns.values() if isinstance(v, np.ndarray))
    fields = list(SCHEMAS[table])[1:]
    arrays = []
    for column in fields:
        value = columns.get(column.name)
        if isinstance(value, np.ndarray):
            arrays.append(pa.array(value).cast(column.type, safe=False))
        elif pa.types.is_dictionary(column.type) and value is not None:
            arrays.append(pa.DictionaryArray.from_arrays(np.zeros(rows, np.int32), [value]))
        else:
            arrays.append(pa.nulls(rows, column.type))
    return pa.Table.from_arrays(arrays, schema=pa.schema(fields))


if __name__ == "__main__":
    sys.exit(main())
