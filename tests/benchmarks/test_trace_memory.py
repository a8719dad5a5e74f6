"""A training step is traced on fake tensors."""

from __future__ import annotations

import pytest

from benchmarks import trace_memory
from inpaint_bench.core.errors import UserError

pytestmark = pytest.mark.torch  # which the traced step loads


def test_step_is_traced_without_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against what is known by hand: weights, two moments and gradients; and activations that grow with the batch."""
    bench = trace_memory._compose("gpu=h200", "model=tiny_inpaint", "data.resolution_px=64", "recipe=baseline")
    (low, optimizer, trained, texts), (high, other, *_) = (trace_memory.trace(bench, batch) for batch in (4, 8))
    assert trained < low < high
    assert 4 * trained < optimizer < other < 1.1 * optimizer
    assert texts == 0


@pytest.mark.parametrize("model", ["tiny_flux_fill", "tiny_flux2"])
def test_text_encoders_of_a_transformer_are_told_apart(model: str) -> None:
    bench = trace_memory._compose("gpu=h200", f"model={model}", "data.resolution_px=64", "recipe=[half,lora]")
    (low, _, _, texts), (high, *_) = (trace_memory.trace(bench, batch) for batch in (4, 8))
    assert 0 < texts < low < high


def test_recipe_that_cannot_be_traced_is_refused() -> None:
    with pytest.raises(UserError, match=r"unet, .*does not run on fake tensors"):
        trace_memory.add_traces("sd15_inpaint", ["tuned"], 512)
