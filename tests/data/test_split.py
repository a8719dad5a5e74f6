"""Held out are whole blocks of ground."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inpaint_bench.core.config import DataConfig
from inpaint_bench.core.errors import UserError
from inpaint_bench.data.open_source import open_source, open_split
from inpaint_bench.data.split import blocks, split

from .support import opened


def scattered(count: int, seed: int = 0) -> np.ndarray:
    """Over about 4 km x 4 km."""
    return np.array([30.6, -96.3]) + np.random.default_rng(seed).uniform(0, 0.04, (count, 2))


@settings(deadline=None, max_examples=50)
@given(st.integers(20, 400), st.floats(0.01, 0.9), st.floats(50, 1500), st.integers(0, 99))
def test_no_block_is_on_both_sides_and_the_share_is_reached(count: int, share: float, side: float, seed: int) -> None:
    positions = scattered(count, seed)
    held_out = split(positions, share, side, seed)
    of = np.array(blocks(positions, side))
    assert not set(of[held_out]) & set(of[~held_out])
    assert 0 < held_out.sum() < count
    if len(set(of[~held_out])) > 1:
        assert held_out.mean() >= share


def test_the_same_seed_holds_out_the_same_and_another_one_others() -> None:
    positions = scattered(300)
    first = split(positions, 0.2, 200, 0)
    assert np.array_equal(first, split(positions, 0.2, 200, 0))
    assert not np.array_equal(first, split(positions, 0.2, 200, 1))


def test_an_image_stays_on_its_side_when_the_order_of_images_changes() -> None:
    positions = scattered(300)
    order = np.random.default_rng(1).permutation(300)
    assert np.array_equal(split(positions, 0.2, 200, 0)[order], split(positions[order], 0.2, 200, 0))


@pytest.mark.parametrize("latitude", [0.0, 60.0, -33.9, 89.9])
def test_a_block_is_as_wide_as_it_is_high_at_any_latitude(latitude: float) -> None:
    metre = 1 / 111_320
    east = metre / np.cos(np.radians(latitude))
    line = np.array([[latitude, 10 + east * at] for at in range(0, 2000, 10)])
    assert len(set(blocks(line, 200))) == pytest.approx(10, abs=1)
    line = np.array([[latitude - metre * at, 10.0] for at in range(0, 2000, 10)])
    assert len({name.split(":")[0] for name in blocks(line, 200)}) == pytest.approx(10, abs=1)


def test_one_single_block_cannot_be_split_and_the_message_says_what_to_do() -> None:
    with pytest.raises(UserError, match=r"smaller data\.block_m, or data\.validation_share=0"):
        split(scattered(5), 0.1, 1e6, 0)
    assert not split(scattered(5), 0, 1e6, 0).any()


def test_synthetic_images_are_split_as_the_same_ones_prepared(facades: Path) -> None:
    config = DataConfig(kind="synthetic", num_images=60, resolution_px=32)
    direct = open_split(open_source(config), config)
    again = open_split(opened(facades), config)
    assert [part.tolist() for part in direct] == [part.tolist() for part in again]
    assert sorted(np.concatenate(direct).tolist()) == list(range(60))
    assert min(map(len, direct)) > 0
