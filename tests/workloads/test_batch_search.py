"""The search of the largest batch. Whether a batch fits is asked of a GPU."""

from __future__ import annotations

import pytest

from inpaint_bench.workloads.batch_search import largest_batch


@pytest.mark.parametrize(("limit", "found"), [(0, 0), (1, 1), (3, 3), (99, 96), (104, 104), (127, 120), (5000, 4096)])
def test_the_largest_batch_is_found_to_within_an_eighth(limit: int, found: int) -> None:
    asked: list[int] = []

    def fits(batch: int) -> bool:
        asked.append(batch)
        return batch <= limit

    assert largest_batch(fits) == found
    assert len(asked) == len(set(asked)) <= 13
