"""What the probe job checks on a node, and that every check may fail alone."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from inpaint_bench.cli.doctor import node_report
from inpaint_bench.core.console import console
from inpaint_bench.core.records import read_record
from inpaint_bench.run import node_probe
from inpaint_bench.run.node_probe import NodeFindings
from tests.telemetry.nvml.fake_pynvml import driver

pytestmark = pytest.mark.subprocess


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_probe, "GPU_S", 2.0)
    monkeypatch.setattr(node_probe, "MODULES", ("pyarrow", "no_such_module"))


@pytest.mark.usefixtures("quick")
def test_gpu_is_reported_as_doctor_gpu_does_and_a_failed_import_fails_the_node(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with driver():
        node_probe.NodeProbe(out=tmp_path / "probe.json", folders={"storage.scratch": str(tmp_path)})()
    findings = read_record(tmp_path / "probe.json", NodeFindings)
    assert findings is not None
    node_report.show(console(), "mine", findings)
    out = capsys.readouterr().out
    assert re.search(r"NVML\s+\d+ of \d+ values available; missing none", out)
    assert re.search(r"import no_such_module\s+FAILS: ModuleNotFoundError", out)
    assert node_report.lacks_essentials(findings)


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there is an NVIDIA driver here")
@pytest.mark.usefixtures("quick")
def test_node_without_a_gpu_has_the_reason_and_the_other_findings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    node_probe.NodeProbe(out=tmp_path / "probe.json", folders={"storage.scratch": None})()
    findings = read_record(tmp_path / "probe.json", NodeFindings)
    assert findings is not None
    assert "NvmlError" in str(findings.nvml.error)
    assert findings.required["import pyarrow"].error is None
    node_report.show(console(), "mine", findings)
    assert re.search(r"storage.scratch\s+FAILS: the site file names none", capsys.readouterr().out)


def test_folder_is_checked_by_writing_and_nothing_is_left(tmp_path: Path) -> None:
    check = node_probe.check_folder(str(tmp_path))
    assert check.error is None
    assert re.match(r"writable; free: [\d.]+ GiB", str(check.result))
    assert not list(tmp_path.iterdir())
    assert node_probe.check_folder(str(tmp_path / "none")).error == "No such file or directory"
    assert node_probe.check_folder("/proc").error is not None
    assert node_probe.check_folder(None).error == "the site file names none"


def test_existing_quota_commands_are_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert node_probe.read_quotas(["/scratch"]) == {}
    for name, text in (("showquota", "your quota"), ("lfs", 'usage of "$3"')):
        (tmp_path / name).write_text(f"#!/bin/sh\necho {text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert node_probe.read_quotas(["/scratch"]) == {
        "showquota": "your quota",
        "lfs quota -h /scratch": "usage of /scratch",
    }


def test_hanging_quota_command_times_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "showquota").write_text("#!/bin/sh\nexec /bin/sleep 60\n")
    (tmp_path / "showquota").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(node_probe, "QUOTA_TIMEOUT_S", 0.2)
    assert "timed out" in node_probe.read_quotas([])["showquota"]
