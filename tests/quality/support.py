"""Tiny networks and batches."""

from __future__ import annotations

from pathlib import Path

import torch

from inpaint_bench.models.networks import Networks, build_networks
from tests.run.support import bench

CPU = torch.device("cpu")
CENTRE = (55.7, 13.2)


def tiny(*overrides: str, seed: int = 0) -> Networks:
    torch.manual_seed(seed)
    return build_networks(bench(*overrides).model, CPU, CENTRE)


def listening(seed: int = 0) -> Networks:
    """Networks whose output depends on the position."""
    nets = tiny(seed=seed)
    assert nets.location is not None
    with torch.no_grad():
        nets.location.gate.fill_(1.0)
    return nets


def loaded(folder: Path, *overrides: str) -> Networks:
    return build_networks(bench(f"model.weights={folder}", *overrides).model, CPU, (0.0, 0.0))


def noise(nets: Networks, latitude: float = 55.7, longitude: float = 13.2) -> torch.Tensor:
    """What the networks predict for one fixed input."""
    random = torch.Generator().manual_seed(7)
    state = torch.randn(1, 9, 8, 8, generator=random)
    text = torch.randn(1, 77, 32, generator=random)
    with torch.no_grad():
        if nets.location:
            here = torch.tensor([latitude, longitude], dtype=torch.float64)
            text = torch.cat([text, nets.location(here[:1], here[1:])], dim=1)
        output: torch.Tensor = nets.unet.eval()(state, torch.tensor([300]), text).sample
    return output
