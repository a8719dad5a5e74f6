"""FID and CLIP score over guidance, with tiny random networks: from the configuration to the curve."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from inpaint_bench import launch
from inpaint_bench.cli import app
from inpaint_bench.core.config.bench import QualityConfig
from inpaint_bench.core.errors import UnavailableError, UserError
from inpaint_bench.data.captions import draw_captions
from inpaint_bench.models.networks import build_networks
from inpaint_bench.models.pipeline_folder import save_pipeline
from inpaint_bench.quality.metrics import Judges
from inpaint_bench.run import worker
from tests.run.support import bench, compose, last_given

TINY = ("workload=fid_clip", "model=tiny", "workload.steps=1", "workload.images=32", "batch=16", "data.num_images=40")
LENGTHS = ("workload.warmup_steps=0", "workload.measure_steps=10", "workload.min_measure_s=5")  # as by default
TINY = (*TINY, "workload.judges=tiny", *LENGTHS)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def curve(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[float, dict[str, Any]], Path]:
    """Return the result of each guidance, and the report."""
    root = tmp_path_factory.mktemp("fid-clip")
    for guidance in (1.5, 8):
        worker.run(compose(*TINY, f"workload.guidance={guidance}"), root / "in" / str(guidance), [])
    assert app.main(["merge", str(root / "in"), "-o", str(root / "ds")]) == 0
    assert app.main(["report", str(root / "ds"), "-o", str(root / "report")]) == 0
    rows = [pq.read_table(run / "results_fid_clip").to_pylist() for run in sorted((root / "in").iterdir())]
    return {row["guidance"]: row for (row,) in rows}, root / "report"


def test_each_guidance_has_one_result_on_the_same_prompts(curve: tuple[dict[float, dict[str, Any]], Path]) -> None:
    low, high = curve[0][1.5], curve[0][8.0]
    assert low["prompts_sha256"] == high["prompts_sha256"]
    assert (low["images"], low["real_images"]) == (32, 40)
    assert low["fid"] > 0
    assert low["fid"] != high["fid"]
    assert -1 <= low["clip_mean"] <= 1
    assert low["clip_std"] > 0


def test_the_report_draws_the_curve_and_names_the_reference_set(
    curve: tuple[dict[float, dict[str, Any]], Path],
) -> None:
    text, page = (curve[1] / "report.md").read_text(), (curve[1] / "report.html").read_text()
    assert re.search(r"\| 1.5 \| [\d.]+ \| -?0\.\d{4} \|", text)
    assert "32 generated images per point; reference set: 40 images (synthetic " in page
    assert "these figures say nothing about the model" in page
    assert "fig-fid-clip-0" in page


def coco(path: Path, count: int) -> Path:
    """Write captions in COCO's format, the highest id first."""
    captions = [{"image_id": 9, "id": 3 * i, "caption": f"A street with {i} houses."} for i in reversed(range(count))]
    path.write_text(json.dumps({"info": {}, "images": [], "annotations": captions}))
    return path


def test_captions_are_drawn_by_the_seed_without_replacement_in_the_order_of_ids(tmp_path: Path) -> None:
    file = str(coco(tmp_path / "captions.json", 100))
    drawn = draw_captions(file, 32, 0)
    ids = [caption.id for caption in drawn]
    assert ids == sorted(set(ids))
    assert len(ids) == 32
    assert drawn == draw_captions(file, 32, 0)
    assert drawn != draw_captions(file, 32, 1)
    assert all(caption.caption == f"A street with {caption.id // 3} houses." for caption in drawn)
    assert len(draw_captions(file, 100, 5)) == 100


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"cannot be read \(No such file or directory\)"),
        ('[{"image_id": 404464, "caption": "a man"}]', r"not captions in COCO's format \(Expected `object`"),
        ("version https://git-lfs.github.com/spec/v1", r"cannot be read \(is a Git LFS pointer: run `git lfs pull`"),
        ('{"annotations": [{"id": 1, "bbox": []}]}', "not captions in COCO's format .*`caption`"),
        ('{"annotations": [{"id": 1, "caption": "a"}]}', "has 1 captions, and a run needs 32 different ones"),
    ],
)
def test_what_are_no_captions_is_refused(content: str | None, message: str, tmp_path: Path) -> None:
    file = tmp_path / "captions.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(UserError, match=rf"data\.captions={file}: {message}"):
        draw_captions(str(file), 32, 0)


