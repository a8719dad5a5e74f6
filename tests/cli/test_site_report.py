"""`doctor site` against real Slurm: planted errors, and corrections written back."""

from __future__ import annotations

import datetime
import os
import re
import shutil
import sys
import time
from pathlib import Path

import pytest

from inpaint_bench.cli import app
from inpaint_bench.core.paths import conf_dir
from launchers.points import compose as composing
from tests.launchers.over_ssh import replace_ssh
from tests.testbed import Bed
from tests.testbed.errors import PackagesError
from tests.testbed.fixtures import REQUIRE
from tests.testbed.ssh import LoginNodes, install

SITE = ["doctor", "site", "grace"]
BED = [*SITE, "profile=testbed"]
# In grace's file: the right text, the planted error, the correction to be printed.
PLANTED = [
    ("    partition: gpu\n", "    partition: gpus\n", "gpus.a100.partition: gpu"),
    ("max_minutes: 5760\n", "max_minutes: 20160\n", "gpus.a100.max_minutes: 5760"),
    ("mem_gb_per_gpu: 117\n", "mem_gb_per_gpu: 400\n", "gpus.a100.mem_gb_per_gpu: 180"),
    ("gres: a40\n", "gres: A40\n", "gpus.a40.gres: a40"),
    ("max_array_size: 1001\n", "max_array_size: 10001\n", "limits.max_array_size: 1001"),
]


