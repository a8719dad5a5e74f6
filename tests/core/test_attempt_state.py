"""resolve_attempt_state: the state of an attempt from what Slurm, the manifest and the Parquet parts say."""

import json

import msgspec
import pytest

from inpaint_bench.core.attempt_state import (
    DROPPED,
    LEFT_QUEUE,
    PROCESS_EXITED,
    RENAMED,
    STALE_MANIFEST_S,
    RunArtifacts,
    SchedulerState,
    resolve_attempt_state,
)
from inpaint_bench.core.records import ManifestHead
from inpaint_bench.core.schema import MANIFEST, TELEMETRY, PointState, Reason

NO_ANSWER = "no answer"


def manifest(status: str, reason: str | None = None, message: str | None = None, **more):
    content = {"status": status, "reason": reason, "message": message, "telemetry": {"source": "nvml"}}
    return {**content, "progress": {"step": 7, "steps_total": 60}, **more}


def head(content) -> ManifestHead:
    return msgspec.convert(content, ManifestHead)


def resolve(slurm, content=None, sidecar_status="complete", artifacts=None, **more):
    """Resolve with Slurm's state (or NO_ANSWER) and the content of the manifest, or all artifacts."""
    scheduler = SchedulerState(state=slurm, detail="exit code 1:0") if slurm != NO_ANSWER else None
    if artifacts is None and content is not None:
        artifacts = RunArtifacts(manifest=head(content), sidecar_status=sidecar_status)
    artifacts = artifacts or RunArtifacts()
    facts = {"submitted": True, "refused": None, "cancelled": False, "scheduler": scheduler, "artifacts": artifacts}
    return resolve_attempt_state(**{**facts, **more})


def state_and_reason(*facts, **more):
    result = resolve(*facts, **more)
    return result.state, result.reason


FAILED, COMPLETED = PointState.FAILED, PointState.COMPLETED


@pytest.mark.parametrize(
    ("slurm", "content", "expected"),
    [
        ("PENDING", None, (PointState.QUEUED, None)),
        ("RUNNING", manifest("running"), (PointState.RUNNING, None)),
        ("COMPLETING", manifest("completed"), (PointState.RUNNING, None)),
        ("COMPLETED", manifest("completed"), (COMPLETED, None)),
        (RENAMED, manifest("completed"), (COMPLETED, None)),
        (RENAMED, manifest("interrupted", "cancelled"), (PointState.UNKNOWN, None)),
        (RENAMED, None, (PointState.UNKNOWN, None)),
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
        (None, manifest("failed", "oom_gpu"), (FAILED, Reason.OOM_GPU)),
        (NO_ANSWER, None, (PointState.UNKNOWN, None)),
        (NO_ANSWER, manifest("running"), (PointState.RUNNING, None)),
        (NO_ANSWER, manifest("completed"), (COMPLETED, None)),
        (PROCESS_EXITED, None, (FAILED, Reason.NEVER_STARTED)),
        (PROCESS_EXITED, manifest("running"), (FAILED, Reason.LOST)),
        (PROCESS_EXITED, manifest("completed"), (COMPLETED, None)),
        (LEFT_QUEUE, None, (PointState.UNKNOWN, None)),
        (LEFT_QUEUE, manifest("running"), (PointState.UNKNOWN, None)),
        (LEFT_QUEUE, manifest("completed"), (COMPLETED, None)),
        (LEFT_QUEUE, manifest("failed", "oom_gpu"), (FAILED, Reason.OOM_GPU)),
    ],
)
def test_three_sources_resolve_to_one_state(slurm, content, expected):
    assert state_and_reason(slurm, content) == expected


def test_run_whose_sidecar_did_not_finish_is_not_complete():
    result = state_and_reason("COMPLETED", manifest("completed"), sidecar_status="running")
    assert result == (FAILED, Reason.TELEMETRY_INCOMPLETE)


def test_run_without_telemetry_is_complete_if_none_was_requested():
    content = manifest("completed", telemetry={"source": "none"})
    assert state_and_reason("COMPLETED", content, sidecar_status=None) == (COMPLETED, None)


def test_refused_array_never_started():
    result = state_and_reason(None, refused="sbatch: invalid account", submitted=False)
    assert result == (FAILED, Reason.NEVER_STARTED)
    ran = state_and_reason(NO_ANSWER, manifest("completed"), refused="sbatch: invalid account", submitted=False)
    assert ran == (COMPLETED, None)


