"""Replicates that contradict each other have no mean, and cells say what their runs differ in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest

from analysis.dataset import open_dataset
from analysis.report.sections import decision
from analysis.report.tables import TableBuilder
from analysis.stats import agreement, study
from analysis.stats.cells import build_cells
from inpaint_bench.cli import app
from tests.analysis.build import write_run
from tests.analysis.report.test_tables import frame

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"


def runs_of(*speeds: float, **more: Any) -> list[dict[str, Any]]:
    return [
        {"run_id": f"r-{seed}-{more.get('batch', 8)}", "images_per_s": speed, "joules_per_image": 100 / speed}
        | {"seed": seed, "gpu_uuid": "GPU-1", "point": seed, "attempt": 1, **more}
        for seed, speed in enumerate(speeds)
    ]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((10.0,), False),
        ((10.0, 10.0), False),
        ((10.0, 11.9), False),
        ((10.0, 12.1), True),
        ((10.0, 10.1, 10.05), False),
        ((10.0, 10.1, 11.6), True),  # one against two that agree
        ((10.0, 10.0, 11.2), True),
        ((10.0, 10.0, 10.9), False),
        ((27.9, 29.1, 32.3), False),  # a busy host
        ((72.6, 78.7, 79.8, 81.9), False),
        ((100.0, 100.1, 100.2, 100.1, 88.0), True),
    ],
)
def test_runs_disagree_beyond_a_range_or_with_an_outlier(values: tuple[float, ...], expected: bool) -> None:
    assert agreement.disagree(values) is expected
    assert agreement.disagree([1 / value for value in values]) is expected


# Plain loops at batch 4: the host decides, and the reports of these datasets say that the runs disagree.
HOST_BOUND = {("2026-11-23-h100-h200", "poster_optimized", 4)}


@pytest.mark.parametrize("name", sorted(path.parent.name for path in RESULTS.glob("*/dataset.json")))
def test_runs_of_committed_datasets_agree_but_for_host_bound_cells(name: str) -> None:
    cells = build_cells(open_dataset(RESULTS / name).runs).filter(pl.col("disagreement").is_not_null())
    assert {(name, cell["recipe"], cell["batch"]) for cell in cells.to_dicts()} == {
        cell for cell in HOST_BOUND if cell[0] == name
    }


class TestDisagreeingRuns:
    def test_have_no_mean_and_tables_say_so(self) -> None:
        build = TableBuilder(runs=frame(*runs_of(10.0, 20.0), *runs_of(30.0, 30.1, batch=16)))
        table = build.summary("throughput")
        speeds = [row[table.columns.index("Images/s")] for row in table.rows]
        assert speeds == ["runs disagree (10.0\u201320.0)", "30.1 (range 30.0 to 30.1)"]
        assert "1 cell: see the table of cells whose runs differ." in table.note
        (remark,) = build.cell_remarks().rows
        assert "images/s 10 (r-0-8) to 20 (r-1-8)" in remark[6]
        assert remark[6].endswith("; no mean")

    def test_that_print_alike_show_no_range(self) -> None:
        """Regression: `runs disagree (20,979\u201320,979)`."""
        build = TableBuilder(runs=frame(*(row | {"vram_used_mib_peak": 20979.0} for row in runs_of(10.0, 20.0))))
        table = build.summary("memory")
        assert table.rows[0][table.columns.index("VRAM peak, measured [MiB]")] == "20,979"

    def test_are_in_no_answer_ratio_or_recommendation(self) -> None:
        rows = runs_of(10.0, 20.0, 90.0) + runs_of(1.0, 1.01, 1.02, batch=16)
        rows += runs_of(5.0, 5.01, 5.02, gpu="a100", batch=8)
        build = TableBuilder(runs=frame(*rows))
        (section,) = decision.sections(build, [])
        assert section.answer.startswith("Take an A100, batch 8")
        assert build.gpu_ratios().rows == []
        assert [row[1] for row in section.tables[0].rows if row[0] == "A40"] == ["16"]

    def test_alone_have_an_answer_that_says_so(self) -> None:
        (section,) = decision.sections(TableBuilder(runs=frame(*runs_of(10.0, 20.0))), [])
        assert section.answer == "Runs disagree in every cell: no mean, and no best one."

    @pytest.mark.parametrize("more", [{"demonstration": True}, {"gpu": "cpu"}])
    def test_of_a_demonstration_or_a_cpu_have_a_mean_and_a_note(self, more: dict[str, Any]) -> None:
        build = TableBuilder(runs=frame(*runs_of(10.0, 20.0, **more)))
        assert build.cells["images_per_s"].to_list() == [15.0]
        assert build.cell_remarks().rows[0][6].startswith("images/s 10 (r-0-8) to 20 (r-1-8)")

    def test_have_a_mean_where_the_user_accepts_it(self) -> None:
        build = TableBuilder(runs=agreement.accept(frame(*runs_of(10.0, 20.0))))
        assert build.cells["images_per_s"].to_list() == [15.0]
        assert not build.cell_remarks().rows[0][6].endswith("no mean")

    def test_of_a_study_have_no_gain(self) -> None:
        facts = {"study_name": "one_at_a_time", "study_base": "baseline", "study_levers": "tf32", "batch": 8}
        rows = [row | facts | {"recipe_parts": "baseline"} for row in runs_of(10.0, 10.1, 10.2)]
        rows += [row | facts | {"recipe_parts": "baseline,tf32", "recipe": "tf32"} for row in runs_of(10.0, 20.0)]
        rows = [row | {"run_id": f"r-{index}"} for index, row in enumerate(rows)]
        (comparison,) = study.comparisons(frame(*rows))
        base, step = comparison.steps
        assert step.summarise("images_per_s")["images_per_s"] is None
        assert study.step_gain(step, base, comparison.steps) is None


def differences(*changes: dict[str, Any]) -> str:
    rows = [row | change for row, change in zip(runs_of(*[10.0] * len(changes)), changes, strict=True)]
    return str(build_cells(frame(*rows))["differences"].item() or "")


class TestDifferencesOfACell:
    def test_are_code_versions(self) -> None:
        assert differences({"code_version": "a1"}, {"code_version": "b2"}) == "2 code versions"
        assert differences({"code_version": "a1"}, {"code_version": None}) == ""

    def test_are_uncommitted_changes(self) -> None:
        assert differences(*[{"code_version": "a1-dirty"}] * 2) == "uncommitted code: 2 runs"

    def test_are_what_mfu_rests_on(self) -> None:
        found = differences(
            {"flop_per_image": 1e12, "peak_tflops": 989.0}, {"flop_per_image": 2e12, "peak_tflops": 312.0}
        )
        assert found == "2 figures of FLOP per image, 2 figures of peak FLOP/s"

    def test_are_several_attempts_of_one_point(self) -> None:
        first = {"sweep_id": "s-1", "point": 3, "attempt": 1}
        assert differences(first, {**first, "attempt": 2}) == "further attempts of a point: 1"
        assert differences(first, {**first, "point": 4, "attempt": 2}) == ""


@pytest.mark.parametrize(
    ("change", "label"),
    [
        ({"encodes_online": 0}, "latents cached"),
        ({"encodes_online": 1}, "half of the latents cached"),
        ({"text_online": False}, "text cached"),
    ],
)
def test_cached_and_online_are_separate_cells(change: dict[str, Any], label: str) -> None:
    rows = runs_of(10.0, 10.1, encodes_online=2, text_online=True)
    rows[1] |= change
    cells = build_cells(frame(*rows))
    assert cells.height == 2
    assert any(label in series for series in cells["series"])


def test_a_recipe_that_tells_of_its_caches_needs_no_further_label() -> None:
    rows = runs_of(10.0, encodes_online=2) + runs_of(20.0, batch=16, recipe="cache_image", encodes_online=0)
    assert build_cells(frame(*rows))["series"].to_list() == ["A40 \u00b7 baseline", "A40 \u00b7 cache_image"]


def test_a_recipe_that_names_its_precision_says_it_once() -> None:
    recipes = {"baseline": "bf16", "baseline+amp_fp16": "fp16", "cpu": "fp32"}
    rows = [row for name, type_ in recipes.items() for row in runs_of(10.0, recipe=name, precision=type_)]
    labels = ["A40 \u00b7 baseline \u00b7 bf16", "A40 \u00b7 baseline+amp_fp16", "A40 \u00b7 cpu \u00b7 fp32"]
    assert sorted(build_cells(frame(*rows))["series"]) == labels


def test_a_lever_that_is_not_active_makes_a_cell_of_its_own_that_says_so() -> None:
    rows = runs_of(10.0, 10.1, recipe="compile")
    rows[1] |= {"inactive_levers": "compile"}
    series = build_cells(frame(*rows))["series"].to_list()
    assert series == ["A40", "A40 \u00b7 compile not active"]


def test_every_output_of_a_report_lists_disagreeing_runs_and_inactive_levers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for index, rate in enumerate((2.0, 2.02, 2.9)):
        write_run(tmp_path / "runs", f"r-{index}", steps_per_s=rate, point=index, seed=index)
    lever = {"name": "compile", "field": "compile", "requested": True, "active": False}
    write_run(tmp_path / "runs", "r-lever", recipe="compile", levers=[lever], window_s=60.0)
    assert app.main(["merge", str(tmp_path / "runs"), "-o", str(tmp_path / "ds")]) == 0
    command = ["report", str(tmp_path / "ds"), "-o", str(tmp_path / "out")]
    assert app.main([*command, "--export", "csv,latex"]) == 0
    texts = [capsys.readouterr().out, *((tmp_path / "out" / name).read_text() for name in ("report.md", "report.html"))]
    for text in texts:
        words = " ".join(text.split())
        assert "runs disagree" in words.lower()
        assert "compile not active" in words
    for text in texts[1:]:
        assert "disagrees with runs of its cell" in " ".join(text.split())
    for name in ("cell-remarks.csv", "cell-remarks.tex"):
        assert "r-2" in (tmp_path / "out" / "tables" / name).read_text().replace("{-}", "-")
    assert "runs disagree (16.0\u201323.2)" in (tmp_path / "out" / "tables" / "throughput.csv").read_text()
    assert app.main([*command, "--accept-disagreement"]) == 0
    assert "runs disagree (" not in (tmp_path / "out" / "tables" / "throughput.csv").read_text()
    assert "r-2" in (tmp_path / "out" / "tables" / "cell-remarks.csv").read_text()
