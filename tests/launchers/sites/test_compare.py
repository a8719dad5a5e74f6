"""compare: many small differences between a site file and Slurm's output; real Slurm is in test_site_report.py."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from inpaint_bench.core.config.site import SiteConfig
from inpaint_bench.core.paths import conf_dir
from launchers.sites.compare import Agreement, Finding, compare
from launchers.sites.slurm_facts import (
    Cluster,
    NotReportedError,
    is_model,
    is_slice,
    parse_gres,
    parse_minutes,
)
from tests.launchers.sites.slurm_replies import (
    ASSOCIATIONS,
    CONFIG_22_05,
    NODES_22_05,
    NODES_NEW,
    OUTPUTS_22_05,
    OUTPUTS_NEW,
    PARTITIONS_22_05,
    QOS,
)
from tests.launchers.sites.slurm_replies import cluster as make_cluster

SAME, DIFFERS, NOT_APPLICABLE, UNKNOWN = Agreement


def site(name: str, **changes: Any) -> SiteConfig:
    """Return a site file of this repository, with keys changed by key."""
    merged = _file(name).copy()
    for key, value in changes.items():
        OmegaConf.update(merged, key, value, merge=False)
    config = OmegaConf.to_object(merged)
    assert isinstance(config, SiteConfig)
    return config


@cache
def _file(name: str) -> DictConfig:
    merged = OmegaConf.merge(OmegaConf.structured(SiteConfig), OmegaConf.load(conf_dir() / "site" / f"{name}.yaml"))
    assert isinstance(merged, DictConfig)
    return merged


def findings(site: SiteConfig, cluster: Cluster) -> dict[str, Finding]:
    return {finding.key: finding for finding in compare(site, cluster)}


def delta(outputs: Mapping[str, str | None] | None = None, **changes: Any) -> dict[str, Finding]:
    return findings(
        site("delta", **{"account.value": "bbxx-delta-gpu"} | changes), make_cluster(OUTPUTS_22_05, **(outputs or {}))
    )


def grace(outputs: Mapping[str, str | None] | None = None, **changes: Any) -> dict[str, Finding]:
    one_partition = {"gpus.a40.partition": "gpu"}  # the replies are of a cluster with one partition for all GPUs
    return findings(site("grace", **(one_partition | changes)), make_cluster(OUTPUTS_NEW, **(outputs or {})))


def test_correct_site_file_has_no_differences():
    wrong = {key: finding for key, finding in delta().items() if finding.agreement is DIFFERS}
    assert set(wrong) == {"limits.max_submit_jobs"}
    assert wrong["limits.max_submit_jobs"].corrections == {"limits.max_submit_jobs": 500}
    right = {"limits.max_submit_jobs": 500}
    assert not [finding for finding in delta(**right).values() if finding.agreement is DIFFERS]


@pytest.mark.parametrize(
    ("key", "wrong", "right"),
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
    ],
)
def test_wrong_value_is_reported_with_its_correction(key: str, wrong: Any, right: Any):
    finding = delta(**{key: wrong})[key]
    assert (finding.agreement, finding.configured, finding.corrections) == (DIFFERS, wrong, {key: right})


def test_more_nodes_than_slurm_gives_a_job_differ():
    key = "gpus.a100.max_nodes"
    limited = {"partitions": PARTITIONS_22_05.replace("MaxNodes=UNLIMITED", "MaxNodes=1")}
    assert [delta(**{key: number})[key].agreement for number in (None, 1, 2, 3)] == [SAME, SAME, SAME, DIFFERS]
    assert delta(**{key: 3})[key].corrections == {key: 2}, "the partition has two nodes"
    for number in (None, 2):
        assert delta(limited, **{key: number})[key].corrections == {key: 1}


def test_wrong_partition_does_not_hide_other_errors_of_the_gpu():
    wrong = delta(**{"gpus.a40.partition": "gpuA40x8", "gpus.a40.max_minutes": 9999, "gpus.a40.mem_gb_per_gpu": 999})
    assert wrong["gpus.a40.max_minutes"].corrections == {"gpus.a40.max_minutes": 2880}
    assert wrong["gpus.a40.mem_gb_per_gpu"].corrections == {"gpus.a40.mem_gb_per_gpu": 62}


def test_unknown_partition_is_reported_with_the_partitions_that_have_gpus():
    nodes = NODES_22_05.replace("gpu:h200:8", "(null)")
    finding = delta({"nodes": nodes}, **{"gpus.h200.partition": "gpuH200"})["gpus.h200.partition"]
    assert (finding.agreement, finding.corrections) == (DIFFERS, {})
    assert "gpuA100x4" in finding.note
    assert "cpu," not in finding.note


def test_partition_that_is_down_or_closed_to_the_account_differs():
    down = PARTITIONS_22_05.replace("State=UP", "State=DOWN", 1)
    assert "DOWN" in delta({"partitions": down})["gpus.a40.partition"].reported
    closed = PARTITIONS_22_05.replace("AllowAccounts=ALL", "AllowAccounts=aaaa-delta-gpu", 1)
    assert delta({"partitions": closed})["gpus.a40.partition"].agreement is DIFFERS
    denied = {"account.value": "closed", "account.pattern": None}
    assert "closed to account closed" in grace(**denied)["gpus.a100.partition"].note
    assert grace()["gpus.a100.partition"].agreement is SAME


def test_gres_type_is_corrected_to_that_of_the_nodes():
    assert grace()["gpus.a100.gres"].corrections == {"gpus.a100.gres": "nvidia_a100-pcie-40gb"}
    assert grace()["gpus.a40.gres"].corrections == {"gpus.a40.gres": "nvidia_a40"}
    named = grace(**{"gpus.a40.gres": "nvidia_a40"})
    assert named["gpus.a40.gres"].agreement is SAME


def test_request_by_type_is_wrong_for_gpus_without_a_type():
    finding = grace(**{"gpus.a40.partition": "old"})["gpus.a40.gres"]
    assert finding.corrections == {"gpus.a40.request": "gpus_per_node"}


def test_gpu_missing_from_the_partition_has_no_correction():
    finding = grace({"nodes": NODES_NEW.replace("nvidia_a40", "tesla_t4")})["gpus.a40.gres"]
    assert (finding.agreement, finding.corrections) == (DIFFERS, {})
    assert "tesla_t4" in finding.reported
    rest = grace({"nodes": NODES_NEW.replace("nvidia_a40", "tesla_t4")})["gpus.a40.max_per_node"]
    assert rest.agreement is UNKNOWN


def test_request_by_number_needs_a_partition_of_one_model():
    mixed = NODES_22_05 + "gpuA40x4|gpub002|64|256000|gpu:a100:4|\n"
    finding = delta({"nodes": mixed})["gpus.a40.request"]
    assert finding.corrections == {"gpus.a40.request": "gres"}
    untyped = NODES_22_05.replace("gpu:a40:4", "gpu:4")
    assert delta({"nodes": untyped})["gpus.a40.request"].agreement is UNKNOWN


def test_time_limit_is_the_shorter_of_partition_and_qos():
    assert grace()["gpus.a100.max_minutes"].corrections == {"gpus.a100.max_minutes": 2880}
    short = delta(qos="high")["gpus.a40.max_minutes"]
    assert short.corrections == {"gpus.a40.max_minutes": 1440}
    without_qos = grace({"qos": None})["gpus.a100.max_minutes"]
    assert (without_qos.agreement, without_qos.note) == (UNKNOWN, "`it` failed: no")


def test_partition_without_a_time_limit_accepts_any():
    free = PARTITIONS_22_05.replace("MaxTime=2-00:00:00", "MaxTime=UNLIMITED")
    assert delta({"partitions": free})["gpus.a40.max_minutes"].agreement is SAME


def test_partition_limits_below_the_node_size_count():
    a100 = grace(**{"gpus.a100.cpus_per_gpu": 24})["gpus.a100.cpus_per_gpu"]
    assert a100.corrections == {"gpus.a100.cpus_per_gpu": 20}  # MaxCPUsPerNode 40, though nodes have 48
    memory = grace(**{"gpus.a100.mem_gb_per_gpu": 130})["gpus.a100.mem_gb_per_gpu"]
    assert memory.corrections == {"gpus.a100.mem_gb_per_gpu": 125}  # 16 CPUs at MaxMemPerCPU 8000 MB
    assert grace()["gpus.a40.mem_gb_per_gpu"].corrections == {"gpus.a40.mem_gb_per_gpu": 90}
    less = PARTITIONS_22_05.replace("MaxMemPerNode=UNLIMITED", "MaxMemPerNode=204800")
    assert delta({"partitions": less})["gpus.a40.mem_gb_per_gpu"].corrections == {"gpus.a40.mem_gb_per_gpu": 50}


def test_charge_factor_is_unknown_and_shown_with_the_billing_weights():
    finding = grace(**{"gpus.a40.charge_factor": 0.5})["gpus.a40.charge_factor"]
    assert finding.agreement is UNKNOWN
    assert finding.reported.endswith("GRES/gpu=10,GRES/gpu:nvidia_a100-pcie-40gb=20")
    assert delta()["gpus.a40.charge_factor"].reported == "TRESBillingWeights=none"


def test_rates_that_are_upper_bounds_are_shown_with_the_billing_weights():
    finding = grace()["charging.units_per_gpu"]
    assert (finding.agreement, finding.corrections) == (UNKNOWN, {})
    assert "upper bound: a40" in finding.note
    assert "GRES/gpu:nvidia_a100-pcie-40gb=20" in finding.reported
    assert "charging.units_per_gpu" not in delta()


def test_constraint_that_no_node_has_differs():
    assert delta()["constraint"].agreement is SAME
    finding = delta(constraint=["work", "burst", "a&b"])["constraint"]
    assert finding.agreement is DIFFERS
    assert "burst in gpuA40x4" in finding.reported
    assert "a&b" not in finding.reported


def test_accounts_are_compared_only_if_slurm_enforces_them():
    free = CONFIG_22_05.replace("= associations,limits,qos", "= none")
    assert delta({"config": free}, **{"account.value": "any"})["account.value"].agreement is NOT_APPLICABLE
    assert delta({"config": free})["limits.max_submit_jobs"].agreement is SAME
    two = delta(
        {"associations": ASSOCIATIONS.replace("-cpu", "2-gpu")}, **{"account.value": None, "account.pattern": None}
    )
    assert (two["account.value"].agreement, two["account.value"].corrections) == (DIFFERS, {})
    assert delta({"associations": None})["account.value"].agreement is UNKNOWN
    assert grace()["account.value"].agreement is SAME


def test_submit_limit_is_the_smallest_of_association_and_qos():
    assert delta(qos="high")["limits.max_submit_jobs"].corrections == {"limits.max_submit_jobs": 100}
    assert grace()["limits.max_submit_jobs"].corrections == {"limits.max_submit_jobs": 200}
    none = delta({"associations": "bbxx-delta-gpu|normal|normal|\n"}, **{"limits.max_submit_jobs": 7})
    assert none["limits.max_submit_jobs"].agreement is NOT_APPLICABLE


@pytest.mark.parametrize("topic", ["config", "partitions", "nodes", "associations", "qos"])
def test_failed_command_makes_facts_unknown_and_none_differ(topic: str):
    whole, without = delta(), delta({topic: None})
    assert set(whole) == set(without)
    for key, finding in without.items():
        if finding.agreement is not whole[key].agreement:
            assert (finding.agreement, finding.note) == (UNKNOWN, "`it` failed: no")


def test_garbled_numbers_are_unknown():
    assert delta({"nodes": NODES_22_05.replace("|64|", "|?|")})["gpus.a40.cpus_per_gpu"].agreement is UNKNOWN


@pytest.mark.parametrize(
    ("topic", "output", "note"),
    [
        ("nodes", "Usage: sinfo [OPTIONS]\n", "`sinfo` printed what cannot be read: Usage: sinfo [OPTIONS]"),
        ("nodes", NODES_22_05 + "gpuA40x4|gpub9|64|256000|gpu:a40:4\n", "gpub9|64|256000|gpu:a40:4"),
        ("nodes", "", "`sinfo` lists no node"),
        ("partitions", "sinfo: \x1b[31mno\n", "`scontrol show partition` lists none: sinfo: ?[31mno"),
        ("partitions", "", "`scontrol show partition` lists none: it printed nothing"),
        ("associations", "Account|Share\nabcd|1\n", "`sacctmgr` printed what cannot be read: Account|Share"),
        ("qos", QOS + "\nhigh|\n", "`sacctmgr` printed what cannot be read: high|"),
        ("config", "slurm is being upgraded\n", "`scontrol show config` has no"),
        ("user", "", "`id -un` printed '', which is no user name"),
        ("user", "\x1b[31mme\n", "which is no user name"),
        ("user", "Welcome\nme\n", "which is no user name"),
    ],
)
def test_output_that_cannot_be_read_is_named_and_contradicts_nothing(topic: str, output: str, note: str):
    whole, garbled = delta(), delta({topic: output})
    changed = [finding for key, finding in garbled.items() if finding.agreement is not whole[key].agreement]
    assert changed
    assert {finding.agreement for finding in changed} == {UNKNOWN}
    assert any(note in finding.note for finding in changed)


SLICES = "gpuA100x4*|gpua001|64|256000|gpu:a100_3g.20gb:8|a100\n"


@pytest.mark.parametrize("gres", [None, "a100_3g.20gb"])
def test_slices_are_not_taken_for_the_gpu(gres: str | None):
    nodes = "".join(line for line in NODES_22_05.splitlines(True) if "gpua00" not in line) + SLICES
    wrong = delta({"nodes": nodes}, **{"gpus.a100.gres": gres, "gpus.a100.request": "gres"})
    finding = wrong["gpus.a100.gres"]
    assert (finding.agreement, finding.corrections, finding.reported) == (DIFFERS, {}, "a100_3g.20gb")
    assert finding.note == "partition gpuA100x4 has no a100, and a MIG slice is no GPU"
    assert wrong["gpus.a100.max_per_node"].agreement is UNKNOWN
    by_number = delta({"nodes": nodes}, **{"gpus.a100.request": "gpus_per_node"})["gpus.a100.request"]
    assert (by_number.agreement, by_number.corrections) == (DIFFERS, {})


def test_beside_slices_the_whole_gpus_count():
    whole = "gpu:nvidia_a100-sxm4-40gb:2,gpu:a100_1g.5gb:14"
    beside = {"nodes": NODES_22_05.replace("gpu:a100:4", whole)}
    wrong = delta(beside, **{"gpus.a100.request": "gres"})
    assert wrong["gpus.a100.gres"].corrections == {"gpus.a100.gres": "nvidia_a100-sxm4-40gb"}
    assert wrong["gpus.a100.max_per_node"].corrections == {"gpus.a100.max_per_node": 2}
    by_number = delta(beside, **{"gpus.a100.request": "gpus_per_node"})["gpus.a100.request"]
    assert by_number.corrections["gpus.a100.request"] == "gres", "a request without a type may get a slice"


def test_a_partition_of_slices_is_not_the_likely_one():
    nodes = NODES_22_05.replace("gpu:a40:4", "gpu:a40-mig:4")
    assert delta({"nodes": nodes}, **{"gpus.a40.partition": "gpuA40"})["gpus.a40.partition"].corrections == {}


@pytest.mark.parametrize(
    "name",
    [
        *("a100_3g.20gb", "1g.5gb", "nvidia_a100_80gb_pcie_1g.10gb+me", "A100-MIG", "a100mig", "h100_1c.3g.40gb"),
        *("mig-1g-10gb", "a100_2g", "h200.7g.141gb"),
    ],
)
def test_names_of_slices_are_known(name: str):
    assert is_slice(name)
    assert not is_model("a100", name)


@pytest.mark.parametrize(
    "name", ["a100", "nvidia_a100-sxm4-40gb", "a100_80gb", "gh200_480gb", "l40s-48g", "v100s-32gb", "2080ti"]
)
def test_names_of_whole_gpus_are_no_slices(name: str):
    assert not is_slice(name)


def test_durations_are_parsed_in_every_form_of_slurm():
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
        "NONE": math.inf,
        "": math.inf,
        "-1": math.inf,
    }
    assert {text: parse_minutes(text) for text in forms} == forms


def test_duration_in_another_form_is_rejected():
    with pytest.raises(NotReportedError, match="two days"):
        parse_minutes("two days")


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
    assert {gres: parse_gres(gres) for gres in forms} == forms


def test_model_matches_a_whole_word_of_the_gres_type():
    assert is_model("a100", "nvidia_a100-sxm4-40gb")
    assert is_model("h200", "H200")
    assert not is_model("a10", "nvidia_a100")
    assert not is_model("a100", "")
