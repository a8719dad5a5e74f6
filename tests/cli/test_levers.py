"""The list of levers, with what measurements show about them."""

from __future__ import annotations

import json

import pytest
from rich.console import Console

from inpaint_bench.cli import app, levers
from inpaint_bench.core.config import recipe
from inpaint_bench.core.paths import ROOT


def test_every_recipe_is_described(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["levers", "--json", str(ROOT / "benchmarks/results/2026-11-21-h200-batches")]) == 0
    shown = {lever["name"]: lever for lever in json.loads(capsys.readouterr().out)}
    assert list(shown) == recipe.choices()
    assert {"baseline", "tuned", "tf32", "compile_max-autotune_plain"} < set(shown)
    assert not {"no_tf32", "adamw"} & set(shown)
    assert [name for name, lever in shown.items() if not lever["description"]] == []
    assert any(seen.startswith("helps: H200, batch 16") for seen in shown["adamw_fused"]["seen"])


def test_one_lever_is_shown_with_what_it_sets_and_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["levers", "attn_flash4", str(ROOT / "benchmarks/results/2026-11-23-h200-ladder")]) == 0
    out = capsys.readouterr().out
    assert out.startswith(
        "attn_flash4: FlashAttention-4\n  sets recipe.attention=flash4\n  needs unet_nhwc, FLUX or SD 3.5; a Hopper GPU"
    )
    assert "part of generate_hopper, tuned_hopper, tuned_online" in out
    assert "images/s" in out
    assert app.main(["levers", "no_tf32", "--json"]) == 0
    (lever,) = json.loads(capsys.readouterr().out)
    assert lever["sets"] == {"tf32": False}
    assert lever["description"].endswith("false, the default")


def test_levers_outside_of_studies_have_the_cells_that_differ_by_them(capsys: pytest.CaptureFixture[str]) -> None:
    """Regression: nothing was shown of attn_math, fp8, tuned_hopper; of channels_last the runs that undid it."""
    assert (
        app.main(["levers", "--json", "attn_math", "fp8", "tuned_hopper", "channels_last", "exchange_peer_copies"]) == 0
    )
    math, fp8, hopper, layout, exchange = json.loads(capsys.readouterr().out)
    assert math["seen"] == [
        "provisional: sd15_inpaint, 512 px, H200, batch 16: -49.2 % images/s (no interval, n = 1) over baseline"
    ]
    assert any(
        seen.startswith("helps: flux_fill, 512 px, H200, batch 16: +38.6 % images/s (95 %: ") for seen in fp8["seen"]
    )
    assert hopper["seen"][0].endswith(", n = 3) over baseline")
    assert any("1024 px, H200, batch 4: +26.3 %" in seen for seen in fp8["seen"])
    assert any(", 2 H200, batch 16: +3.9 % images/s" in seen for seen in exchange["seen"])
    assert any("over poster_optimized+no_channels_last" in seen for seen in layout["seen"])
    assert not any("earlier_baseline" in seen for seen in layout["seen"])
    assert app.main(["levers", "--json", "attn_flash4", "lora"]) == 0
    flash, lora = json.loads(capsys.readouterr().out)
    assert any("flux2_klein" in seen and seen.endswith("over tuned_dit") for seen in flash["seen"])  # for attn_flash
    assert lora["seen"] == []  # other work than all weights


def test_the_datasets_of_the_checkout_are_named_on_lines_of_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(levers, "console", lambda: Console(width=80))
    assert app.main(["levers", "no_tf32"]) == 0
    measured = capsys.readouterr().out.partition("Datasets that were read: ")[2]
    assert measured.split()[0] == "2026-11-21-h200-baseline,"
    assert max(map(len, measured.splitlines())) <= 80
