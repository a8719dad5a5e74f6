"""The sections of volume diffusion: speed-ups over fp32 with validation beside them, and the published figures."""

import polars as pl

from analysis.columns import SCHEMA
from analysis.report.tables import TableBuilder
from analysis.report.workloads import volume3d_sample, volume3d_train

RUN = {"site": "delta", "gpu": "h200", "workload": "volume3d_train", "model": "whole_head 128x128x128", "batch": 2}
RATES = {"fp32": 1.0, "tf32+fp32": 3.0}


def _runs() -> pl.DataFrame:
    rows = [
        {**RUN, "run_id": recipe, "recipe": recipe, "precision": "fp32", "images_per_s": 2 * rate, "steps_per_s": rate}
        | {"joules_per_image": 100 / rate, "comparability_key": "", "parity_prediction_rel": 0.001}
        for recipe, rate in RATES.items()
    ]
    return pl.DataFrame(rows, schema_overrides=SCHEMA).with_columns(
        pl.lit(None, dtype).alias(name) for name, dtype in SCHEMA.items() if name not in rows[0]
    )


def test_training_shows_speed_ups_with_validation_and_the_published_networks():
    sizes = {"network": "whole_head", "depth": 128, "height": 128, "width": 128}
    sizes |= {"parameters": 40226433, "forward_tflop": 5.537}
    results = pl.DataFrame(
        [
            {"run_id": recipe, **sizes, "trained_steps": 25, "validation_l1": 0.5, "validation_ms_ssim": 0.25}
            | {"ms_ssim_scales": 4}
            for recipe in RATES
        ]
    )
    section = volume3d_train.section(TableBuilder(runs=_runs()), results, _runs())
    recipes, networks, claims = section.tables
    shown = [dict(zip(recipes.columns, row, strict=True)) for row in recipes.rows]
    assert {row["Recipe"]: row["Speed-up"] for row in shown} == {"fp32": "1.00", "tf32+fp32": "3.00"}
    assert {row["Energy [J/step]"] for row in shown} == {"200", "66.7"}
    assert {(row["Validation L1"], row["MS-SSIM"]) for row in shown} == {("0.500", "0.250")}
    assert networks.rows[0][2:4] == ["40,226,433", "40,226,433"]
    assert networks.rows[1][3] == "\u2013"
    assert ["tensor core utilisation, largest gain", "9.98 times", "TF32+channels_last_3d"] in claims.rows
    assert "MS-SSIM (4 scales)" in recipes.note


def test_sampling_shows_the_agreement_with_the_baseline():
    results = pl.DataFrame(
        [
            {"run_id": recipe, "window_id": "measure-0", "total_ms": 1000 / rate, "baseline_l1": 0.01}
            | {"baseline_ms_ssim": 0.99, "ms_ssim": 0.1, "finite": recipe == "fp32"}
            for recipe, rate in RATES.items()
        ]
    )
    section = volume3d_sample.section(TableBuilder(runs=_runs()), results, _runs())
    shown = [dict(zip(section.tables[0].columns, row, strict=True)) for row in section.tables[0].rows]
    assert {row["Recipe"]: row["Speed-up"] for row in shown} == {"fp32": "1.00", "tf32+fp32": "3.00"}
    assert {row["MS-SSIM to baseline"] for row in shown} == {"0.990"}
    assert section.paragraphs == ["Batches with voxels that are NaN or infinite: 1."]