def test_attempt_that_was_not_submitted_is_planned():
    assert state_and_reason(NO_ANSWER, submitted=False) == (PointState.PLANNED, Reason.NEVER_STARTED)


@pytest.mark.parametrize(
    ("slurm", "status", "texts"),
    [
        ("TIMEOUT", "completed", ["manifest says completed", "TIMEOUT"]),
        ("NODE_FAIL", "completed", ["manifest says completed", "NODE_FAIL"]),
        ("FAILED", "completed", ["manifest says completed", "FAILED"]),
        ("COMPLETED", "failed", ["scheduler says COMPLETED", "manifest failed"]),
        ("RUNNING", "completed", ["manifest says completed", "the scheduler still RUNNING"]),
        (None, "completed", ["from the manifest only", "Slurm has purged the job"]),
        (NO_ANSWER, "completed", ["from the manifest only", "did not answer"]),
        (LEFT_QUEUE, "completed", ["from the manifest only", "exit code 1:0"]),
    ],
)
def test_message_names_contradicting_and_missing_sources(slurm, status, texts):
    message = resolve(slurm, manifest(status, message="")).message
    assert all(text in message for text in texts), message


def test_completed_run_on_which_all_sources_agree_has_no_message():
    assert resolve("COMPLETED", manifest("completed")).message == ""


def test_stale_running_manifest_is_not_believed():
    fresh, stale = (
        RunArtifacts(manifest=head(manifest("running")), manifest_age_s=age_s)
        for age_s in (5.0, STALE_MANIFEST_S + 120)
    )
    assert resolve(NO_ANSWER, artifacts=fresh).state is PointState.RUNNING
    result = resolve(NO_ANSWER, artifacts=stale)
    assert result.state is PointState.UNKNOWN
    assert "12 min ago" in result.message


def test_running_job_with_a_stale_manifest_says_so():
    stale = RunArtifacts(manifest=head(manifest("running")), manifest_age_s=STALE_MANIFEST_S + 60)
    result = resolve("RUNNING", artifacts=stale)
    assert result.state is PointState.RUNNING
    assert "manifest last written 11 min ago" in result.message


def test_a_run_whose_manifest_was_lost_has_started(tmp_path):
    """Regression: a point that had trained was `never_started`."""
    (tmp_path / "windows.json").write_text("[]")
    result = resolve(PROCESS_EXITED, artifacts=RunArtifacts.read(tmp_path))
    assert (result.state, result.reason) == (FAILED, Reason.LOST)
    assert result.message.endswith("manifest.json: does not exist, though windows.json does")


def test_damaged_manifest_without_an_answer_of_slurm_is_unknown(tmp_path):
    (tmp_path / MANIFEST).write_text('{"status": "comp')
    artifacts = RunArtifacts.read(tmp_path)
    for slurm, cancelled in ((NO_ANSWER, False), (NO_ANSWER, True), (LEFT_QUEUE, False)):
        assert resolve(slurm, artifacts=artifacts, cancelled=cancelled).state is PointState.UNKNOWN


@pytest.mark.parametrize("slurm", ["COMPLETED", None, "FAILED", PROCESS_EXITED])
def test_deleted_run_directory_is_named(slurm, tmp_path):
    result = resolve(slurm, artifacts=RunArtifacts.read(tmp_path / "0" / "attempt-1"))
    assert result.state is FAILED
    assert "no run directory" in result.message


@pytest.mark.parametrize("text", ["[]", "{}", '"x"', '{"status": "comp', "\xff", '{"status": "exploded"}'])
def test_file_that_is_no_manifest_is_damage_without_a_traceback(text, tmp_path):
    (tmp_path / MANIFEST).write_bytes(text.encode("latin-1"))
    artifacts = RunArtifacts.read(tmp_path)
    assert str(tmp_path / MANIFEST) in artifacts.damage
    assert state_and_reason("COMPLETED", artifacts=artifacts) == (FAILED, Reason.LOST)
    assert state_and_reason("RUNNING", artifacts=artifacts) == (PointState.RUNNING, None)


def test_reason_of_a_later_version_is_still_a_failure():
    assert state_and_reason("FAILED", manifest("failed", "struck_by_lightning")) == (FAILED, Reason.APP_ERROR)


