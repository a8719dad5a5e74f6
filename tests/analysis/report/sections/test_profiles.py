"""The report's section of profiles, of made-up kernels."""

from pathlib import Path
from typing import Any

import pytest

from analysis.dataset import open_dataset
from analysis.merge import merge
from analysis.report import report
from analysis.report.figures import step_time
from analysis.report.sections import profiles
from analysis.report.tables import Section, TableBuilder
from tests.analysis.build import write_part, write_run

PROFILE = {"profiler": "torch", "calls": ["step"], "traces": [], "problems": []}
SLOW = {"nchwToNhwcKernel": ("layout conversion", 30.0, 10), "nvjet_sm90": ("GEMM", 20.0, 4), "": ("idle", 5.0, 13)}
FAST = {"nvjet_sm90": ("GEMM", 21.0, 4), "flash_fwd": ("attention", 4.0, 2), "": ("idle", 1.0, 5)}


def write(
    root: Path,
    run_id: str,
    recipe: str,
    times: dict[str, tuple[str, float, int]],
    call: str = "step",
    details: dict[str, str] | None = None,
    **changes: Any,
) -> None:
    changes = {"steps_per_s": 1000 / sum(ms for _, ms, _ in times.values()), **changes}
    changes = {"profile": PROFILE | {"calls": [call]}, "wait_share": 0.001, **changes}
    folder = write_run(root, run_id, recipe=recipe, gpu="h200", **changes)
    columns = {
        "run_id": run_id,
        "call": call,
        "measured": True,
        "detail": [(details or {}).get(name, "") for name in times],
        "kernel": list(times),
        "kind": [kind for kind, _, _ in times.values()],
        "ms": [ms for _, ms, _ in times.values()],
        "launches": [launches for _, _, launches in times.values()],
    }
    write_part(folder / "kernel_times", "kernel_times", columns)


def section(tmp_path: Path) -> list[Section]:
    merge([tmp_path / "runs"], tmp_path / "dataset")
    dataset = open_dataset(tmp_path / "dataset")
    return profiles.sections(dataset, TableBuilder(runs=dataset.runs))


def test_the_change_between_two_recipes_says_what_each_class_lost_or_gained(tmp_path):
    write(tmp_path / "runs", "r-1", "baseline", SLOW)
    write(tmp_path / "runs", "r-2", "tuned", FAST, call="CUDA graph replay", power_w=300.0)
    (result,) = section(tmp_path)
    change, *heaviest = result.tables
    assert change.title.startswith(
        "From earlier_baseline (step) to tuned (CUDA graph replay), H200, sd15_inpaint, batch 8"
    )
    rows = {row[0]: row[1:] for row in change.rows}
    assert rows["layout conversion"] == ["30.00", "54.5 %", "10", "0.00", "0.0 %", "\u2013", "-30.00", "-100 %"]
    assert rows["GEMM"][-2:] == ["+1.00", "+5 %"]
    assert rows["attention"][-2:] == ["+4.00", "\u2013"]
    assert rows["all kernels"][-2:] == ["-25.00", "-50 %"]
    assert rows["together"][-2:] == ["-29.00", "-53 %"]
    assert [table.rows[0][0] for table in heaviest] == ["nchwToNhwcKernel", "nvjet_sm90"]


def test_every_recipe_is_compared_with_that_of_the_fewest_levers(tmp_path):
    titles = _titles(tmp_path, {"fp32": 1.0, "fp32+channels_last": 1.1, "fp32+tf32": 0.2})
    changed = [
        f"From earlier_baseline+fp32 (step) to earlier_baseline+fp32+{name} (step)"
        for name in ("channels_last", "tf32")
    ]
    assert titles == changed


def _titles(tmp_path: Path, factors: dict[str, float]) -> list[str]:
    """Return which recipes are compared, of profiles that take so many times as long as SLOW."""
    for index, (recipe, factor) in enumerate(factors.items()):
        times = {name: (kind, factor * ms, launches) for name, (kind, ms, launches) in SLOW.items()}
        write(tmp_path / "runs", f"r-{index}", recipe, times, power_w=200.0 + index)
    (result,) = section(tmp_path)
    return [table.title.partition(",")[0] for table in result.tables if table.title.startswith("From ")]


def test_the_baseline_comes_before_a_slower_lever_and_is_compared_once_if_it_is_the_fastest(tmp_path):
    titles = _titles(tmp_path, {"baseline": 1.0, "ema": 1.2, "ema+compile": 1.1})
    assert len(titles) == 2
    assert all(title.startswith("From earlier_baseline (step) to earlier_baseline+ema") for title in titles)


