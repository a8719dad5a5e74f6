"""The stages of a run sum up to its time, and nested ones count once."""

from __future__ import annotations

import time
from itertools import count

import pytest

from inpaint_bench.core import stages
from inpaint_bench.core.stages import stage


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second passes between two readings; the process is 10 s old."""
    ticks = count(100)
    monkeypatch.setattr(time, "monotonic", lambda: float(next(ticks)))
    monkeypatch.setattr(time, "time_ns", lambda: 0)
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    monkeypatch.setattr(stages, "_process_s", lambda: 10.0)
    monkeypatch.setattr(stages, "_used", False)


def test_a_nested_stage_is_not_counted_in_the_outer_one() -> None:
    stages.begin()
    with stage("model"), stage("parity"):
        pass
    with pytest.raises(ZeroDivisionError), stage("window"):
        _ = 1 / 0
    expected = {"imports": 10.0, "model": 2.0, "parity": 1.0, "window": 1.0, "other": 3.0}
    assert stages.seconds(0) == expected
    assert list(expected) == [name for name in stages.STAGES if name in expected]


def test_time_before_the_process_counts_as_the_start_of_the_job_or_as_other() -> None:
    stages.begin("940")
    assert stages.seconds(0) == {"job start": 50.0, "imports": 10.0, "other": 1.0}
    stages.begin("940")  # a second run in this process: neither job nor process started for it
    assert stages.seconds(-int(5e9)) == {"imports": 0.0, "other": 5.0}


def test_what_executes_no_run_has_no_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "_seconds", {})
    with stage("window"):
        pass
    monkeypatch.setattr(stages, "_seconds", {})
    assert stages.seconds(0) is None
