"""What the answer on making images says of several kinds of work in one dataset."""

from typing import Any

import polars as pl

from analysis import recipe_labels
from analysis.report.workloads import sd_inference

CELL: dict[str, Any] = {"inpaints": False, "sampler": "plms", "sampler_steps": 50, "guidance": 7.5, "variant": None}
CELL |= {"resolution_px": 512, "model": "sd15, plms 50, guidance 7.5", "site": "local", "gpu": "h200", "batch": 1}
CELL |= {"demonstration": False, "comparability_key": "", "precision": "fp16", "recipe": "amp_fp16", "p50_ms": 2000.0}
CELL |= {recipe_labels.COLUMN: "amp_fp16", "gpu_uuid": "GPU-1", "node": "n", "seed": 0, "run_id": "r-1"}


def answer(*changes: dict[str, Any]) -> str:
    return sd_inference._answer([pl.DataFrame([CELL | change]) for change in changes])


def test_fewer_steps_are_another_work_and_not_a_faster_recipe() -> None:
    """Regression: of 50 and 20 steps the answer gave the seconds of 20, and did not say of how many."""
    short = {"sampler_steps": 20, "model": "sd15, plms 20, guidance 7.5", "p50_ms": 800.0}
    assert answer({}, short) == (
        "Making images with amp_fp16 on an H200 (1 run) takes 2.00 s per image of SD 1.5, 50 steps at batch 1; "
        "0.800 s per image of SD 1.5, 20 steps at batch 1."
    )
    inpainting = {"inpaints": True, "model": "sd15_inpaint, plms 50, guidance 7.5"}
    assert " of SD 1.5, text to image at batch 1; " in answer({}, inpainting)


def test_one_work_is_not_named() -> None:
    assert answer({}) == "Making images takes 2.00 s per image at batch 1 with amp_fp16 on an H200 (1 run)."
