"""Formats of tables and texts."""

import pytest

from launchers.status.tables import duration, folded_job_ids


@pytest.mark.parametrize(
    ("seconds", "text"), [(5, "5 s"), (61, "1 min"), (3600, "1 h"), (3900, "1 h 5 min"), (90_000, "1 d 1 h")]
)
def test_duration_has_its_two_largest_units(seconds, text):
    assert duration(seconds) == text


def test_tasks_of_an_array_are_folded():
    assert folded_job_ids(["7_0", "7_1", "8_4", "7_3"]) == ["7_[0-1,3]", "8_4"]
