"""The ledger survives what its writers do not."""

import json
import threading

import pytest

from inpaint_bench.core.errors import UserError
from launchers.sweep.ledger import Ledger


@pytest.fixture
def ledger(tmp_path):
    made = Ledger(tmp_path)
    made.create(sweep_id="s1")
    entries = [{"point": n, "overrides": [f"batch={n}"], "gpu": "a40", "batch": n, "site": "grace"} for n in (0, 1)]
    made.know(entries, {"grace": {}})
    return made


def plan(ledger, attempt=1):
    points = [[0, attempt, f"r{attempt}"], [1, attempt, "r"]]
    asked = [{"gpu": "a40", "batch": 8 * attempt, "overrides": []}] * 2
    ledger.append("planned", group="00", job_name="j", site="grace", points=points, asked=asked)


def test_a_point_is_planned_then_submitted(ledger):
    plan(ledger)
    assert ledger.points()[1].last.job_id is None
    ledger.append("submitted", group="00", job_id="77_%a", points=[[0, 1], [1, 1]])
    assert [p.last.job_id for p in ledger.points().values()] == ["77_0", "77_1"]


def test_a_point_is_what_its_last_attempt_asked(ledger):
    plan(ledger)
    plan(ledger, attempt=2)
    assert ledger.points()[0].batch == 16


def test_attempts_are_appended(ledger):
    plan(ledger)
    plan(ledger, attempt=2)
    point = ledger.points()[0]
    assert [a.subdir for a in point.attempts] == ["0/attempt-1", "0/attempt-2"]


def test_a_writer_killed_in_mid_line_spoils_no_other_record(ledger):
    plan(ledger)
    with (ledger.folder / "ledger.jsonl").open("a") as out:
        out.write('{"kind": "submitted", "job')
    assert ledger.points()[0].last.job_id is None
    ledger.append("submitted", group="00", job_id="78_%a", points=[[0, 1], [1, 1]])
    assert ledger.points()[0].last.job_id == "78_0"


def test_two_submitters_at_once_are_one(ledger):
    with ledger.locked():
        refused = []

        def second():
            try:
                with Ledger(ledger.folder).locked():
                    pass
            except UserError as error:
                refused.append(str(error))

        thread = threading.Thread(target=second)
        thread.start()
        thread.join()
    assert "another command is submitting" in refused[0]


def test_a_folder_without_a_sweep_is_refused(tmp_path):
    with pytest.raises(UserError, match="not a sweep directory"):
        Ledger.open(tmp_path / "nothing")


def test_the_last_attempt_is_the_one_with_the_highest_number_whenever_it_was_heard_of(ledger):
    for attempt in (1, 3, 2):
        plan(ledger, attempt=attempt)
    point = ledger.points()[0]
    assert [a.attempt for a in point.attempts] == [1, 2, 3]
    assert point.last.run_id == "r3"


@pytest.mark.parametrize(("method", "asked"), [("slurm", ["batch=64"]), ("ssh", ["batch=8"])])
def test_what_a_run_that_was_brought_here_says_it_was_asked_for_is_not_sent_again(method, asked, tmp_path):
    """Only runs sent from here tell of a change that a lost ledger knew."""
    ledger = Ledger(tmp_path)
    ledger.create(sweep_id="s1")
    entry = {"point": 0, "overrides": ["batch=8"], "gpu": None, "batch": 8, "site": "delta"}
    ledger.know([entry], {"delta": {"connect": {"method": method}}})
    (tmp_path / "0" / "attempt-2").mkdir(parents=True)
    manifest = {"run_id": "r-2", "site": "delta", "overrides": ["batch=64"]}
    (tmp_path / "0" / "attempt-2" / "manifest.json").write_text(json.dumps(manifest))
    record = ledger.points()[0]
    assert [attempt.run_id for attempt in record.attempts] == ["r-2"]
    assert record.overrides == asked
