"""The ledger survives a killed writer, and an incomplete one is reported."""

import json

import pytest

from inpaint_bench.core.errors import UserError
from launchers.sweep.events import Planned, Submitted
from launchers.sweep.ledger import Ledger, job_name
from launchers.sweep.sweep_record import check_unused
from tests.launchers.sweeps import a_point, a_sweep, defer, plan, submit

POINTS = [a_point(0), a_point(1)]


@pytest.fixture
def ledger(tmp_path):
    return a_sweep(tmp_path, POINTS, {"delta": {}})


def test_point_is_planned_then_submitted(ledger):
    plan(ledger, POINTS)
    assert ledger.points()[1].last.job_id is None
    submit(ledger, [0, 1], job_id="77_%a")
    assert [point.last.job_id for point in ledger.points().values()] == ["77_0", "77_1"]


def test_point_has_the_configuration_of_its_last_attempt(ledger):
    plan(ledger, POINTS)
    plan(ledger, [a_point(0, batch=32)], attempt=2)
    assert [point.batch for point in ledger.points().values()] == [32, 16]


def test_attempts_are_appended(ledger):
    plan(ledger, POINTS)
    plan(ledger, POINTS, attempt=2)
    assert [a.subdir for a in ledger.points()[0].attempts] == ["0/attempt-1", "0/attempt-2"]


def test_attempts_are_ordered_by_number_not_by_time_of_recording(ledger):
    for attempt in (1, 3, 2):
        plan(ledger, POINTS, attempt=attempt, run_id="r{attempt}", carried=True)
    point = ledger.points()[0]
    assert [a.attempt for a in point.attempts] == [1, 2, 3]
    assert point.last.run_id == "r3"


def test_planned_point_no_longer_waits_in_a_plan_file(ledger):
    defer(ledger, [0, 1])
    assert ledger.points()[0].plan == "plan.delta.yaml"
    plan(ledger, [POINTS[0]])
    assert [point.plan for point in ledger.points().values()] == [None, "plan.delta.yaml"]


def test_line_of_a_killed_writer_damages_no_other_event(ledger):
    plan(ledger, POINTS, job_name=None)
    with (ledger.folder / "ledger.jsonl").open("a") as out:
        out.write('{"kind": "submitted", "job')
    problems = []
    assert ledger.points(problems)[0].last.job_id is None
    assert problems == [f"{ledger.folder}/ledger.jsonl: line 2 is damaged and was skipped"]
    ledger.check_complete()
    submit(ledger, [0, 1], job_id="78_%a")
    assert ledger.points()[0].last.job_id == "78_0"


def test_cluster_that_sbatch_named_counts_before_the_one_that_was_asked_for(ledger):
    plan(ledger, [a_point(num, cluster="far") for num in (0, 1)])
    assert {point.last.cluster for point in ledger.points().values()} == {"far"}
    ledger.append(Submitted(group="00", job_id="7_0", attempts=[(0, 1)]))
    ledger.append(Submitted(group="00", job_id="7_1", cluster="near", attempts=[(1, 1)]))
    assert [point.last.queue for point in ledger.points().values()] == ["delta (cluster far)", "delta (cluster near)"]


def test_job_of_that_id_on_another_cluster_contradicts_the_first(ledger):
    plan(ledger, POINTS)
    for cluster in ("far", "far", "near"):
        ledger.append(Submitted(group="00", job_id="7_0", cluster=cluster, attempts=[(0, 1)]))
    problems = []
    assert ledger.points(problems)[0].last.cluster == "far"
    assert "gives 0/attempt-1 job 7_0 (cluster near) beside 7_0 (cluster far) in line 4" in problems[0]


UNSAFE = [
    {"kind": "submitted", "group": "00", "job_id": "7_1;id", "attempts": [[0, 1]]},
    {"kind": "submitted", "group": "00", "job_id": "7_1\n", "attempts": [[0, 1]]},
    {"kind": "submitted", "group": "00", "job_id": "pid:x@host", "attempts": [[0, 1]]},
    {"kind": "submitted", "group": "00", "job_id": "7_1", "cluster": "a,b", "attempts": [[0, 1]]},
    {"kind": "submitted", "group": "00", "job_id": "7_1", "cluster": "-rf", "attempts": [[0, 1]]},
    {"kind": "submitted", "group": "../00", "job_id": "7_1", "attempts": [[0, 1]]},
    {"kind": "deferred", "points": [0], "plan": "../plan.delta.yaml"},
]


@pytest.mark.parametrize("event", UNSAFE)
def test_text_that_is_no_name_is_damage(ledger, event):
    plan(ledger, POINTS)
    with (ledger.folder / "ledger.jsonl").open("a") as out:
        out.write(json.dumps(event) + "\n")
    problems = []
    assert ledger.points(problems)[0].last.job_id is None
    assert "line 2 is damaged" in problems[0]


