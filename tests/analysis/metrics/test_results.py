"""Tables of results are compared with the steps, the facts and themselves, whatever the workload."""

from __future__ import annotations

import inspect
import math
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import polars as pl
import pytest

from analysis.metrics import run_row
from analysis.metrics.facts import Facts
from inpaint_bench.core.console import pluralize
from inpaint_bench.core.records import Manifest, Window
from inpaint_bench.core.schema import results_table
from inpaint_bench.core.tables import SCHEMAS
from inpaint_bench.core.workloads import _denoisers, results
from tests.analysis.build import load_run, write_part, write_run

STEPS, STEP_MS = 60, 500.0  # of tests.analysis.build
SAMPLER = {"sampler": "plms", "sampler_steps": 50, "guidance": 7.5}
STAGES = {"text_ms": 1.0, "image_ms": 2.0, "sampling_ms": 480.0, "decode_ms": 17.0, "total_ms": 500.0}
VOLUME = {"network": "whole_head", "depth": 128, "height": 128, "width": 128}
CASE = {"model": "drunet", "published_plan": True, "tiling": "library", "input_mode": "pinned", "branch": "direct"}
CASE |= {"time_ms": STEP_MS, "weights_mib": 130.0, "allocated_peak_mib": 900.0, "reserved_peak_mib": 1000.0}
CASE |= {"nvml_used_mib": 2000.0, "out_of_memory": None, "tile_h_px": 512, "tile_w_px": 512}
DENOISER_FACTS = {"channels": [*_denoisers.CHANNELS], "parameters_by_network": {"drunet": 32_640_960}}
DENOISER_FACTS |= {"tiling": "library", "input_mode": "pinned", "image_px": 2048, "patch_batches": [1, 4]}
DENOISER_FACTS |= {"image_width_px": 2048, "patch_overlap_px": 0, "patches_px": [512]}
VOLUME_FACTS = {"network": "whole_head", "volume": [128, 128, 128]}
# Of each workload: its facts, and a row without window and step.
ROWS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sd_inference": (
        SAMPLER | {"task": "inpainting", "evaluations": 102, "psnr_db": 52.0},
        SAMPLER | STAGES | {"evaluations": 102, "inpaints": True, "psnr_db": 52.0, "finite": True},
    ),
    "fid_clip": (
        SAMPLER | {"num_images": 500},
        SAMPLER
        | {"fid": 12.5, "clip_mean": 0.26, "clip_std": 0.03, "images": 480, "real_images": 500}
        | {"reference": "folder 0123", "judges": "files", "prompts_sha256": "ab"},
    ),
    "volume3d_train": (
        VOLUME_FACTS | {"parameters": 40_226_433, "flop_per_image": 3 * 5_536_663_142_400},
        VOLUME
        | {"parameters": 40_226_433, "forward_tflop": 5.5366631424, "loss": 0.79, "validation_l1": 0.78}
        | {"validation_ms_ssim": 0.5, "ms_ssim_scales": 4},
    ),
    "volume3d_sample": (
        VOLUME_FACTS | {"sampler_steps": 250},
        VOLUME
        | {"sampler_steps": 250, "total_ms": STEP_MS, "finite": True, "ms_ssim": 0.4, "ms_ssim_scales": 4}
        | {"baseline_l1": 0.01, "baseline_ms_ssim": 0.99, "compared_volumes": 8, "mmd": -0.01, "pair_ms_ssim": 0.3}
        | {"real_pair_ms_ssim": 0.4, "other_weights_rel": 0.2, "trained_with": "fp32"},
    ),
    "denoise_shape": (
        DENOISER_FACTS,
        CASE
        | {"series_px": 64, "height_px": 2048, "width_px": 1024, "batch": 8, "calls": 1}
        | {"mpx_per_s": 8 * 2048 * 1024 / STEP_MS / 1000},
    ),
    "denoise_patch": (
        DENOISER_FACTS,
        CASE
        | {"patch_px": 512, "num_patches": 16, "batch": 4, "calls": 4, "height_px": 2048, "width_px": 2048}
        | {"times_by_rank_ms": None, "peaks_by_rank_mib": None}
        | {"patches_per_s": 16_000 / STEP_MS, "images_per_s": 1000 / STEP_MS},
    ),
}


@cache
def sound(folder: Path, workload: str) -> tuple[Manifest, list[Window], dict[str, pl.DataFrame]]:
    """Return a run of the workload, without a contradiction."""
    facts, values = ROWS[workload]
    facts = {"precision": "bf16", "uniform_steps": True, **facts}
    run = write_run(folder, f"r-{workload}", workload=workload, model="m", gpu="h200", workload_facts=facts)
    last = {"trained_steps": [None] * (STEPS - 1) + [STEPS]} if workload == "volume3d_train" else {}
    numbers = list(range(STEPS)) if results()[workload].each_step else [STEPS - 1]
    columns = {"run_id": f"r-{workload}", "window_id": "w-1", "step": numbers, **values, **last}
    write_part(run / results_table(workload), results_table(workload), columns)
    loaded, tables = load_run(run)
    return loaded.manifest, loaded.windows, tables


def reason(run: tuple[Manifest, list[Window], dict[str, pl.DataFrame]], workload: str, rows: pl.DataFrame) -> str:
    manifest, windows, tables = run
    facts = Facts(manifest=manifest, windows=windows, tables={**tables, results_table(workload): rows})
    row = run_row.summarise(facts)
    return row["invalid_reason"] or ""


