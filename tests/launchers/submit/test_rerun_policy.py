"""Rerun policies: what is done with a point, by its failure reason."""

import pytest

from inpaint_bench.core.attempt_state import RunArtifacts, SchedulerState
from inpaint_bench.core.config.bench import RerunConfig
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.records import ManifestHead, SlurmJob
from inpaint_bench.core.schema import PointState, Reason, Status
from launchers.status.survey import AttemptStatus, PointStatus
from launchers.submit.rerun import decide, merge_overrides
from launchers.sweep.attempt import Attempt
from launchers.sweep.ledger import PointRecord
from tests.launchers.conftest import ACCOUNT

pytestmark = pytest.mark.slow


@pytest.fixture
def compose(kept_composer):
    with kept_composer.used() as compose:
        yield compose


@pytest.fixture
def decide_one(compose, tmp_path):
    """Return the decision about a failed point of Delta's A100 (unless overridden), and its next attempt."""

    def of(reason, *overrides, only=None, changes=(), attempts=1, message="", manifest=None, run_dir=None, nodes=""):
        attempted = [
            Attempt(point=3, attempt=n + 1, run_id="r", site="delta", group="g", planned_unix=0, job_id=f"1_{n}")
            for n in range(attempts)
        ]
        launched = ["gpu=a100", "site=delta", ACCOUNT, *overrides]
        record = PointRecord(num=3, overrides=launched, gpu="a100", batch=16, site="delta", attempts=attempted)
        resolved = {"state": PointState.FAILED, "reason": reason, "message": message}
        sources = {"artifacts": RunArtifacts(manifest=manifest), "run_dir": run_dir or tmp_path / "3" / "attempt-1"}
        sources["scheduler"] = SchedulerState(state=str(reason).upper(), detail=message, nodes=nodes) if nodes else None
        statuses = tuple(AttemptStatus(attempt=attempt, **resolved, **sources) for attempt in attempted)
        point = PointStatus(record=record, attempts=statuses, **resolved)
        decisions = decide([point], compose, only=only and frozenset({Reason(only)}), changes=changes)
        return (decisions[0], decisions[0].point) if decisions else None

    return of


def test_every_reason_has_a_policy():
    assert set(Reason) == {name for name in vars(RerunConfig()) if name != "max_attempts"}


def test_failures_that_are_not_the_points_fault_are_submitted_unchanged(decide_one):
    for reason in ("preempted", "cancelled", "lost", "never_started", "telemetry_incomplete"):
        decision, point = decide_one(Reason(reason), "batch=8")
        assert (decision.action, decision.changes) == ("submitted unchanged", ()), reason
        assert point.overrides == ["gpu=a100", "site=delta", ACCOUNT, "batch=8"]
        assert (point.num, point.attempt) == (3, 2)


def test_failures_that_would_repeat_are_left_alone_unless_named_by_only(decide_one):
    for reason in ("app_error", "oom_gpu", "oom_host", "unavailable"):
        decision, point = decide_one(Reason(reason))
        assert point is None
        assert decision.action == f"left alone: --only {reason} submits it"
        assert decide_one(Reason(reason), only=reason)[1] is not None
    assert decide_one(Reason.APP_ERROR, "rerun.app_error.send=true")[1] is not None, "the policy of the sweep"
    assert decide_one(Reason.APP_ERROR, changes=["rerun.app_error.send=true"])[1] is not None, "and of this command"


def test_points_that_only_does_not_name_are_not_listed(decide_one):
    assert decide_one(Reason.LOST, only="timeout") is None


class TestTimeout:
    def test_limit_grows_by_the_factor_from_the_last_attempts_limit(self, decide_one):
        decision, point = decide_one(Reason.TIMEOUT, "time_min=45")
        assert decision.changes == ("time_min=68",)
        assert point.request.time_min == 68
        assert point.overrides.count("time_min=68") == 1
        assert "time_min=45" not in point.overrides

    def test_limit_grows_up_to_the_partitions_maximum(self, decide_one):
        decision, point = decide_one(Reason.TIMEOUT, "time_min=2000")
        assert point.request.time_min == 2880
        assert "2880 min instead of 2000" in decision.action

    def test_at_the_partitions_maximum_without_checkpoint_the_point_is_left_alone(self, decide_one):
        decision, point = decide_one(Reason.TIMEOUT, "time_min=2880")
        assert point is None
        assert "it had the 2880 min that gpuA100x4 allows; there is no checkpoint" in decision.action
        assert decide_one(Reason.TIMEOUT, "time_min=2880", only="timeout")[1] is not None

    def test_at_the_partitions_maximum_the_newest_checkpoint_of_any_attempt_is_resumed(self, decide_one, tmp_path):
        for attempt, step in ((1, 300), (2, 40)):
            checkpoint = tmp_path / "3" / f"attempt-{attempt}" / "checkpoints" / f"step-{step:08d}"
            checkpoint.mkdir(parents=True)
            (checkpoint / "checkpoint.json").touch()
        decision, point = decide_one(Reason.TIMEOUT, "time_min=2880", run_dir=tmp_path / "3" / "attempt-2")
        assert point is not None
        assert decision.action.endswith("resumes from step-00000300")

    def test_at_the_partitions_maximum_a_point_of_a_site_over_ssh_is_submitted(self, decide_one):
        """Regression: checkpoints were looked for here only, and those at a site over ssh reported as missing."""
        over_ssh = ["connect.method=ssh", "connect.host=login", "connect.folder=/scratch", "python=/usr/bin/python3"]
        decision, point = decide_one(Reason.TIMEOUT, "time_min=2880", *(f"sites.delta.{key}" for key in over_ssh))
        assert point is not None
        assert decision.action.endswith("whether delta has a checkpoint is not known here")

    def test_limit_given_by_the_user_is_used(self, decide_one):
        decision, point = decide_one(Reason.TIMEOUT, "time_min=45", changes=["time_min=50"])
        assert point.request.time_min == 50
        assert decision.changes == ("time_min=50",)


