"""A site file held against what Slurm prints, for many small differences; the real Slurm is in test_doctor.py."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from inpaint_bench.core.paths import conf_dir
from inpaint_bench.core.site import SiteConfig
from launchers.sites.compare import compare
from launchers.sites.finding import Agreement, Finding
from launchers.sites.slurm_facts import Cluster, NotKnownError, duration_min, gpu_weight, gpus, is_model
from tests.launchers.slurm_replies import (
    ASSOCIATIONS,
    CONFIG_22_05,
    NODES_22_05,
    NODES_NEW,
    PARTITIONS_22_05,
    SAID_22_05,
    SAID_NEW,
)
from tests.launchers.slurm_replies import cluster as says

SAME, DIFFERS, ONLY_HERE, NOT_KNOWN = Agreement


def site(name: str, **changes: Any) -> SiteConfig:
    """A site file of this repository, with keys changed by place."""
    merged = _file(name).copy()
    for place, value in changes.items():
        OmegaConf.update(merged, place, value, merge=False)
    found = OmegaConf.to_object(merged)
    assert isinstance(found, SiteConfig)
    return found


@cache
def _file(name: str) -> DictConfig:
    merged = OmegaConf.merge(OmegaConf.structured(SiteConfig), OmegaConf.load(conf_dir() / "site" / f"{name}.yaml"))
    assert isinstance(merged, DictConfig)
    return merged


def found(site: SiteConfig, cluster: Cluster) -> dict[str, Finding]:
    return {finding.place: finding for finding in compare(site, cluster)}


def delta(said: Mapping[str, str | None] | None = None, **changes: Any) -> dict[str, Finding]:
    return found(site("delta", **{"account.value": "bbxx-delta-gpu"} | changes), says(SAID_22_05, **(said or {})))


def grace(said: Mapping[str, str | None] | None = None, **changes: Any) -> dict[str, Finding]:
    return found(site("grace", **changes), says(SAID_NEW, **(said or {})))


def test_a_file_that_is_right_differs_in_nothing():
    wrong = {place: finding for place, finding in delta().items() if finding.agreement is DIFFERS}
    assert set(wrong) == {"limits.max_submit_jobs"}
    assert wrong["limits.max_submit_jobs"].fix == {"limits.max_submit_jobs": 500}
    right = {"limits.max_submit_jobs": 500}
    assert not [finding for finding in delta(**right).values() if finding.agreement is DIFFERS]


@pytest.mark.parametrize(
    ("place", "wrong", "right"),
    [
        ("gpus.a40.partition", "gpuA40x8", "gpuA40x4"),
        ("gpus.a40.max_minutes", 5760, 2880),
        ("gpus.a40.max_minutes", 60, 2880),
        ("gpus.h200.max_per_node", 4, 8),
        ("gpus.a100.cpus_per_gpu", 32, 16),
        ("gpus.a100.mem_gb_per_gpu", 64, 62),
        ("limits.max_array_size", 5000, 1001),
        ("account.value", "bbyy-delta-gpu", "bbxx-delta-gpu"),
        ("account.value", None, "bbxx-delta-gpu"),
        ("wckey", "bench", None),
    ],
)
def test_a_wrong_value_is_found_with_the_right_one(place: str, wrong: Any, right: Any):
    finding = delta(**{place: wrong})[place]
    assert (finding.agreement, finding.here, finding.fix) == (DIFFERS, wrong, {place: right})


def test_a_wrong_partition_hides_no_other_error_of_the_gpu():
    wrong = delta(**{"gpus.a40.partition": "gpuA40x8", "gpus.a40.max_minutes": 9999, "gpus.a40.mem_gb_per_gpu": 999})
    assert wrong["gpus.a40.max_minutes"].fix == {"gpus.a40.max_minutes": 2880}
    assert wrong["gpus.a40.mem_gb_per_gpu"].fix == {"gpus.a40.mem_gb_per_gpu": 62}


def test_a_partition_without_a_likely_meaning_is_said_with_those_that_have_gpus():
    nodes = NODES_22_05.replace("gpu:h200:8", "(null)")
    finding = delta({"nodes": nodes}, **{"gpus.h200.partition": "gpuH200"})["gpus.h200.partition"]
    assert (finding.agreement, finding.fix) == (DIFFERS, {})
    assert "gpuA100x4" in finding.note
    assert "cpu," not in finding.note


def test_a_partition_that_is_down_or_closed_to_the_account_is_no_match():
    down = PARTITIONS_22_05.replace("State=UP", "State=DOWN", 1)
    assert "DOWN" in delta({"partitions": down})["gpus.a40.partition"].there
    closed = PARTITIONS_22_05.replace("AllowAccounts=ALL", "AllowAccounts=aaaa-delta-gpu", 1)
    assert delta({"partitions": closed})["gpus.a40.partition"].agreement is DIFFERS
    denied = {"account.value": "closed", "account.pattern": None}
    assert "closed to account closed" in grace(**denied)["gpus.a100.partition"].note
    assert grace()["gpus.a100.partition"].agreement is SAME


def test_a_gres_type_is_named_as_the_nodes_name_it():
    assert grace()["gpus.a100.gres"].fix == {"gpus.a100.gres": "nvidia_a100-pcie-40gb"}
    assert grace()["gpus.a40.gres"].fix == {"gpus.a40.gres": "nvidia_a40"}
    named = grace(**{"gpus.a40.gres": "nvidia_a40"})
    assert named["gpus.a40.gres"].agreement is SAME


def test_gpus_without_a_type_cannot_be_asked_for_by_one():
    finding = grace(**{"gpus.a40.partition": "old"})["gpus.a40.gres"]
    assert finding.fix == {"gpus.a40.request": "gpus_per_node"}


def test_a_gpu_that_the_partition_has_not_is_no_line_to_paste():
    finding = grace({"nodes": NODES_NEW.replace("nvidia_a40", "tesla_t4")})["gpus.a40.gres"]
    assert (finding.agreement, finding.fix) == (DIFFERS, {})
    assert "tesla_t4" in finding.there
    rest = grace({"nodes": NODES_NEW.replace("nvidia_a40", "tesla_t4")})["gpus.a40.max_per_node"]
    assert rest.agreement is NOT_KNOWN


def test_gpus_asked_for_by_number_must_be_of_one_model():
    mixed = NODES_22_05 + "gpuA40x4|gpub002|64|256000|gpu:a100:4|\n"
    finding = delta({"nodes": mixed})["gpus.a40.request"]
    assert finding.fix == {"gpus.a40.request": "gres"}
    untyped = NODES_22_05.replace("gpu:a40:4", "gpu:4")
    assert delta({"nodes": untyped})["gpus.a40.request"].agreement is NOT_KNOWN


def test_the_time_limit_is_the_shorter_of_the_partition_and_its_qos():
    assert grace()["gpus.a100.max_minutes"].fix == {"gpus.a100.max_minutes": 2880}
    short = delta(qos="high")["gpus.a40.max_minutes"]
    assert short.fix == {"gpus.a40.max_minutes": 1440}
    unsaid = grace({"qos": None})["gpus.a100.max_minutes"]
    assert (unsaid.agreement, unsaid.note) == (NOT_KNOWN, "`it` failed: no")


def test_a_partition_without_a_time_limit_takes_any():
    free = PARTITIONS_22_05.replace("MaxTime=2-00:00:00", "MaxTime=UNLIMITED")
    assert delta({"partitions": free})["gpus.a40.max_minutes"].agreement is SAME


def test_the_partition_may_give_less_of_a_node_than_it_has():
    a100 = grace(**{"gpus.a100.cpus_per_gpu": 24})["gpus.a100.cpus_per_gpu"]
    assert a100.fix == {"gpus.a100.cpus_per_gpu": 20}  # MaxCPUsPerNode 40, though nodes have 48
    memory = grace(**{"gpus.a100.mem_gb_per_gpu": 130})["gpus.a100.mem_gb_per_gpu"]
    assert memory.fix == {"gpus.a100.mem_gb_per_gpu": 125}  # 16 CPUs at MaxMemPerCPU 8000 MB
    assert grace()["gpus.a40.mem_gb_per_gpu"].fix == {"gpus.a40.mem_gb_per_gpu": 90}
    less = PARTITIONS_22_05.replace("MaxMemPerNode=UNLIMITED", "MaxMemPerNode=204800")
    assert delta({"partitions": less})["gpus.a40.mem_gb_per_gpu"].fix == {"gpus.a40.mem_gb_per_gpu": 50}


def test_charge_factors_are_told_by_proportion_to_the_partition_of_factor_1():
    factors = {"gpus.a100.charge_factor": 1.0, "gpus.a40.charge_factor": 0.25}
    assert grace(**factors)["gpus.a40.charge_factor"].fix == {"gpus.a40.charge_factor": 0.5}
    assert grace(**factors | {"gpus.a40.charge_factor": 0.5})["gpus.a40.charge_factor"].agreement is SAME
    assert grace(**{"gpus.a40.charge_factor": 0.5})["gpus.a40.charge_factor"].agreement is NOT_KNOWN
    assert delta()["gpus.a40.charge_factor"].agreement is NOT_KNOWN


def test_a_feature_that_no_node_has_is_found():
    assert delta()["constraint"].agreement is SAME
    finding = delta(constraint=["scratch", "burst", "a&b"])["constraint"]
    assert finding.agreement is DIFFERS
    assert "burst in gpuA40x4" in finding.there
    assert "a&b" not in finding.there


def test_accounts_are_judged_only_where_slurm_checks_them():
    free = CONFIG_22_05.replace("= associations,limits,qos", "= none")
    assert delta({"config": free}, **{"account.value": "any"})["account.value"].agreement is ONLY_HERE
    assert delta({"config": free})["limits.max_submit_jobs"].agreement is SAME
    two = delta(
        {"associations": ASSOCIATIONS.replace("-cpu", "2-gpu")}, **{"account.value": None, "account.pattern": None}
    )
    assert (two["account.value"].agreement, two["account.value"].fix) == (DIFFERS, {})
    assert delta({"associations": None})["account.value"].agreement is NOT_KNOWN
    assert grace()["account.value"].agreement is SAME
    assert delta(**{"account.pattern": r"\d+"})["account.pattern"].agreement is DIFFERS


def test_a_qos_must_be_there_and_be_ones_own():
    assert delta(qos="high")["qos"].agreement is SAME
    assert delta(qos="vip")["qos"].note == "there is no such QOS"
    mine = delta({"associations": "bbxx-delta-gpu||normal|normal|\n"}, qos="high")["qos"]
    assert mine.note == "not one that you may use"
    closed = PARTITIONS_22_05.replace("AllowQos=ALL", "AllowQos=normal", 1)
    assert "not let into gpuA40x4" in delta({"partitions": closed}, qos="high")["qos"].note


def test_the_submit_limit_is_the_smallest_of_association_and_qos():
    assert delta(qos="high")["limits.max_submit_jobs"].fix == {"limits.max_submit_jobs": 100}
    assert grace()["limits.max_submit_jobs"].fix == {"limits.max_submit_jobs": 200}
    none = delta({"associations": "bbxx-delta-gpu||normal|normal|\n"}, **{"limits.max_submit_jobs": 7})
    assert none["limits.max_submit_jobs"].agreement is ONLY_HERE


def test_requeue_is_wrong_only_where_ours_alone_would_refuse_it():
    assert delta()["requeue.request"].agreement is SAME
    assert delta(**{"requeue.request": False})["requeue.request"].agreement is SAME
    assert grace()["requeue.request"].agreement is SAME
    assert grace(**{"requeue.request": False})["requeue.request"].fix == {"requeue.request": True}


def test_a_tracked_key_that_is_demanded_is_missed():
    assert (grace()["wckey"].agreement, grace()["wckey"].fix) == (DIFFERS, {})
    assert grace(wckey="bench")["wckey"].agreement is SAME


def test_preemption_is_compared_where_a_partition_in_use_is_pre_empted():
    assert delta()["preempt.grace_s"].agreement is ONLY_HERE
    exposed = {"gpus.a40.partition": "gpuA40x4-preempt"}
    assert delta(**exposed)["preempt.grace_s"].agreement is SAME
    assert delta(**exposed)["preempt.min_run_s"].agreement is SAME
    wrong = delta(**exposed, **{"preempt.grace_s": 30, "preempt.min_run_s": 0, "preempt.signal": None})
    assert wrong["preempt.grace_s"].fix == {"preempt.grace_s": 300}
    assert wrong["preempt.min_run_s"].fix == {"preempt.min_run_s": 600}
    assert wrong["preempt.signal"].fix == {"preempt.signal": "SIGTERM"}


def test_preemption_by_qos_takes_grace_and_exemption_of_the_qos():
    assert grace()["preempt.grace_s"].fix == {"preempt.grace_s": 300}
    assert grace()["preempt.min_run_s"].fix == {"preempt.min_run_s": 600}


def test_a_site_that_sends_the_users_own_signal_is_not_called_wrong():
    said = {
        "config": SAID_NEW["config"].replace("PreemptParameters       = (null)", "PreemptParameters = send_user_signal")
    }
    assert grace(said)["preempt.signal"].agreement is NOT_KNOWN


@pytest.mark.parametrize("topic", ["config", "partitions", "nodes", "associations", "qos"])
def test_a_command_that_fails_makes_nothing_differ_that_it_would_have_told(topic: str):
    whole, without = delta(), delta({topic: None})
    assert set(whole) == set(without)
    for place, finding in without.items():
        if finding.agreement is not whole[place].agreement:
            assert (finding.agreement, finding.note) == (NOT_KNOWN, "`it` failed: no") or "TRESBilling" in finding.note


def test_numbers_that_slurm_garbled_are_not_known():
    assert delta({"nodes": NODES_22_05.replace("|64|", "|?|")})["gpus.a40.cpus_per_gpu"].agreement is NOT_KNOWN


def test_times_are_read_in_every_form_that_slurm_writes():
    forms = {
        "2-00:00:00": 2880,
        "01:00:00": 60,
        "30:00": 30,
        "45": 45,
        "2-12": 3600,
        "1-06:30": 1830,
        "00:00:30": 0.5,
        "UNLIMITED": math.inf,
        "infinite": math.inf,
        "NONE": None,
        "": None,
        "-1": None,
    }
    assert {text: duration_min(text) for text in forms} == forms


def test_a_time_of_another_form_is_not_guessed():
    with pytest.raises(NotKnownError, match="two days"):
        duration_min("two days")


def test_gpus_are_counted_by_type_in_every_form_of_a_gres():
    forms = {
        "gpu:a100:4": {"a100": 4},
        "gpu:a100:4(S:0,1),shard:a100:16(S:0,1)": {"a100": 4},
        "gpu:2": {"": 2},
        "gpu": {"": 1},
        "gpu:tesla": {"tesla": 1},
        "gpu:a100:no_consume:2,gpu:1g.10gb:7": {"a100": 2, "1g.10gb": 7},
        "gpu:a40:0": {},
        "craynetwork:4,bandwidth:lustre:2": {},
        "(null)": {},
    }
    assert {gres: gpus(gres) for gres in forms} == forms


def test_a_model_is_a_word_of_the_type_and_not_a_part_of_one():
    assert is_model("a100", "nvidia_a100-sxm4-40gb")
    assert is_model("h200", "H200")
    assert not is_model("a10", "nvidia_a100")
    assert not is_model("a100", "")


def test_the_weight_of_a_type_goes_before_that_of_any_gpu():
    weights = "CPU=1.0,Mem=0.25G,GRES/gpu=10,GRES/gpu:a100=20"
    assert (gpu_weight(weights, "a100"), gpu_weight(weights, "a40"), gpu_weight("CPU=1", "a40")) == (20, 10, None)
    assert gpu_weight(None, "a40") is None
