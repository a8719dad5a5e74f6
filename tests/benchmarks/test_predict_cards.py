"""Other cards are predicted from a profile, and the table says that it is no measurement."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import predict_cards, step_record
from benchmarks.step_record import StepProfile
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


def line(text: str, start: str) -> list[str]:
    (line,) = (row for row in text.splitlines() if row.startswith(start))
    return line.removeprefix(start).split()


def test_products_scale_with_bf16_peaks_other_kernels_with_bandwidth_and_idle_time_not_at_all() -> None:
    text = predict_cards.table(made_up(), ["a100"], None)
    assert text.startswith("PREDICTION, NOT MEASURED, from a profile of NVIDIA H200")
    products, memory = 989.5 / 312, 4800 / 1555
    assert line(text, "convolution forward")[:2] == ["45.00", f"{45 * products:.1f}"]
    assert line(text, "norm")[:2] == ["30.00", f"{30 * memory:.1f}"]
    assert line(text, "idle") == ["10.00", "10.0"]
    step_ms = 10 + 60 * products + 30 * memory
    assert line(text, "step")[:2] == ["100.00", f"{step_ms:.1f}"]
    assert line(text, "images/s")[:2] == ["160.0", f"{16e3 / step_ms:.1f}"]


def test_the_measured_rate_scales_the_profile() -> None:
    text = predict_cards.table(made_up(), ["a100"], 80.0)
    # 200 ms, of which 10 are idle: kernels take 190 instead of 90.
    assert line(text, "norm")[0] == f"{30 * 190 / 90:.2f}"
    assert line(text, "images/s")[0] == "80.0"


def test_the_range_ends_where_convolutions_reach_what_libraries_reach() -> None:
    classes = made_up().classes
    (convolutions,) = (row for row in classes if row.kind == KernelClass.CONV_FORWARD)
    convolutions.flop = 19.2e12
    base, card = predict_cards.peaks("h200"), predict_cards.peaks("a40")
    result = predict_cards.predict_class(convolutions, 45.0, base, card)
    assert result.fastest == pytest.approx(19.2 / (0.8 * 149.7) * 1e3)
    assert result.fastest < result.ms <= result.slowest
    # Attention may be bound by its softmax, but is never faster than its products.
    (attention,) = (row for row in classes if row.kind == KernelClass.ATTENTION)
    attention.flop = 7.0e12
    assert predict_cards.predict_class(attention, 15.0, base, card).fastest == pytest.approx(7.0 / 149.7 * 1e3)


def test_the_posters_ratio_stands_beside_it() -> None:
    text = predict_cards.table(made_up(), ["a40", "a100", "l40s"], None)
    assert line(text, "the same, poster (published)") == ["4.41", "2.59", "-"]


def test_attention_of_hopper_alone_is_no_basis_and_the_table_says_so() -> None:
    kernels = [*made_up().kernels]
    kernels[-1].detail = "FlashAttention-4"
    assert "profile recipe=tuned for other cards" in predict_cards.table(made_up(kernels=kernels), ["a100"], None)
    assert "FlashAttention-4" not in predict_cards.table(made_up(), ["a100"], None)


def test_what_cannot_be_predicted_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no peaks of a card named cpu; have: a40"):
        predict_cards.table(made_up(gpu="cpu"), ["a100"], None)
    with pytest.raises(UserError, match="no peaks of a card named b300"):
        predict_cards.table(made_up(), ["b300"], None)
    with pytest.raises(UserError, match="phase eager has no step time"):
        predict_cards.table(made_up(phase="eager", step_ms=None), ["a100"], None)
    with pytest.raises(UserError, match=r"9\.00 ms per step is less than the 10\.00 ms"):
        predict_cards.table(made_up(step_ms=9.0), ["a100"], None)
    with pytest.raises(UserError, match="does not exist"):
        predict_cards.main([str(tmp_path / "none.json")])


def test_the_test_on_an_h100_stands_beside_it() -> None:
    text = predict_cards.table(made_up(), ["a40"], None)
    plain = "  baseline, batch 16: predicted 27.9 (26.0 to 28.5), measured 31.3 to 31.6: -11 %, outside of the range"
    assert plain in text.splitlines()
    assert (
        "  tuned_hopper, batch 16: predicted 145.3 (120.3 to 162.7), measured 149.3 to 149.8: -3 %" in text.splitlines()
    )


def test_a_written_profile_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_record(tmp_path / "profile.json", made_up())
    assert predict_cards.main([str(tmp_path / "profile.json"), "--cards", "a40"]) == 0
    assert "A40 predicted" in capsys.readouterr().out
