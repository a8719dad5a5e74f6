"""Advice below the table of a sweep."""

from __future__ import annotations

from inpaint_bench.core.schema import PointState, Reason
from launchers.status.survey import PointStatus, SweepStatus
from launchers.status.tables import next_steps
from launchers.sweep.ledger import PointRecord


def test_advice_follows_the_rerun_policies_that_the_sweep_was_launched_with(tmp_path):
    """Regression: it followed the defaults."""
    launched = [
        (Reason.TIMEOUT, []),
        (Reason.APP_ERROR, []),
        (Reason.TIMEOUT, ["rerun.timeout.send=false"]),
        (Reason.APP_ERROR, ["++rerun.app_error.send=True"]),
    ]
    points = [
        PointStatus(
            record=PointRecord(num=num, overrides=overrides, gpu="a100", batch=16, site="delta"),
            state=PointState.FAILED,
            reason=reason,
            message="",
        )
        for num, (reason, overrides) in enumerate(launched)
    ]
    resubmitted, permanent = next_steps(SweepStatus(points=points, replies={}, sites={}, notes=[]), tmp_path)
    assert "resubmits 1 app_error, 1 timeout." in resubmitted
    assert "Next: 1 app_error, 1 timeout would fail the same way again" in permanent
    assert "--point 1`" in permanent
    assert "--only app_error,timeout " in permanent
