"""What is said of a point, given what Slurm, the manifest and the parts say."""

import json

import pytest

from inpaint_bench.contract import MANIFEST, TELEMETRY, PointState, Reason
from inpaint_bench.truth import GONE, Leavings, SchedulerWord, verdict


def manifest(status: str, reason: str | None = None, message: str | None = None, **more):
    content = {"status": status, "reason": reason, "message": message, "telemetry": {"source": "nvml"}}
    return {**content, "progress": {"step": 7, "steps_total": 60}, **more}


def judge(slurm, left=None, telemetry="complete", **more):
    word = SchedulerWord(state=slurm, detail="exit code 1:0") if slurm != "silent" else None
    leavings = Leavings(manifest=left, telemetry=telemetry if left else None)
    facts = {"submitted": True, "refused": None, "cancelled": False, "scheduler": word, "left": leavings}
    result = verdict(**{**facts, **more})
    return result.state, result.reason


FAILED, COMPLETED = PointState.FAILED, PointState.COMPLETED


@pytest.mark.parametrize(
    ("slurm", "left", "says"),
    [
        ("PENDING", None, (PointState.QUEUED, None)),
        ("RUNNING", manifest("running"), (PointState.RUNNING, None)),
        ("COMPLETING", manifest("completed"), (PointState.RUNNING, None)),
        ("COMPLETED", manifest("completed"), (COMPLETED, None)),
        ("COMPLETED", None, (FAILED, Reason.LOST)),
        ("COMPLETED", manifest("failed", "app_error"), (FAILED, Reason.APP_ERROR)),
        ("FAILED", manifest("failed", "oom_gpu"), (FAILED, Reason.OOM_GPU)),
        ("FAILED", manifest("running"), (FAILED, Reason.LOST)),
        ("FAILED", manifest("completed"), (FAILED, Reason.APP_ERROR)),
        ("FAILED", None, (FAILED, Reason.NEVER_STARTED)),
        ("TIMEOUT", manifest("interrupted", "cancelled"), (FAILED, Reason.TIMEOUT)),
        ("NODE_FAIL", manifest("running"), (FAILED, Reason.NODE_FAIL)),
        ("PREEMPTED", manifest("interrupted", "preempted"), (FAILED, Reason.PREEMPTED)),
        ("OUT_OF_MEMORY", manifest("running"), (FAILED, Reason.OOM_HOST)),
        ("CANCELLED", None, (FAILED, Reason.CANCELLED)),
        (None, None, (FAILED, Reason.LOST)),
        (None, manifest("completed"), (COMPLETED, None)),
        (None, manifest("running"), (FAILED, Reason.LOST)),
        ("silent", None, (PointState.UNKNOWN, None)),
        ("silent", manifest("running"), (PointState.RUNNING, None)),
        ("silent", manifest("completed"), (COMPLETED, None)),
        (GONE, None, (FAILED, Reason.NEVER_STARTED)),
        (GONE, manifest("running"), (FAILED, Reason.LOST)),
        (GONE, manifest("completed"), (COMPLETED, None)),
    ],
)
def test_three_witnesses_make_one_verdict(slurm, left, says):
    assert judge(slurm, left) == says


def test_a_run_whose_sidecar_did_not_close_is_not_complete():
    assert judge("COMPLETED", manifest("completed"), telemetry="running") == (FAILED, Reason.TELEMETRY_INCOMPLETE)


def test_a_run_that_asked_for_no_telemetry_is_complete_without():
    left = manifest("completed", telemetry={"source": "none"})
    assert judge("COMPLETED", left, telemetry=None) == (COMPLETED, None)


def test_a_refused_array_never_started():
    assert judge(None, refused="sbatch: invalid account", submitted=False) == (FAILED, Reason.NEVER_STARTED)


def test_what_was_never_submitted_is_planned():
    assert judge("silent", submitted=False) == (PointState.PLANNED, Reason.NEVER_STARTED)


def test_a_damaged_manifest_is_named(tmp_path):
    (tmp_path / MANIFEST).write_text('{"status": "comp')
    left = Leavings.read(tmp_path)
    word = SchedulerWord(state="COMPLETED")
    result = verdict(submitted=True, refused=None, cancelled=False, scheduler=word, left=left)
    assert result.reason is Reason.LOST
    assert str(tmp_path / MANIFEST) in result.message


def test_leavings_read_what_an_attempt_left(tmp_path):
    (tmp_path / MANIFEST).write_text(json.dumps(manifest("completed")))
    (tmp_path / TELEMETRY).write_text(json.dumps({"status": "complete"}))
    left = Leavings.read(tmp_path)
    assert left.telemetry == "complete"
    assert left.manifest is not None
