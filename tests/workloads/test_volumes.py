"""Volume diffusion through launch, merge and report with a tiny network on the CPU, and what its runs leave."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from analysis.dataset import open_dataset
from inpaint_bench import launch, levers
from inpaint_bench.cli import app
from inpaint_bench.core.errors import UnavailableError, UserError
from inpaint_bench.core.files import read_json
from inpaint_bench.data import volumes as data
from inpaint_bench.quality import grid, metrics
from inpaint_bench.run import worker
from inpaint_bench.workloads import load
from tests.run.support import bench, compose

TRAIN = ("workload=volume3d_train", "recipe=cpu", "workload.network=tiny", "workload.validation_volumes=1")
SAMPLE = ("workload=volume3d_sample", "recipe=cpu", "workload.network=tiny", "batch=1")
SAMPLE = (*SAMPLE, "workload.steps=3", "workload.reference_steps=2")


def train(run_dir: Path, *overrides: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    worker.run(compose(*TRAIN, *overrides), run_dir, [])
    return read_json(run_dir / "manifest.json"), pq.read_table(run_dir / "results_volume3d_train").to_pylist()


def test_recipes_see_the_same_volumes_and_are_validated_after_as_many_steps(tmp_path):
    _, plain = train(tmp_path / "plain", "batch=4")
    overrides = ("batch=4", "recipe.channels_last=true", "recipe.accumulate=2", "workload.min_measure_s=2")
    manifest, changed = train(tmp_path / "changed", *overrides)
    assert len(changed) >= len(plain) == 4
    # Another layout, and noise that is drawn per micro-batch: the losses are near, of unrelated inputs they were not.
    assert [row["loss"] for row in changed[:4]] == pytest.approx([row["loss"] for row in plain], abs=0.02)
    for rows in (plain, changed):
        validated = [row for row in rows if row["validation_l1"] is not None]
        assert [(row["step"], row["trained_steps"]) for row in validated] == [(3, 4)]
        assert 0 < validated[0]["validation_ms_ssim"] < 1
    levers = {lever["field"]: lever for lever in manifest["levers"]}
    assert "25 of 25 convolution inputs are channels_last_3d" in levers["channels_last"]["evidence"]
    assert manifest["parity"]["gradient_rel"] < 1e-3


def test_files_are_trained_on_and_sampled_from_with_the_same_volumes_held_out(tmp_path):
    root = tmp_path / "volumes"
    options = ["workload=volume3d_train", "workload.network=tiny", "workload.volume=[20,16,16]"]
    assert (
        app.main(["prepare", *options, "workload.volumes=4", "workload.validation_volumes=1", f"prepare.out={root}"])
        == 0
    )
    files = ("data=nifti", f"data.root={root}", "data.num_images=null")
    manifest, rows = train(tmp_path / "train", *files)
    assert all(math.isfinite(row["loss"]) for row in rows)
    assert rows[-1]["validation_ms_ssim"] > 0
    known = {"kind": "nifti", "root": str(root), "found": 5, "used": 5, "train": 4, "validation": 1}
    assert {key: manifest["data"][key] for key in known} == known
    worker.run(compose(*SAMPLE, *files), tmp_path / "sample", [])
    sampled = read_json(tmp_path / "sample" / "manifest.json")["data"]
    assert (sampled["used"], sampled["train"], sampled["validation"], sampled["beyond_limit"]) == (1, 0, 1, 4)
    assert sampled["identity"] != manifest["data"]["identity"]
    broken = root / "labels" / "volume-0000.nii.gz"
    broken.write_bytes(broken.read_bytes()[:-20])
    with pytest.raises(UserError, match=r"volume-0000\.nii\.gz: cannot be read as NIfTI"):
        train(tmp_path / "broken", *files)
    assert read_json(tmp_path / "broken" / "manifest.json")["status"] == "failed"


def test_bf16_differs_from_the_baseline_and_is_not_far(tmp_path):
    manifest, _ = train(tmp_path, "recipe.precision=bf16")
    parity = manifest["parity"]
    assert 1e-4 < parity["prediction_rel"] < 0.1
    assert not parity["far"]
    assert manifest["workload_facts"]["precision"] == "bf16"


def test_the_fused_network_computes_what_the_plain_one_does():
    workload = load(bench(*TRAIN, "recipe.volume_unet=fused", "recipe.channels_last=true"), torch.device("cpu"))
    assert workload.parity.gradient_rel < 1e-4
    row = next(row for row in levers.verify(workload.execution, workload.probe) if row.field == "volume_unet")
    assert row.active
    assert row.effective > 10
    with pytest.raises(UnavailableError, match=r"set recipe\.channels_last too"):
        load(bench(*TRAIN, "recipe.volume_unet=fused"), torch.device("cpu"))


def test_saved_weights_make_samples_and_both_leave_pictures(tmp_path):
    manifest, _ = train(tmp_path / "train", "workload.save_weights=true")
    weights = tmp_path / "train" / manifest["quality"]["weights"]
    assert sum(tensor.numel() for tensor in load_file(weights).values()) == manifest["workload_facts"]["parameters"]
    sets = (f"workload.weights={weights}", f"workload.other_weights={weights}", "workload.compared_volumes=4")
    worker.run(compose(*SAMPLE, *sets, "recipe.channels_last=true", "batch=2"), tmp_path / "sample", [])
    rows = pq.read_table(tmp_path / "sample" / "results_volume3d_sample").to_pylist()
    assert all(row["finite"] and row["total_ms"] > 0 for row in rows)
    assert {row["trained_with"] for row in rows} == {"cpu"}
    assert {(row["compared_volumes"], row["other_weights_rel"]) for row in rows} == {(4, 0.0)}
    assert 0 < rows[0]["mmd"] <= 2
    assert 0 <= rows[0]["pair_ms_ssim"] != rows[0]["real_pair_ms_ssim"] <= 1
    assert rows[0]["baseline_l1"] < 1e-3
    assert rows[0]["baseline_ms_ssim"] > 0.99
    for run in ("train", "sample"):
        with Image.open(tmp_path / run / "slices.png") as picture:
            assert np.asarray(picture).std() > 10


def test_runs_go_through_launch_and_merge(tmp_path):
    options = ["gpu=h200", "profile=demo", "batch=1", "workload.min_measure_s=3", "workload.network=tiny"]
    options.append("workload.measure_steps=2")
    recipes = "recipe=[cpu],[cpu,channels_last]"
    for workload, extra in (("volume3d_train", [recipes]), ("volume3d_sample", ["workload.steps=2"])):
        options_of = [f"workload={workload}", *options, *extra, f"hydra.sweep.dir={tmp_path / 'in' / workload}"]
        if workload == "volume3d_sample":
            options_of.append("workload.reference_steps=2")
        assert launch.main(["-m", *options_of]) == 0
    assert app.main(["merge", str(tmp_path / "in"), "-o", str(tmp_path / "dataset")]) == 0
    dataset = open_dataset(tmp_path / "dataset")
    runs = dataset.runs.sort("workload", "recipe")
    assert runs["valid"].all(), runs["invalid_reason"].to_list()
    assert runs["model"].to_list() == ["tiny 16x16x16, 2 steps", "tiny 16x16x16", "tiny 16x16x16"]
    assert all(value > 0 for name in ("images_per_s", "joules_per_image") for value in runs[name])
    assert runs["sample_grid"].null_count() == 0
    assert dataset.scan("results_volume3d_train").collect()["run_id"].n_unique() == 2
    assert app.main(["report", str(tmp_path / "dataset"), "-o", str(tmp_path / "report")]) == 0
    sampling, training = (tmp_path / "report" / "report.html").read_text().split('id="answer-2"')
    training, others = training.split("Every cell:")
    assert [part.count("<img") for part in (sampling, training, others)] == [1, 2, 0]


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ((*TRAIN, "workload.volume=[16,16,15]"), "must be three multiples of 2, at most 512"),
        ((*TRAIN, "workload.volume=[16,16]"), "must be three multiples of 2"),
        ((*TRAIN, "recipe.ema=true"), "ema: workload=volume3d_train has no use for it"),
        ((*SAMPLE, "recipe.accumulate=2"), "accumulate=2: workload=volume3d_sample has no use for it"),
        ((*TRAIN, "recipe.precision=fp16"), "takes fp32 or bf16"),
        ((*TRAIN, "batch=auto"), "does not search a batch"),
        ((*TRAIN, "data=folder", "data.root=x"), "data=folder: workload=volume3d_train takes synthetic or nifti"),
        (
            ("data=nifti", "data.root=x"),
            "data=nifti: workload=finetune_inpaint takes synthetic or folder or parquet or prepared",
        ),
        ((*TRAIN, "data=nifti"), "data=nifti needs data.root=<a folder with images/ and labels/>"),
        ((*SAMPLE, "workload.steps=251"), "must be at most diffusion_steps=250"),
        ((*SAMPLE, "workload.compared_volumes=1"), "compared_volumes=1: must be 0, or 2 and more"),
        (
            (*SAMPLE, "batch=4", "workload.compared_volumes=6"),
            "compared_volumes=6: must be 0, or 2 and more, a multiple of batch",
        ),
        (
            (*SAMPLE, "workload.weights=w", "workload.other_weights=v"),
            "needs workload.weights and workload.compared_vol",
        ),
        ((*SAMPLE, "workload.other_weights=v", "workload.compared_volumes=2"), "needs workload.weights and"),
    ],
)
def test_what_the_workloads_cannot_use_is_refused_before_submission(overrides, sentence):
    with pytest.raises(UserError, match="^(?s:.*)" + sentence.replace("(", r"\(")):
        bench(*overrides)


def test_weights_of_another_network_are_refused(tmp_path):
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(UserError, match="not weights of network tiny"):
        load(bench(*SAMPLE, f"workload.weights={tmp_path / 'other.safetensors'}"), torch.device("cpu"))


def test_synthetic_volumes_follow_from_their_seed_and_labels_lie_in_one_another():
    image, labels = data.synthetic(7, 3, (24, 32, 40), 2, 3)
    again, _ = data.synthetic(7, 3, (24, 32, 40), 2, 3)
    other, _ = data.synthetic(7, 4, (24, 32, 40), 2, 3)
    assert (image.shape, labels.shape) == ((2, 24, 32, 40), (3, 24, 32, 40))
    assert np.array_equal(image, again)
    assert not np.array_equal(image, other)
    assert labels.sum(0).max() == 1
    sizes = labels.sum((1, 2, 3))
    assert sizes[0] > sizes[1] > sizes[2] > 0
    assert np.abs(image).max() <= 1
    assert (image[0][labels.sum(0) == 0] == -1).all()


def test_slices_are_axial_with_the_front_at_the_top(tmp_path):
    volume = torch.full((1, 8, 16, 12), -1.0)
    volume[0, 4, 8:, :3] = 1  # left and front, in the middle of the height
    grid.write_slices(tmp_path / "slices.png", {"Volume": volume})
    with Image.open(tmp_path / "slices.png") as picture:
        cell = np.asarray(picture)[grid.SLICE_HEADER_PX :, grid.GAP_PX :][: grid.SLICE_PX, : grid.SLICE_PX * 3 // 4]
    assert cell[:80, :30].min() == 255
    assert cell[80:].max() == cell[:, 30:].max() == 0


def test_ms_ssim_falls_with_noise_and_has_as_many_scales_as_fit():
    assert [metrics.ms_ssim_scales((side, 256, 256)) for side in (8, 16, 32, 64, 96, 128, 176)] == [0, 1, 2, 3, 3, 4, 5]
    volume = torch.from_numpy(data.synthetic(0, 0, (32, 32, 32), 1, 2)[0])[None]
    near = volume + 0.05 * torch.randn(volume.shape, generator=torch.Generator().manual_seed(0))
    far = volume + 0.5 * torch.randn(volume.shape, generator=torch.Generator().manual_seed(0))
    values = [metrics.volume_ms_ssim(other, volume) for other in (volume, near, far)]
    assert values[0] == pytest.approx(1)
    assert values[0] > values[1] > values[2] >= 0
    assert math.isnan(metrics.volume_ms_ssim(volume[..., :8], volume[..., :8]))


def gaussian(count: int, mean: float, seed: int) -> torch.Tensor:
    return torch.randn((count, 1, 2, 2, 2), generator=torch.Generator().manual_seed(seed)) + mean


def test_mmd_of_two_gaussians_is_that_of_their_closed_form():
    volumes, real = gaussian(600, 0.5, 0), gaussian(600, 0.0, 1)
    squares = torch.cdist(real.flatten(1).double(), real.flatten(1).double())[~torch.eye(600, dtype=torch.bool)] ** 2
    width, voxels = float(squares.median()), 8
    expected = 2 * (width / (width + 2)) ** (voxels / 2) * (1 - math.exp(-(voxels * 0.5**2) / (2 * (width + 2))))
    assert metrics.mmd(volumes, real) == pytest.approx(expected, rel=0.1)
    assert abs(metrics.mmd(gaussian(600, 0.0, 2), real)) < expected / 50


def test_sets_are_compared_whatever_the_order_of_their_volumes():
    volumes, real = gaussian(6, 0.3, 0), gaussian(6, 0.0, 1)
    order = [3, 0, 5, 1, 4, 2]
    assert metrics.mmd(real, real) == 0
    assert metrics.mmd(volumes[order], real[order]) == pytest.approx(metrics.mmd(volumes, real), rel=1e-9)
    heads = torch.stack([torch.from_numpy(data.synthetic(0, index, (16, 16, 16), 1, 2)[0]) for index in range(3)])
    alike = metrics.pair_ms_ssim(heads)
    assert 0 < alike < 1
    assert metrics.pair_ms_ssim(heads[[2, 0, 1]]) == pytest.approx(alike, rel=1e-5)
    assert metrics.pair_ms_ssim(heads[[0, 0, 0]]) == pytest.approx(1)
