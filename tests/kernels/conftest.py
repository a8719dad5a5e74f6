"""Run Triton's kernels on the processor: slow, but the very code that a GPU runs."""

import pytest

from inpaint_bench.kernels import dispatch


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the kernels run on tensors of the processor, in Triton's interpreter (see tests/conftest.py)."""
    pytest.importorskip("triton")
    monkeypatch.setattr(dispatch, "interpret", True)
