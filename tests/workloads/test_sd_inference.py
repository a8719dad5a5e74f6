"""Making images: from the configuration to the report, with tiny networks on the CPU."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from inpaint_bench import launch
from inpaint_bench.cli import app
from inpaint_bench.core.errors import UnavailableError, UserError
from inpaint_bench.core.files import read_json
from inpaint_bench.core.workloads.sd_inference import Result
from inpaint_bench.run import worker
from inpaint_bench.workloads import sd_inference
from tests.run.support import bench, compose, last_given
from tests.testbed import Bed

SHORT = ("workload=sd_inference", "workload.steps=2", "workload.warmup_steps=1", "workload.measure_steps=2")
SHORT = (*SHORT, "workload.min_measure_s=0")
TUNED = ("recipe.unet=nhwc", "recipe.weights=half")
RUNS = {
    "baseline": ("model=tiny",),
    "tuned": ("model=tiny", *TUNED),
    "inpainting": ("model=tiny_inpaint", "workload.sampler=dpmpp", *TUNED),
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], str]:
    """Return the folder of the runs, their manifests, and the report as Markdown."""
    root = tmp_path_factory.mktemp("inference")
    for name, overrides in RUNS.items():
        worker.run(compose(*SHORT, *overrides), root / "in" / name, [])
    assert app.main(["merge", str(root / "in"), "-o", str(root / "ds")]) == 0
    assert app.main(["report", str(root / "ds"), "-o", str(root / "report")]) == 0
    manifests = {name: read_json(root / "in" / name / "manifest.json") for name in RUNS}
    return root, manifests, (root / "report" / "report.md").read_text()


def results(root: Path, name: str) -> list[dict[str, Any]]:
    import pyarrow.parquet as pq

    rows: list[dict[str, Any]] = pq.read_table(root / "in" / name / "results_sd_inference").to_pylist()
    return rows


def test_every_call_has_a_row_whose_stages_add_up(finished: tuple[Path, dict[str, Any], str]) -> None:
    for name in RUNS:
        rows = results(finished[0], name)
        assert [row["step"] for row in rows] == [0, 1, 2]
        for row in rows:
            assert set(Result.__struct_fields__) <= row.keys()
            stages = [row[stage] or 0 for stage in ("text_ms", "image_ms", "sampling_ms", "decode_ms")]
            assert sum(stages) == pytest.approx(row["total_ms"])
            assert (row["image_ms"] is not None) == row["inpaints"] == (name == "inpainting")
            assert row["finite"]
    # With guidance twice; PLMS of 2 steps evaluates 3 times.
    assert [results(finished[0], name)[0]["evaluations"] for name in RUNS] == [6, 6, 4]


def test_images_of_a_recipe_agree_with_those_of_the_baseline(finished: tuple[Path, dict[str, Any], str]) -> None:
    root, manifests, _ = finished
    assert results(root, "baseline")[0]["psnr_db"] is None
    for name in ("tuned", "inpainting"):
        assert results(root, name)[0]["psnr_db"] > 60  # fp32 on both sides: only the order of sums differs
        assert manifests[name]["parity"]["prediction_rel"] < 1e-3
        assert all(lever["active"] for lever in manifests[name]["levers"])


def test_manifests_tell_what_makes_runs_comparable(finished: tuple[Path, dict[str, Any], str]) -> None:
    manifests = finished[1]
    assert manifests["tuned"]["model"] == "tiny, plms 2, guidance 7.5"
    assert manifests["inpainting"]["workload_facts"]["task"] == "inpainting"
    parts = manifests["tuned"]["workload_facts"]["flop_parts"]
    expected = 6 * parts["unet_forward"] + 2 * parts["text_encode"] + parts["vae_decode"]
    assert manifests["tuned"]["workload_facts"]["flop_per_image"] == expected


def test_the_report_shows_latency_stages_and_published_figures(finished: tuple[Path, dict[str, Any], str]) -> None:
    text = finished[2]
    assert re.search(
        r"text to image, 32 px, plms 2, guidance 7.5 \| 2 \| cpu \| fp32 \| 1 \| [^|]+ \| [^|]+ \| \d+ \|", text
    )
    assert "Latency, stages, rate and energy of making images" in text
    assert "Published: latency of making images" in text
    assert "| SD1.5 | 1 | 3.3 | 0.9 |" in text
    assert "Time per image by stage" in (finished[0] / "report" / "report.html").read_text()


def test_psnr_is_that_of_the_worst_image() -> None:
    reference = torch.zeros(2, 3, 8, 8)
    images = reference.clone()
    assert sd_inference.psnr_db(reference, images) == 100
    images[1] += 0.02
    assert sd_inference.psnr_db(reference, images) == pytest.approx(40.0, abs=1e-3)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("recipe.ema=true",),
            "ema: workload=sd_inference has no use for it, as it needs an AdamW",
        ),
        (("recipe.weights=bf16_split",), "recipe.weights=bf16_split trains"),
        (("batch=auto",), "batch=auto searches the largest batch of a training"),
        (("workload.guidance=0.5",), "guidance"),
        (("workload.steps=501",), "steps"),
    ],
)
def test_what_making_images_cannot_use_is_refused_before_submission(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        bench(*SHORT, "model=tiny", *overrides)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("recipe.compile=tensorrt",), "lever compile_tensorrt: needs a GPU"),
        (("recipe.cuda_graph=true",), "lever cuda_graph: needs a GPU"),
    ],
)
def test_a_lever_that_cannot_run_is_unavailable_with_its_reason(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(UnavailableError, match=message):
        sd_inference.build(bench(*SHORT, "model=tiny", *overrides), torch.device("cpu"))


@pytest.mark.faults
def test_a_sweep_over_recipes_runs_through_slurm_merge_and_report(
    testbed: Bed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INPAINT_BENCH_TESTBED", str(testbed.state))
    sweep, dataset, report = tmp_path / "sweep", tmp_path / "ds", tmp_path / "report"
    study = ("study=one_at_a_time", "study.base=cpu", "study.levers=[unet_nhwc+half,compile_tensorrt]")
    enough_samples = "workload.min_measure_s=3"
    overrides = [*SHORT, enough_samples, "profile=testbed", "gpu=h200", "model=tiny", "batch=2", *study, "wait=true"]
    # One of three points cannot run: a result, not a failure.
    assert launch.main(["-m", *last_given(*overrides), f'hydra.sweep.dir="{sweep}"']) == 0
    assert app.main(["merge", str(sweep), "-o", str(dataset)]) == 0
    assert app.main(["report", str(dataset), "-o", str(report)]) == 0
    text = (report / "report.md").read_text()
    work = r"tiny model \| text to image, 64 px, plms 2, guidance 7.5"
    row = rf"\| H200 \| delta \| {work} \| 2 \| cpu(\S*) \| fp32 \| 1 \| \d+ \|"
    assert re.findall(row, text) == ["", "+unet_nhwc+half"]
    assert "lever compile_tensorrt: needs a GPU" in text
    assert "Unavailable: 1" in text
