"""Every test is in one tier, and each tier is a target of the Makefile."""

from __future__ import annotations

from pathlib import Path

import pytest

from .tiers import COLLECTED, TIERS


def test_every_test_belongs_to_exactly_one_tier(pytestconfig: pytest.Config) -> None:
    """Of all that this session collected: in `make test` and `make faults`, of all there are."""
    tiers = {
        item.nodeid: {mark.name for mark in item.iter_markers()} & {*TIERS} for item in pytestconfig.stash[COLLECTED]
    }
    assert {name: found for name, found in tiers.items() if len(found) != 1} == {}


@pytest.mark.parametrize("tier", TIERS)
def test_tier_is_run_by_the_makefile(tier: str) -> None:
    makefile = (Path(__file__).parents[1] / "Makefile").read_text()
    assert f"-m {tier}\n" in makefile or f"--{tier}\n" in makefile
