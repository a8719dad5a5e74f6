"""The denoiser workloads through launch, merge and report, on this machine and on two real Slurm clusters."""

import json
from pathlib import Path
from typing import Any

import pytest

from analysis.dataset import open_dataset
from analysis.report import report, workloads
from analysis.report.tables import TableBuilder
from inpaint_bench import launch
from inpaint_bench.cli import app
from tests.run.support import last_given

SMALL = ["workload.channels=[4,8,8,8]", "workload.warmup_steps=1", "workload.measure_steps=2"]
SHAPES = ["workload.height_px=64", "workload.width_min_px=64", "workload.width_max_px=136"]
PATCHES = ["workload.image_px=64", "workload.patches_px=[32,64]", "workload.patch_batches=[1,3]"]
KIND = {"denoise_shape": SHAPES, "denoise_patch": PATCHES}


def sweep(folder: Path, workload: str, *overrides: str) -> int:
    options = [f"workload={workload}", "gpu=h200", "wait=true", *SMALL, *KIND[workload]]
    # Of each case: together a few seconds, as telemetry needs to be checked.
    options += ["workload.min_measure_s=0.5", *overrides, f"hydra.sweep.dir={folder}"]
    return launch.main(["-m", *last_given(*options)])


def merged(folder: Path, tmp_path: Path) -> Path:
    assert app.main(["merge", str(folder), "-o", str(tmp_path / "dataset")]) == 0
    return tmp_path / "dataset"


def results(dataset: Path, workload: str) -> list[dict[str, Any]]:
    return open_dataset(dataset).scan(f"results_{workload}").collect().to_dicts()


def test_shapes_on_this_machine_become_rows_and_a_section(tmp_path):
    assert sweep(tmp_path / "sweep", "denoise_shape", "profile=demo") == 0
    dataset = merged(tmp_path / "sweep", tmp_path)
    run = open_dataset(dataset).runs.row(0, named=True)
    assert (run["valid"], run["model"]) == (True, "DRUNet, UNet, DnCNN (4-8-8-8 channels)"), run["invalid_reason"]
    assert (run["images_per_s"], run["joules_per_image"]) == (None, None)
    assert run["n_steps"] >= 3 * 4 * 2
    assert run["power_w"] > 0
    rows = results(dataset, "denoise_shape")
    assert len(rows) == run["n_steps"]
    drunet = {row["width_px"]: row for row in rows if row["model"] == "drunet" and row["series_px"] == 68}
    assert [(row["branch"], row["calls"], row["tile_w_px"]) for row in drunet.values()] == [
        ("direct", 1, 64),
        ("onesplit4", 4, 128),
    ]
    assert all(row["time_ms"] > 0 and row["allocated_peak_mib"] is None for row in rows)
    page = report.write_report(dataset, tmp_path / "report").read_text()
    assert "Why DRUNet's memory rises and falls" in page.replace("&#39;", "'")
    assert "fig-denoise-shape-time" in page


def test_patches_on_this_machine_become_rows_and_a_section(tmp_path):
    assert sweep(tmp_path / "sweep", "denoise_patch", "profile=demo", "workload.models=[unet,dncnn]") == 0
    dataset = merged(tmp_path / "sweep", tmp_path)
    rows = results(dataset, "denoise_patch")
    # Four patches in batches of three are two calls, of three and of one.
    assert {(row["patch_px"], row["batch"]): (row["num_patches"], row["calls"]) for row in rows} == {
        (32, 1): (4, 4),
        (32, 3): (4, 2),
        (64, 1): (1, 1),
        (64, 3): (1, 1),
    }
    assert all(row["images_per_s"] == pytest.approx(1000 / row["time_ms"]) for row in rows)
    assert "fig-denoise-patch-images" in report.write_report(dataset, tmp_path / "report").read_text()


