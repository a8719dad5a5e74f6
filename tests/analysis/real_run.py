"""Write a run directory with the samples that a real H200 gave: 32 images per step, 39.6 s measured, 675 W.

The samples, steps and windows are those of the committed dataset. The records beside them say of the run what the
worker and the sidecar write today, and agree with the samples.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from inpaint_bench.core import records, schema
from inpaint_bench.core.records import TableCounts
from inpaint_bench.core.tables import SAMPLES_CPU, SAMPLES_GPM, SAMPLES_SLOW, SCHEMAS
from inpaint_bench.telemetry.report import DeviceReport, GpuHealth, StreamReport, TelemetryReport

DATASET = Path(__file__).parents[2] / "benchmarks" / "results" / "2026-11-21-h200-baseline"
RUN_ID = "r-20261121T092412-fac72daf"
SOURCE, DRIVER, BOOT_ID = "nvml", "580.159.04", "2cf17a05-f34a-4010-ba1c-4e3ae39abaf5"
PARTS = {"samples_fast": 2}  # of one table; one of each other, and the steps have one per window
_HEAD = SAMPLES_SLOW.names[:7]  # of any sample: run, GPU, source, tick, times
BETWEEN_RUNS_NS = 600 * 10**9
BETWEEN_RUNS_MJ = 500_000_000


@cache
def _recorded(table: str) -> pa.Table:
    (path,) = (DATASET / table).glob(f"*/*/run={RUN_ID}/part-*.parquet")
    return pq.ParquetFile(path).read(columns=SCHEMAS[table].names)


@cache
def _recorded_windows() -> list[dict[str, Any]]:
    rows = pl.read_parquet(DATASET / "windows.parquet").filter(pl.col("run_id") == RUN_ID).to_dicts()
    return [msgspec.to_builtins(msgspec.convert(row, records.Window)) for row in rows]


def columns_of(table: str, run_id: str, index: int) -> dict[str, Any]:
    """Return the columns of one table of run number `index`, later by ten minutes than the one before.

    No two runs have the same samples: times and durations differ by some microseconds, power by some 0.01 W, and the
    energy counter goes on.
    """
    if made := {"samples_gpm": _counters, "samples_cpu": _packages, "events": _events}.get(table):
        columns = made()
    else:
        recorded = _recorded(table)
        columns = {name: recorded[name].to_pylist() for name in recorded.column_names}
    rng = np.random.default_rng(index)
    late_ns = rng.integers(0, 2_000, len(columns["run_id"]))
    for name, values in columns.items():
        if name.endswith(("mono_ns", "unix_ns")):
            # The start of a step stays where it is: it follows the window's by some microseconds.
            by_ns = late_ns if table != "steps" else 0
            columns[name] = (np.asarray(values, np.int64) + index * BETWEEN_RUNS_NS + by_ns).tolist()
        elif name in ("data_wait_ns", "read_us"):
            columns[name] = [value + int(by) for value, by in zip(values, late_ns, strict=True)]
        elif name == "energy_mj":
            columns[name] = [value + index * BETWEEN_RUNS_MJ for value in values]
        elif name.startswith("power_") and name != "power_mem_avg_w":
            columns[name] = list(np.asarray(values) + rng.normal(0, 0.01, len(values)))
    return {**columns, "run_id": [run_id] * len(columns["run_id"])}


def _counters() -> dict[str, Any]:
    """Return performance counters at the times of the slow samples, as a training of this size shows them."""
    slow = {name: _recorded("samples_slow")[name].to_pylist()[1:] for name in SAMPLES_SLOW.names[:8]}
    before = _recorded("samples_slow")["t_mono_ns"].to_pylist()[:-1]
    rng, rows = np.random.default_rng(0), len(before)
    means = {"sm_active_pct": 88.0, "sm_occupancy_pct": 55.0, "tensor_active_pct": 20.0, "dram_active_pct": 37.0}
    means |= {"pcie_tx_mib_s": 25.0, "pcie_rx_mib_s": 290.0}
    columns: dict[str, Any] = {name: slow[name] for name in slow if name in SAMPLES_GPM.names}
    columns["window_ms"] = [(end - start) / 1e6 for start, end in zip(before, slow["t_mono_ns"], strict=True)]
    columns |= {name: list(mean * rng.normal(1, 0.02, rows)) for name, mean in means.items()}
    return columns | {"nvlink_tx_mib_s": [0.0] * rows, "nvlink_rx_mib_s": [0.0] * rows, "nulls": [None] * rows}


def _packages() -> dict[str, Any]:
    """Return the energy of two processors that draw 250 W each, at the times of the slow samples."""
    columns = {name: _recorded("samples_slow")[name].to_pylist() for name in SAMPLES_CPU.names if name in _HEAD}
    energy_uj = [(t_ns - columns["t_mono_ns"][0]) // 1000 * 500 for t_ns in columns["t_mono_ns"]]
    rows = len(energy_uj)
    columns |= {"energy_uj": energy_uj, "whole_node": [True] * rows}
    return columns | {"nulls": [None] * rows}


def _events() -> dict[str, Any]:
    """Return one event that changes no figure: a check of processes and power limit failed once."""
    first = {name: _recorded("samples_fast")[name].to_pylist()[20] for name in ("t_mono_ns", "t_unix_ns", "gpu_uuid")}
    columns = {"run_id": "", **first, "kind": "check_failed", "detail": "process list: no_permission"}
    return {name: [value] for name, value in columns.items()}


def write_table(path: Path, table: str, columns: dict[str, Any], run_id: str) -> None:
    """Write one part as the sidecar does, with its metadata."""
    kind = SCHEMAS[table]
    arrays = []
    for column in kind:
        is_text = pa.types.is_dictionary(column.type)
        array = pa.array(columns[column.name], type=pa.string() if is_text else column.type)
        arrays.append(array.dictionary_encode() if is_text else array)
    about = schema.file_metadata(run_id)
    if table.startswith("samples") or table == "events":
        about |= {"source": SOURCE, "driver": DRIVER, "nvml": f"13.{DRIVER}", "boot_id": BOOT_ID}
        about |= {"clock": "CLOCK_MONOTONIC"}
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = pa.Table.from_arrays(arrays, schema=kind.with_metadata({k.encode(): v.encode() for k, v in about.items()}))
    pq.write_table(rows, path, compression="zstd")


def write_run(folder: Path, run_id: str, index: int = 0) -> Path:
    """Write the run directory of run number `index`."""
    counts: dict[str, TableCounts] = {}
    fast: dict[str, Any] = {}
    for table in schema.RUN_TABLES:
        columns = columns_of(table, run_id, index)
        fast = columns if table == "samples_fast" else fast
        rows = len(columns["run_id"])
        cuts = [rows * number // PARTS.get(table, 1) for number in range(1, PARTS.get(table, 1))]
        if table == "steps":  # a part for each window
            cuts = [columns["window_id"].index("measure-1")]
        counts[table] = TableCounts(rows=rows, parts=len(cuts) + 1)
        for number, (start, end) in enumerate(zip([0, *cuts], [*cuts, rows], strict=True)):
            piece = {name: values[start:end] for name, values in columns.items()}
            write_table(folder / table / schema.PART_PATTERN.format(number), table, piece, run_id)
    windows = [
        {name: value + index * BETWEEN_RUNS_NS if name.endswith("_ns") else value for name, value in window.items()}
        for window in _recorded_windows()
    ]
    records.write_record(folder / schema.WINDOWS, windows)
    records.write_record(folder / schema.MANIFEST, _manifest(run_id, index, windows[-1]))
    records.write_record(folder / schema.TELEMETRY, _report(run_id, counts, fast))
    return folder


def _device(index: int) -> dict[str, Any]:
    return {
        "uuid": _recorded("samples_fast")["gpu_uuid"][0].as_py(),
        "name": "NVIDIA H200",
        "pci_bus_id": "00000000:00:06.0",
        "minor": 0,
        "power_limit_w": 700.0,
        "memory_mib": 143771.0,
        "max_sm_clock_mhz": 1980,
        "persistence_mode": 1,
        "ecc_mode": 1,
        "mig_mode": 0,
        "vbios": "96.00.A5.00.1A",
        "energy_start_mj": _recorded("samples_fast")["energy_mj"][0].as_py() + index * BETWEEN_RUNS_MJ,
    }


def _images_per_s(window: dict[str, Any]) -> float:
    """Return the rate that the worker records when it closes a window."""
    return float(window["images"] / ((window["t_end_mono_ns"] - window["t_start_mono_ns"]) * 1e-9))


def _manifest(run_id: str, index: int, last_window: dict[str, Any]) -> records.Manifest:
    first_ns = _recorded("samples_fast")["t_unix_ns"][0].as_py() + index * BETWEEN_RUNS_NS
    return records.Manifest(
        schema_version=schema.SCHEMA_VERSION,
        producer=schema.PRODUCER,
        run_id=run_id,
        status=schema.Status.COMPLETED,
        batch=32,
        started_unix_ns=first_ns - 2 * 10**9,
        ended_unix_ns=last_window["t_end_unix_ns"] + 10**9,
        slurm=records.SlurmJob(cluster="delta", job_id=str(4700 + index), node="gpue01", partition="gpuH200x8"),
        telemetry=records.TelemetryState(source=SOURCE, hz=10.0, status="complete"),
        progress=records.Progress(
            step=60,
            steps_total=60,
            images_per_s=_images_per_s(last_window),
            t_unix_ns=last_window["t_end_unix_ns"] + 10**6,
        ),
        sweep_id="s261121eb4156",
        point=index,
        attempt=1,
        workload="finetune_inpaint",
        recipe="baseline",
        model="sd15_inpaint",
        site="delta",
        gpu="h200",
        gpu_facts=records.GpuFacts(
            architecture="Hopper",
            memory_gb=141.0,
            memory_type="HBM3e",
            bandwidth_gb_s=4800.0,
            bf16_dense_tflops=989.5,
            power_limit_w=700.0,
        ),
        gpus=1,
        seed=index,
        demonstration=False,
        config_hash="bb8952581711",
        overrides=["gpu=h200", "batch=32", "recipe=baseline", "site=delta", f"seed={index}"],
        boot_id=BOOT_ID,
        devices=[msgspec.convert(_device(index) | {"index_visible": 0}, records.Device)],
        environment=records.Environment(
            cores=16,
            cpu="AMD EPYC",
            cuda="13.0",
            driver=DRIVER,
            git=records.GitState(commit="9705b9599f446c0280f67b76e36ea7ed34625b3b", dirty=False),
            hostname="gpue01",
            python="3.11.7",
            torch="2.11.0+cu130",
        ),
        workload_facts={
            "resolution_px": 512,
            "precision": "bf16",
            "own_shapes": False,
            "weights_precision": "fp32",
            "parameters": 859_535_364,
            "parameters_by_network": {"unet": 859_535_364, "vae": 83_653_863, "text_encoder": 123_060_480},
            "parameters_trained": 859_535_364,
            "num_images": 6500,
            "flop_per_image": 4657804152832,
            "flop_parts": {
                "unet_forward": 803729571840,
                "vae_encode": 1116658466816,
                "text_encode": 13298503680,
            },
            "encodes_online": 2,
            "text_online": True,
            "cache": None,
            "skipped_steps": 0,
            "losses_not_finite": 0,
            "epochs": 16,
            "dataset_images": 6500,
            "compile_s": None,
            "batch_requested": 32,
            "setup_s": 3.7,
        },
        data=records.DataFacts(kind="synthetic", found=6500, used=6500, identity="0f1a8ed7", train=6240),
        study=records.Study(name="none", base="baseline"),
        levers=[],
        parity=records.Parity(
            reference="baseline",
            prediction_rel=0.0,
            loss_rel=0.0,
            gradient_rel=0.0,
            update_rel=0.0,
            encoder_rel=0.0,
            far=False,
        ),
        memory=records.MemoryPeaks(allocated_peak_mib=52702.9, reserved_peak_mib=62070.0),
    )


def _report(run_id: str, counts: dict[str, TableCounts], fast: dict[str, Any]) -> TelemetryReport:
    """Return what the sidecar says of itself; the steps table is the worker's."""
    index = round((fast["t_unix_ns"][0] - _recorded("samples_fast")["t_unix_ns"][0].as_py()) / BETWEEN_RUNS_NS)
    no_errors = dict.fromkeys(GpuHealth.__struct_fields__[:9], 0) | {"recovery_action": "none"}
    happened = {
        "power_limit_last_w": 700.0,
        "health_start": no_errors,
        "health_end": no_errors,
        "processes": {"verdict": "alone", "checks": 3, "failed": 1},
        "xids": {"count": 0},
    }
    ticks = {"fast": (10.0, counts["samples_fast"].rows), "slow": (1.0, counts["samples_slow"].rows)}
    ticks["gpm"] = (1.0, counts["samples_gpm"].rows + 1)  # the first read has no window and so no row
    return TelemetryReport(
        status="complete",
        reason="SIGTERM",
        run_id=run_id,
        source=SOURCE,
        driver=DRIVER,
        nvml=f"13.{DRIVER}",
        boot_id=BOOT_ID,
        host="gpue01",
        pid=4242,
        cpus=list(range(16)),
        started_unix_ns=fast["t_unix_ns"][0] - 10**8,
        started_mono_ns=fast["t_mono_ns"][0] - 10**8,
        updated_unix_ns=fast["t_unix_ns"][-1] + 10**8,
        ended_unix_ns=fast["t_unix_ns"][-1] + 10**8,
        ended_mono_ns=fast["t_mono_ns"][-1] + 10**8,
        part_s=60.0,
        journal_s=5.0,
        devices=[msgspec.convert(_device(index) | happened, DeviceReport)],
        streams={
            name: StreamReport(hz=hz, ticks_due=count, ticks_done=count, ticks_skipped=0)
            for name, (hz, count) in ticks.items()
        },
        tables={name: count for name, count in counts.items() if name != "steps"},
        cpu_s=1.4,
        max_rss_mib=83.7,
    )