@pytest.fixture
def conf(testbed: Bed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use a copy of the configuration whose site files point to the test bed."""
    folder = tmp_path / "conf"
    shutil.copytree(conf_dir(), folder)
    for name in testbed.sites:
        file = folder / "site" / f"{name}.yaml"
        connect = f"  method: slurm\n  slurm_conf: {testbed.conf(name)}\n"
        text = re.sub(r"^  method: slurm.*\n", connect, file.read_text(), count=1, flags=re.MULTILINE)
        # The bed has none of GRACE's few nodes with RTX 6000 and T4.
        text = re.sub(r"(?s)  quadro_rtx_6000:\n.*?(?=charging:)|, quadro_rtx_6000: [\d.]+, t4: [\d.]+", "", text)
        file.write_text(re.sub(r"(?m)^  scratch: [^ ]+", f"  scratch: {tmp_path}", text))
    monkeypatch.setattr(composing, "conf_dir", lambda: folder)
    return folder


def corrections(out: str) -> list[str]:
    return re.findall(r"^  (\S+: .*?)  # line \d+$", out, re.MULTILINE)


class TestOnRealSlurm:
    @pytest.fixture(autouse=True)
    def _reach(self, testbed, monkeypatch):
        monkeypatch.setenv("INPAINT_BENCH_TESTBED", str(testbed.state))

    def test_five_planted_errors_are_found_and_corrected(self, conf, capsys):
        file = conf / "site" / "grace.yaml"
        original = file.read_text()
        text = original
        for right, wrong, _ in PLANTED:
            text = text.replace(right, wrong, 1)
        file.write_text(text)
        assert app.main(SITE) == 1
        assert corrections(capsys.readouterr().out) == [correction for _, _, correction in PLANTED]
        assert file.read_text() == text
        assert app.main([*SITE, "--write"]) == 0
        assert "+    partition: gpu\n" in capsys.readouterr().out
        corrected = file.read_text()
        today = f"checked_on: {datetime.date.today()}"
        expected = original.replace("mem_gb_per_gpu: 117", "mem_gb_per_gpu: 180", 1)
        for block in ("a100", "a40"):
            assert re.search(
                rf"\n  {block}:\n(    .*\n)+?    {today}\n(    seen: {{}}\n)?    verified: true\n", corrected
            )
        assert re.search(rf"\nlimits:\n(  .*\n)+?  {today}\n  verified: true\n", corrected)
        marks = r"checked_on: .*|\n +(verified|seen): .*"
        plain = re.sub(marks, "", corrected)
        assert plain == re.sub(marks, "", expected)
        assert app.main([*SITE, "--write"]) == 0
        assert file.read_text() == corrected

    def test_new_site_is_right_at_once(self, testbed, tmp_path, monkeypatch, capsys):
        """Check that the comparison has nothing to correct, and that Slurm would take the script of a dry run."""
        for cluster, gpu, request in (("delta", "h200", "gres=gpu:h200:1 cpus=12"), ("grace", "a40", "gres=gpu:a40:1")):
            monkeypatch.setenv("SLURM_CONF", str(testbed.conf(cluster)))
            own, name = ["--config-dir", str(tmp_path)], f"my-{cluster}"
            assert app.main(["new", "site", name, *own]) == 0
            assert "are marked" not in capsys.readouterr().out
            assert app.main(["doctor", "site", name, *own]) == 0
            assert re.search(rf"{name}: \d+ same, 1 not applicable\n", capsys.readouterr().out)
            sweep = tmp_path / f"sweep-{cluster}"
            options = [f"site={name}", f"gpu={gpu}", "batch=16", "dry_run=true", f"hydra.sweep.dir={sweep}"]
            assert app.main(["launch", "-m", *own, *options]) == 0
            assert request in capsys.readouterr().out
            (script,) = (sweep / "sbatch").iterdir()
            assert "to start at" in testbed.run(cluster, "sbatch", "--test-only", str(script)).stderr

    def test_unverified_values_are_not_marked_as_verified(self, conf, capsys):
        file = conf / "site" / "delta.yaml"
        assert app.main(["doctor", "site", "delta", "sites.delta.account.value=bbxx-delta-gpu", "--write"]) == 0
        assert "account: not marked as verified" in capsys.readouterr().out
        blocks = file.read_text().split("\nlimits:")
        assert "verified: true" not in blocks[0]  # no billing weights there, so no factor was seen
        (a40, *_) = re.findall("seen: {(.*)}", blocks[0])
        assert f"partition: {datetime.date.today()}" in a40
        assert "charge_factor" not in a40
        assert "  verified: true\nrequeue:" in blocks[1]
        assert "grace_s: 300" in file.read_text()

    def test_unreachable_controller_contradicts_nothing(self, testbed, conf, tmp_path, capsys):
        """Check that no answer is not taken for the answer that there is no such partition."""
        slurm_conf = tmp_path / "slurm.conf"
        port = testbed.plan.site_ports("grace")[9]  # nothing listens
        own = re.sub(r"(?m)^SlurmctldPort=.*", f"SlurmctldPort={port}", testbed.conf("grace").read_text())
        slurm_conf.write_text(re.sub(r"(?m)^MessageTimeout=.*", "MessageTimeout=2", own))
        file = conf / "site" / "grace.yaml"
        before = file.read_text()
        start = time.monotonic()
        assert app.main([*SITE, f"sites.grace.connect.slurm_conf={slurm_conf}", "--write"]) == 0
        assert time.monotonic() - start < 45
        out = capsys.readouterr().out
        assert not re.search(r"\b(same|differs)\b", out.split("comparison")[1])
        assert "`scontrol show config`" in out
        assert file.read_text() == before

    def test_site_over_ssh_is_queried_on_its_login_node(self, testbed, conf, tmp_path, monkeypatch, capsys):
        try:
            install()
        except PackagesError as error:
            if os.environ.get(REQUIRE) == "1":
                pytest.fail(str(error), pytrace=False)
            pytest.skip(str(error))
        nodes = LoginNodes(testbed)
        nodes.up("delta")
        connect = {
            "method": "ssh",
            "host": "delta-login",
            "ssh_config": nodes.config,
            "folder": tmp_path,
            "timeout_s": 10,
        }
        over = [f"sites.delta.connect.{key}={value}" for key, value in connect.items()]
        over += [f"sites.delta.python={sys.executable}", "sites.delta.gpus.h200.max_minutes=5000", "profile=testbed"]
        try:
            assert app.main(["doctor", "site", "delta", *over]) == 1
            out = capsys.readouterr().out
            assert re.search(r"gpus.h200.partition\s+gpuH200x8\s+gpuH200x8\s+same", out)
            assert re.search(r"gpus.h200.max_minutes: 2880  # line \d+, overridden here by 5000", out)
            assert "ClusterName=delta" in out
        finally:
            nodes.down()
        assert app.main(["doctor", "site", "delta", *over, "sites.delta.connect.persist_min=0"]) == 0
        assert not re.search(r"\b(same|differs)\b", capsys.readouterr().out.split("comparison")[1])


def test_values_of_a_demonstration_are_not_written_into_a_site_file(testbed, monkeypatch, capsys):
    monkeypatch.setenv("INPAINT_BENCH_TESTBED", str(testbed.state))
    before = (conf_dir() / "site" / "grace.yaml").read_bytes()
    assert app.main([*BED, "--write"]) == 2
    assert "whose values are not theirs" in capsys.readouterr().err
    assert (conf_dir() / "site" / "grace.yaml").read_bytes() == before


@pytest.mark.subprocess
def test_doctor_lists_this_machine_and_why_sites_cannot_be_reached(capsys):
    assert app.main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"grace\s+\S+/conf/site/grace.yaml\s+no\s+\S+ is not a machine of grace\s+0 of 11", out)
    assert re.search(r"grace .* 0 of 11\s+account, charging, ", out)
    assert re.search(r"local .* 1 of 1\s+-", out)
    assert "blocks to check: not compared with the site's Slurm" in out
    assert re.search(r"sbatch\s+\S", out)
    assert re.search(r"torch\s+\d", out)


@pytest.mark.subprocess
@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({"bash_profile": "read answer"}, "reads the standard input of commands"),
        ({"bash_profile": "tty -s || exit"}, "ends or replaces it before it runs a command"),
    ],
)
def test_startup_files_that_hinder_commands_are_named_with_the_cure(files, problem, tmp_path, monkeypatch, capsys):
    replace_ssh(tmp_path, monkeypatch, **files)
    connect = {"method": "ssh", "host": "login", "folder": tmp_path}
    keys = [f"sites.delta.connect.{key}={value}" for key, value in connect.items()]
    assert app.main(["doctor", "site", "delta", *keys, f"sites.delta.python={sys.executable}"]) in (0, 1)
    out = capsys.readouterr().out
    assert re.search(rf"^delta: a startup file of your shell on login \(.*\) {problem}; put those .*`fi`", out, re.M)
