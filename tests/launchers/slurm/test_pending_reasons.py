"""Why jobs are pending, in plain words with advice, for every reason code that Slurm documents."""

from pathlib import Path

import pytest

from inpaint_bench.core.config.site import Account, SiteConfig
from launchers.slurm.pending_reasons import explain

DELTA = SiteConfig(name="delta", account=Account(how_to_list="accounts"))

# of https://slurm.schedmd.com/job_reason_codes.html those that a pending job can have
CODES = (Path(__file__).parent / "slurm_reasons.txt").read_text().split()


@pytest.mark.parametrize("code", CODES)
def test_every_code_of_slurm_gives_a_complete_sentence_with_the_code(code):
    reason = explain(code, DELTA, jobs=["7_1"])
    assert reason.advice
    assert "{" not in reason.explanation + reason.advice
    assert code in (*reason.sentence.replace("(", " ").replace(")", " ").split(), "None")


@pytest.mark.parametrize(
    ("code", "explanation", "advice", "stuck"),
    [
        ("Priority", "higher priority", "nothing to do", False),
        ("QOSGrpBillingMinutes", "allocation of its QOS is used up", "`accounts` at delta lists yours", True),
        ("AssocGrpGRESMinutes", "allocation of its account is used up", "sites.delta.account.value=", True),
        ("QOSGrpBillingRunMinutes", "limit of its QOS is reached", "starts as they end", False),
        ("AssocGrpCPURunMinutesLimit", "limit of its account is reached", "starts as they end", False),
        ("QOSMaxGRESPerUser", "limit of its QOS is reached", "starts as they end", False),
        ("PartitionTimeLimit", "longer than its partition allows", "smaller time_min", True),
        ("QOSMaxWallDurationPerJobLimit", "longer than its QOS allows", "smaller time_min", True),
        ("AssocMaxGRESPerJob", "its account does not allow", "doctor site delta", True),
        ("BadConstraints", "no node has", "doctor site delta", True),
        ("ReqNodeNotAvail, UnavailableNodes:gr[01-02]", "reserved for maintenance", "scontrol show reserv", False),
        ("JobHeldUser", "is held", "`scontrol release 7_1` at delta", True),
        ("launch failed requeued held", "could not be started", "scontrol release 7_1", True),
        ("user_env_retrieval_failed_requeued_held", "could not be started", "scontrol release 7_1", True),
        ("InvalidAccount", "account or QOS does not exist", "`accounts` at delta", True),
        ("DependencyNeverSatisfied", "can never be met", "`rerun`", True),
        ("BeginTime", "2 minutes", "nothing to do", False),
    ],
)
def test_common_reasons_say_why_a_job_waits_and_what_to_do(code, explanation, advice, stuck):
    reason = explain(code, DELTA, jobs=["7_1"])
    assert explanation in reason.explanation
    assert advice in reason.advice
    assert reason.stuck is stuck
    assert code in reason.sentence


def test_an_unknown_code_is_shown_as_it_is():
    reason = explain("FullMoon", DELTA, jobs=["7_1"])
    assert reason.sentence.endswith("(FullMoon)")
    assert "scontrol show job 7_1" in reason.advice


def test_the_state_is_explained_where_there_is_no_code():
    assert "configured" in explain("None", DELTA, state="CONFIGURING").explanation


def test_advice_names_one_job_where_slurm_takes_no_list():
    """Regression: `scontrol show job 7_[0-2]` is an invalid job id to Slurm."""
    advice = explain("JobHeldUser", DELTA, jobs=["7_[0-2]", "8_4"]).advice
    assert "`scontrol release 7_[0-2],8_4` at delta" in advice
    assert "`scontrol show job 7_0`" in advice


@pytest.mark.parametrize("state", ["RESV_DEL_HOLD", "REQUEUE_HOLD", "SPECIAL_EXIT", "LAUNCH_FAILED"])
def test_held_job_is_stuck_whatever_reason_it_waited_for(state):
    for code in ("None", "Priority"):
        reason = explain(code, DELTA, state=state, jobs=["7_1"])
        assert (reason.stuck, reason.code) == (True, state)
        assert "{" not in reason.advice
