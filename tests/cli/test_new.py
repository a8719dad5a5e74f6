"""`new` on a machine without Slurm and without a GPU: what is left to be typed is marked, and refused."""

from __future__ import annotations

import pytest

from inpaint_bench.cli import app
from inpaint_bench.cli import new as module
from inpaint_bench.core.records import Device


def test_a_gpu_that_nvml_does_not_list_is_left_to_be_typed(tmp_path, capsys) -> None:
    assert app.main(["new", "gpu", "rtx4090", "--config-dir", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert f"{tmp_path}/gpu/rtx4090.yaml: written; lines 3, 4, 5, 6, 7, 8, 9, 11 are marked ???: type them" in out
    command = f"launch -m --config-dir {tmp_path} site=local sites.local.gpus.rtx4090.request=none gpu=rtx4090 batch=16"
    assert command in out
    assert app.main([*command.split(), "dry_run=true"]) == 2
    assert "rtx4090.yaml:3: title=???: is yet to be typed; needs a text" in capsys.readouterr().err
    assert app.main(["new", "gpu", "rtx4090", "--config-dir", str(tmp_path)]) == 2
    assert "rtx4090.yaml: exists; edit it, or choose another name" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "taken"), [("rtx4090", "NVIDIA GeForce RTX 4090$"), ("rtx_4090", "NVIDIA GeForce RTX 4090$"), ("t4", None)]
)
def test_a_gpu_is_found_by_its_name(name, taken, monkeypatch) -> None:
    cards = [
        Device(uuid="1", name="NVIDIA GeForce RTX 4090", memory_mib=24564, power_limit_w=450, max_sm_clock_mhz=3105),
        Device(uuid="2", name="NVIDIA T400 4GB"),
    ]
    monkeypatch.setattr(module, "listed", lambda: cards)
    text, remark = module._gpu_text(name)
    if taken:
        assert f"nvml_name: {taken} #" in text
        assert "\nmemory_gb: 24 #" in text
        assert not remark
    else:
        assert "nvml_name: ???" in text
        assert remark == "NVML lists NVIDIA GeForce RTX 4090, NVIDIA T400 4GB here"


@pytest.mark.subprocess
def test_a_site_without_slurm_is_left_to_be_typed(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert app.main(["new", "site", "mine", "--config-dir", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "no Slurm answers here: scontrol is not on PATH" in out
    assert f"inpaint-bench launch -m --config-dir {tmp_path} site=mine gpu=h100 batch=16 dry_run=true" in out
    for command in (["doctor", "site", "mine"], ["launch", "-m", "site=mine", "gpu=h100", "dry_run=true"]):
        assert app.main([*command, "--config-dir", str(tmp_path)]) == 2
        assert "site/mine.yaml:4: connect.hostnames=???: is yet to be typed" in capsys.readouterr().err
