"""query_jobs: which jobs that squeue and sacct list are ours."""

import time
from datetime import datetime

import pytest

from inpaint_bench.core.attempt_state import JOB_STATES, LEFT_QUEUE, RENAMED
from inpaint_bench.core.config.site import SiteConfig
from launchers.slurm.query import (
    cancellable_jobs,
    cause_of,
    elapsed_s,
    jobs_named,
    query_jobs,
)


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


NAME = "inpaint-s-0"


def listed(job_id: str, state: str = "PENDING", name: str = NAME) -> str:
    """Return squeue's row."""
    return f"{job_id}|{state}|None||1|2|10:00|{name}\\n"


@pytest.mark.subprocess
@pytest.mark.parametrize(
    "before",
    [
        r"Bienvenue \351 Delta\n\n",  # Latin-1
        r"CLUSTER: delta\n",
        r"JOBID|STATE|REASON|NODELIST|START|END|LIMIT|NAME\n",
        r"\033[?1h\033=\033[32m",
        r"9_0|RUNNING|None|n1|1|2|10:00|th\350se|v2\n",
    ],
)
def test_rows_are_read_beside_what_is_no_row(before, query):
    rows = before + listed("7_0") + listed("7_1", "RUNNING")
    for text in (rows, rows.replace("\\n", "\\r\\n")):
        reply = query(text, "", {"7_0": NAME, "7_1": NAME, "8_0": NAME})
        assert (reply.squeue, reply.sacct) == ("ok", "ok")
        assert {job_id: state.state for job_id, state in reply.states.items()} == {
            "7_0": "PENDING",
            "7_1": "RUNNING",
            "8_0": None,
        }


@pytest.mark.subprocess
def test_array_that_is_cancelled_before_the_database_knows_its_tasks(query):
    """As Slurm 22.05 prints it."""
    queue, ids = f"7|CANCELLED|PartitionDown||1|2|10:00|{NAME}\\n", dict.fromkeys(("7_0", "7_1", "7_2"), NAME)
    assert query(queue, "", ids).states == {}  # the next poll decides
    whole = f"7|CANCELLED by 0|0:0|PartitionDown|None assigned|{NAME}\\n"
    done = f"7_2|COMPLETED|0:0|None|n1|{NAME}\\n"
    for rows in (whole + done, done + whole):
        states = query(queue, rows, ids).states
        assert [states[job_id].state for job_id in ids] == ["CANCELLED", "CANCELLED", "COMPLETED"]
    assert cancellable_jobs(SiteConfig(name="delta"), ids) == (set(), [])


@pytest.mark.subprocess
def test_steps_are_no_jobs_and_an_array_without_its_tasks_is_not_lost(query):
    rows = "7_0|COMPLETED|0:0|None|n1|{0}\\n7_0.batch|FAILED|1:0|None|n1|batch\\n7_0.0|FAILED|1:0|None|n1|python\\n"
    reply = query(
        "",
        (rows + "8|PENDING|0:0|None||{0}\\n9+0|RUNNING|0:0|None||{0}\\n").format(NAME),
        dict.fromkeys(("7_0", "8_0", "9_0"), NAME),
    )
    assert {job_id: state.state for job_id, state in reply.states.items()} == {"7_0": "COMPLETED"}
    assert not reply.foreign
    assert reply.missing_reason("8_0") == "Slurm does not say which tasks of its array it lists"


@pytest.mark.subprocess
def test_row_of_a_task_outweighs_a_list_with_it(query):
    rows = ["7_2|COMPLETED|0:0|None|n1|{0}\\n", "7_[0-5]|PENDING|0:0|None||{0}\\n"]
    for order in (rows, rows[::-1]):
        reply = query("", "".join(order).format(NAME), dict.fromkeys(("7_1", "7_2"), NAME))
        assert [reply.states[job_id].state for job_id in ("7_1", "7_2")] == ["PENDING", "COMPLETED"]


@pytest.mark.subprocess
def test_squeue_without_a_full_list_loses_no_job(query, fake_command):
    ids = dict.fromkeys(("7_0", "7_1"), NAME)
    query("", "", ids)
    fake_command("squeue", f"printf '{listed('7_0')}'; echo 'squeue: error: cluster b does not answer' >&2")
    reply = query_jobs(SiteConfig(name="delta"), ids)
    assert set(reply.states) == {"7_0"}
    assert reply.missing_reason("7_1") == "squeue did not answer in full (cluster b does not answer)"
    assert cancellable_jobs(SiteConfig(name="delta"), ids)[0] == {"7_0"}
    assert jobs_named(SiteConfig(name="delta"), "inpaint")[0] is None
    fake_command("sacct", "echo 'sacct: error: no database' >&2")
    fake_command("squeue", "true")
    assert {state.state for state in query_jobs(SiteConfig(name="delta"), ids).states.values()} == {LEFT_QUEUE}


