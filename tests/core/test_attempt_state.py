"""What is said of a point, given what Slurm, the manifest and the parts say."""

import json

import pytest

from inpaint_bench.core.attempt_state import GONE, LEFT, SILENT_S, Leavings, SchedulerWord, verdict
from inpaint_bench.core.schema import MANIFEST, TELEMETRY, PointState, Reason


def manifest(status: str, reason: str | None = None, message: str | None = None, **more):
    content = {"status": status, "reason": reason, "message": message, "telemetry": {"source": "nvml"}}
    return {**content, "progress": {"step": 7, "steps_total": 60}, **more}


def told(slurm, left=None, telemetry="complete", leavings=None, **more):
    word = SchedulerWord(state=slurm, detail="exit code 1:0") if slurm != "silent" else None
    leavings = leavings or Leavings(manifest=left, telemetry=telemetry if left else None)
    facts = {"submitted": True, "refused": None, "cancelled": False, "scheduler": word, "left": leavings}
    return verdict(**{**facts, **more})


def judge(*facts, **more):
    result = told(*facts, **more)
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
        (LEFT, None, (PointState.UNKNOWN, None)),
        (LEFT, manifest("running"), (PointState.UNKNOWN, None)),
        (LEFT, manifest("completed"), (COMPLETED, None)),
        (LEFT, manifest("failed", "oom_gpu"), (FAILED, Reason.OOM_GPU)),
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


@pytest.mark.parametrize(
    ("slurm", "status", "words"),
    [
        ("TIMEOUT", "completed", ["manifest says completed", "TIMEOUT"]),
        ("NODE_FAIL", "completed", ["manifest says completed", "NODE_FAIL"]),
        ("FAILED", "completed", ["manifest says completed", "FAILED"]),
        ("COMPLETED", "failed", ["scheduler says COMPLETED", "manifest failed"]),
        ("RUNNING", "completed", ["manifest says completed", "the scheduler does not yet"]),
        (None, "completed", ["by its manifest alone", "knows the job no more"]),
        ("silent", "completed", ["by its manifest alone", "did not answer"]),
        (LEFT, "completed", ["by its manifest alone", "exit code 1:0"]),
    ],
)
def test_where_two_witnesses_contradict_or_one_is_missing_the_verdict_names_them(slurm, status, words):
    message = told(slurm, manifest(status, message="")).message
    assert all(word in message for word in words), message


def test_a_completed_run_on_which_all_agree_needs_no_words():
    assert told("COMPLETED", manifest("completed")).message == ""


def test_why_the_scheduler_gave_no_word_is_told():
    result = told("silent", silence="its process is on node7, which cannot be asked from here")
    assert "on node7" in result.message


def test_a_manifest_that_has_been_running_in_silence_is_not_believed():
    fresh, old = (Leavings(manifest=manifest("running"), silent_s=age_s) for age_s in (5.0, SILENT_S + 120))
    assert told("silent", leavings=fresh).state is PointState.RUNNING
    result = told("silent", leavings=old)
    assert result.state is PointState.UNKNOWN
    assert "12 min ago" in result.message


def test_a_job_that_runs_and_says_nothing_any_more_is_told():
    old = Leavings(manifest=manifest("running"), silent_s=SILENT_S + 60)
    result = told("RUNNING", leavings=old)
    assert result.state is PointState.RUNNING
    assert "no word from it for 11 min" in result.message


@pytest.mark.parametrize("slurm", ["COMPLETED", None, "FAILED"])
def test_a_run_directory_deleted_by_hand_is_told(slurm, tmp_path):
    left = Leavings.read(tmp_path / "0" / "attempt-1")
    result = told(slurm, leavings=left)
    assert result.state is FAILED
    assert "no run directory" in result.message


@pytest.mark.parametrize("text", ["[]", "{}", '"x"', "\xff", '{"status": "exploded"}'])
def test_a_manifest_that_is_none_is_damage_and_no_traceback(text, tmp_path):
    (tmp_path / MANIFEST).write_bytes(text.encode("latin-1"))
    left = Leavings.read(tmp_path)
    assert str(tmp_path / MANIFEST) in left.damaged
    assert judge("COMPLETED", leavings=left) == (FAILED, Reason.LOST)
    assert judge("RUNNING", leavings=left) == (PointState.RUNNING, None)


def test_a_reason_that_a_later_version_gave_is_a_failure_none_the_less():
    assert judge("FAILED", manifest("failed", "struck_by_lightning")) == (FAILED, Reason.APP_ERROR)


def test_parts_that_were_closed_and_are_gone_are_missed(tmp_path):
    (tmp_path / MANIFEST).write_text(json.dumps(manifest("completed")))
    tables = {"samples_fast": {"rows": 9, "parts": 2}, "events": {"rows": 0, "parts": 0}}
    (tmp_path / TELEMETRY).write_text(json.dumps({"status": "complete", "tables": tables}))
    parts = tmp_path / "samples_fast"
    parts.mkdir()
    for number in range(2):
        (parts / f"part-{number:06d}.parquet").touch()
    assert judge("COMPLETED", leavings=Leavings.read(tmp_path)) == (COMPLETED, None)
    (parts / "part-000000.parquet").unlink()
    result = told("COMPLETED", leavings=Leavings.read(tmp_path))
    assert (result.state, result.reason) == (FAILED, Reason.TELEMETRY_INCOMPLETE)
    assert "1 of 2 parts of samples_fast" in result.message


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"state": "FAI'])
def test_a_kept_word_that_is_not_whole_is_none(text, tmp_path):
    (tmp_path / "scheduler.json").write_text(text)
    assert SchedulerWord.kept(tmp_path) is None


@pytest.mark.parametrize("reason", [Reason.PREEMPTED, Reason.TIMEOUT])
def test_a_run_that_went_back_into_the_queue_is_not_lost_while_slurm_is_silent(reason):
    left = manifest("interrupted", reason.value, slurm={"requeued": True})
    assert judge("silent", left) == (PointState.UNKNOWN, None)
    assert judge("PENDING", left) == (PointState.QUEUED, None)
    assert judge("FAILED", left) == (FAILED, reason)


def test_of_a_run_that_could_not_ask_whether_it_was_cancelled_slurms_word_says_so():
    left = manifest("interrupted", "preempted")
    assert judge("CANCELLED", left) == (FAILED, Reason.CANCELLED)
    assert judge("FAILED", left) == (FAILED, Reason.PREEMPTED)
