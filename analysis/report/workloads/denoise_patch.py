"""The section of the workload `denoise_patch`."""

from __future__ import annotations

import polars as pl

from analysis import published
from analysis.report.tables import Table, TableBuilder
from inpaint_bench.core.workloads._denoisers import MODELS

from . import Section, _denoisers
from ._denoisers import cell

KEYS = ["model", "patch_px", "num_patches", "batch", "published_plan", "branch", "calls", "tile_h_px", "tile_w_px"]
RATES = ["patches_per_s", "images_per_s"]
CONFOUNDED = (
    "With input_mode=host_random, as published, the timed call also draws the image on the CPU and copies it from "
    "pageable memory: the faster the network, the less such a time says of the GPU. input_mode=device_resident times "
    "the network alone."
)


def section(build: TableBuilder, results: pl.DataFrame, runs: pl.DataFrame) -> Section:
    """Return tables and panels of time and memory over the size of patches and their batch."""
    cases = _add_predictions(_denoisers.means(results, KEYS, RATES))
    figures = _denoisers.panels(
        "fig-denoise-patch",
        cases,
        x=("batch", "Patches per batch"),
        panel=("patch_px", "patches of {} px"),
        y={
            "time": ("time_ms", "Time [ms]", "Denoisers: time per image"),
            "memory": ("allocated_peak_mib", "Allocated peak [MiB]", "Denoisers: peak memory"),
            "patches": ("patches_per_s", "Patches/s", "Denoisers: patches per second"),
            "images": ("images_per_s", "Images/s", "Denoisers: images per second"),
        },
    )
    return Section(
        title="Denoisers: patches",
        paragraphs=[CONFOUNDED],
        tables=[_cases(build, cases)],
        figures=figures,
    )


def _add_predictions(cases: pl.DataFrame) -> pl.DataFrame:
    table = published.read("denoiser_predicted_batch.csv").rename({"patch": "patch_px"})
    # A patch has the same branch in an image of any size; a last batch may be smaller, never larger.
    applies = (pl.col("branch") == "direct") & (pl.col("num_patches") >= pl.col("batch"))
    return _denoisers.add_predictions(cases, table, ["patch_px", "batch"], applies)


def _cases(build: TableBuilder, cases: pl.DataFrame) -> Table:
    columns = ["Site", "GPU", "Setting", "Model", "Patch [px]", "Patches", "Batch", "Branch", "Calls", "Tile [px]"]
    columns += ["Time [ms]", "SD [ms]", "J per call", "Patches/s", "Images/s", "Allocated peak [MiB]"]
    columns += ["Reserved peak [MiB]", "NVML [MiB]", "Above weights [MiB]", "Predicted [MiB]", "Explained by", "n"]
    rows = []
    for case in cases.iter_rows(named=True):
        tile = f"{case['tile_h_px']}x{case['tile_w_px']}"
        reason = _denoisers.explain(case, tile)
        rows.append(
            [
                *_denoisers.setting_text(case),
                MODELS[case["model"]],
                *(str(case[name]) for name in ("patch_px", "num_patches", "batch", "branch", "calls")),
                tile,
                *(cell(case[name]) for name in ("time_ms", "time_sd", "joules_per_call")),
                *(cell(case[name]) for name in ("patches_per_s", "images_per_s")),
                *(cell(case[name]) for name in _denoisers.MEMORY[1:]),
                *(cell(case[name]) for name in ("tensors_mib", "predicted_mib")),
                reason,
                str(case["n"]),
            ]
        )
    note = (
        f"{_denoisers.MEASURES} {_denoisers.ENERGY} "
        "A step is one image, i.e. all of its patches. SD: standard deviation of a run's calls. "
        f"Predicted: peak of the live fp32 tensors, without any workspace. Protocol: {_denoisers.SOURCE}; of its "
        "figures it states only that patches of 128 px in batches of 16 give the most images/s."
    )
    return build.table("denoise-patch", "Denoisers by patch size and batch", columns, rows, note=note, key_columns=3)
