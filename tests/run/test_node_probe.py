"""What the probe job looks at on a node, and that every look fails alone."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from inpaint_bench.cli.doctor import node_report
from inpaint_bench.core.console import console
from inpaint_bench.core.files import read_json
from inpaint_bench.run import node_probe
from tests.telemetry.nvml.fake_pynvml import driver


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_probe, "GPU_S", 2.0)
    monkeypatch.setattr(node_probe, "MODULES", ("pyarrow", "no_such_module"))


@pytest.mark.usefixtures("quick")
def test_a_card_that_answers_is_told_as_doctor_gpu_tells_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with driver():
        node_probe.NodeProbe(out=tmp_path / "probe.json", folders={"storage.scratch": str(tmp_path)})()
    found = read_json(tmp_path / "probe.json")
    assert found is not None
    node_report.show(console(), "mine", found)
    out = capsys.readouterr().out
    assert "answers; the card's findings are below" in out
    assert "cost of a call" in out
    assert re.search(r"import no_such_module\s+FAILS: ModuleNotFoundError", out)
    assert node_report.fails(found)


def test_a_folder_is_judged_by_writing_into_it_and_nothing_is_left(tmp_path: Path):
    found = node_probe.folder(str(tmp_path))
    assert (found["ok"], found["free_gib"] > 0) == (True, True)
    assert not list(tmp_path.iterdir())
    assert node_probe.folder(str(tmp_path / "none"))["why"] == "No such file or directory"
    assert node_probe.folder("/proc")["ok"] is False
    assert node_probe.folder(None)["why"] == "the site file names none"


def test_a_quota_command_is_shown_where_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert node_probe.quotas(["/scratch"]) == []
    for name, text in (("showquota", "your quota"), ("lfs", 'usage of "$3"')):
        (tmp_path / name).write_text(f"#!/bin/sh\necho {text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert node_probe.quotas(["/scratch"]) == [
        {"command": "showquota", "text": "your quota"},
        {"command": "lfs quota -h /scratch", "text": "usage of /scratch"},
    ]


def test_a_quota_command_that_hangs_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "showquota").write_text("#!/bin/sh\nexec /bin/sleep 60\n")
    (tmp_path / "showquota").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(node_probe, "QUOTA_TIMEOUT_S", 0.2)
    (found,) = node_probe.quotas([])
    assert "timed out" in found["text"]
