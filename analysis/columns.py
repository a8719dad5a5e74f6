"""Tables and folders of a merged dataset. Units are in the column names; docs/dataset.md describes the figures."""

from __future__ import annotations

from urllib.parse import quote

import polars as pl

WINDOWS = "windows.parquet"
SAMPLE_GRIDS = "quality"  # folder of images, one per run
HIVE_KEYS = ("site", "gpu", "run")  # folders of the long tables: samples_fast/site=grace/gpu=a40/run=r-01
COUNTERS = (  # performance counters of the GPU, by GPM or DCGM
    "sm_active_pct",
    "sm_occupancy_pct",
    "tensor_active_pct",
    "dram_active_pct",
    "pcie_tx_mib_s",
    "pcie_rx_mib_s",
)

TEXT = [
    "run_id",
    "sweep_id",
    "point",
    "attempt",
    "site",
    "gpu",
    "gpu_name",
    "gpu_uuid",
    "node",
    "boot_id",  # of the node's kernel: the monotonic clock is of one boot
    "workload",
    "recipe",
    "model",
    "variant",  # changed keys of the workload, and digest of loaded weights: part of the cell
    "source",
    "status",
    "reason",
    "message",
    "invalid_reason",
    "invalid_across_runs",  # the part of it that only a comparison with other runs shows: across_runs
    "warnings",
    "null_reasons",
    "energy_source",
    "step_ms_kind",
    "runtime_kind",
    "precision",
    "config_hash",
    "git_commit",
    "code_sha256",  # of the snapshot that ran
    "code_version",  # digest of the snapshot that ran, else the commit, with -dirty where files were changed
    "data_identity",  # digest of images, positions, texts and masks
    "slurm_job_id",
    "driver",
    "torch",
    "cuda",
    "run_dir",
    "tracking_link",  # address or folder of the run's curves in an experiment tracker
    "skipped_images",  # JSON: [{file, reason}], the first ones
    "content_hash",
    "study_name",
    "study_base",
    "study_levers",  # its steps in order, separated by commas
    "overrides",  # of the launch, as the run recorded them, separated by blanks
    "recipe_parts",  # the requested value of recipe=, separated by commas: base, lever, lever ...
    "levers",  # JSON: [{name, field, requested, effective, active, evidence}]
    "inactive_levers",  # requested, and found not active: names separated by commas
    "parity_reference",
    "parity_unavailable",
    "batch_requested",  # auto, or null
    "cache",  # JSON: {place, bytes, key ...}
    "validation",  # JSON: [{step, loss, n}]
    "quality_metrics",  # JSON: {name: {value, n} or {unavailable}}
    "profile",  # JSON: {profiler, calls, traces, problems, communication}
    "sample_grid",  # an image file, relative to the dataset
    "counters_source",  # of the performance counters: gpm, dcgm:<host:port>, none
    "steady",  # whether the step time was in steady state: yes, no, too_short
    "flags",  # codes of what happened during the run, separated by commas: flags.Flag
    "power_semantics",  # reading and source behind power_w: "energy_mj by nvml"
    "comparability_key",  # what distinguishes it from runs that it must not be averaged with; empty: nothing
]
FLOAT = [
    "window_s",
    "steps_per_s",
    "images_per_s",
    "step_ms_p50",
    "step_ms_p95",
    "data_wait_pct",
    "runtime_h",
    "gpu_util_pct",
    "mem_active_pct",
    "vram_used_mib_peak",
    "vram_used_mib_mean",
    "vram_pct",
    "torch_allocated_peak_mib",
    "torch_reserved_peak_mib",
    "power_w",
    "energy_j",
    "energy_integral_j",
    "energy_ratio",
    "temp_gpu_c_mean",
    "temp_gpu_c_max",
    "joules_per_image",
    "images_per_s_per_w",
    "steps_per_s_per_w",
    "sm_clock_mhz_mean",
    "sm_clock_mhz_limit",
    "throttle_power_pct",
    "throttle_thermal_pct",
    "power_limit_w",
    "coverage_pct",
    "mfu_pct",
    "flop_per_image",  # behind mfu_pct: of the model, less what a cache saves
    "peak_tflops",  # behind mfu_pct: of one GPU, dense BF16
    "compile_s",
    "setup_s",
    "parity_prediction_rel",
    "parity_loss_rel",
    "parity_gradient_rel",
    "parity_update_rel",
    "parity_encoder_rel",
    "validation_first_loss",
    "validation_last_loss",
    *COUNTERS,
    "energy_error_pct",  # upper bound for energy_j, power_w and joules_per_image: energy.uncertainty_pct
    "energy_edge_pct",
    "energy_sensor_pct",
    "energy_update_ms",  # observed time between two updates of the energy counter
    "joules_per_image_error",
    "step_drift_pct",  # over the measured time; above 0: steps became slower
    "step_block_cv_pct",
    "stall_s",  # of steps that took far longer than the median, beyond the median: stalls.py
    "stall_pct",  # of the measure windows
    "images_per_s_steady",  # over the measured time without stalls
]
PARITY = [name for name in FLOAT if name.startswith("parity_")]
INT = ["batch", "gpus", "nodes", "n_steps", "images", "epochs", "dataset_images", "resolution_px"]
INT += ["images_found", "images_used", "images_skipped", "seed", "encodes_online"]
INT += ["validation_first_step", "validation_last_step", "resumed_from_step", "step_blocks", "stalls"]
SCHEMA: dict[str, pl.DataType] = {
    **{name: pl.String() for name in TEXT},
    "valid": pl.Boolean(),
    "demonstration": pl.Boolean(),
    "text_online": pl.Boolean(),
    "git_dirty": pl.Boolean(),
    "parity_exceeded": pl.Boolean(),  # so far from the reference that it computes something else
    "started": pl.Datetime("us", "UTC"),
    "ended": pl.Datetime("us", "UTC"),
    **{name: pl.Int64() for name in INT},
    **{name: pl.Float64() for name in FLOAT},
}
# The version of a column's definition, 1 if it is not named here. To be raised whenever the same run directory gives
# another value than before: a report then says so of datasets that were merged earlier.
DEFINITIONS = {
    "throttle_power_pct": 2,  # 2: of the time measured, interpolated at its edges; before, of the time between samples
    "throttle_thermal_pct": 2,
    "flags": 2,  # of throttling, by these shares
}
WINDOW_SCHEMA: dict[str, pl.DataType] = {
    **dict.fromkeys(("run_id", "site", "gpu", "window_id", "kind", "status", "reason", "flags"), pl.String()),
    **dict.fromkeys(
        ("t_start_mono_ns", "t_end_mono_ns", "t_start_unix_ns", "t_end_unix_ns", "steps", "images"), pl.Int64()
    ),
}
SKIPPED_SCHEMA: dict[str, pl.DataType] = {
    **dict.fromkeys(("path", "code", "reason", "run_id"), pl.String()),
    "size_bytes": pl.Int64(),
}


def hive_value(value: str) -> str:
    """Return a value as a folder name may hold it. It begins with a letter: readers turn bare digits into integers."""
    lettered = value if value[:1].isascii() and value[:1].isalpha() else f"r-{value}"
    return quote(lettered, safe="")
