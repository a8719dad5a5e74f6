"""Two datasets side by side: what is worse, what is missing, and the exit code that a test of performance reads."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import polars as pl
import pytest

from inpaint_bench.cli import app
from inpaint_bench.core import seal
from inpaint_bench.core.paths import ROOT

pytestmark = pytest.mark.slow

MEASURED = ROOT / "benchmarks/results/2026-11-23-h200-finetune"


@pytest.fixture
def changed(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that copies the measured dataset and changes its table of runs."""

    def copy(*expressions: pl.Expr, keep: pl.Expr | bool = True) -> Path:
        folder = tmp_path / "changed"
        shutil.copytree(MEASURED, folder)
        runs = pl.read_parquet(folder / "runs.parquet")
        runs.filter(keep).with_columns(*expressions).write_parquet(folder / "runs.parquet")
        metadata = json.loads((folder / "dataset.json").read_text(encoding="utf-8"))
        (folder / "dataset.json").write_text(json.dumps(seal.seal(metadata, folder)), encoding="utf-8")
        return folder

    return copy


def scaled(column: str, factor: float, *, batch: int) -> pl.Expr:
    rows = (pl.col("batch") == batch) & (pl.col("recipe") == "tuned_hopper")
    return pl.when(rows).then(pl.col(column) * factor).otherwise(pl.col(column)).alias(column)


