"""Other cards are predicted from measured ones, with an interval as wide as what such predictions were off by."""

from __future__ import annotations

from pathlib import Path

import pytest

from analysis.dataset import Dataset, open_dataset
from analysis.predict.cards import known_errors, predict
from analysis.predict.claims import Claim, read_claims
from inpaint_bench.cli import app
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.estimates import rates
from inpaint_bench.core.paths import ROOT


@pytest.fixture(scope="module")
def measured() -> Dataset:
    return open_dataset(ROOT / "benchmarks" / "results" / "2026-11-23-h100-h200")


def test_another_architecture_is_labelled_and_its_interval_holds_the_largest_error(measured: Dataset) -> None:
    found = {each.cell.gpu: each for each in predict(measured, cards=["a100", "h100"], recipe="baseline", batch=16)}
    errors = rates.errors()
    a100, h100 = found["a100"], found["h100"]
    assert a100.label == "extrapolated from Hopper"
    assert a100.value / a100.low == a100.high / a100.value == pytest.approx(1 + errors["card, published"])
    assert h100.label == ""
    assert h100.value / h100.low == pytest.approx(1 + errors["card"])
    # The card that the dataset has measured is predicted from the other one.
    assert h100.value == pytest.approx(35.8 / rates.slowdown("baseline", "h200", "h100"), rel=0.001)


def test_products_scale_with_bf16_peaks_other_kernels_with_bandwidth_and_idle_time_not_at_all() -> None:
    slower = rates.slowdown("tuned", "h200", "a100")
    assert slower == pytest.approx(0.7425 * 989.5 / 312 + 0.2322 * 4800 / 1555 + 0.0253)


def test_both_cards_are_left_out_in_turn(measured: Dataset) -> None:
    texts = [text for text in known_errors(measured) if text.startswith("tuned_hopper batch 16")]
    assert len(texts) == 2
    assert any("h200 to h100: predicted 146.2 images/s, measured 149.6: -2.3 %" in text for text in texts)
    assert sum("published" in text for text in known_errors(measured)) == 7


def test_attention_of_hopper_alone_is_no_basis_for_other_cards(measured: Dataset) -> None:
    refused, claim = predict(measured, cards=["a40", "h100"], recipe="tuned_hopper", batch=16)
    assert isinstance(claim, Claim)
    assert isinstance(refused, str)
    assert refused.startswith("A40, tuned_hopper, batch 16: ")


def test_what_cannot_be_predicted_is_a_sentence(measured: Dataset) -> None:
    with pytest.raises(UserError, match="b300: no card whose peaks are in conf/gpu; have: a100"):
        list(predict(measured, cards=["b300"]))
    with pytest.raises(UserError, match="no valid run on one GPU"):
        list(predict(measured, cards=["a40"], recipe="none_such"))


def test_claims_are_added_to_a_file(measured: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "claims.json"
    arguments = ["predict", "cards", str(measured.folder), "--recipe", "baseline", "--batch", "16", "-o", str(path)]
    assert app.main(arguments) == 0
    assert "PREDICTED, NOT MEASURED: A40, baseline, batch 16" in capsys.readouterr().out
    assert [claim.cell.gpu for claim in read_claims(path)] == ["a40", "a100"]
    assert app.main(arguments) == 0  # what is stated already stays
    assert len(read_claims(path)) == 2