@pytest.mark.parametrize("line", ["[]", "5", '{"kind": "unheard-of"}', '{"kind": "planned"}', "\\xff", ""])
def test_line_that_is_no_event_is_skipped(ledger, line):
    (ledger.folder / "ledger.jsonl").write_text(f"{line}\n")
    plan(ledger, POINTS)
    assert len(ledger.events(Planned)) == 1
    assert ledger.points()[0].last.attempt == 1


class TestIncompleteRecord:
    def test_job_folder_of_an_unknown_array(self, ledger):
        plan(ledger, POINTS, group="00-delta", job_name=job_name("00-delta", "s1"))
        (ledger.folder / "jobs" / "00-delta").mkdir(parents=True)
        ledger.check_complete()
        (ledger.folder / "jobs" / "01-\x1b[2J").mkdir()
        with pytest.raises(UserError, match=r"does not record jobs/01-\?\[2J"):
            ledger.check_complete()

    @pytest.mark.parametrize("name", ["inpaint-s2-00", "inpaint-s1-01"])
    def test_array_named_for_another_sweep(self, ledger, name):
        plan(ledger, POINTS, group="00", job_name=name)
        with pytest.raises(UserError, match=f"names job {name}, which is not of sweep s1"):
            ledger.check_complete()

    def test_attempt_planned_twice(self, ledger):
        plan(ledger, POINTS, job_name=None)
        submit(ledger, [0, 1])
        plan(ledger, POINTS, job_name=None)
        assert [len(point.attempts) for point in ledger.points().values()] == [1, 1]
        assert ledger.points()[0].last.job_id == "7_0"
        with pytest.raises(UserError, match="plans 0/attempt-1 a second time in line 3"):
            ledger.check_complete()

    def test_attempts_out_of_order(self, ledger):
        """The overrides of an earlier attempt would be submitted again."""
        plan(ledger, POINTS, attempt=2, job_name=None)
        plan(ledger, POINTS, attempt=1, job_name=None)
        with pytest.raises(UserError, match="plans 0/attempt-1 after 0/attempt-2 in line 2"):
            ledger.check_complete()

    def test_two_jobs_for_one_attempt(self, ledger):
        plan(ledger, POINTS, job_name=None)
        submit(ledger, [0, 1])
        submit(ledger, [0, 1])
        ledger.check_complete()
        submit(ledger, [1], job_id="8_%a")
        with pytest.raises(UserError, match="gives 1/attempt-1 job 8_1 beside 7_1 in line 4"):
            ledger.check_complete()

    def test_site_that_the_record_lacks(self, ledger):
        plan(ledger, [a_point(0, site="grace")])
        assert ledger.points()[0].last is None
        with pytest.raises(UserError, match="does not record the attempt of line 1"):
            ledger.check_complete()

    def test_plan_file_that_may_have_been_carried_away(self, ledger):
        (ledger.folder / "plan.delta.yaml").touch()
        with pytest.raises(UserError, match=r"plan\.delta\.yaml \(remove it if nobody has carried it away\)"):
            ledger.check_complete()
        defer(ledger, [0])
        ledger.check_complete()

    def test_many_unknown_directories_are_listed_in_part(self, ledger):
        for attempt in range(1, 7):
            (ledger.folder / "0" / f"attempt-{attempt}").mkdir(parents=True)
        with pytest.raises(UserError, match=r"0/attempt-1, 0/attempt-2, 0/attempt-3 and 3 more\."):
            ledger.check_complete()


@pytest.mark.parametrize("name", ["ledger.jsonl", "jobs/00", "3/attempt-1"])
def test_new_sweep_is_refused_where_another_left_something(tmp_path, name):
    (tmp_path / "0").mkdir()
    check_unused(tmp_path)
    (tmp_path / name).mkdir(parents=True)
    with pytest.raises(UserError, match=r"holds runs of a sweep without its sweep\.json"):
        check_unused(tmp_path)


def test_folder_without_a_sweep_is_refused(tmp_path):
    with pytest.raises(UserError, match="not a sweep directory"):
        Ledger.open(tmp_path / "nothing")


def test_planned_attempts_are_read_as_earlier_versions_wrote_them(ledger):
    request = {"point": 0, "overrides": ["a=1"], "gpu": "h200", "batch": 4, "site": "delta"}
    attempt = request | {"total_time_min": None, "service_units": None, "attempt": 1, "run_id": "r-1"}
    head = {"kind": "planned", "t_unix": 5.0, "group": "00", "job_name": None, "site": "delta", "partition": None}
    (ledger.folder / "ledger.jsonl").write_text(json.dumps(head | {"carried": True, "attempts": [attempt]}) + "\n")
    (read,) = ledger.points()[0].attempts
    assert (read.overrides, read.batch, read.run_id, read.group) == (["a=1"], 4, "r-1", "00")
    for missing in ("overrides", "attempt", "run_id"):
        damaged = {key: value for key, value in attempt.items() if key != missing}
        (ledger.folder / "ledger.jsonl").write_text(json.dumps(head | {"attempts": [damaged]}) + "\n")
        with pytest.raises(UserError, match="does not record the attempt of line 1"):
            ledger.check_complete()
