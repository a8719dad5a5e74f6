"""More GPUs are predicted from runs of one and two."""

from __future__ import annotations

from pathlib import Path

import pytest

from analysis.dataset import Dataset, open_dataset
from analysis.predict.claims import Claim
from analysis.predict.scaling import predict, sent_ms, step_ms
from inpaint_bench.cli import app

RESULT = Path(__file__).parents[3] / "benchmarks" / "results" / "2026-11-23-h200-finetune"


@pytest.fixture(scope="module")
def one_gpu() -> Dataset:
    return open_dataset(RESULT)


def test_a_step_takes_the_share_of_the_communication_that_two_gpus_lost() -> None:
    # 4 GB over 400 GB/s: two GPUs exchange them in 10 ms, eight in 17.5 ms.
    assert (sent_ms(4e9, 2, 400.0), sent_ms(4e9, 8, 400.0)) == pytest.approx((10.0, 17.5))
    assert step_ms(300.0, 17.5, 0.4) == pytest.approx((300 + 0.4 * 17.5, 300.0, 317.5))
    assert step_ms(300.0, 17.5, 2.0) == pytest.approx((335.0, 300.0, 335.0))
    assert step_ms(300.0, 17.5, None) == (None, 300.0, 317.5)


def test_what_the_backward_pass_cannot_hold_is_exposed() -> None:
    # Of 375 ms over the network 200 fit beside the backward pass.
    assert step_ms(300.0, 375.0, 0.4) == pytest.approx((300 + 175, 300 + 175, 300 + 375))
    assert step_ms(300.0, 375.0, 1.0)[0] == pytest.approx(300 + 375)


def claims(dataset: Dataset, recipe: str = "baseline") -> dict[tuple[int, int], Claim]:
    made = predict(dataset, recipe=recipe, batch=16)
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


def test_gradients_of_bf16_weights_are_half_as_large(one_gpu: Dataset) -> None:
    for recipe, size in (("baseline", 3.44e9), ("tuned_hopper", 1.72e9)):
        claim = claims(one_gpu, recipe)[8, 1]  # from all exposed to nothing
        sent_ms = 1e3 * 8 * 16 * (1 / claim.low - 1 / claim.high)
        assert sent_ms == pytest.approx(1.75 * size / 450e9 * 1e3, rel=1e-2)


def test_what_cannot_be_predicted_is_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["predict", "scaling", str(RESULT), "--recipe", "none_such"]) == 2
    assert "no valid run of finetune_inpaint on one GPU" in capsys.readouterr().err
