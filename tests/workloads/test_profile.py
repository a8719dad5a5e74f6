"""A profile of each kind of workload on a CPU, through launch, merge and report."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from analysis.dataset import open_dataset
from analysis.report import report
from inpaint_bench import launch

from .test_denoisers import merged

pytestmark = pytest.mark.subprocess  # a run asks git for the commit

DENOISERS = ["workload=denoise_patch", "workload.channels=[4,8,8,8]", "workload.models=[unet,dncnn]"]
DENOISERS += ["workload.image_px=64", "workload.patches_px=[32]", "workload.patch_batches=[3]"]
VOLUMES = ["workload.network=tiny", "batch=1", "workload.measure_steps=1"]
SAMPLING = {"two steps of sampling"}
CURVE = ["workload=fid_clip", "model=tiny", "workload.steps=1", "workload.images=32", "batch=16", "data.num_images=40"]
CURVE.append("workload.judges=tiny")
IMAGES = ["workload=sd_inference", "workload.steps=2"]


def sweep(folder: Path, *overrides: str) -> Path:
    options = ["gpu=h200", "profile=demo", "profiler=torch", "workload.min_measure_s=1", *overrides]
    assert launch.main(["-m", *options, f"hydra.sweep.dir={folder}"]) == 0
    return folder / "0" / "attempt-1"


def kernels(dataset: Path) -> list[dict[str, Any]]:
    return open_dataset(dataset).scan("kernel_times").collect().to_dicts()


def test_a_training_step_becomes_a_table_a_trace_and_a_section_and_a_damaged_table_costs_only_itself(tmp_path):
    run_dir = sweep(tmp_path / "sweep", "batch=2", "workload.min_measure_s=6")
    dataset = merged(tmp_path / "sweep", tmp_path)
    run = open_dataset(dataset).runs.row(0, named=True)
    assert run["valid"], run["invalid_reason"]
    rows = kernels(dataset)
    assert {(row["call"], row["measured"]) for row in rows} == {("step", True)}
    assert {"convolution forward", "GEMM", "norm", "optimizer"} <= {row["kind"] for row in rows}
    assert rows[0]["ms"] == max(row["ms"] for row in rows) > 0
    # The profiled steps are none of those that count.
    assert run["n_steps"] == run["images"] / 2
    profile = json.loads((run_dir / "manifest.json").read_text())["profile"]
    assert (profile["profiler"], profile["calls"], profile["traces"]) == ("torch", ["step"], ["traces/step.json.gz"])
    assert (profile["problems"], profile["communication"]) == ([], {})
    assert json.loads(gzip.decompress((run_dir / "traces" / "step.json.gz").read_bytes()))["traceEvents"]
    page = report.write_report(dataset, tmp_path / "report").read_text()
    assert "fig-kernel-classes" in page
    assert "no time of a profiled step is counted" in page
    assert "aten::mkldnn_convolution" in (tmp_path / "report" / "report.md").read_text()

    (run_dir / "kernel_times" / "part-000000.parquet").write_bytes(b"PAR1 and nothing more")
    dataset = merged(tmp_path / "sweep", tmp_path)
    again = open_dataset(dataset)
    assert again.runs["valid"].to_list() == [True]
    assert again.runs["images_per_s"].to_list() == [run["images_per_s"]]
    assert [Path(path).parent.name for path in again.skipped["path"]] == ["kernel_times"]
    page = report.write_report(dataset, tmp_path / "report").read_text()
    assert "its profile is missing or damaged" in page
    assert "fig-kernel-classes" not in page


@pytest.mark.parametrize(
    ("overrides", "calls"),
    [
        (DENOISERS, {f"{name} patches of 32 px by 3" for name in ("unet", "dncnn")}),
        (IMAGES, {"call"}),
        (CURVE, {"call"}),
        (["workload=volume3d_train", *VOLUMES], {"training step"}),
        (["workload=volume3d_sample", "workload.steps=2", "workload.reference_steps=2", *VOLUMES], SAMPLING),
    ],
    ids=["denoisers", "making images", "guidance", "volumes, training", "volumes, sampling"],
)
def test_each_call_of_a_measuring_workload_is_profiled(tmp_path, overrides, calls):
    sweep(tmp_path / "sweep", *overrides)
    rows = kernels(merged(tmp_path / "sweep", tmp_path))
    assert {row["call"] for row in rows} == calls
    for call in calls:
        assert "convolution forward" in {row["kind"] for row in rows if row["call"] == call}