class TestNodeFailure:
    def test_node_is_excluded_in_addition_to_earlier_ones(self, decide_one):
        manifest = ManifestHead(status=Status.FAILED, slurm=SlurmJob(node="gpua002"))
        decision, point = decide_one(Reason.NODE_FAIL, "sites.delta.exclude_nodes=[gpua001]", manifest=manifest)
        assert point.site.exclude_nodes == ["gpua001", "gpua002"]
        assert decision.changes == ("sites.delta.exclude_nodes=[gpua001,gpua002]",)

    def test_node_is_taken_from_slurm_where_there_is_no_manifest(self, decide_one):
        _, point = decide_one(Reason.NODE_FAIL, nodes="gpua001")
        assert point.site.exclude_nodes == ["gpua001"]

    @pytest.mark.parametrize(
        "nodes", ["gpua[001,017]", "gpua[001-003]", "gpua001,gpub002", "gpua[001,", "gp...", "None assigned", "(null)"]
    )
    def test_no_node_is_excluded_of_several_or_of_a_list_that_cannot_be_read(self, decide_one, nodes):
        manifest = ManifestHead(status=Status.FAILED, slurm=SlurmJob(node="gpua001"), nodes=2)
        for facts in ({"nodes": nodes}, {"manifest": manifest}):
            decision, point = decide_one(Reason.NODE_FAIL, **facts)
            assert point.site.exclude_nodes == []
            assert decision.action == "submitted unchanged: which node failed is not known"

    @pytest.mark.parametrize(
        "message", ["/data/runs on a40/3/attempt-1/manifest.json: damaged", "exit code 0:1, on gpua"]
    )
    def test_no_node_is_read_from_a_sentence(self, decide_one, message):
        assert decide_one(Reason.NODE_FAIL, message=message)[1].site.exclude_nodes == []

    def test_compact_list_of_the_site_file_is_extended(self, decide_one):
        site = 'sites.delta.exclude_nodes=["gpua[001-002]"]'
        _, point = decide_one(Reason.NODE_FAIL, site, nodes="gpua017")
        assert point.site.exclude_nodes == ["gpua001", "gpua002", "gpua017"]
        decision, point = decide_one(Reason.NODE_FAIL, site, nodes="gpua002")
        assert decision.changes == ()

    def test_bad_exclusion_is_left_by_an_override(self, decide_one):
        bad = "sites.delta.exclude_nodes=[gpua]"
        _, point = decide_one(Reason.NEVER_STARTED, bad, changes=["sites.delta.exclude_nodes=[]"])
        assert point.site.exclude_nodes == []
        assert bad not in point.overrides

    def test_node_is_not_excluded_by_a_policy_or_if_unknown(self, decide_one):
        node = {"nodes": "gpua001"}
        assert decide_one(Reason.NODE_FAIL, "rerun.node_fail.exclude_node=false", **node)[1].site.exclude_nodes == []
        decision, point = decide_one(Reason.NODE_FAIL)
        assert point.site.exclude_nodes == []
        assert "not known" in decision.action


class TestGpuOutOfMemory:
    def test_each_attempt_takes_the_next_relief_step_under_another_label(self, decide_one):
        labels = []
        overrides: list[str] = []
        for _ in range(3):
            decision, point = decide_one(Reason.OOM_GPU, *overrides, only="oom_gpu")
            overrides = [o for o in point.overrides if o.startswith("recipe.")]
            labels.append(decision.action)
        expected = ("grad_checkpoint", "accumulate=2+grad_checkpoint", "accumulate=4+grad_checkpoint")
        for label, parts in zip(labels, expected, strict=True):
            assert all(part in label for part in parts.split("+")), label
        assert len(set(labels)) == 3
        decision, point = decide_one(Reason.OOM_GPU, *overrides, only="oom_gpu")
        assert point is None
        assert "rerun.oom_gpu.relief has no further step" in decision.action

    def test_a_relief_step_that_the_recipe_cannot_have_is_passed_over(self, decide_one):
        """`reduce-overhead` makes CUDA graphs, which overwrite gradients that accumulate."""
        graphs = ["recipe=[baseline,compile_reduce-overhead]", "recipe.grad_checkpoint=true"]
        decision, point = decide_one(Reason.OOM_GPU, *graphs, only="oom_gpu")
        assert point is None
        assert "rerun.oom_gpu.relief has no further step" in decision.action

    def test_changes_by_the_user_count_if_they_give_another_label(self, decide_one):
        _, point = decide_one(Reason.OOM_GPU, only="oom_gpu", changes=["batch=8"])
        assert (point.bench.batch, point.bench.recipe.grad_checkpoint) == (8, False)
        _, point = decide_one(Reason.OOM_GPU, only="oom_gpu", changes=["time_min=30"])
        assert point.bench.recipe.grad_checkpoint, "equal labels mean equal execution"


