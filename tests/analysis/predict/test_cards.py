"""Other cards are predicted from a profile, with an interval as wide as what such predictions were off by."""

from __future__ import annotations

from pathlib import Path

import pytest

from analysis.dataset import Dataset, open_dataset
from analysis.predict import cards
from analysis.predict.cards import Predicted, peaks, predict, predict_class, predict_step
from analysis.predict.claims import read_claims
from benchmarks import step_record
from benchmarks.step_record import StepProfile
from inpaint_bench.cli import app
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.kernels import KernelClass, classify
from inpaint_bench.core.records import write_record
from inpaint_bench.profiling.profile import KernelTotal


def made_up(**changes: object) -> StepProfile:
    """Return a profile of 100 ms: half convolutions, a third norms, the rest attention, and 10 ms idle."""
    times = {"sm90_xmma_fprop_implicit_gemm": 45.0, "_group_norm_forward": 30.0, "flash_fwd_kernel": 15.0}
    kernels = [
        KernelTotal(name=name, kind=classify(name).kind, detail=classify(name).detail, ms=ms, launches=1)
        for name, ms in times.items()
    ]
    fields = {
        "recipe": "tuned",
        "overrides": [],
        "phase": "replay",
        "gpu": "h200",
        "device": "NVIDIA H200",
        "torch": "2.11.0",
        "model": "sd15_inpaint",
        "batch": 16,
        "resolution_px": 512,
        "images": 16,
        "step_ms": 100.0,
        "span_ms": 100.0,
        "kernel_ms": 90.0,
        "idle_ms": 10.0,
        "idle_gaps": 5,
        "norm_pointwise_floor_ms": 8.0,
        "classes": step_record.class_totals(kernels, {}, {}),
        "kernels": kernels,
        "gaps": [],
    }
    return StepProfile(**{**fields, **changes})


BENCHMARKS = Path(step_record.__file__).parent
PROFILES = BENCHMARKS / "profiles" / "2026-11-22-h200"


@pytest.fixture(scope="module")
def measured() -> Dataset:
    return open_dataset(BENCHMARKS / "results" / "2026-11-23-h100-h200")


def predicted(dataset: Dataset, folder: Path, cards: list[str], **changes: object) -> Predicted:
    write_record(folder / "profile.json", made_up(**changes))
    return predict(dataset, [folder / "profile.json"], cards)


def test_products_scale_with_bf16_peaks_other_kernels_with_bandwidth_and_idle_time_not_at_all(
    measured: Dataset, tmp_path: Path
) -> None:
    products, memory = 989.5 / 312, 4800 / 1555
    step_ms = 10 + 60 * products + 30 * memory
    assert predict_step(made_up(), peaks("a100")).ms == pytest.approx(step_ms)  # type: ignore[arg-type]
    (claim,) = predicted(measured, tmp_path, ["a100"]).claims
    assert claim.value == pytest.approx(16e3 / step_ms)


def test_the_range_ends_where_convolutions_reach_what_libraries_reach() -> None:
    classes = made_up().classes
    (convolutions,) = (row for row in classes if row.kind == KernelClass.CONV_FORWARD)
    convolutions.flop = 19.2e12
    base, card = peaks("h200"), peaks("a40")
    result = predict_class(convolutions, 45.0, base, card)
    assert result.fastest == pytest.approx(19.2 / (0.8 * 149.7) * 1e3)
    assert result.fastest < result.ms <= result.slowest
    # Attention may be bound by its softmax, but is never faster than its products.
    (attention,) = (row for row in classes if row.kind == KernelClass.ATTENTION)
    attention.flop = 7.0e12
    assert predict_class(attention, 15.0, base, card).fastest == pytest.approx(7.0 / 149.7 * 1e3)


def test_another_architecture_is_labelled_and_its_interval_holds_the_largest_error(measured: Dataset) -> None:
    result = predict(measured, [PROFILES / "tuned.json", PROFILES / "baseline.json"], ["a100", "h100"])
    largest = max(abs(error) for _, error in result.checks)
    assert any("A100" in text and "published" in text for text, _ in result.checks)
    for claim in result.claims:
        assert claim.value is not None
        if claim.cell.gpu == "a100":
            assert claim.label == "extrapolated from Hopper"
            assert claim.low <= claim.value / (1 + largest)
            assert claim.high >= claim.value / (1 - largest)
        else:
            assert claim.label == ""


def test_both_cards_are_left_out_in_turn(measured: Dataset) -> None:
    texts = [text for text, _ in predict(measured, [PROFILES / "tuned_hopper.json"], []).checks]
    assert texts[0].endswith("predicted 146.2 images/s, measured 149.6: -2.3 %")
    assert texts[1].endswith("predicted 163.4 images/s, measured 159.7: +2.3 %; the shares of classes are its own")
    assert texts[0].startswith("tuned_hopper: H100 left out, from the H200's rate")


def test_attention_of_hopper_alone_is_no_basis_for_other_cards(measured: Dataset) -> None:
    result = predict(measured, [PROFILES / "tuned_hopper.json"], ["a40", "h100"])
    assert [claim.cell.gpu for claim in result.claims] == ["h100"]
    (text,) = result.refused
    assert "for A40: has FlashAttention-4, which needs Hopper: profile recipe=tuned" in text


def test_what_cannot_be_predicted_is_a_sentence(measured: Dataset, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no peaks of a card named cpu; have: a40"):
        predicted(measured, tmp_path, ["a100"], gpu="cpu")
    with pytest.raises(UserError, match="no peaks of a card named b300"):
        predicted(measured, tmp_path, ["b300"])
    with pytest.raises(UserError, match="phase eager has no step time"):
        predicted(measured, tmp_path, ["a100"], phase="eager", step_ms=None)
    with pytest.raises(UserError, match=r"9\.00 ms per step is less than the 10\.00 ms"):
        predicted(measured, tmp_path, ["a100"], step_ms=9.0)
    with pytest.raises(UserError, match="does not exist"):
        cards.read_profile(tmp_path / "none.json")
    (tmp_path / "profile.json").write_text("[]")
    with pytest.raises(UserError, match="give a JSON file that benchmarks/step_profile"):
        cards.read_profile(tmp_path / "profile.json")


def test_the_committed_claims_are_what_the_command_predicts(measured: Dataset, tmp_path: Path) -> None:
    committed = [claim for claim in read_claims(BENCHMARKS / "predictions.json") if claim.kind == "cards"]
    names = {"h100": ("tuned_hopper", "baseline"), "a40,a100": ("tuned", "baseline")}
    for gpus, profiles in names.items():
        options = [word for name in profiles for word in ("--profile", str(PROFILES / f"{name}.json"))]
        out = ["-o", str(tmp_path / "claims.json")]
        assert app.main(["predict", "cards", str(measured.folder), *options, "--cards", gpus, *out]) == 0
    made = read_claims(tmp_path / "claims.json")
    assert [(claim.cell, claim.inputs) for claim in made] == [(claim.cell, claim.inputs) for claim in committed]
    for ours, theirs in zip(made, committed, strict=True):
        assert [ours.value, ours.low, ours.high] == pytest.approx([theirs.value, theirs.low, theirs.high])
