"""Masks: their coverage, their seeds, and the same at every resolution."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from inpaint_bench.data.masks import DRAWINGS, KINDS, WORK_PX, debris, make_mask, water
from inpaint_bench.data.source import Mask

SEEDS = 400
# Mean coverage of masks that are not full; see docs/training.md.
COVERAGE = {"sd": (0.30, 0.42), "disaster": (0.22, 0.35)}
DRAWN = {"debris": (0.12, 0.25), "water": (0.25, 0.40), "smoke": (0.32, 0.46), "facade": (0.15, 0.30)}


@pytest.mark.parametrize("kind", KINDS)
class TestEveryKind:
    def test_mask_covers_a_part_and_on_average_the_documented_share(self, kind: str) -> None:
        shares = [make_mask(64, (0, number), kind, full_mask_share=0).mean() for number in range(SEEDS)]
        assert min(shares) > 0
        assert max(shares) < 1
        assert COVERAGE[kind][0] < np.mean(shares) < COVERAGE[kind][1]

    def test_share_of_full_masks_is_as_configured(self, kind: str) -> None:
        for share in (0.25, 0.6):
            full = sum(make_mask(32, (1, number), kind, share).all() for number in range(SEEDS))
            spread = 4 * math.sqrt(SEEDS * share * (1 - share))
            assert full == pytest.approx(SEEDS * share, abs=spread)
        assert all(make_mask(32, (2, number), kind, full_mask_share=1).all() for number in range(10))

    def test_mask_is_determined_by_its_seed(self, kind: str) -> None:
        first, second, other = (make_mask(64, (3, number), kind, full_mask_share=0) for number in (1, 1, 2))
        assert np.array_equal(first, second)
        assert not np.array_equal(first, other)

    @pytest.mark.parametrize("side", [32, 96, 512])
    def test_coverage_is_the_same_at_any_resolution(self, kind: str, side: int) -> None:
        masks, reference = (
            [make_mask(size, (4, number), kind, full_mask_share=0) for number in range(60)] for size in (side, WORK_PX)
        )
        assert {(mask.shape, mask.dtype) for mask in masks} == {((side, side), np.dtype(np.uint8))}
        assert np.mean([m.mean() for m in masks]) == pytest.approx(np.mean([m.mean() for m in reference]), abs=0.02)


@pytest.mark.parametrize("drawing", DRAWINGS, ids=lambda drawing: drawing.__name__)
def test_each_kind_of_disaster_covers_its_documented_share(drawing: Any) -> None:
    low, high = DRAWN[drawing.__name__]
    shares = [drawing(np.random.default_rng(number)).mean() for number in range(SEEDS)]
    assert low < np.mean(shares) < high
    assert np.std(shares) > 0.02, "they vary"


def test_the_four_disasters_are_equally_frequent() -> None:
    def bottom_row(mask: Mask) -> bool:
        return bool(mask[-1].all() and not mask[0].any())  # water hides the whole lower edge, hardly anything else does

    floods = sum(bottom_row(make_mask(WORK_PX, (5, number), "disaster", 0)) for number in range(SEEDS))
    assert floods / SEEDS == pytest.approx(0.25, abs=0.09)


def test_debris_is_mostly_in_the_lower_half_and_water_only_at_the_bottom() -> None:
    for number in range(50):
        heap = debris(np.random.default_rng(number))
        assert heap[WORK_PX // 2 :].mean() > heap[: WORK_PX // 2].mean()
        flood = water(np.random.default_rng(number))
        assert (np.diff(flood.astype(int), axis=0) >= 0).all(), "nothing dry below the line"
        assert not flood[: WORK_PX // 4].any()
