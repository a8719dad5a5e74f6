"""Rerun by cause: what the policies make of a point, given why it is not complete."""

import pytest

from inpaint_bench.core.attempt_state import AttemptState, RunArtifacts
from inpaint_bench.core.config import RerunConfig
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.schema import PointState, Reason
from launchers.points.compose import composer
from launchers.status.survey import AttemptStatus, PointStatus
from launchers.submit.rerun_policy import Asked, decide, merged
from launchers.sweep.ledger import Attempt, PointRecord
from tests.launchers.conftest import ACCOUNT


@pytest.fixture
def compose():
    with composer() as compose:
        yield compose


@pytest.fixture
def treat(compose, tmp_path):
    """What becomes of a point of Delta's A100 (unless said otherwise) that ended for `cause`."""

    def of(cause, *overrides, only=None, changes=(), tries=1, message="", left=None, folder=None):
        attempts = [
            Attempt(point=3, attempt=n + 1, run_id="r", site="delta", group="g", planned_unix=0, job_id=f"1_{n}")
            for n in range(tries)
        ]
        asked = ["gpu=a100", "site=delta", ACCOUNT, *overrides]
        record = PointRecord(num=3, overrides=asked, gpu="a100", batch=16, site="delta", attempts=attempts)
        word = AttemptState(state=PointState.FAILED, reason=cause, message=message)
        artifacts, run_dir = left or RunArtifacts(), folder or tmp_path / "3" / "attempt-1"
        statuses = [AttemptStatus(attempt=a, resolved=word, artifacts=artifacts, run_dir=run_dir) for a in attempts]
        standing = PointStatus(record=record, resolved=word, attempts=tuple(statuses))
        named = None if only is None else frozenset({Reason(only)})
        outcomes = decide([standing], Asked(only=named, changes=tuple(changes)), compose)
        return outcomes[0] if outcomes else None

    return of


def test_every_reason_has_a_policy():
    assert set(Reason) == {name for name in vars(RerunConfig()) if name != "max_attempts"}


def test_what_was_no_fault_of_the_point_is_sent_as_it_was(treat):
    for cause in ("preempted", "cancelled", "lost", "never_started", "telemetry_incomplete"):
        decision, point = treat(Reason(cause), "batch=8")
        assert (decision.what, decision.changes) == ("sent as it was", ()), cause
        assert point.overrides == ["gpu=a100", "site=delta", ACCOUNT, "batch=8"]
        assert (point.num, point.attempt) == (3, 2)


def test_what_would_end_the_same_way_is_left_alone_until_it_is_named(treat):
    for cause in ("app_error", "oom_gpu", "oom_host", "unavailable"):
        decision, point = treat(Reason(cause))
        assert point is None
        assert decision.what == f"left alone: --only {cause} sends it"
        assert treat(Reason(cause), only=cause)[1] is not None
    assert treat(Reason.APP_ERROR, "rerun.app_error.send=true")[1] is not None, "the policy of the sweep"
    assert treat(Reason.APP_ERROR, changes=["rerun.app_error.send=true"])[1] is not None, "and of this command"


def test_what_only_does_not_name_is_not_spoken_of(treat):
    assert treat(Reason.LOST, only="timeout") is None


class TestATimeLimit:
    def test_grows_by_the_factor_from_what_the_last_attempt_had(self, treat):
        decision, point = treat(Reason.TIMEOUT, "time_min=45")
        assert decision.changes == ("time_min=68",)
        assert point.request.time_min == 68
        assert point.overrides.count("time_min=68") == 1
        assert not any(one == "time_min=45" for one in point.overrides)

    def test_grows_no_further_than_the_partition_allows(self, treat):
        decision, point = treat(Reason.TIMEOUT, "time_min=2000")
        assert point.request.time_min == 2880
        assert "2880 min instead of 2000" in decision.what

    def test_at_the_partitions_limit_is_left_alone_with_nothing_to_go_on_from(self, treat):
        decision, point = treat(Reason.TIMEOUT, "time_min=2880")
        assert point is None
        assert "it has the 2880 min that gpuA100x4 allows, and there is no checkpoint" in decision.what
        assert treat(Reason.TIMEOUT, "time_min=2880", only="timeout")[1] is not None

    def test_at_the_partitions_limit_goes_on_from_the_newest_checkpoint_of_any_attempt(self, treat, tmp_path):
        for attempt, step in ((1, 300), (2, 40)):
            checkpoint = tmp_path / "3" / f"attempt-{attempt}" / "checkpoints" / f"step-{step:08d}"
            checkpoint.mkdir(parents=True)
            (checkpoint / "checkpoint.json").touch()
        decision, point = treat(Reason.TIMEOUT, "time_min=2880", folder=tmp_path / "3" / "attempt-2")
        assert point is not None
        assert decision.what.endswith("goes on from step-00000300")

    def test_at_the_partitions_limit_is_sent_where_the_checkpoints_stay_at_the_site(self, treat):
        """Regression: looked for here only, a checkpoint at a site over ssh was said not to exist."""
        over_ssh = ["connect.method=ssh", "connect.host=login", "connect.folder=/scratch", "python=/usr/bin/python3"]
        decision, point = treat(Reason.TIMEOUT, "time_min=2880", *(f"sites.delta.{word}" for word in over_ssh))
        assert point is not None
        assert decision.what.endswith("whether there is a checkpoint at delta to go on from is not known here")

    def test_is_what_the_user_says_where_he_says_one(self, treat):
        decision, point = treat(Reason.TIMEOUT, "time_min=45", changes=["time_min=50"])
        assert point.request.time_min == 50
        assert decision.changes == ("time_min=50",)