def test_missing_parts_that_were_closed_are_reported(tmp_path):
    (tmp_path / MANIFEST).write_text(json.dumps(manifest("completed")))
    tables = {"samples_fast": {"rows": 9, "parts": 2}, "events": {"rows": 0, "parts": 0}}
    (tmp_path / TELEMETRY).write_text(json.dumps({"status": "complete", "tables": tables}))
    parts = tmp_path / "samples_fast"
    parts.mkdir()
    for number in range(2):
        (parts / f"part-{number:06d}.parquet").touch()
    assert state_and_reason("COMPLETED", artifacts=RunArtifacts.read(tmp_path)) == (COMPLETED, None)
    (parts / "part-000000.parquet").unlink()
    result = resolve("COMPLETED", artifacts=RunArtifacts.read(tmp_path))
    assert (result.state, result.reason) == (FAILED, Reason.TELEMETRY_INCOMPLETE)
    assert "samples_fast has only 1 of 2 parts" in result.message


def test_incomplete_telemetry_of_a_further_node_is_reported(tmp_path):
    (tmp_path / MANIFEST).write_text(json.dumps(manifest("completed")))
    (tmp_path / "node-1").mkdir()
    (tmp_path / TELEMETRY).write_text(json.dumps({"status": "complete"}))
    (tmp_path / "node-1" / TELEMETRY).write_text(json.dumps({"status": "died"}))
    result = resolve("COMPLETED", artifacts=RunArtifacts.read(tmp_path))
    assert (result.state, result.reason) == (FAILED, Reason.TELEMETRY_INCOMPLETE)
    assert result.message == "the sidecar ended with status died"
    tables = {"samples_fast": {"rows": 9, "parts": 1}}
    (tmp_path / "node-1" / TELEMETRY).write_text(json.dumps({"status": "complete", "tables": tables}))
    result = resolve("COMPLETED", artifacts=RunArtifacts.read(tmp_path))
    assert "samples_fast has only 0 of 1 part" in result.message


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"state": "FAI'])
def test_damaged_saved_state_is_ignored(text, tmp_path):
    (tmp_path / "scheduler.json").write_text(text)
    assert SchedulerState.load(tmp_path) is None


@pytest.mark.parametrize("reason", [Reason.PREEMPTED, Reason.TIMEOUT])
def test_requeued_run_is_unknown_while_slurm_does_not_answer(reason):
    content = manifest("interrupted", reason.value, slurm={"requeued": True})
    assert state_and_reason(NO_ANSWER, content) == (PointState.UNKNOWN, None)
    assert state_and_reason("PENDING", content) == (PointState.QUEUED, None)
    assert state_and_reason("FAILED", content) == (FAILED, reason)


def test_slurm_decides_whether_an_interrupted_run_was_cancelled():
    content = manifest("interrupted", "preempted")
    assert state_and_reason("CANCELLED", content) == (FAILED, Reason.CANCELLED)
    assert state_and_reason("FAILED", content) == (FAILED, Reason.PREEMPTED)


@pytest.mark.parametrize(
    "slurm", ["COMPLETED", "FAILED", "TIMEOUT", None, LEFT_QUEUE, DROPPED, PROCESS_EXITED, NO_ANSWER]
)
def test_files_that_cannot_be_read_make_a_job_that_ended_unknown(slurm):
    artifacts = RunArtifacts(unreadable="manifest.json: Stale file handle")
    result = resolve(slurm, artifacts=artifacts)
    assert (result.state, result.message) == (PointState.UNKNOWN, artifacts.unreadable)
    assert state_and_reason("PENDING", artifacts=artifacts) == (PointState.QUEUED, None)
    assert artifacts.unreadable in resolve("RUNNING", artifacts=artifacts).message


@pytest.mark.parametrize("state", ["REVOKED", "HIBERNATING", RENAMED])
def test_state_that_says_nothing_is_outweighed_by_a_completed_run_alone(state):
    assert state_and_reason(state, manifest("completed")) == (COMPLETED, None)
    for content in (None, manifest("running"), manifest("failed", "app_error")):
        assert state_and_reason(state, content) == (PointState.UNKNOWN, None)


def test_signal_after_a_run_counts_where_parts_are_missing():
    killed = SchedulerState(state="FAILED", detail="exit code 0:12", exit_code="0:12")
    assert resolve("FAILED", manifest("completed"), scheduler=killed).state is COMPLETED
    assert resolve("FAILED", manifest("completed"), "died", scheduler=killed).state is FAILED
    assert resolve("FAILED", manifest("running"), scheduler=killed).reason is Reason.LOST


def test_exit_code_is_read_from_what_earlier_versions_saved(tmp_path):
    (tmp_path / "scheduler.json").write_text('{"state": "FAILED", "detail": "exit code 12:0, on n1"}')
    assert SchedulerState.load(tmp_path).exit_code == "12:0"
