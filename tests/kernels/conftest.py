"""Run Triton's kernels on the processor: slow, but the very code that a GPU runs."""

import pytest


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the kernels run on tensors of the processor, in Triton's interpreter (see tests/conftest.py)."""
    from inpaint_bench.kernels import dispatch  # loads torch, which `make quick` does without

    pytest.importorskip("triton")
    monkeypatch.setattr(dispatch, "interpret", True)
