"""More GPUs are predicted from runs of one and two."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest

from analysis.dataset import Dataset, open_dataset
from analysis.predict.claims import Claim
from analysis.predict.scaling import HDR100_GB_S, Model, models, predict
from inpaint_bench.cli import app

RESULT = Path(__file__).parents[3] / "benchmarks" / "results" / "2026-11-23-h200-finetune"
# 4 GB over 400 GB/s: two GPUs exchange them in 10 ms.
MEASURED = Model(batch=16, step_ms_1=300.0, step_ms_2=304.0, gradient_bytes=4e9, nvlink=400.0, network=20.0)


@pytest.fixture(scope="module")
def one_gpu() -> Dataset:
    return open_dataset(RESULT)


def test_what_two_gpus_lose_is_the_share_that_more_gpus_lose() -> None:
    assert MEASURED.share == pytest.approx(0.4)
    assert MEASURED.step_ms(2, 1)[0] == pytest.approx(304.0)
    assert MEASURED.step_ms(8, 1) == pytest.approx((300 + 0.4 * 17.5, 300.0, 317.5))
    assert MEASURED.rate(8, 320.0) == pytest.approx(400.0)


def test_the_rate_of_nvlink_does_not_matter_within_a_node_where_the_share_is_calibrated() -> None:
    slower = replace(MEASURED, nvlink=200.0)
    assert slower.step_ms(8, 1)[0] == pytest.approx(MEASURED.step_ms(8, 1)[0])


def test_what_the_backward_pass_cannot_hold_is_exposed() -> None:
    # 375 ms over the network, of which 200 fit beside the backward pass.
    step_ms, least_ms, most_ms = MEASURED.step_ms(16, 2)
    assert step_ms == least_ms == pytest.approx(300 + 175)
    assert most_ms == pytest.approx(300 + 375)


def test_two_gpus_that_are_faster_expose_nothing_and_slower_ones_than_the_link_widen_the_range() -> None:
    assert replace(MEASURED, step_ms_2=299.0).share == 0.0
    step_ms, _, most_ms = replace(MEASURED, step_ms_2=320.0).step_ms(8, 1)
    assert step_ms == most_ms == pytest.approx(335.0)


def test_between_nodes_an_exchange_costs_at_most_its_time_over_the_network() -> None:
    slow = replace(MEASURED, step_ms_2=320.0)
    assert slow.share == pytest.approx(2.0)
    assert slow.step_ms(16, 2)[0] == pytest.approx(300 + 375)


def claims(dataset: Dataset, recipe: str = "baseline") -> dict[tuple[int, int], Claim]:
    made = predict(dataset, network=HDR100_GB_S, per_node=8, recipe=recipe, batch=16)
    return {(claim.cell.gpus, claim.cell.nodes): claim for claim in made}


def test_the_runs_of_two_gpus_calibrate_it() -> None:
    made = claims(open_dataset(RESULT.with_name("2026-11-23-h200-two-gpus")), "tuned")
    assert list(made) == [(4, 1), (8, 1), (16, 2)]
    assert made[8, 1].value == pytest.approx(1020.0, abs=0.05)  # as in the log of 2026-11-23
    assert made[8, 1].note == "exposed 2.1 times the communication"
    assert made[16, 2].label == "two nodes"


def test_without_runs_of_two_gpus_only_the_interval_is_claimed(one_gpu: Dataset) -> None:
    made = claims(one_gpu)
    assert [claim.value for claim in made.values()] == [None] * 4
    assert made[8, 1].note == "not calibrated"
    assert made[8, 1].low < made[8, 1].high


def test_with_them_it_predicts_the_steps(one_gpu: Dataset) -> None:
    runs = one_gpu.runs
    two = runs.with_columns(
        run_id=pl.col("run_id") + "-2",
        gpus=pl.lit(2).cast(runs.schema["gpus"]),
        images_per_s=pl.col("images_per_s") * 1.9,
    )
    eight = claims(replace(one_gpu, runs=pl.concat([runs, two])))[8, 1]
    (alone,) = (
        runs.filter("valid", recipe="baseline", batch=16)
        .group_by("recipe")
        .agg(pl.mean("images_per_s"))["images_per_s"]
    )
    # 95 % on two GPUs; 8 send 1.75 times as much.
    assert eight.value == pytest.approx(8 * alone / (1 + 1.75 * (1 / 0.95 - 1)), rel=1e-3)


def test_gradients_of_bf16_weights_are_half_as_large(one_gpu: Dataset) -> None:
    sizes = [
        next(models(one_gpu, HDR100_GB_S, recipe, 16))[1].gradient_bytes for recipe in ("baseline", "tuned_hopper")
    ]
    assert sizes == pytest.approx([3.44e9, 1.72e9], rel=1e-2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--recipe", "none_such"], "no valid run of finetune_inpaint on one GPU"),
        (["--network-gb-s", "50"], "say where it is from, with --source"),
        (["--network-gb-s", "0", "--source", "x"], "give a rate above 0"),
        (["--per-node", "1"], "--per-node 1: must be at least 2"),
    ],
)
def test_what_cannot_be_predicted_is_a_sentence(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.main(["predict", "scaling", str(RESULT), *arguments]) == 2
    assert message in capsys.readouterr().err
