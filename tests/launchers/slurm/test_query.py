"""query_jobs: which jobs that squeue and sacct list are ours."""

import pytest

from inpaint_bench.core.attempt_state import RENAMED
from inpaint_bench.core.config.site import SiteConfig
from launchers.slurm.query import query_jobs


@pytest.fixture
def query(fake_command):
    """Query jobs, given as names by id, while squeue and sacct print these rows."""

    def run(squeue: str, sacct: str, jobs: dict[str, str]):
        fake_command("squeue", f"printf '{squeue}'")
        fake_command("sacct", f"printf '{sacct}'")
        return query_jobs(SiteConfig(name="delta"), jobs)

    return run


@pytest.mark.subprocess
def test_job_of_another_name_is_ignored_and_no_job_beside_it_is_lost(query):
    rows = "7|FAILED|1:0|None|n1|thesis\\n"
    reply = query("", rows, {"7_0": "inpaint-s-0", "8_0": "inpaint-s-1"})
    assert reply.states == {}
    assert "another job under id 7, named thesis" in reply.missing_reason("7_0")
    assert "has other jobs under ids of this sweep (7)" in reply.missing_reason("8_0")


@pytest.mark.subprocess
def test_task_that_squeue_lists_under_another_name_is_unknown_whatever_sacct_says(query):
    queue = "7_0|RUNNING|None|n1|1|2|10:00|inpaint-s-0\\n7_1|PENDING|BeginTime||1|2|10:00|mine\\n"
    reply = query(queue, "7_1|CANCELLED|0:0|None|n1|inpaint-s-0\\n", {"7_0": "inpaint-s-0", "7_1": "inpaint-s-0"})
    assert {job_id: state.state for job_id, state in reply.states.items()} == {"7_0": "RUNNING", "7_1": RENAMED}
    assert reply.states["7_1"].detail == "this Slurm has another job under id 7_1, named mine"


@pytest.mark.subprocess
def test_job_whose_start_the_database_does_not_know_yet_is_not_lost(query):
    ended = "7|COMPLETED|0:0|None|n1|allocation\\n8|FAILED|1:0|None|n1|inpaint-s-1\\n"
    reply = query("", ended, {"7_0": "inpaint-s-0", "8": "inpaint-s-1", "9_0": "inpaint-s-2"})
    assert {job_id: state.state for job_id, state in reply.states.items()} == {"8": "FAILED", "9_0": None}


@pytest.mark.subprocess
def test_job_name_may_contain_the_separator(query):
    reply = query("7_0|PENDING|Priority||1|2|10:00|a|b\\n", "", {"7_0": "a|b"})
    assert reply.states["7_0"].state == "PENDING"


@pytest.mark.subprocess
def test_nodes_are_a_field_of_their_own(query):
    queue = "7_0|RUNNING|None|n1|1|2|10:00|inpaint\\n7_1|PENDING|Priority||1|2|10:00|inpaint\\n"
    ended = "7_2|NODE_FAIL|1:0|None|gpua[001,017]|inpaint\\n7_3|CANCELLED|0:0|None|None assigned|inpaint\\n"
    states = query(queue, ended, dict.fromkeys(("7_0", "7_1", "7_2", "7_3"), "inpaint")).states
    assert [states[f"7_{task}"].nodes for task in range(4)] == ["n1", "", "gpua[001,017]", ""]
