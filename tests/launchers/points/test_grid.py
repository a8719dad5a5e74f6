"""The grid of a study: its points, what the command line chooses of them, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from analysis import published
from inpaint_bench.core.config.bench import StudyConfig
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.hydra_support import register
from inpaint_bench.core.paths import conf_dir
from launchers.submit.plugin import grid_points, merge_typed


@pytest.fixture(autouse=True)
def _registered() -> None:
    register()


def study(*lines: str, name: str = "mine", **keys: object) -> StudyConfig:
    return StudyConfig(name=name, grid=list(lines), **keys)  # type: ignore[arg-type]


def test_study_poster_is_every_cell_that_the_poster_publishes() -> None:
    content = yaml.safe_load(Path(conf_dir() / "study" / "poster.yaml").read_text())
    points = {tuple(sorted(point)) for point in grid_points(StudyConfig(**content))}
    cells = [(gpu.lower(), batch) for gpu, batch, *_ in published.read("poster_runtime_hours.csv").iter_rows()]
    cells = [("recipe=poster_baseline", *cell) for cell in cells]
    assert ("recipe=poster_baseline", "h200", 16) in cells
    cells.append(("recipe=poster_optimized", "h200", 16))  # poster_input_pipeline.csv
    assert points == {(f"batch={batch}", f"gpu={gpu}", recipe) for recipe, gpu, batch in cells}


def test_the_command_line_chooses_among_the_points_and_adds_to_all() -> None:
    points = grid_points(study("gpu=a40,a100 batch=4,8", "recipe=tf32+num_workers=8 gpu=h200"))
    assert points[-1] == ["recipe=[tf32,num_workers\\=8]", "gpu=h200"]
    typed = [["gpu=a40", "seed=1"], ["gpu=a40", "seed=2"], ["gpu=h200", "seed=1"], ["gpu=h200", "seed=2"]]
    chosen = merge_typed(points, typed)
    assert chosen[:2] == [["gpu=a40", "batch=4", "seed=1"], ["gpu=a40", "batch=4", "seed=2"]]
    assert len(chosen) == (2 + 1) * 2
    # A key that a line leaves open takes the value of the command line.
    assert merge_typed(points, [["batch=4"]])[-1] == [*points[-1], "batch=4"]
    assert merge_typed([[]], typed) == typed


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["gpu=h100"], "gpu=h100: no point of study.grid has this; it has gpu=a40 batch=4, gpu=a40 batch=8, gpu=h200"),
        (["gpu=a40", "batch=32"], "gpu=a40 batch=32: no point of study.grid has this"),
    ],
)
def test_values_that_choose_no_point_are_refused(typed: list[str], message: str) -> None:
    points = grid_points(study("gpu=a40 batch=4,8", "gpu=h200 batch=32"))
    with pytest.raises(UserError, match=f"^{re.escape(message)}"):
        merge_typed(points, [typed])


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        (study("gpu=a40", name="ladder"), "a study.name other than one_at_a_time, ladder, leave_one_out"),
        (study("gpu=a40", levers=["tf32"]), "study.grid: takes no study.levers and no study.base"),
        (study("gpu=a40 batch=["), "study.grid[0]: batch=[: a bracket is missing"),
        (study("gpu=a40 'batch=4"), "study.grid[0]: No closing quotation"),
        (study("gpu"), "study.grid[0]: gpu: is not KEY=VALUE"),
        (study("gpu=a40 gpu=h200"), "study.grid[0]: gpu is given twice"),
        (study("gpu=a40 repeats=3"), "study.grid[0]: repeats=3: holds for a whole sweep; give it to the launch"),
        (study("hydra.sweep.dir=x"), "holds for a whole sweep"),
        (study("gpu=a40,h200 batch=8", "batch=8 gpu=h200"), "study.grid: batch=8 gpu=h200 is in it twice; repeats=2"),
    ],
)
def test_grid_that_makes_no_sense_is_refused(grid: StudyConfig, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        grid_points(grid)
