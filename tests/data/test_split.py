"""The split by whole geographic blocks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inpaint_bench.core.config.bench import DataConfig
from inpaint_bench.data.open import open_source
from inpaint_bench.data.source import Source, blocks, open_split, split

from .support import open_prepared


def scattered(count: int, seed: int = 0) -> np.ndarray:
    """Return positions scattered over about 4 km x 4 km."""
    return np.array([30.6, -96.3]) + np.random.default_rng(seed).uniform(0, 0.04, (count, 2))


@settings(deadline=None, max_examples=50)
@given(st.integers(20, 400), st.floats(0.01, 0.9), st.floats(50, 1500), st.integers(0, 99))
def test_no_block_is_on_both_sides_and_the_share_is_reached(count: int, share: float, side: float, seed: int) -> None:
    positions = scattered(count, seed)
    held_out = split(positions, share, side, seed)
    block_of_image = np.array(blocks(positions, side))
    assert not set(block_of_image[held_out]) & set(block_of_image[~held_out])
    assert 0 < held_out.sum() < count
    if len(set(block_of_image[~held_out])) > 1:
        assert held_out.mean() >= share


def test_split_is_determined_by_the_seed() -> None:
    positions = scattered(300)
    first = split(positions, 0.2, 200, 0)
    assert np.array_equal(first, split(positions, 0.2, 200, 0))
    assert not np.array_equal(first, split(positions, 0.2, 200, 1))


def test_split_does_not_depend_on_the_order_of_images() -> None:
    positions = scattered(300)
    order = np.random.default_rng(1).permutation(300)
    assert np.array_equal(split(positions, 0.2, 200, 0)[order], split(positions[order], 0.2, 200, 0))


@pytest.mark.parametrize("latitude", [0.0, 60.0, -33.9, 89.9])
def test_blocks_are_square_at_any_latitude(latitude: float) -> None:
    metre = 1 / 111_320
    east = metre / np.cos(np.radians(latitude))
    line = np.array([[latitude, 10 + east * at] for at in range(0, 2000, 10)])
    assert len(set(blocks(line, 200))) == pytest.approx(10, abs=1)
    line = np.array([[latitude - metre * at, 10.0] for at in range(0, 2000, 10)])
    assert len({name.split(":")[0] for name in blocks(line, 200)}) == pytest.approx(10, abs=1)


@pytest.mark.parametrize("latitude", [0.0, -16.8, 65.3, 89.99])
@pytest.mark.parametrize("block_m", [50, 200, 1000])
def test_village_on_the_180th_meridian_lies_in_one_block(latitude: float, block_m: float) -> None:
    degree_m = 111_320 * np.cos(np.radians(latitude))
    near = np.linspace(0, 0.9 * block_m, 20) / degree_m
    row = np.floor(latitude * 111_320 / block_m) * block_m / 111_320 + 0.5 * block_m / 111_320
    both = np.array([[row, east] for east in (*(180 - near), *(-180 + near))])
    assert len(set(blocks(both, block_m))) == 1
    far = np.array([[row, 180 - 5 * block_m / degree_m], [row, -180 + 5 * block_m / degree_m]])
    assert len({*blocks(far, block_m), blocks(both, block_m)[0]}) == 3


def test_blocks_elsewhere_are_those_of_plain_arithmetic() -> None:
    positions = np.random.default_rng(0).uniform((-80, -179.9), (80, 179.9), (500, 2))
    rows = np.floor(positions[:, 0] * 111_320 / 200)
    columns = np.floor(positions[:, 1] * 111_320 * np.cos(np.radians((rows + 0.5) * 200 / 111_320)) / 200)
    assert blocks(positions, 200) == [f"{int(row)}:{int(column)}" for row, column in zip(rows, columns, strict=True)]


@pytest.mark.parametrize(
    ("longitudes", "centre"),
    [
        ([179.99, -179.99, -179.98], -179.99),
        ([179.98, 179.99, -179.99], 179.99),
        ([180.0, -180.0, 180.0], 180.0),
        ([-96.3, -96.1, -96.0], -96.1),
        ([13.1, 13.2, 13.3, -170.0], 13.25),
    ],
    ids=str,
)
def test_centre_is_where_the_photographs_are(longitudes: list[float], centre: float) -> None:
    source = Source()
    source.positions = np.array([[-16.8, longitude] for longitude in longitudes])
    assert source.centre[0] == -16.8
    assert abs((source.centre[1] - centre + 180) % 360 - 180) < 1e-9
    assert -180 <= source.centre[1] <= 180


def test_prepared_data_has_the_same_split_as_its_source(facades: Path) -> None:
    config = DataConfig(kind="synthetic", num_images=60, resolution_px=32)
    direct = open_split(open_source(config), config)
    prepared = open_split(open_prepared(facades), config)
    assert [part.tolist() for part in direct] == [part.tolist() for part in prepared]
    assert sorted(np.concatenate(direct).tolist()) == list(range(60))
    assert min(map(len, direct)) > 0