def test_convolutions_are_divided_by_algorithm_and_a_profile_alone_has_its_classes(tmp_path):
    kernels = {
        "nvjet": ("GEMM", 60.0, 4),
        "ampere_scudnn_winograd": ("convolution forward", 30.0, 3),
        "sm80_xmma_fprop": ("convolution forward", 10.0, 2),
    }
    details = {"ampere_scudnn_winograd": "Winograd", "sm80_xmma_fprop": "implicit GEMM", "nvjet": "cuBLAS"}
    write(tmp_path / "runs", "r-1", "fp32", kernels, details=details)
    (result,) = section(tmp_path)
    classes, heaviest = result.tables
    assert classes.title.startswith("Kernel time by class: ")
    assert classes.rows == [
        ["GEMM", "60.00", "60.0 %", "4"],
        ["convolution forward, Winograd", "30.00", "30.0 %", "3"],
        ["convolution forward, implicit GEMM", "10.00", "10.0 %", "2"],
    ]
    assert heaviest.rows[0][0] == "nvjet"


def test_the_report_says_how_many_profiles_it_leaves_out_and_markdown_explains_as_the_page_does(tmp_path):
    for batch in range(1, profiles.MAX_TABLES + 2):
        write(tmp_path / "runs", f"r-{batch}", "baseline", FAST, batch=batch, power_w=200.0 + batch)
    (result,) = section(tmp_path)
    most = profiles.MAX_TABLES
    assert f"Tables of heaviest kernels: the first {most} of {most + 1}." in result.paragraphs
    assert f"Tables of classes: the first {most} of {most + 1}." in result.paragraphs
    report.write_report(tmp_path / "dataset", tmp_path / "report")
    text = (tmp_path / "report" / "report.md").read_text()
    before, _, after = text.partition("## Where a step's time goes")
    assert "no time of a profiled step is counted" in after.partition("### ")[0]
    assert "Kernel time by class" not in before
    assert "## Method" in after


def test_the_lines_of_a_change_add_up_to_the_call(tmp_path):
    """Regression: the lines did not add up to the step, and which of them were sums was not said."""
    write(tmp_path / "runs", "r-1", "baseline", SLOW)
    write(tmp_path / "runs", "r-2", "tf32", FAST)
    (result,) = section(tmp_path)
    lines = {row[0]: row for row in result.tables[0].rows}
    classes = [row for name, row in lines.items() if name not in ("all kernels", "idle", "together")]
    for column in (1, 4):
        assert sum(float(row[column]) for row in classes) == pytest.approx(float(lines["all kernels"][column]))
        parts = [float(lines[name][column]) for name in ("all kernels", "idle") if name in lines]
        assert sum(parts) == pytest.approx(float(lines["together"][column]))
    assert lines["together"][2] == "100.0 %"


def test_the_figure_has_a_bar_per_profile_and_means_over_runs(tmp_path):
    write(tmp_path / "runs", "r-1", "baseline", SLOW)
    twice = {name: (kind, 3 * ms, launches) for name, (kind, ms, launches) in SLOW.items()}
    write(tmp_path / "runs", "r-2", "baseline", twice, power_w=300.0, seed=1)
    (result,) = section(tmp_path)
    (figure,) = result.figures
    assert "batch 8, step<" in figure.svg
    assert "110.0 ms, idle 9.1 %" in figure.svg
    assert "layout conversion, copy" in figure.svg
    assert "communication" not in figure.svg
    assert figure.run_ids == ["r-1", "r-2"]


def test_a_class_of_a_later_version_counts_as_other(tmp_path):
    write(tmp_path / "runs", "r-1", "baseline", {"quantize": ("quantization", 4.0, 1)})
    (result,) = section(tmp_path)
    assert result.tables[0].rows[0][0] == "other"


def test_why_a_call_was_not_profiled_is_a_sentence_and_without_profiles_there_is_no_section(tmp_path):
    write_run(tmp_path / "runs", "r-1")
    assert section(tmp_path) == []
    problems = {"profiler": "torch", "calls": [], "traces": [], "problems": ["eager step: CUDA out of memory"]}
    write_run(tmp_path / "runs", "r-2", batch=16, profile=problems, power_w=300.0)
    (result,) = section(tmp_path)
    assert "Run r-2: eager step: CUDA out of memory." in result.paragraphs
    assert not result.figures


def test_bars_of_one_colour_give_way_to_the_profiles(tmp_path):
    write(tmp_path / "runs", "r-1", "baseline", SLOW)
    merge([tmp_path / "runs"], tmp_path / "dataset")
    dataset = open_dataset(tmp_path / "dataset")
    assert step_time.draw(dataset, TableBuilder(runs=dataset.runs).cells) == step_time.DIVIDED