class TestANodeThatFailed:
    def test_is_excluded_beside_those_that_failed_before(self, treat):
        left = RunArtifacts(manifest={"slurm": {"node": "gpua002"}})
        decision, point = treat(Reason.NODE_FAIL, "sites.delta.exclude_nodes=[gpua001]", left=left)
        assert point.site.exclude_nodes == ["gpua001", "gpua002"]
        assert decision.changes == ("sites.delta.exclude_nodes=[gpua001,gpua002]",)

    def test_is_known_by_slurms_word_where_the_run_left_none(self, treat):
        _, point = treat(Reason.NODE_FAIL, message="exit code 0:1, on gpua001")
        assert point.site.exclude_nodes == ["gpua001"]

    def test_is_not_where_the_policy_says_so_or_nobody_knows_it(self, treat):
        word = {"message": "on gpua001"}
        assert treat(Reason.NODE_FAIL, "rerun.node_fail.exclude_node=false", **word)[1].site.exclude_nodes == []
        decision, point = treat(Reason.NODE_FAIL)
        assert point.site.exclude_nodes == []
        assert "not known" in decision.what


class TestOutOfGpuMemory:
    def test_each_attempt_takes_the_next_relief_under_another_label(self, treat):
        labels = []
        overrides: list[str] = []
        for _ in range(3):
            decision, point = treat(Reason.OOM_GPU, *overrides, only="oom_gpu")
            overrides = [one for one in point.overrides if one.startswith("recipe.")]
            labels.append(decision.what)
        expected = ("grad_checkpoint", "accumulate_2+grad_checkpoint", "accumulate_4+grad_checkpoint")
        for label, parts in zip(labels, expected, strict=True):
            assert all(part in label for part in parts.split("+")), label
        assert len(set(labels)) == 3
        decision, point = treat(Reason.OOM_GPU, *overrides, only="oom_gpu")
        assert point is None
        assert "nothing of rerun.oom_gpu.relief is left" in decision.what

    def test_what_the_user_changes_counts_where_it_makes_another_label(self, treat):
        _, point = treat(Reason.OOM_GPU, only="oom_gpu", changes=["batch=8"])
        assert (point.bench.batch, point.bench.recipe.grad_checkpoint) == (8, False)
        _, point = treat(Reason.OOM_GPU, only="oom_gpu", changes=["time_min=30"])
        assert point.bench.recipe.grad_checkpoint, "equal labels mean equal execution"


class TestOutOfHostMemory:
    def test_doubles_it_up_to_the_node(self, treat):
        share = 58
        for before, after in ((None, 2 * share), (150, 4 * share)):
            overrides = [] if before is None else [f"mem_gb={before}"]
            decision, point = treat(Reason.OOM_HOST, *overrides, only="oom_host")
            assert point.request.mem_gb == after
            assert decision.changes == (f"mem_gb={after}",)
        decision, point = treat(Reason.OOM_HOST, f"mem_gb={4 * share}", only="oom_host")
        assert point is None
        assert "the 232 G of a node" in decision.what

    def test_more_than_a_node_has_is_refused(self, treat):
        with pytest.raises(UserError, match=r"mem_gb=233: a node with a100 of delta has 232 G"):
            treat(Reason.OOM_HOST, only="oom_host", changes=["mem_gb=233"])

    def test_more_of_it_costs_more(self, treat):
        _, point = treat(Reason.OOM_HOST, only="oom_host")
        assert point.service_units == pytest.approx(2 * 58 * 2**30 / 62.5e9)


def test_after_its_attempts_a_point_is_left_alone_whoever_asks(treat):
    decision, point = treat(Reason.LOST, tries=5, only="lost")
    assert point is None
    assert "it had its 5 attempts" in decision.what
    assert treat(Reason.LOST, tries=5, changes=["rerun.max_attempts=6"])[1] is not None


def test_a_point_that_never_got_an_attempt_is_sent_for_the_first_time(treat):
    decision, point = treat(Reason.NEVER_STARTED, tries=0)
    assert (decision.what, point.attempt) == ("sent for the first time", 1)


def test_policies_are_no_part_of_what_is_executed(compose):
    from inpaint_bench.core.config import config_hash

    plain = compose(0, ["gpu=a100"])
    other = compose(0, ["gpu=a100", "rerun.max_attempts=9", "mem_gb=100", "sites.grace.exclude_nodes=[gr01]"])
    assert config_hash(plain.config) == config_hash(other.config)


def test_a_wrong_policy_is_refused_by_name(compose):
    with pytest.raises(UserError, match=r"rerun\.timeout\.time_factor=0\.5: must lie between"):
        compose(0, ["gpu=a100", "rerun.timeout.time_factor=0.5"])


def test_further_overrides_take_the_place_of_earlier_ones_of_their_key():
    assert merged(["a=1", "+b=2", "c=3"], ["b=4", "d=5", "d=6"]) == ["a=1", "c=3", "b=4", "d=6"]
