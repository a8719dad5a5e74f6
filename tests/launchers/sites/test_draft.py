"""The first file of a site, from recorded answers of Slurm; from real Slurm in test_site_report.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from inpaint_bench.core.config.site import SiteConfig
from inpaint_bench.core.config.yaml_file import ConfigFileError, read_config_file
from inpaint_bench.core.estimates.rates import cards
from launchers.sites.compare import Agreement, compare
from launchers.sites.draft import TO_TYPE, draft
from tests.launchers.sites.slurm_replies import (
    NODES_22_05,
    OUTPUTS_22_05,
    OUTPUTS_NEW,
    PARTITIONS_22_05,
)
from tests.launchers.sites.slurm_replies import cluster as make_cluster

HOSTS = ("dt-login03", "dt-login03.delta.ncsa.illinois.edu")


@pytest.mark.parametrize("outputs", [OUTPUTS_22_05, OUTPUTS_NEW], ids=["22.05", "new"])
def test_a_draft_agrees_with_the_slurm_that_it_is_from(outputs, tmp_path: Path) -> None:
    cluster = make_cluster(outputs)
    text, gpus, _ = draft("mine", cluster, cards(), HOSTS)
    (file := tmp_path / "mine.yaml").write_text(text.replace(TO_TYPE, "bbxx-delta-gpu"))  # an account of two
    content = read_config_file(file, "site")
    assert content["connect"]["hostnames"] == [r"dt-login\d+(\.delta\.ncsa\.illinois\.edu)?"]
    assert {*gpus} == content["gpus"].keys() >= {"a40", "a100"}
    site = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(SiteConfig), content))
    assert isinstance(site, SiteConfig)
    assert not [finding for finding in compare(site, cluster) if finding.agreement is Agreement.DIFFERS]


@pytest.mark.parametrize(
    ("outputs", "shown"),
    [
        (
            {},
            [
                "value: ??? # the account, or the project; yours: bbxx-delta-cpu, bbxx-delta-gpu",
                "a100: # or a100_80gb?",
            ],
        ),
        ({"associations": "07|normal||\n"}, ["value: '07' # the account, or the project; yours: 07"]),
        ({"associations": None}, ["value: ??? # the account, or the project; `it` failed"]),
        ({"nodes": NODES_22_05.replace("gpu:a40:4", "gpu:4")}, ["  a40:", "request: gpus_per_node"]),
        ({"nodes": NODES_22_05.replace("gpu:a40:4", "gpu:a40_2g.20gb:4")}, ["known to be a40_2g.20gb in gpuA40x4"]),
        (
            {"nodes": NODES_22_05.replace("gpu:a40:4", "gpu:rtx:4")},
            ["gpus: # no file of conf/gpu is known to be rtx in"],
        ),
        ({"nodes": NODES_22_05.replace("gpu:a100:4", "gpu:nvidia_a100-sxm4-80gb:4")}, ["  a100_80gb:\n"]),
        ({"partitions": PARTITIONS_22_05.replace("=2-00", "=soon")}, ["max_minutes: ??? # longest time limit"]),
        ({"partitions": PARTITIONS_22_05.replace("=2-00:00:00", "=UNLIMITED")}, ["max_minutes: UNLIMITED"]),
        ({"nodes": None}, ["hostnames: ???", "  h100: # the name of a file in conf/gpu", "partition: ???"]),
        ({"nodes": NODES_22_05.replace("gpu:", "fpga:")}, [r"login\d+", "    gres: ???"]),
    ],
)
def test_what_slurm_does_not_report_is_left_to_be_typed(outputs, shown, tmp_path: Path) -> None:
    text, _, _ = draft("mine", make_cluster(OUTPUTS_22_05, **outputs), cards(), HOSTS)
    for part in shown:
        assert part in text
    (file := tmp_path / "mine.yaml").write_text(text)
    if TO_TYPE in text.partition("\n")[2]:
        with pytest.raises(ConfigFileError, match=rf"{file}:\d+: .*=\?\?\?: is yet to be typed; needs "):
            read_config_file(file, "site")


@pytest.mark.parametrize(
    ("hosts", "pattern"),
    [
        (("login", "login.x.edu"), r"['login(\.x\.edu)?']"),
        (("gl-login12", "localhost"), r"['gl-login\d+']"),
        (("hpc2.x.edu", "hpc2.x.edu"), r"['hpc\d+(\.x\.edu)?']"),
        (("localhost", "localhost.localdomain"), TO_TYPE),
    ],
)
def test_host_names_become_a_pattern_of_the_whole_name(hosts, pattern) -> None:
    assert f"\n  hostnames: {pattern} #" in draft("mine", make_cluster(OUTPUTS_22_05), cards(), hosts)[0]
