"""Which points a job runs one after another, and what its time limit and their costs are."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from inpaint_bench.core.errors import UserError
from launchers.points.blocks import advice, assign_blocks
from launchers.points.point import Point, group_points

Make = Callable[..., list[Point]]
CELLS = [f"gpu={gpu} batch={batch} site=delta" for gpu in ("a40", "h200") for batch in (8, 16, 24)]


def numbers(points: list[Point]) -> list[list[list[int]]]:
    """Return the numbers of the points of each job of each array."""
    return [[[point.num for point in task] for task in group.tasks] for group in group_points(points)]


def test_points_have_jobs_of_their_own_by_default(points: Make) -> None:
    made = points(*CELLS)
    assign_blocks(made)
    assert numbers(made) == [[[0], [1], [2]], [[3], [4], [5]]]
    assert not any(group.in_blocks for group in group_points(made))


def test_blocks_of_one_request_are_filled_in_order(points: Make) -> None:
    made = points(*(f"{cell} points_per_job=2 time_min=30" for cell in CELLS))
    before = [point.service_units or 0.0 for point in made]
    assign_blocks(made)
    assert numbers(made) == [[[0, 1]], [[2]], [[3, 4]], [[5]]]  # a block of one has another time limit
    assert [point.request.time_min for point in made] == [60, 60, 30] * 2
    assert [point.service_units for point in made] == pytest.approx(before)
    assert [point.requested().total_time_min for point in made] == [30] * 6


def test_a_block_has_each_cell_once(points: Make) -> None:
    cells = [f"gpu=h200 batch={batch} site=delta repeats=2 points_per_job=9" for batch in (8, 16)]
    made = points(*(f"{cell} seed={seed}" for seed in (0, 1) for cell in cells))
    assign_blocks(made)
    assert numbers(made) == [[[0, 1], [2, 3]]]


def test_auto_takes_as_many_as_likely_fit_the_limit_of_one(points: Make) -> None:
    made = points(
        *(f"gpu=h200 batch={batch} site=delta points_per_job=auto time_min=20" for batch in (2, 4, 8, 16, 32))
    )
    for point, minutes in zip(made, (2.0, None, 4.0, 5.0, 1.0), strict=True):
        point.likely_min = minutes
    assign_blocks(made)
    # 5 and 8 min, and another 9.5 are too many; one point is not predicted.
    assert sorted(numbers(made)[0]) == [[0, 2], [1], [3, 4]]
    assert {point.request.time_min for point in made} == {20}


def test_dry_run_says_what_auto_would_save(points: Make) -> None:
    made = points(*(f"{cell} time_min=20" for cell in CELLS))
    assert advice(made) is None  # nothing is predicted
    for point, minutes in zip(made, (1.0, 1.2, 2.0, 1.0, 1.0, 9.0), strict=True):
        point.likely_min = minutes
    assert advice(made) == "6 jobs of 1 to 9 min; points_per_job=auto makes 3"


def test_what_the_partition_does_not_allow_is_refused(points: Make) -> None:
    made = points(*(f"gpu=h200 batch={batch} site=delta points_per_job=2 time_min=2000" for batch in (8, 16)))
    with pytest.raises(
        UserError, match=r"points_per_job=2: 2 points may take 4000 min, and partition gpuH200x8 of delta"
    ):
        assign_blocks(made)


def test_points_on_this_machine_stay_alone(points: Make) -> None:
    made = points(
        "gpu=cpu recipe=cpu telemetry=none site=local points_per_job=4", "gpu=h200 site=delta points_per_job=4"
    )
    assign_blocks(made)
    assert [point.block for point in made] == [None, 1]
