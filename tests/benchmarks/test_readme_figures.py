"""The measured figures in the README are those of the committed datasets."""

import re
from pathlib import Path

import polars as pl
import pytest

from benchmarks.step_record import read_profile

ROOT = Path(__file__).resolve().parents[2]


def _rows() -> list[tuple[frozenset[str], list[str]]]:
    """Return the levers and the cells of every row of the README that names a dataset; `+a` is the row above with a."""
    rows: list[tuple[frozenset[str], list[str]]] = []
    for line in (ROOT / "README.md").read_text().splitlines():
        if re.search(r"\| \d{4}-\d\d-\d\d-\S+ \|$", line):
            cells = line.strip("| ").split(" | ")
            (name,) = re.findall(r"`([^`]+)`", cells[0])
            above = rows[-1][0] if name.startswith("+") else frozenset()
            rows.append((above | set(name.strip("+").split("+")), cells))
    return rows


def _span(values: pl.Series, digits: int) -> str:
    return f"{values.min():.{digits}f} to {values.max():.{digits}f}"


def test_readme_has_measured_figures():
    assert len(_rows()) >= 7


@pytest.mark.parametrize(("levers", "cells"), _rows(), ids=[cells[0] for _, cells in _rows()])
def test_a_row_of_the_readme_is_the_range_of_the_valid_runs(levers, cells):
    _, rates, energies, count, dataset = cells
    table = pl.read_parquet(ROOT / "benchmarks/results" / dataset / "runs.parquet")
    runs = [row for row in table.filter(pl.col("valid")).to_dicts() if set(row["recipe"].split("+")) == levers]
    runs = [row for row in runs if row["batch"] == 16]
    for column, printed in (("images_per_s", rates), ("joules_per_image", energies)):
        values = [row[column] for row in runs]
        assert (f"{min(values):.1f} to {max(values):.1f}", str(len(values))) == (printed, count)


def test_the_grid_of_the_readme_is_the_range_of_the_valid_runs():
    table = pl.read_parquet(ROOT / "benchmarks/results/2026-11-23-h100-h200/runs.parquet")
    rows = re.findall(r"^\| (H100|H200) \| `(\w+)` \| (.+) \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(rows) == 6
    for gpu, recipe, cells in rows:
        for batch, printed in zip((4, 16, 64), cells.split(" | "), strict=True):
            runs = table.filter(pl.col("gpu") == gpu.lower(), pl.col("recipe") == recipe, pl.col("batch") == batch)
            speeds = runs.filter(pl.col("valid"))["images_per_s"]
            if printed == "out of memory":
                assert runs["reason"].to_list() == ["oom_gpu"] * 3
            else:
                assert _span(speeds, 1) == printed


def test_the_figures_of_two_gpus_are_the_range_of_the_valid_runs():
    table = pl.read_parquet(ROOT / "benchmarks/results/2026-11-23-h200-two-gpus/runs.parquet").filter(pl.col("valid"))
    rows = re.findall(
        r"^\| `(\w+)` \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", (ROOT / "README.md").read_text(), re.MULTILINE
    )
    rows = [(recipe, cells) for recipe, *cells in rows if " to " in cells[0]]
    assert [recipe for recipe, _ in rows] == ["baseline", "tuned"]
    for recipe, cells in rows:
        for (gpus, batch), printed in zip(((1, 16), (2, 16), (2, 8)), cells, strict=True):
            runs = table.filter(pl.col("recipe") == recipe, pl.col("gpus") == gpus, pl.col("batch") == batch)
            assert runs.height == (4 if (gpus, batch) == (2, 16) else 3)
            assert _span(runs["images_per_s"], 1) == printed


def test_the_figures_of_making_images_are_the_range_of_the_valid_runs():
    table = pl.read_parquet(ROOT / "benchmarks/results/2026-11-23-h200-inference/runs.parquet").filter(pl.col("valid"))
    rows = re.findall(
        r"^\| `(\w+)`, (\d+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", (ROOT / "README.md").read_text(), re.M
    )
    assert len(rows) == table.group_by("recipe", "batch").len().height == 3
    for recipe, batch, *cells in rows:
        runs = table.filter(pl.col("recipe") == recipe, pl.col("batch") == int(batch))
        assert runs.height == 3
        speeds = runs["images_per_s"]
        values = ((int(batch) / speeds, 2), (speeds, 2), (runs["joules_per_image"], 0))
        assert [_span(column, digits) for column, digits in values] == cells


def test_the_step_times_of_the_readme_are_those_of_the_profiles():
    rows = re.findall(r"^\| `(\w+)` \| ((?:[\d.]+ \| ){8}[\d.]+) \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert [recipe for recipe, _ in rows] == ["baseline", "tuned", "tuned_hopper"]
    for recipe, cells in rows:
        *classes, idle, step = map(float, cells.split(" | "))
        profile = read_profile(ROOT / "benchmarks/profiles/2026-11-22-h200" / f"{recipe}.json")
        assert sum(classes) == pytest.approx(profile.kernel_ms, abs=0.05 * len(classes))
        assert (idle, step) == (round(profile.idle_ms, 1), round(profile.step_ms, 1))
        attention = sum(row.ms for row in profile.classes if "attention" in row.kind)
        assert round(attention, 1) in classes


def _model_rows(names: str) -> list[tuple[str, str, list[str]]]:
    """Return model, recipe and further cells of the rows that begin with one of these models."""
    text = (ROOT / "README.md").read_text()
    rows = re.findall(rf"^\| ({names}), `([\w+]+)` \| (.+) \|$", text, re.MULTILINE)
    return [(model, recipe, cells.split(" | ")) for model, recipe, cells in rows]


def test_the_figures_of_volumes_are_the_range_of_the_valid_runs():
    table = pl.read_parquet(ROOT / "benchmarks/results/2026-11-23-h200-volumes/runs.parquet").filter(pl.col("valid"))
    rows = _model_rows("whole_head|brats")
    assert len(rows) == table.group_by("model", "recipe").len().height == 8
    for model, recipe, cells in rows:
        runs = table.filter(pl.col("model").str.starts_with(f"{model} "), pl.col("recipe") == recipe)
        assert runs.height == (3 if model == "whole_head" else 2)
        speeds, energies = _span(runs["steps_per_s"], 2), _span(runs["joules_per_image"], 0)
        assert [speeds, energies, f"{runs['vram_used_mib_peak'].max() / 1024:.1f}"] == cells


def test_the_figures_of_lora_and_sdxl_are_the_range_of_the_valid_runs():
    table = pl.read_parquet(ROOT / "benchmarks/results/2026-11-23-h200-lora-sdxl/runs.parquet").filter(pl.col("valid"))
    rows = _model_rows("sd15_inpaint|sdxl_inpaint")
    assert len(rows) == table.drop_nulls("model").group_by("model", "recipe").len().height == 5
    for model, recipe, cells in rows:
        runs = table.filter(pl.col("model") == model, pl.col("recipe") == recipe)
        speeds, energies = _span(runs["images_per_s"], 1), _span(runs["joules_per_image"], 1)
        assert [speeds, energies, f"{runs['vram_used_mib_peak'].max() / 1024:.1f}", str(runs.height)] == cells