def test_a_dataset_is_not_worse_than_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["compare", str(MEASURED), str(MEASURED), "--fail-on", "0%", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["failures"] == []
    assert [row["Result"] for row in content["tables"]["comparison"]] == ["no difference shown"] * 5
    assert "comparison-environment" not in content["tables"]
    assert app.main(["compare", str(MEASURED), str(MEASURED)]) == 0
    copy = "NOTE: Both datasets hold the same runs, copied or merged twice: this compares no two measurements."
    assert capsys.readouterr().out.startswith(copy)


def test_planted_regression_of_one_cell_is_the_only_failure(
    changed: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    worse = changed(scaled("images_per_s", 0.95, batch=32), pl.lit("999.99").alias("driver"))
    assert app.main(["compare", str(MEASURED), str(worse), "--fail-on", "3%"]) == 1
    out = capsys.readouterr().out
    assert "1 failure with --fail-on 3%" in out
    assert "tuned_hopper batch 32: images_per_s worse" in out
    assert "batch 16: images_per_s" not in out
    assert "999.99" in out
    assert app.main(["compare", str(MEASURED), str(worse), "--fail-on", "6"]) == 0
    assert app.main(["compare", str(MEASURED), str(worse)]) == 0


def test_junit_has_a_case_per_cell_and_a_failure_per_regression(changed: Callable[..., Path], tmp_path: Path) -> None:
    worse, file = changed(scaled("images_per_s", 0.95, batch=32)), tmp_path / "junit.xml"
    assert app.main(["compare", str(MEASURED), str(worse), "--fail-on", "3%", "--junit", str(file)]) == 1
    suite = ElementTree.parse(file).getroot()
    cases = {case.attrib["name"]: case.findall("failure") for case in suite}
    ((name, (failure,)),) = [(name, found) for name, found in cases.items() if found]
    assert name.endswith("tuned_hopper batch 32")
    assert "images_per_s worse" in failure.attrib["message"]
    assert (suite.attrib["tests"], suite.attrib["failures"]) == (str(len(cases)), "1")
    assert len(cases) == 5


def test_more_energy_is_a_failure_and_less_is_none(changed: Callable[..., Path]) -> None:
    worse = changed(scaled("joules_per_image", 1.05, batch=4))
    assert app.main(["compare", str(MEASURED), str(worse), "--fail-on", "3%"]) == 1
    assert app.main(["compare", str(worse), str(MEASURED), "--fail-on", "3%"]) == 0


def test_cell_without_a_valid_run_cannot_hide_a_regression(
    changed: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    fewer = changed(keep=pl.col("batch") != 4)
    assert app.main(["compare", str(MEASURED), str(fewer), "--fail-on", "3%"]) == 1
    assert "tuned_hopper batch 4: no valid run in the new dataset" in capsys.readouterr().out
    assert app.main(["compare", str(fewer), str(MEASURED), "--fail-on", "3%"]) == 0


def test_a_fraction_of_a_percent_needs_its_sign(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["compare", str(MEASURED), str(MEASURED), "--fail-on", "0.03"]) == 2
    assert capsys.readouterr().err == "error: --fail-on 0.03: write 3% or 0.03%, whichever you mean\n"
    assert app.main(["compare", str(MEASURED), str(MEASURED), "--fail-on", "0.03%"]) == 0


def test_few_runs_are_compared_by_their_means(changed: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    single = changed(scaled("images_per_s", 0.9, batch=16), keep=pl.col("seed") == 1)
    assert app.main(["compare", str(MEASURED), str(single), "--fail-on", "3%"]) == 1
    assert "tuned_hopper batch 16: images_per_s worse, no interval" in capsys.readouterr().out


def test_cells_of_another_site_are_compared_where_they_are_the_only_ones(changed: Callable[..., Path]) -> None:
    elsewhere = changed(pl.lit("grace").alias("site"))
    assert app.main(["compare", str(MEASURED), str(elsewhere), "--fail-on", "3%"]) == 0


@pytest.mark.parametrize("percent", ["fast", "-1", "100%", "nan", ""])
def test_percentage_that_is_none_is_refused(percent: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["compare", str(MEASURED), str(MEASURED), f"--fail-on={percent}"]) == 2
    assert "is not a percentage from 0 to below 100, such as 3%" in capsys.readouterr().err


def test_datasets_without_a_common_cell_are_refused(
    changed: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    other = changed(pl.lit("a40").alias("gpu"))
    assert app.main(["compare", str(MEASURED), str(other)]) == 2
    assert "have no cell in common" in capsys.readouterr().err


def test_cards_are_not_advised_for_datasets_of_other_work(
    changed: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: it advised --gpu, and was then refused with the same sentence."""
    other = changed(pl.lit("a40").alias("gpu"), pl.lit("sd_inference").alias("workload"))
    assert app.main(["compare", str(MEASURED), str(other)]) == 2
    assert "compares two cards" not in capsys.readouterr().err


def test_report_has_the_comparison_as_a_section(changed: Callable[..., Path], tmp_path: Path) -> None:
    worse = changed(scaled("images_per_s", 0.95, batch=32))
    out = tmp_path / "report"
    assert app.main(["report", str(worse), "-o", str(out), "--export", "csv", "--compare", str(MEASURED)]) == 0
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "Compared with 2026-11-23-h200-finetune" in page
    rows = (out / "tables/comparison.csv").read_text(encoding="utf-8").splitlines()
    assert [row for row in rows if "worse (images/s)" in row and ",32," in row]


def test_recipes_are_told_as_overrides_on_one_line(
    changed: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: the short name was all that `compare` printed, and `recipe=` does not take it."""
    levers = "cache_image+cache_masked+cache_text+on_gpu+cuda_graph"
    parts = f"baseline+{levers}".replace("+", ",")
    is_tuned = pl.col("recipe") == "tuned_hopper"
    renamed = [
        pl.when(is_tuned).then(pl.lit(value)).otherwise(column).alias(column)
        for column, value in (("recipe", levers), ("recipe_parts", parts))
    ]
    assert app.main(["compare", str(MEASURED), str(changed(*renamed))]) == 0
    out = capsys.readouterr().out
    assert "earlier_baseline+cached+graph" in "".join(out.split())
    pasted = parts.replace("baseline", "earlier_baseline")  # `baseline` had no lever when they ran
    assert f"To launch earlier_baseline+cached+graph: 'recipe=[{pasted}]'\n" in out


def test_two_gpus_are_compared_as_if_they_were_one(capsys: pytest.CaptureFixture[str]) -> None:
    both = str(ROOT / "benchmarks/results/2026-11-23-h100-h200")
    assert app.main(["compare", both, "--gpu", "h100,h200"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "NOTE: Old: h100, new: h200." in lines
    assert max(map(len, lines)) <= 80
    assert "+15.7 %" in " ".join(lines)
    h100, h200 = (str(ROOT / f"benchmarks/results/{name}-yardstick") for name in ("2026-11-28-h100", "2026-11-27-h200"))
    assert app.main(["compare", h100, h200]) == 2
    assert "--gpu h100,h200 compares two cards" in capsys.readouterr().err
    assert app.main(["compare", h100, h200, "--gpu", "h100,h200"]) == 0
    # Regression: the option was named where it finds no cell either.
    denoisers = [str(ROOT / f"benchmarks/results/{name}-denoisers") for name in ("2026-11-23-h200", "2026-11-25-h100")]
    assert app.main(["compare", *denoisers]) == 2
    assert "--gpu" not in capsys.readouterr().err


def test_a_terminal_that_is_not_of_utf_8_gets_other_characters() -> None:
    """Regression: an arrow or a dash ended the command with a traceback."""
    both = str(ROOT / "benchmarks/results/2026-11-23-h100-h200")
    command = [sys.executable, "-m", "inpaint_bench", "compare", both, "--gpu", "h100,h200"]
    environment = os.environ | {"PYTHONIOENCODING": "latin-1"}
    done = subprocess.run(command, capture_output=True, cwd=ROOT, env=environment, timeout=300)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"H100?H200" in done.stdout


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ([], "give a second dataset, or two GPUs of this one"),
        (["--gpu", "h200"], "name two GPUs"),
        (["--gpu", "h200,h200"], "name two GPUs"),
        (["--gpu", "a40,h200"], "has no run on a40, it has h200"),
    ],
)
def test_what_is_missing_of_two_sides_is_said(
    more: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.main(["compare", str(MEASURED), *more]) == 2
    assert message in capsys.readouterr().err


def test_a_side_that_knows_no_fact_keeps_its_column(
    changed: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: a new dataset without cards had the column Old only, and again a hint on the means."""
    unknown = changed(pl.lit(None, pl.String).alias("gpu_uuid"))
    assert app.main(["compare", str(MEASURED), str(unknown)]) == 0
    out = capsys.readouterr().out
    lines = out.partition("What differs between the compared runs")[2].splitlines()
    assert next(line.split() for line in lines if line.strip()) == ["Fact", "Old", "New"]
    assert out.count("The means, and how many runs") == 1
