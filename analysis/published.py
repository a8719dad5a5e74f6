"""The poster's published figures as a layer of their own: shown beside what was measured, never averaged with it.

Source: "Accelerating Inpainting: Benchmarking Fine-Tuning Performance" (Kim, Park, Handa, Texas A&M); see
published/README.md for what each status means.
"""

from __future__ import annotations

from pathlib import Path

import polars as pl

SOURCE = "Kim, Park, Handa: Accelerating Inpainting (poster)"
WORKLOAD = "finetune_inpaint"  # the only workload that these figures may stand beside
IMAGES = 16 * 6500  # epochs times images that its hours stand for
IMAGES_WITHIN = 0.01
SHOWN = ("proven", "likely")
_FOLDER = Path(__file__).parent / "published"
_SCHEMA = {"metric": pl.String, "gpu": pl.String, "batch": pl.Int64, "value": pl.Float64, "status": pl.String}
_CELLS = {  # file -> (its column, our metric)
    "poster_runtime_hours.csv": ("hours", "runtime_h"),
    "poster_gpu_util_pct.csv": ("gpu_util_pct", "gpu_util_pct"),
    "poster_power_w.csv": ("power_w", "power_w"),
}


def read(name: str) -> pl.DataFrame:
    """One of the CSV files as it is."""
    return pl.read_csv(_FOLDER / name)


def load() -> pl.DataFrame:
    """Long frame (metric, gpu, batch, value, status) with every status, GPUs named as in conf/gpu."""
    pieces = [_cells(name, column, metric) for name, (column, metric) in _CELLS.items()]
    pieces += [_temperature(), _memory(), *_derived()]
    return pl.concat(pieces).sort("metric", "gpu", "batch")


def shown() -> pl.DataFrame:
    """What may stand beside a measurement: proven and likely figures only."""
    return load().filter(pl.col("status").is_in(SHOWN))


def _tidy(frame: pl.DataFrame, metric: str) -> pl.DataFrame:
    tidy = frame.with_columns(pl.lit(metric).alias("metric"), pl.col("gpu").str.to_lowercase())
    return tidy.select([pl.col(name).cast(kind) for name, kind in _SCHEMA.items()])


def _cells(name: str, column: str, metric: str) -> pl.DataFrame:
    return _tidy(read(name).rename({column: "value"}), metric)


def _temperature() -> pl.DataFrame:
    """A cell that may belong to several GPUs appears once for each of them, as ambiguous."""
    frame = read("poster_temperature_c.csv").with_columns(pl.col("gpu_candidates").str.split("|").alias("gpu"))
    return _tidy(frame.explode("gpu").rename({"temp_c": "value"}), "temp_gpu_c_mean")


def _memory() -> pl.DataFrame:
    """As printed, on one reading: likely. The tuned pipeline is another recipe and stays out."""
    frame = read("poster_mem_util.csv").filter(pl.col("source") != "pipeline_table_optimized")
    frame = frame.with_columns(pl.lit("likely").alias("status"))
    columns = {"vram_pct": "vram_pct", "mem_bw_pct": "mem_active_pct"}
    return pl.concat([_tidy(frame.rename({old: "value"}), metric) for old, metric in columns.items()])


def _derived() -> list[pl.DataFrame]:
    """Rates rest on an inferred number of images: likely at most; per watt also on the power's own status."""
    frame = read("poster_derived.csv").filter(~pl.col("gpu").str.contains("_"))
    power = read("poster_power_w.csv").select("gpu", "batch", pl.col("status").alias("of_power"))
    capped = pl.when(pl.col("of_power") == "proven").then(pl.lit("likely")).otherwise(pl.col("of_power"))
    per_watt = frame.join(power, on=["gpu", "batch"], how="left").with_columns(capped.alias("status"))
    plain = frame.with_columns(pl.lit("likely").alias("status"))
    rates = [_tidy(plain.rename({name: "value"}), name) for name in ("images_per_s", "steps_per_s")]
    watts = [_tidy(per_watt.rename({name: "value"}), name) for name in ("steps_per_s_per_w", "images_per_s_per_w")]
    return rates + watts