@pytest.mark.subprocess
def test_sacct_is_given_a_start_and_prints_whole_lists_in_english(fake_command, tmp_path):
    fake_command("squeue", "true")
    calls = fake_command("sacct", f"echo $SLURM_BITSTR_LEN $LC_ALL >> {tmp_path / 'environment'}")
    query_jobs(SiteConfig(name="delta"), {"7_0": NAME}, since_unix=time.time())
    start = calls.read_text().split()[calls.read_text().split().index("-S") + 1]
    assert datetime.fromisoformat(start).timestamp() == pytest.approx(time.time() - 86400, abs=60)
    assert (tmp_path / "environment").read_text().split() == ["0", "C"]


@pytest.mark.parametrize(
    ("stderr", "cause"),
    [
        (
            "squeue: unrecognized option '--me'\nTry \"squeue --help\" for more information\n",
            "squeue: unrecognized option '--me'",
        ),
        (
            "sacct: error: Problem talking to the database: Connection refused\n",
            "Problem talking to the database: Connection refused",
        ),
        (
            "slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n",
            "Unable to contact slurm controller (connect failure)",
        ),
        ("squeue: fatal: no configuration\nUsage: squeue [OPTIONS]\n", "no configuration"),
        ("bash: Zeile 1: squeue: Kommando nicht gefunden.\n", "bash: Zeile 1: squeue: Kommando nicht gefunden."),
    ],
)
def test_line_with_the_cause_is_shown(stderr, cause):
    assert cause_of(stderr.encode()) == cause


def test_every_state_of_slurm_has_a_meaning():
    """The names of job_state_string and job_state_string_complete in Slurm 22.05 to 26.05."""
    names = """PENDING RUNNING SUSPENDED COMPLETED CANCELLED FAILED TIMEOUT NODE_FAIL PREEMPTED BOOT_FAIL DEADLINE
        OUT_OF_MEMORY COMPLETING CONFIGURING EXPEDITING LAUNCH_FAILED POWER_UP_NODE RECONFIG_FAIL REQUEUED REQUEUE_FED
        REQUEUE_HOLD RESIZING RESV_DEL_HOLD REVOKED SIGNALING SPECIAL_EXIT STAGE_OUT STOPPED UPDATE_DB"""
    assert set(names.split()) == set(JOB_STATES)


@pytest.mark.subprocess
@pytest.mark.parametrize(
    "noise",
    [
        "bash: warning: setlocale: LC_ALL: cannot change locale (en_US.UTF-8)",
        "ERROR: ld.so: object libx.so from LD_PRELOAD cannot be preloaded: ignored.",
        "bash: /etc/profile.d/site.sh: line 3: module: command not found",
        "squeue: warning: 2 nodes are drained",
    ],
)
def test_noise_beside_an_answer_is_none_of_it(noise, fake_command):
    for rows in ("", "7_0|RUNNING|x-1\\n"):
        fake_command("squeue", f"printf '{rows}'; echo '{noise}' >&2")
        jobs, result = jobs_named(SiteConfig(name="delta"), "x")
        assert (jobs, result) == ([("7_0", "x-1", True)] if rows else [], "ok")
    fake_command("squeue", f"echo '{noise}' >&2; exit 3")
    assert jobs_named(SiteConfig(name="delta"), "x")[0] is None


@pytest.mark.subprocess
@pytest.mark.parametrize(
    "error",
    [
        "squeue: error: Unable to get job info: Connection refused",
        "squeue: warning: error: _open_persist_conn: failed to open persistent connection",
        "sh: line 1: /opt/slurm/bin/squeue: No such file or directory",
        "bash: squeue: command not found",
        "sh: 1: cannot fork: Resource temporarily unavailable",
    ],
)
def test_error_is_no_noise(error, fake_command):
    """Regression: the missing rows counted as an empty list, and `rerun` submitted what was running."""
    fake_command("squeue", f"echo '{error}' >&2")
    assert jobs_named(SiteConfig(name="delta"), "x")[0] is None


@pytest.mark.subprocess
@pytest.mark.parametrize("error", ["ERROR: answer of 20 minutes ago", "slurm_load_jobs Error: half"])
def test_rows_beside_an_error_are_not_all(error, fake_command):
    fake_command("squeue", f"echo '7_0|RUNNING|x-1'; echo '{error}' >&2")
    assert jobs_named(SiteConfig(name="delta"), "x")[1].startswith("did not answer in full")


@pytest.mark.subprocess
@pytest.mark.parametrize(
    ("printed", "elapsed"),
    [
        ("7_0|01:00:00|x\\n7_0|00:30:00|x\\n", {"7_0": 5400.0}),
        ("7_0|01:00:00|x\\n7_0|INVALID|x\\n7_1|02:00|x\\n", {"7_1": 120.0}),
        ("7_0||x\\n", {}),
        ("7_0|01:00:00|x\\n7_1|0", {}),
    ],
)
def test_time_that_is_not_understood_is_not_zero(printed, elapsed, fake_command):
    """Regression: the start that could not be read cost nothing."""
    fake_command("sacct", f"printf '{printed}'")
    assert elapsed_s(SiteConfig(name="delta"), {"7_0": "x", "7_1": "x"}) == elapsed
