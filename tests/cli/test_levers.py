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


def test_the_datasets_of_the_checkout_are_named_on_lines_of_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(levers, "console", lambda: Console(width=80))
    assert app.main(["levers", "no_tf32"]) == 0
    measured = capsys.readouterr().out.partition("Datasets that were read: ")[2]
    assert measured.split()[0] == "2026-11-21-h200-baseline,"
    assert max(map(len, measured.splitlines())) <= 80