def test_missing_captions_are_refused_before_submission(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here = ("gpu=cpu", "recipe=cpu", "telemetry=none", "site=local", "dry_run=true")
    given = last_given(*TINY, *here, "data.captions=none.json", f"hydra.sweep.dir={tmp_path}/sweep")
    assert launch.main(["-m", *given, "demonstration=true"]) == 2
    assert capsys.readouterr().err == "error: data.captions=none.json: cannot be read (No such file or directory)\n"


def test_a_training_takes_no_captions() -> None:
    with pytest.raises(
        UserError, match=r"data\.captions=c\.json: workload=finetune_inpaint makes no images of prompts"
    ):
        bench("data.captions=c.json")


def test_checkpoints_are_curves_of_one_figure_named_by_their_folders(tmp_path: Path) -> None:
    file = coco(tmp_path / "captions.json", 100)
    for number, name in enumerate(("open/final", "mine/final", "mine/last")):
        torch.manual_seed(number)
        save_pipeline(build_networks(bench(*TINY).model, CPU, inputs=(4,)), tmp_path / name)
        given = (*TINY, f"model.weights={tmp_path / name}", f"data.captions={file}", "workload.guidance=2")
        worker.run(compose(*given), tmp_path / "in" / str(number), list(given))
    assert app.main(["merge", str(tmp_path / "in"), "-o", str(tmp_path / "ds")]) == 0
    assert app.main(["report", str(tmp_path / "ds"), "-o", str(tmp_path / "report")]) == 0
    rows = [pq.read_table(tmp_path / "in" / str(number) / "results_fid_clip").to_pylist()[0] for number in range(3)]
    lines = "".join(f"{caption.id} {caption.caption}\n" for caption in draw_captions(str(file), 32, 0))
    assert {row["prompts_sha256"] for row in rows} == {hashlib.sha256(lines.encode()).hexdigest()}
    text = (tmp_path / "report" / "report.md").read_text()
    assert "FID against CLIP score: 3 curves" in (tmp_path / "report" / "report.html").read_text()
    names = [re.search(rf"\| {name} \([0-9a-f]+\) +\|", text) for name in ("open/final", "mine/final", "mine/last")]
    assert all(names)


def test_fid_of_a_set_with_itself_is_zero_and_grows_with_the_difference() -> None:
    images = torch.rand(40, 3, 32, 32, generator=torch.Generator().manual_seed(0)) * 2 - 1

    def fid(generated: torch.Tensor) -> float:
        judges = Judges("tiny", QualityConfig(), CPU, images=40, real=40)
        for part in images.chunk(4):
            judges.add_real(part)
        for part in generated.chunk(5):
            judges.add(part, [""] * len(part))
        return judges.scores()["fid"]

    same, near, far = fid(images), fid(images * 0.9), fid(images * 0.2)
    assert same == pytest.approx(0, abs=1e-4)
    assert same < near < far


def test_missing_files_are_named_together() -> None:
    with pytest.raises(UnavailableError) as caught:
        Judges("files", QualityConfig(), CPU, images=3000, real=100)
    message = str(caught.value)
    assert "quality.inception_weights is empty" in message
    assert "quality.clip_model is empty" in message
    assert "at least 2,049 images in the reference set, there are 100" in message


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("workload.images=33", "workload.images=33: must be a multiple of batch=16"),
        ("repeats=auto", "repeats=auto: workload=fid_clip has no images/s to judge by"),
        ("workload.judges=files", "model.weights is empty: FID and CLIP score of random weights say nothing"),
        ("quality.clip_model=clip", "quality.clip_model=clip: workload.judges=tiny reads no file"),
        ("workload.measure_steps=3", "workload.measure_steps=3: workload=fid_clip ends after workload.images alone"),
    ],
)
def test_what_gives_no_curve_is_refused_before_submission(override: str, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        bench(*[key for key in TINY if key.partition("=")[0] != override.partition("=")[0]], override)


def test_judges_without_files_are_refused_before_submission() -> None:
    given = ("workload.judges=files", "model.weights=weights", "quality.clip_model=clip")
    with pytest.raises(UserError, match=r"^quality\.inception_weights: empty, and nothing is downloaded"):
        bench(*TINY, *given)
