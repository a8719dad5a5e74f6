"""More GPUs are predicted from runs of one and two, and the text says that it is no measurement."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest

from analysis.dataset import Dataset, open_dataset
from benchmarks import predict_scaling
from benchmarks.predict_scaling import Links, Model
from inpaint_bench.core.errors import UserError

RESULT = Path(predict_scaling.__file__).parent / "results" / "2026-11-23-h200-finetune"
LINKS = Links(nvlink=400.0, network=20.0)
# 4 GB over 400 GB/s: two GPUs exchange them in 10 ms.
MEASURED = Model(batch=16, step_ms_1=300.0, step_ms_2=304.0, gradient_bytes=4e9, links=LINKS)


@pytest.fixture(scope="module")
def one_gpu() -> Dataset:
    return open_dataset(RESULT)


def text(dataset: Dataset, recipe: str = "baseline") -> str:
    return predict_scaling.table(dataset, "made-up", None, 12.5, 8, "published", recipe=recipe, batch=16)


def test_what_two_gpus_lose_is_the_share_that_more_gpus_lose() -> None:
    assert MEASURED.share == pytest.approx(0.4)
    assert MEASURED.step_ms(2, 1)[0] == pytest.approx(304.0)
    assert MEASURED.step_ms(8, 1) == pytest.approx((300 + 0.4 * 17.5, 300.0, 317.5))
    assert MEASURED.rate(8, 320.0) == pytest.approx(400.0)


def test_the_rate_of_nvlink_does_not_matter_within_a_node_where_the_share_is_calibrated() -> None:
    slower = replace(MEASURED, links=Links(nvlink=200.0, network=20.0))
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


def test_the_runs_of_two_gpus_calibrate_it() -> None:
    lines = text(open_dataset(RESULT.with_name("2026-11-23-h200-two-gpus")), "tuned").splitlines()
    assert lines[1].startswith("Calibrated on made-up: 3 runs of one GPU and 4 of two; ")
    assert [line.split()[3] for line in lines if line.split()[:2] == ["2", "1"]] == ["119.4"]


def test_without_runs_of_two_gpus_it_says_that_it_is_not_calibrated(one_gpu: Dataset) -> None:
    lines = text(one_gpu).splitlines()
    assert lines[0].startswith("PREDICTION, NOT MEASURED: h200, baseline")
    assert lines[1].startswith("NOT CALIBRATED: made-up has no runs of two GPUs")
    assert [line.split()[3] for line in lines if line.split()[:2] in (["8", "1"], ["16", "2"])] == ["-", "-"]


def test_with_them_it_names_the_dataset_and_predicts_the_steps(one_gpu: Dataset) -> None:
    runs = one_gpu.runs
    two = runs.with_columns(
        run_id=pl.col("run_id") + "-2",
        gpus=pl.lit(2).cast(runs.schema["gpus"]),
        images_per_s=pl.col("images_per_s") * 1.9,
    )
    lines = text(replace(one_gpu, runs=pl.concat([runs, two]))).splitlines()
    assert lines[1].startswith("Calibrated on made-up: 3 runs of one GPU and 3 of two; ")
    (eight,) = [line.split() for line in lines if line.split()[:2] == ["8", "1"]]
    step_ms_1 = float(next(line.split()[3] for line in lines if line.split()[:2] == ["1", "1"]))
    # 95 % on two GPUs; 8 send 1.75 times as much.
    assert float(eight[3]) == pytest.approx(step_ms_1 * (1 + 1.75 * (1 / 0.95 - 1)), rel=1e-3)


def test_gradients_of_bf16_weights_are_half_as_large(one_gpu: Dataset) -> None:
    assert "Gradients 3.44 GB" in text(one_gpu)
    assert "Gradients 1.72 GB" in text(one_gpu, "tuned_hopper")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--recipe", "none_such"], "no valid run of finetune_inpaint on one GPU"),
        (["--network-gb-s", "50"], "say where the rates are from"),
        (["--per-node", "1"], "nobody to exchange gradients with"),
        (["--nvlink-gb-s", "0"], "must be above 0"),
    ],
)
def test_what_cannot_be_predicted_is_a_sentence(arguments: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        predict_scaling.main([str(RESULT), *arguments])