def test_ranks_divide_the_patches_and_stop_a_case_that_is_too_large_for_one(tmp_path):
    folder = tmp_path / "run"
    options = ["workload=denoise_patch", "workload.models=[dncnn]", "workload.module=tests.workloads.small_memory"]
    options += [*SMALL, "batch=1", "gpus=2", "workload.image_px=64", "workload.image_width_px=80", "site=local"]
    options += ["workload.patches_px=[32,80]", "workload.patch_overlap_px=4", "workload.patch_batches=[1,2,4]"]
    cpu = ["gpu=cpu", "recipe=cpu", "telemetry=none"]
    assert launch.main([*cpu, *options, f"hydra.run.dir={folder}"]) == 0
    dataset = merged(folder, tmp_path)
    run = open_dataset(dataset).runs.row(0, named=True)
    assert run["valid"], run["invalid_reason"]
    assert (run["gpus"], run["batch"], run["n_steps"]) == (2, 1, 4)
    rows = results(dataset, "denoise_patch")
    # Of 24 px each has its own: three by four patches, six on each rank.
    done = {(row["patch_px"], row["batch"]): (row["num_patches"], row["calls"]) for row in rows if row["time_ms"]}
    assert done == {(32, 1): (12, 12), (32, 2): (12, 6)}
    for row in rows:
        if row["time_ms"]:
            times = [float(text) for text in row["times_by_rank_ms"].split(", ")]
            assert len(times) == 2
            assert 0 < max(times) <= row["time_ms"]
    # The whole image is of rank 0 alone; four patches are too many on both.
    failed = {(row["patch_px"], row["batch"]) for row in rows if row["out_of_memory"]}
    assert failed == {(32, 4), (80, 1), (80, 2), (80, 4)}
    assert "Time by GPU [ms]" in report.write_report(dataset, tmp_path / "report").read_text()


def test_a_case_that_needs_more_memory_is_a_row_and_the_run_goes_on(tmp_path):
    options = ["workload.module=tests.workloads.small_memory", "workload.models=[dncnn]", "workload.min_measure_s=3"]
    assert sweep(tmp_path / "sweep", "denoise_patch", "profile=demo", *options) == 0
    dataset = merged(tmp_path / "sweep", tmp_path)
    run = open_dataset(dataset).runs.row(0, named=True)
    assert run["valid"], run["invalid_reason"]
    rows = results(dataset, "denoise_patch")
    failed = {(row["patch_px"], row["batch"]): row for row in rows if row["out_of_memory"]}
    assert failed.keys() == {(32, 3), (64, 1), (64, 3)}
    assert {row["out_of_memory"] for row in failed.values()} == {"Tried to allocate 2.00 GiB"}
    assert all(row["time_ms"] is None and row["step"] < 0 for row in failed.values())
    assert len(rows) - len(failed) == run["n_steps"] >= 2
    progress = json.loads((Path(run["run_dir"]) / "manifest.json").read_text())["progress"]
    assert progress["step"] == progress["steps_total"] == run["n_steps"]
    page = report.write_report(dataset, tmp_path / "report").read_text()
    assert "out of memory: Tried to allocate 2.00 GiB" in page
    (section,) = workloads.sections(open_dataset(dataset), TableBuilder(runs=open_dataset(dataset).runs))
    energies = [row[section.tables[0].columns.index("J per call")] for row in section.tables[0].rows]
    # Three seconds are enough for the counter of the recording; what did not run has no energy.
    assert [energy == "\u2013" for energy in energies] == [False, True, True, True]


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("recipe=[cpu,ema]", "ema: workload=denoise_patch has no use for it"),
        ("workload.models=[drunet,vit]", "name some of drunet, unet, dncnn"),
        ("workload.patches_px=[128]", "must be between 16 (16 and twice patch_overlap_px) and 64, the longer side"),
        ("recipe=[cpu,zero1]", "zero1: workload=denoise_patch has no use for it"),
        ("workload.tile_px=66", "tile_px must be a multiple of 8"),
        ("batch=2", "a step is one image"),
        ("repeats=auto", "has no images/s to judge by"),
        ("workload.epochs=3", "workload.epochs"),
    ],
)
def test_what_the_workload_cannot_use_is_refused_before_submission(tmp_path, capsys, override, sentence):
    assert sweep(tmp_path / "sweep", "denoise_patch", "profile=demo", override) == 2
    assert sentence in capsys.readouterr().err
