"""When a resumed training counts as equal to an unbroken one."""

import pytest

from benchmarks.resume_on_gpu import TOLERANCE, compare, tolerance


def test_difference_is_the_largest_of_equal_steps() -> None:
    difference = compare({0: 1.0, 1: 0.5, 2: 0.25}, {0: 1.0, 1: 0.5005, 2: 0.25})
    assert (difference.equal, difference.steps) == (2, 3)
    assert difference.largest == pytest.approx(0.001)


def test_tolerance_grows_with_the_difference_of_unbroken_trainings() -> None:
    losses = {0: 1.0, 1: 0.5}
    assert tolerance(compare(losses, losses)) == TOLERANCE
    assert tolerance(compare(losses, {0: 1.0, 1: 0.501})) == pytest.approx(0.004)


def test_missing_steps_are_an_error() -> None:
    with pytest.raises(AssertionError):
        compare({0: 1.0, 1: 0.5}, {0: 1.0})
