"""The published figures of the poster: a layer of their own beside the measurements, never averaged with them.

Source: "Accelerating Inpainting: Benchmarking Fine-Tuning Performance" (Kim, Park, Handa, Texas A&M). What each status
means is in published/README.md.
"""

from pathlib import Path

import polars as pl

from .columns import METRICS

SOURCE = "Kim, Park, Handa: Accelerating Inpainting (poster)"
WORKLOAD = "finetune_inpaint"  # the only workload that these figures may be compared with
MODEL = "sd15_inpaint"
IMAGES = 16 * 6500  # epochs times images behind the published hours
IMAGES_TOLERANCE = 0.01
SHOWN = ("proven", "likely")
_FOLDER = Path(__file__).parent / "published"


def read(name: str) -> pl.DataFrame:
    """Read one of the CSV files as it is."""
    return pl.read_csv(_FOLDER / name, glob=False)


def load() -> pl.DataFrame:
    """Return all figures (metric, gpu, batch, value, status), with GPUs named as in conf/gpu."""
    likely = pl.lit("likely").alias("status")
    power = read("poster_power_w.csv")
    derived = read("poster_derived.csv").filter(~pl.col("gpu").str.contains("_"))
    per_watt = derived.select("gpu", "batch", "steps_per_s_per_w", "images_per_s_per_w")
    # Figures per watt divide an inferred rate by a read power: never better than likely.
    sureness = power.select("gpu", "batch", pl.col("status").replace("proven", "likely"))
    # A figure that may belong to several GPUs is listed once for each of them, as ambiguous.
    temperature = read("poster_temperature_c.csv").with_columns(gpu=pl.col("gpu_candidates").str.split("|"))
    # Printed, but read in one way of two. The tuned pipeline is another recipe.
    memory = read("poster_mem_util.csv").filter(pl.col("source") != "pipeline_table_optimized")
    tables = [
        read("poster_runtime_hours.csv").rename({"hours": "runtime_h"}),
        read("poster_gpu_util_pct.csv"),
        power,
        temperature.explode("gpu").rename({"temp_c": "temp_gpu_c_mean"}),
        memory.rename({"mem_bw_pct": "mem_active_pct"}).with_columns(likely),
        # Rates rest on an inferred number of images: likely at most, per watt as sure as the power is.
        derived.select("gpu", "batch", "images_per_s", "steps_per_s", likely),
        per_watt.with_columns(joules_per_image=1 / pl.col("images_per_s_per_w")).join(sureness, ["gpu", "batch"]),
    ]
    return pl.concat(map(_unpivot, tables)).sort("metric", "gpu", "batch")


def _unpivot(table: pl.DataFrame) -> pl.DataFrame:
    """Return a row per figure; the figures are the columns named as one of our metrics."""
    metrics = [pl.col(name).cast(pl.Float64) for name in table.columns if name in METRICS]
    keys = pl.col("gpu").str.to_lowercase(), "batch", "status"
    rows = table.select(*keys, *metrics).unpivot(index=["gpu", "batch", "status"], variable_name="metric")
    return rows.select("metric", "gpu", "batch", "value", "status")


def shown() -> pl.DataFrame:
    """Return what may be shown beside a measurement: proven and likely figures only."""
    return load().filter(pl.col("status").is_in(SHOWN))


def is_comparable() -> pl.Expr:
    """Select the runs or cells of the poster's workload: all weights of its model, if a model is known, were trained.

    A demonstration says nothing about the GPU that it names.
    """
    same_model = pl.col("model").fill_null(MODEL) == MODEL
    all_weights = ~pl.col("recipe").fill_null("").str.contains(r"(^|\+)lora")
    return ((pl.col("workload") == WORKLOAD) & same_model & all_weights & ~pl.col("demonstration")).fill_null(False)


def same_training_images() -> pl.Expr:
    """Select the cells whose runtimes are for as many images as the published hours are."""
    return pl.all_horizontal(
        (pl.col(f"training_images_{end}") / IMAGES - 1).abs() <= IMAGES_TOLERANCE for end in ("min", "max")
    ).fill_null(False)
