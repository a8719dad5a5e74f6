"""Every test is in one tier, and each tier is a target of the Makefile."""

from __future__ import annotations

import os
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


def test_tests_of_a_group_share_a_worker(request: pytest.FixtureRequest) -> None:
    """pytest-xdist sends tests to workers by what follows @, which it adds to their names."""
    if os.environ.get("PYTEST_XDIST_WORKER") is None:
        pytest.skip("one process")
    assert request.node.nodeid.endswith("@tests/test_tiers.py")