def known_twice(workload: str) -> list[tuple[str, float]]:
    """Return the numbers that something else tells too, each with the tolerance, in its unit."""
    result, values = results()[workload], {**ROWS[workload][1], "trained_steps": STEPS}
    known = [(name, 1e-6) for name in result.repeated]
    for relation in (relation for relation in result.relations if relation.limit == "equal"):
        # What a column follows from is known by it; of a product each factor has the relative tolerance of all.
        names = sorted(inspect.signature(relation.compute).parameters.keys() & {*result.__struct_fields__})
        known += [(name, relation.tolerance) for name in (relation.column, *names)]
    numbers = [(name, by) for name, by in known if isinstance(values.get(name), int | float) and name != "step"]
    return [(name, by * (values["total_ms"] if name in STAGES else values[name])) for name, by in numbers]


@pytest.mark.parametrize("workload", ROWS)
def test_every_workload_with_results_has_a_sound_run(workload, tmp_path_factory):
    assert ROWS.keys() == results().keys()
    run = sound(tmp_path_factory.mktemp("sound"), workload)
    assert reason(run, workload, run[2][results_table(workload)]) == ""
    columns = set(SCHEMAS[results_table(workload)].names) - {"run_id", "window_id", "step", "trained_steps"}
    assert ROWS[workload][1].keys() == columns


@pytest.mark.parametrize("workload", ROWS)
def test_rows_are_those_of_the_steps(workload, tmp_path_factory):
    run = sound(tmp_path_factory.getbasetemp() / "changed", workload)
    table = results_table(workload)
    rows = run[2][table]
    assert f"{table} lacks 1 of" in reason(run, workload, rows.head(-1))
    assert f"{table} repeats 1 row" in reason(run, workload, pl.concat([rows, rows.tail(1)]))
    other = rows.with_columns((pl.col("step") + 1000).alias("step"))
    text = f"{table} has {pluralize(rows.height, 'row')} of steps that the step table does not have"
    assert text in reason(run, workload, other)


@pytest.mark.parametrize(
    ("workload", "column", "value", "text"),
    [
        ("sd_inference", "total_ms", math.nan, "total_ms is nan, which no measurement gives in step 0 and 59 more"),
        ("sd_inference", "finite", False, "finite is False, outside 1.00 to 1.00"),
        ("sd_inference", "psnr_db", 11.5, "psnr_db is 11.5, outside 20.0 to 100"),
        ("sd_inference", "sampler", "ddim", "sampler is ddim, and the workload states plms"),
        ("fid_clip", "clip_mean", 26.0, "clip_mean is 26, outside -1.00 to 1.00"),
        ("volume3d_train", "loss", -0.1, "loss is -0.1, outside 0 to 10.0"),
        ("volume3d_sample", "baseline_ms_ssim", 0.1, "baseline_ms_ssim is 0.1, outside 0.500 to 1.00"),
        ("volume3d_sample", "mmd", 2.5, "mmd is 2.5, outside -2.00 to 2.00"),
        ("denoise_shape", "model", "swinir", "model is swinir, and by model and parameters_by_network drunet"),
        ("denoise_shape", "weights_mib", 0.13, "and models_resident at least 124.5"),
        ("denoise_patch", "reserved_peak_mib", 800.0, "is 800, and by allocated_peak_mib at least 900"),
        ("denoise_patch", "times_by_rank_ms", "none", "time_ms is 500, and by times_by_rank at least nan"),
        ("denoise_patch", "times_by_rank_ms", "700.0", "time_ms is 500, and by times_by_rank at least 700"),
        ("denoise_patch", "peaks_by_rank_mib", "950.0", "is 900, and by peaks_by_rank_mib at least 950"),
        ("denoise_patch", "nvml_used_mib", 2e6, "nvml_used_mib is 2e+06, and by memory_mib at most 143771"),
    ],
)
def test_what_contradicts_is_named(workload, column, value, text, tmp_path_factory):
    run = sound(tmp_path_factory.getbasetemp() / "changed", workload)
    rows = run[2][results_table(workload)]
    wrong = rows.with_columns(pl.lit(value).cast(rows.schema[column]).alias(column))
    assert text in reason(run, workload, wrong)


def test_number_of_patches_of_an_older_run_is_compared(tmp_path):
    run = sound(tmp_path, "denoise_patch")
    for name in ("image_width_px", "patch_overlap_px"):
        del run[0].workload_facts[name]
    wrong = run[2]["results_denoise_patch"].with_columns(num_patches=pl.lit(9))
    assert "num_patches is 9, and by image_px" in reason(run, "denoise_patch", wrong)


@pytest.mark.parametrize(("counted", "text"), [(0, ", and losses_not_finite is 0"), (3, ""), (None, ""), (5, "is 5")])
def test_a_loss_of_null_is_a_loss_that_is_not_finite(counted, text, tmp_path_factory):
    workload, table = "volume3d_train", results_table("volume3d_train")
    manifest, windows, tables = sound(tmp_path_factory.mktemp("null"), workload)
    stated = {name: value for name, value in {"losses_not_finite": counted}.items() if value is not None}
    facts = msgspec.structs.replace(manifest, workload_facts={**manifest.workload_facts, **stated})
    rows = tables[table].with_columns(loss=pl.when(pl.col("step") >= 3).then("loss"))
    told = reason((facts, windows, tables), workload, rows)
    assert f"{table}, loss: 3 of 60 values are not finite{text}" in told or text == "is 5" in told
    assert ("losses_not_finite is" in told) == bool(text)
