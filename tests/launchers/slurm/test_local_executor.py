"""Which GPUs a sweep on this machine is spread over."""

from __future__ import annotations

import pytest

from launchers.slurm.local_executor import visible_gpus


@pytest.mark.parametrize(
    ("visible", "slots"),
    [
        ("", []),
        ("NoDevFiles", []),
        ("-1", []),
        ("0,2", ["0", "2"]),
        ("GPU-1234,GPU-5678", ["GPU-1234", "GPU-5678"]),
        ("MIG-1", ["MIG-1"]),
    ],
    ids=["empty", "none by Slurm", "none", "numbers", "UUIDs", "slice"],
)
def test_cuda_visible_devices_is_handed_on_entry_by_entry_as_it_is(
    visible: str, slots: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A number is CUDA's own order and a slice is the worker's to refuse: nothing is looked up here."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert visible_gpus() == slots
