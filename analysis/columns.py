"""Tables and folders of a merged dataset. Units are in the column names; docs/dataset.md describes the figures.

A column of runs.parquet is one row of `COLUMNS`. The row holds what other modules need to know of it: where the value
comes from, its bounds, why it may be null, and how the report names it and where the report shows it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import polars as pl

HIVE_KEYS = ("site", "gpu", "run")  # folders of the long tables: samples_fast/site=grace/gpu=a40/run=r-01
STRING, BOOL, TIME, INTEGER, REAL = pl.String(), pl.Boolean(), pl.Datetime("us", "UTC"), pl.Int64(), pl.Float64()


@dataclass(frozen=True)
class Column:
    """One column of runs.parquet. A row without `fact` and `derive` is filled by code of its own."""

    name: str
    kind: pl.DataType
    definition: str = ""  # empty if the name says it
    fact: str = ""  # where the manifest has it; a column of the manifest's own name needs none
    derive: Callable[..., Any] | None = None  # from the columns that its parameters name; null if one is null or 0
    bounds: tuple[float, float] | None = None  # bounds in a valid run
    null_reason: str = "not recorded"  # if nothing else says why it is null
    sampled: tuple[str, ...] = ()  # columns of the samples that it rests on: their reasons for null are its reasons
    of_steps: bool = False  # means something only if every step does the same work
    label: str = ""  # in tables and on axes; a column with a label has a mean and an interval in each cell
    unit: str = ""
    shown: tuple[str, int] | None = None  # table of the report, and position in it
    # Raised whenever the same run directory gives another value: reports then say so of older datasets.
    version: int = 1

    @property
    def heading(self) -> str:
        return f"{self.label} [{self.unit}]" if self.unit else self.label

    @property
    def upper_bound(self) -> float:
        """Return what its mean cannot exceed; no mean is below zero."""
        # The error of an energy is relative to it and may exceed 100 %.
        share = self.unit.startswith("%") and not self.name.startswith("energy_error")
        return 100.0 if share else math.inf


TINY, FLOAT32 = 1e-12, 3.4e38  # more than nothing; what is beyond is not finite
POSITIVE, FINITE, SHARE = (TINY, FLOAT32), (-FLOAT32, FLOAT32), (0, 100.5)
COUNT, MANY, HOURS, MIB = (1, 1e6), (1, 1e12), (0, 1e9), (TINY, 2**21)
ENERGY = ("energy_mj", "power_instant_w")  # samples behind every figure of energy

COLUMNS = (
    *(Column(name, STRING) for name in ("run_id", "sweep_id", "point", "attempt", "site")),
    Column("gpu", STRING, "label of the launch: gpu="),
    Column("gpu_name", STRING, "name of the board"),
    Column("gpu_uuid", STRING, "of all GPUs of the run"),
    Column("node", STRING),
    Column("boot_id", STRING, "of the node's kernel: the monotonic clock is of one boot"),
    *(Column(name, STRING) for name in ("workload", "recipe", "model")),
    Column("variant", STRING, "changed keys of the workload, and digest of loaded weights: part of the cell"),
    Column("source", STRING, "of the telemetry"),
    *(Column(name, STRING) for name in ("status", "reason", "message", "invalid_reason")),
    Column("invalid_across_runs", STRING, "the part of invalid_reason that only a comparison with other runs shows"),
    Column("warnings", STRING),
    Column("null_reasons", STRING, "column=reason, separated by semicolons"),
    Column("energy_source", STRING, "counter or integral"),
    Column("step_ms_kind", STRING, "clock of the step times: device (CUDA events) or host"),
    Column("runtime_kind", STRING, "measured, or projected from images/s"),
    Column("precision", STRING, fact="workload_facts.precision"),
    Column("config_hash", STRING),
    Column("git_commit", STRING, fact="environment.git.commit"),
    Column("code_sha256", STRING, "of the snapshot that ran", "environment.git.content_sha256"),
    Column("code_version", STRING, "digest of the snapshot that ran, else the commit; -dirty where files were changed"),
    Column("data_identity", STRING, "digest of images, positions, texts and masks", "data.identity"),
    Column("slurm_job_id", STRING, fact="slurm.job_id"),
    Column("driver", STRING, fact="environment.driver"),
    Column("torch", STRING, fact="environment.torch"),
    Column("cuda", STRING, "CUDA version that torch was built for", "environment.cuda"),
    Column("cudnn", STRING, fact="environment.cudnn"),
    Column("run_dir", STRING),
    Column("tracking_link", STRING, "address or folder of the run's curves in an experiment tracker", "tracking.link"),
    Column("skipped_images", STRING, "JSON: [{file, reason}], the first ones"),
    Column("content_hash", STRING, "of the whole run directory"),
    Column("study_name", STRING),
    Column("study_base", STRING),
    Column("study_levers", STRING, "levers of the study in order, separated by commas"),
    Column("overrides", STRING, "of the launch, as the run recorded them, separated by blanks"),
    Column("recipe_parts", STRING, "the requested value of recipe=, separated by commas: base, lever, lever ..."),
    Column("levers", STRING, "JSON: [{name, field, requested, effective, active, evidence}]", "levers"),
    Column("inactive_levers", STRING, "requested, and found not active: names separated by commas"),
    Column("parity_reference", STRING, "baseline is bf16 under autocast, in eager PyTorch", "parity.reference"),
    Column("parity_unavailable", STRING, "why no error is known", "parity.unavailable"),
    Column("batch_requested", STRING, "auto, or null"),
    Column("cache", STRING, "JSON: {place, bytes, key ...}", "workload_facts.cache"),
    Column("validation", STRING, "JSON: [{step, loss, n}]"),
    Column("quality_metrics", STRING, "JSON: {name: {value, n} or {unavailable}}", "quality.metrics"),
    Column("profile", STRING, "JSON: {profiler, calls, traces, problems, communication, timeline}", "profile"),
    Column("sample_grid", STRING, "an image file, relative to the dataset"),
    Column("counters_source", STRING, "of the performance counters: gpm or none"),
    Column("steady", STRING, "whether the step time was in steady state: yes, no, too_short"),
    # version 2: flags of throttling are set by the shares below
    Column("flags", STRING, "codes of what happened during the run, separated by commas", version=2),
    Column("power_semantics", STRING, 'reading and source behind power_w: "energy_mj by nvml"'),
    Column("comparability_key", STRING, "what distinguishes it from runs that it must not be averaged with"),
    Column("valid", BOOL, "whether the run counts in means"),
    Column("demonstration", BOOL, "whether telemetry or GPU are simulated"),
    Column("text_online", BOOL, "whether texts are encoded in each step", "workload_facts.text_online"),
    Column("git_dirty", BOOL, "untracked files count", "environment.git.dirty"),
    Column("parity_exceeded", BOOL, "so far from the reference that it computes something else", "parity.far"),
    Column("started", TIME),
    Column("ended", TIME),
    Column("batch", INTEGER, "images per GPU and step", bounds=COUNT),
    Column("gpus", INTEGER, bounds=COUNT),
    Column("nodes", INTEGER, bounds=COUNT),
    Column("n_steps", INTEGER, "in the completed measure windows", bounds=MANY),
    Column("images", INTEGER, "in the completed measure windows, of all GPUs", bounds=MANY),
    Column("epochs", INTEGER, "requested", "workload_facts.epochs", bounds=COUNT),
    Column("dataset_images", INTEGER, "images of one epoch", "workload_facts.dataset_images", bounds=MANY),
    Column("resolution_px", INTEGER, fact="workload_facts.resolution_px", bounds=COUNT),
    Column("parameters", INTEGER, "of the network that is trained or evaluated", "workload_facts.parameters"),
    Column("images_found", INTEGER, fact="data.found"),
    Column("images_used", INTEGER, fact="data.used"),
    Column("images_skipped", INTEGER),
    Column("seed", INTEGER),
    Column("location_tokens", INTEGER, "of the position, after those of the text", "workload_facts.location_tokens"),
    Column("encodes_online", INTEGER, "latents computed per image and step", "workload_facts.encodes_online"),
    Column("validation_first_step", INTEGER),
    Column("validation_last_step", INTEGER),
    Column("resumed_from_step", INTEGER, "of the last resumption"),
    Column("step_blocks", INTEGER, "blocks of 1 s behind the drift"),
    Column("stalls", INTEGER, "steps that took far longer than the median"),
    Column("window_s", REAL, "time in the completed measure windows", bounds=POSITIVE),
    Column("steps_per_s", REAL, bounds=POSITIVE, of_steps=True, label="Steps/s", shown=("throughput", 1)),
    Column("images_per_s", REAL, "of all GPUs, stalls included", bounds=POSITIVE, of_steps=True,
           label="Images/s", shown=("throughput", 2)),
    Column("step_ms_p50", REAL, bounds=POSITIVE, of_steps=True, label="Step p50", unit="ms", shown=("throughput", 3)),
    Column("step_ms_p95", REAL, bounds=POSITIVE, of_steps=True, label="Step p95", unit="ms", shown=("throughput", 4)),
    Column("data_wait_pct", REAL, "time in which the steps waited for data", bounds=SHARE, of_steps=True,
           label="Host waits for data", unit="%", shown=("throughput", 5)),
    Column("runtime_h", REAL, "of the requested epochs", bounds=HOURS, of_steps=True,
           null_reason="epochs, dataset size or images/s unknown",
           label="Runtime, projected", unit="h", shown=("throughput", 0)),
    Column("gpu_util_pct", REAL, "time in which a kernel ran", sampled=("gpu_util_pct",),
           label="GPU utilization", unit="%", shown=("throughput", 6)),
    Column("mem_active_pct", REAL, "time with any access to memory, not a bandwidth", sampled=("mem_active_pct",),
           label="Memory active", unit="% of time", shown=("memory", 6)),
    Column("vram_used_mib_peak", REAL, "of the fullest GPU, in the measure windows", sampled=("vram_used_mib",),
           label="VRAM peak, measured", unit="MiB", shown=("memory", 2)),
    Column("vram_used_mib_mean", REAL, sampled=("vram_used_mib",)),
    Column("vram_pct", REAL, "peak in the measure windows, of what the driver does not reserve", bounds=SHARE,
           sampled=("vram_total_mib", "vram_reserved_mib", "vram_used_mib"),
           label="VRAM peak, measured", unit="%", shown=("memory", 0)),
    Column("vram_run_mib_peak", REAL, "of the fullest GPU, in the whole run: parity and cuDNN's search included",
           sampled=("vram_used_mib",), label="VRAM peak, whole run", unit="MiB", shown=("memory", 3)),
    Column("vram_run_pct", REAL, "peak in the whole run, of what the driver does not reserve", bounds=SHARE,
           sampled=("vram_total_mib", "vram_reserved_mib", "vram_used_mib"),
           label="VRAM peak, whole run", unit="%", shown=("memory", 1)),
    Column("torch_allocated_peak_mib", REAL, "of rank 0; ranks of a pipeline differ", bounds=MIB,
           fact="memory.allocated_peak_mib",
           label="torch allocated, rank 0", unit="MiB", shown=("memory", 5)),
    Column("torch_reserved_peak_mib", REAL, "of rank 0", fact="memory.reserved_peak_mib", bounds=MIB,
           label="torch reserved, rank 0", unit="MiB", shown=("memory", 4)),
    Column("power_w", REAL, "energy_j over window_s, of all GPUs", sampled=ENERGY,
           derive=lambda energy_j, window_s: energy_j / window_s,
           label="Power", unit="W", shown=("energy", 0)),
    Column("energy_j", REAL, "of all GPUs in the measure windows", bounds=POSITIVE, sampled=ENERGY),
    Column("energy_integral_j", REAL, "integral of instant power", sampled=("power_instant_w",)),
    Column("energy_ratio", REAL, "counter over integral", sampled=ENERGY,
           label="Counter / integral", shown=("energy", 6)),
    Column("temp_gpu_c_mean", REAL, sampled=("temp_gpu_c",),
           label="Temperature, mean", unit="\u00b0C", shown=("energy", 7)),
    Column("temp_gpu_c_max", REAL, "of the hottest GPU", sampled=("temp_gpu_c",),
           label="Temperature, max", unit="\u00b0C"),
    Column("joules_per_image", REAL, bounds=POSITIVE, sampled=ENERGY, of_steps=True,
           derive=lambda energy_j, images: energy_j / images,
           label="Energy", unit="J/image", shown=("energy", 1)),
    Column("cpu_energy_j", REAL, "of the processor packages of all nodes in the measure windows", bounds=POSITIVE),
    Column("joules_per_image_with_cpu", REAL, "energy_j and cpu_energy_j over images", bounds=POSITIVE, of_steps=True,
           sampled=ENERGY, derive=lambda energy_j, cpu_energy_j, images: (energy_j + cpu_energy_j) / images,
           label="Energy with processors", unit="J/image", shown=("energy", 3)),
    Column("images_per_s_per_w", REAL, "images per joule", bounds=POSITIVE, sampled=ENERGY, of_steps=True,
           derive=lambda images, energy_j: images / energy_j,
           label="Images/s/W", shown=("energy", 4)),
    Column("steps_per_s_per_w", REAL, "steps per joule", bounds=POSITIVE, sampled=ENERGY, of_steps=True,
           derive=lambda n_steps, energy_j: n_steps / energy_j,
           label="Steps/s/W", shown=("energy", 5)),
    Column("sm_clock_mhz_mean", REAL, sampled=("sm_clock_mhz",), label="SM clock", unit="MHz"),
    Column("sm_clock_mhz_limit", REAL, "of the slowest GPU"),
    # version 2: percent of the measured time, interpolated at its edges; before, of the time between samples
    Column("throttle_power_pct", REAL, "time under the power cap", sampled=("throttle_power_cap_ns",), version=2),
    Column("throttle_thermal_pct", REAL, "time throttled by temperature",
           sampled=("throttle_sw_thermal_ns", "throttle_hw_thermal_ns"), version=2),
    Column("power_limit_w", REAL, "enforced, of all GPUs"),
    Column("coverage_pct", REAL, "samples of the expected ones, in the column with the fewest", bounds=SHARE),
    Column("mfu_pct", REAL, "model FLOP/s over the GPU's dense peak: BF16, in fp32 that of TF32 or fp32",
           bounds=(0, 100), of_steps=True,
           null_reason="FLOP per image or peak unknown", label="MFU", unit="%", shown=("throughput", 7)),
    Column("flop_per_image", REAL, "of the model, less what a cache saves", "workload_facts.flop_per_image",
           bounds=POSITIVE),
    Column("peak_tflops", REAL, "of one GPU, dense BF16", "gpu_facts.bf16_dense_tflops"),
    Column("compile_s", REAL, fact="workload_facts.compile_s", bounds=HOURS, label="Compile", unit="s"),
    Column("setup_s", REAL, fact="workload_facts.setup_s", bounds=HOURS),
    *(Column(f"parity_{name}_rel", REAL, "relative error against the reference", f"parity.{name}_rel")
      for name in ("prediction", "loss", "gradient", "update", "encoder")),
    Column("validation_first_loss", REAL, bounds=FINITE),
    Column("validation_last_loss", REAL, bounds=FINITE),
    Column("sm_active_pct", REAL, label="SMs active", unit="%"),
    Column("sm_occupancy_pct", REAL, label="SM occupancy", unit="%"),
    Column("tensor_active_pct", REAL, label="Tensor cores active", unit="% of time"),
    Column("dram_active_pct", REAL, label="DRAM bandwidth", unit="% of peak"),
    Column("pcie_tx_mib_s", REAL, label="PCIe from the GPU", unit="MiB/s"),
    Column("pcie_rx_mib_s", REAL, label="PCIe to the GPU", unit="MiB/s"),
    Column("energy_error_pct", REAL, "upper bound for energy_j, power_w and joules_per_image",
           label="Energy error, at most", unit="%", shown=("energy", 2)),
    Column("energy_edge_pct", REAL, "part of energy_error_pct: updates of the counter at the edges of the windows"),
    Column("energy_sensor_pct", REAL, "part of energy_error_pct: accuracy of the sensor"),
    Column("energy_update_ms", REAL, "observed time between two updates of the energy counter"),
    Column("joules_per_image_error", REAL, "energy_error_pct of joules_per_image", of_steps=True,
           derive=lambda joules_per_image, energy_error_pct: joules_per_image * energy_error_pct / 100,
           label="Energy error, at most", unit="J/image"),
    Column("step_mean_pct", REAL, "the mean step over the median step, less 100 %", of_steps=True),
    Column("step_drift_pct", REAL, "last third of the blocks over the first, less 100 %; above 0: steps became slower",
           of_steps=True),
    Column("stall_s", REAL, "time of stalled steps beyond the median", of_steps=True),
    Column("stall_pct", REAL, "of the measure windows", of_steps=True),
    Column("images_per_s_steady", REAL, "over the measured time without stalls", of_steps=True),
)  # fmt: skip
SCHEMA = {column.name: column.kind for column in COLUMNS}
METRICS = {column.name: column for column in COLUMNS if column.label}
BOUNDS = {column.name: column.bounds for column in COLUMNS if column.bounds}
DEFINITIONS = {column.name: column.version for column in COLUMNS if column.version > 1}
PARITY = [column.name for column in COLUMNS if column.fact.startswith("parity.") and column.kind == REAL]
COUNTERS = [  # performance counters of the GPU, by GPM
    *("sm_active_pct", "sm_occupancy_pct", "tensor_active_pct", "dram_active_pct", "pcie_tx_mib_s", "pcie_rx_mib_s")
]
WINDOW_SCHEMA: dict[str, pl.DataType] = {
    **dict.fromkeys(("run_id", "site", "gpu", "window_id", "kind", "status", "reason", "flags"), STRING),
    **dict.fromkeys(
        ("t_start_mono_ns", "t_end_mono_ns", "t_start_unix_ns", "t_end_unix_ns", "steps", "images"), INTEGER
    ),
}
SKIPPED_SCHEMA = {**dict.fromkeys(("path", "code", "reason", "run_id"), STRING), "size_bytes": INTEGER}


def shown_in(table: str) -> list[str]:
    """Return the columns that a table of the report shows of each cell, in their order."""
    places = {column.name: column.shown[1] for column in COLUMNS if column.shown and column.shown[0] == table}
    return sorted(places, key=lambda name: places[name])


def hive_value(value: str) -> str:
    """Return a value as a folder name may hold it. It begins with a letter: readers turn bare digits into integers."""
    lettered = value if value[:1].isascii() and value[:1].isalpha() else f"r-{value}"
    return quote(lettered, safe="")
