"""The published figures of the poster: a layer of their own beside the measurements, never averaged with them.

Source: "Accelerating Inpainting: Benchmarking Fine-Tuning Performance" (Kim, Park, Handa, Texas A&M). What each status
means is in published/README.md.
"""

from __future__ import annotations

from pathlib import Path

import polars as pl

SOURCE = "Kim, Park, Handa: Accelerating Inpainting (poster)"
WORKLOAD = "finetune_inpaint"  # the only workload that these figures may be compared with
IMAGES = 16 * 6500  # epochs times images behind the published hours
IMAGES_TOLERANCE = 0.01
SHOWN = ("proven", "likely")
_FOLDER = Path(__file__).parent / "published"
_SCHEMA = {"metric": pl.String, "gpu": pl.String, "batch": pl.Int64, "value": pl.Float64, "status": pl.String}
_FILES = {  # file: its column, our metric
    "poster_runtime_hours.csv": ("hours", "runtime_h"),
    "poster_gpu_util_pct.csv": ("gpu_util_pct", "gpu_util_pct"),
    "poster_power_w.csv": ("power_w", "power_w"),
}


def read(name: str) -> pl.DataFrame:
    """Read one of the CSV files as it is."""
    return pl.read_csv(_FOLDER / name)


def load() -> pl.DataFrame:
    """Return all figures (metric, gpu, batch, value, status), with GPUs named as in conf/gpu."""
    tables = [_select(read(name).rename({column: "value"}), metric) for name, (column, metric) in _FILES.items()]
    return pl.concat([*tables, _temperature(), *_memory(), *_derived()]).sort("metric", "gpu", "batch")


def shown() -> pl.DataFrame:
    """Return what may be shown beside a measurement: proven and likely figures only."""
    return load().filter(pl.col("status").is_in(SHOWN))


def same_training_images() -> pl.Expr:
    """Select the cells whose runtimes are for as many images as the published hours are."""
    return pl.all_horizontal(
        (pl.col(f"training_images_{end}") / IMAGES - 1).abs() <= IMAGES_TOLERANCE for end in ("min", "max")
    ).fill_null(False)


def _select(frame: pl.DataFrame, metric: str) -> pl.DataFrame:
    frame = frame.with_columns(pl.lit(metric).alias("metric"), pl.col("gpu").str.to_lowercase())
    return frame.select([pl.col(name).cast(kind) for name, kind in _SCHEMA.items()])


def _temperature() -> pl.DataFrame:
    """Return a figure that may belong to several GPUs once for each of them, as ambiguous."""
    frame = read("poster_temperature_c.csv").with_columns(pl.col("gpu_candidates").str.split("|").alias("gpu"))
    return _select(frame.explode("gpu").rename({"temp_c": "value"}), "temp_gpu_c_mean")


def _memory() -> list[pl.DataFrame]:
    """Return memory figures as likely: printed, but read in one way of two. The tuned pipeline is another recipe."""
    frame = read("poster_mem_util.csv").filter(pl.col("source") != "pipeline_table_optimized")
    frame = frame.with_columns(pl.lit("likely").alias("status"))
    return [
        _select(frame.rename({column: "value"}), metric)
        for column, metric in {"vram_pct": "vram_pct", "mem_bw_pct": "mem_active_pct"}.items()
    ]


def _derived() -> list[pl.DataFrame]:
    """Return rates, which rest on an inferred number of images: likely at most, per watt as sure as the power is."""
    frame = read("poster_derived.csv").filter(~pl.col("gpu").str.contains("_"))
    power = read("poster_power_w.csv").select("gpu", "batch", pl.col("status").replace("proven", "likely"))
    frames = {
        "images_per_s": (plain := frame.with_columns(pl.lit("likely").alias("status"))),
        "steps_per_s": plain,
        "steps_per_s_per_w": (per_watt := frame.drop("status", strict=False).join(power, ["gpu", "batch"], "left")),
        "images_per_s_per_w": per_watt,
        "joules_per_image": per_watt.with_columns(joules_per_image=1 / pl.col("images_per_s_per_w")),
    }
    return [_select(rates.rename({name: "value"}), name) for name, rates in frames.items()]