class TestHostOutOfMemory:
    def test_memory_doubles_up_to_the_nodes(self, decide_one):
        share = 56
        for before, after in ((None, 2 * share), (150, 4 * share)):
            overrides = [] if before is None else [f"mem_gb={before}"]
            decision, point = decide_one(Reason.OOM_HOST, *overrides, only="oom_host")
            assert point.request.mem_gb == after
            assert decision.changes == (f"mem_gb={after}",)
        decision, point = decide_one(Reason.OOM_HOST, f"mem_gb={4 * share}", only="oom_host")
        assert point is None
        assert "the 224 G of a node" in decision.action

    def test_more_memory_than_a_node_has_is_refused(self, decide_one):
        with pytest.raises(UserError, match=r"mem_gb=225: a node with a100 of delta has 224 G"):
            decide_one(Reason.OOM_HOST, only="oom_host", changes=["mem_gb=225"])

    def test_site_that_requests_no_memory_needs_the_users_number(self, decide_one):
        share = "sites.delta.gpus.a100.mem_gb_per_gpu=null"
        decision, point = decide_one(Reason.OOM_HOST, share, only="oom_host")
        assert (point, decision.action) == (None, "left alone: it requested none; mem_gb=... does")
        assert decide_one(Reason.OOM_HOST, share, only="oom_host", changes=["mem_gb=70"])[1].request.mem_gb == 70
        assert decide_one(Reason.OOM_HOST, share, "mem_gb=70", only="oom_host")[1].request.mem_gb == 140

    def test_more_memory_costs_more(self, decide_one):
        _, point = decide_one(Reason.OOM_HOST, only="oom_host")
        assert point.service_units == pytest.approx(2 * 56 * 2**30 / 62.5e9)


def test_point_with_max_attempts_is_left_alone_even_if_named(decide_one):
    decision, point = decide_one(Reason.LOST, attempts=5, only="lost")
    assert point is None
    assert "it had its 5 attempts" in decision.action
    assert decide_one(Reason.LOST, attempts=5, changes=["rerun.max_attempts=6"])[1] is not None


def test_policies_are_those_of_each_point(compose, tmp_path):
    """Regression: the first point's decided for all."""
    failed = {"state": PointState.FAILED, "reason": Reason.TIMEOUT, "message": ""}
    launched = [["rerun.timeout.send=false"], [], ["rerun.timeout.send=false"]]
    points = [
        PointStatus(
            record=PointRecord(num=num, overrides=["gpu=a100", *more], gpu="a100", batch=16, site="delta"),
            **failed,
        )
        for num, more in enumerate(launched)
    ]
    assert [decision.point is not None for decision in decide(points, compose)] == [False, True, False]


def test_point_without_attempts_is_submitted_for_the_first_time(decide_one):
    decision, point = decide_one(Reason.NEVER_STARTED, attempts=0)
    assert (decision.action, point.attempt) == ("submitted for the first time", 1)


def test_policies_do_not_change_the_config_hash(compose):
    from inpaint_bench.core.config.config_hash import config_hash

    plain = compose(0, ["gpu=a100"])
    other = compose(0, ["gpu=a100", "rerun.max_attempts=9", "mem_gb=100", "sites.grace.exclude_nodes=[gr01]"])
    assert config_hash(plain.composed.build()) == config_hash(other.composed.build())


def test_impossible_policy_is_refused_with_its_key(compose):
    with pytest.raises(UserError, match=r"rerun\.timeout\.time_factor=0\.5: must lie between"):
        compose(0, ["gpu=a100", "rerun.timeout.time_factor=0.5"])


@pytest.mark.parametrize("value", ["1_200_34", "+5", "1e5", "true"])
def test_change_that_is_no_text_as_typed_is_refused(decide_one, value):
    with pytest.raises(UserError, match=r"sites\.delta\.qos=.*: a text is needed"):
        decide_one(Reason.LOST, changes=[f"sites.delta.qos={value}"])
    assert decide_one(Reason.LOST, changes=[f"sites.delta.qos='{value}'"])[1].site.qos == value


def test_later_overrides_replace_earlier_ones_of_the_same_key():
    assert merge_overrides(["a=1", "+b=2", "c=3"], ["b=4", "d=5", "d=6"]) == ["a=1", "c=3", "b=4", "d=6"]
