"""The figures: the data of their marks, their captions, and the reason for each that cannot be drawn."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import altair as alt
import numpy as np
import polars as pl
import pytest

from analysis.dataset import Dataset, open_dataset
from analysis.report import contents
from analysis.report.figures import base, by_batch, step_time, svg, timeline
from analysis.report.figures import points as point_figures
from analysis.report.figures.base import Figure
from analysis.report.sections import study_tables
from analysis.stats import study
from analysis.stats.cells import build_cells
from inpaint_bench.cli import app
from tests.analysis.build import A40, UNIX0, S, rewrite, rewrite_json, write_event, write_part, write_run
from tests.analysis.stats.test_study import run as study_run

from .test_tables import frame

pytestmark = pytest.mark.slow

Row = dict[str, Any]
EVIL = "\"/></svg><script>alert(1)</script>&' " + "x" * 400


def layers(spec: Row, datasets: Row | None = None, rows: list[Row] | None = None) -> Iterator[Row]:
    """Yield every mark of a specification with its rows, which may be those of the layers around it."""
    datasets = datasets or spec.get("datasets", {})
    if data := spec.get("data"):
        rows = datasets[data["name"]] if "name" in data else data["values"]
    if "mark" in spec:
        yield {**spec, "rows": rows}
    for name in ("layer", "vconcat", "hconcat"):
        for inner in spec.get(name, []):
            yield from layers(inner, datasets, rows)


def marks(figure: Figure, kind: str, *, encodes: tuple[str, ...] = (), **properties: Any) -> list[Row]:
    """Return the data of all marks of this kind that encode these channels and have these properties."""
    rows: list[Row] = []
    for layer in layers(figure.spec):
        mark = layer["mark"]
        if mark["type"] != kind or not set(encodes) <= set(layer["encoding"]):
            continue
        if all(mark.get(name) == value for name, value in properties.items()):
            rows += layer["rows"]
    return rows


def runs_of(batch: int, *speeds: float, cards: tuple[str, ...] = ("GPU-1",), **more: Any) -> list[Row]:
    """Return runs of one cell, on each card in turn."""
    return [
        {
            "run_id": f"r-{more.get('recipe', '')}-{more.get('gpu', 'a40')}-{batch}-{i}",
            "batch": batch,
            "images_per_s": speed,
            "joules_per_image": 100 / speed,
            "power_w": 100.0,
            "gpu_uuid": cards[i % len(cards)],
            "seed": i,
            **more,
        }
        for i, speed in enumerate(speeds)
    ]


def throughput(rows: list[Row]) -> Figure:
    """Draw the figure of images/s by batch size."""
    figures = by_batch.draw(build_cells(frame(*rows)))
    return next(figure for figure in figures if figure.id == "fig-images_per_s")


def dataset_of(tmp_path: Path) -> Dataset:
    """Merge the runs below `in` and open the dataset."""
    assert app.main(["merge", str(tmp_path / "in"), "-o", str(tmp_path / "ds")]) == 0
    return open_dataset(tmp_path / "ds")


# --- by batch size ---------------------------------------------------------------------------


def test_whiskers_are_the_confidence_interval_and_a_single_run_has_none() -> None:
    """Student over 9, 10, 11 on one card: 10 +/- 4.303 / sqrt(3). The range, 9 to 11, is not drawn."""
    figure = throughput([*runs_of(8, 9.0, 10.0, 11.0), *runs_of(16, 12.0)])
    (whisker,) = marks(figure, "rule", encodes=("y2",))
    half = 4.302653 / math.sqrt(3)
    assert (whisker["batch"], whisker["low"], whisker["high"]) == pytest.approx((8, 10 - half, 10 + half))
    assert [row["value"] for row in marks(figure, "point", encodes=("x",))] == [10.0, 12.0]
    assert "95 % confidence interval of the mean" in figure.caption
    assert "n = 4 runs in 2 cells." in figure.caption
    assert "min" not in figure.subtitle


def test_single_runs_have_no_whiskers_and_the_caption_says_so() -> None:
    figure = throughput([*runs_of(8, 9.0), *runs_of(16, 10.0)])
    assert not marks(figure, "rule")
    assert "One run per cell: no intervals." in figure.caption


def test_one_batch_has_no_figure_over_the_batch() -> None:
    """Regression: a point alone on an axis, and a memory strip of one tick."""
    assert by_batch.draw(build_cells(frame(*runs_of(8, 9.0), *runs_of(8, 10.0, recipe="tf32")))) == []


def test_a_caption_says_which_axis_does_not_start_at_zero() -> None:
    """Regression: `The axes do not start at zero` stood under axes that do."""
    more = {"gpu_util_pct": 98.0}
    figures = by_batch.draw(build_cells(frame(*runs_of(8, 9.0, **more), *runs_of(16, 10.0, **more))))
    captions = {figure.id: figure.caption for figure in figures}
    assert "start at zero" not in captions["fig-images_per_s"]
    assert "The axis does not start at zero." in captions["fig-gpu_util_pct"]
    assert base.zero_note((0, 1), (0, 1)) == ""
    assert base.zero_note((0, 1), (2, 3)) == "One axis does not start at zero."


def test_colour_is_the_gpu_marker_the_recipe_and_every_line_is_labelled() -> None:
    """Regression: a legend of eight entries."""
    rows = [
        run
        for gpu in ("h100", "h200")
        for recipe in ("baseline", "tf32")
        for batch in (8, 16)
        for run in runs_of(batch, batch + 10.0 * (gpu == "h200") + 5.0 * (recipe == "tf32"), gpu=gpu, recipe=recipe)
    ]
    figure = throughput(rows)
    points = [layer["encoding"] for layer in layers(figure.spec) if layer["mark"]["type"] == "point"]
    assert len(points) == 2  # of the lines, and of their labels
    for look in points:
        assert look["color"]["field"] == "gpu"
        assert len(set(look["color"]["scale"]["range"])) == 2
        assert look["shape"]["field"] == "recipe"
        assert look["color"]["legend"] is look["shape"]["legend"] is None
    labels = {row["text"] for row in marks(figure, "text")}
    assert labels == {f"{gpu} \u00b7 {recipe}" for gpu in ("H100", "H200") for recipe in ("baseline", "tf32")}


def test_labels_at_the_ends_of_lines_do_not_overlap() -> None:
    rows = [r for i in range(6) for batch in (8, 16) for r in runs_of(batch, 10.0 + i / 100, recipe=f"lever_{i}")]
    figure = throughput(rows)
    top = next(layer for layer in layers(figure.spec) if "scale" in layer["encoding"]["y"])
    pixels = svg.HEIGHT / top["encoding"]["y"]["scale"]["domain"][1]
    places = sorted(row["place"] * pixels for row in marks(figure, "text"))
    assert min(b - a for a, b in pairwise(places)) >= base.LINE_PX - 0.01


def test_a_label_that_is_not_at_the_end_of_its_line_is_joined_to_it() -> None:
    """Regression: the label of a line that ends early, or that was pushed away, belonged to no line."""
    far = [r for batch in (8, 16) for r in runs_of(batch, 20.0, recipe="far")]
    early = throughput([*far, *runs_of(8, 10.0, recipe="early")])
    (joined,) = marks(early, "rule", encodes=("x2", "y2"))
    assert (joined["recipe"], joined["batch"], joined["value"]) == ("early", 8, 10.0)
    assert joined["place"] == pytest.approx(10.0)
    close = [r for i in range(6) for batch in (8, 16) for r in runs_of(batch, 10.0 + i / 100, recipe=f"lever_{i}")]
    assert "lever_0" in {row["recipe"] for row in marks(throughput(close), "rule", encodes=("x2", "y2"))}
    assert not marks(throughput(far), "rule", encodes=("x2", "y2"))


def test_a_long_label_has_as_few_lines_as_hold_its_parts() -> None:
    """Regression: a separator alone on a line."""
    name = "H200 \u00b7 poster_optimized \u00b7 channels_last not active"
    assert base._wrap(name, 24) == ["H200 \u00b7 poster_optimized", "channels_last not active"]
    assert base._wrap("H200 \u00b7 tf32", 24) == ["H200 \u00b7 tf32"]


def test_a_cell_without_a_mean_is_named_below_its_figure() -> None:
    cells = build_cells(frame(*runs_of(8, 9.0), *runs_of(16, 10.0), *runs_of(32, 11.0)))
    lacking = cells.with_columns(images_per_s=pl.when(pl.col("batch") != 32).then("images_per_s"))
    (figure,) = [each for each in by_batch.draw(lacking) if each.id == "fig-images_per_s"]
    assert "No point, because there is no mean: A40 at batch 32." in figure.caption


def test_recipes_at_one_batch_are_bars_in_the_order_of_the_table() -> None:
    cells = build_cells(frame(*runs_of(8, 9.0), *runs_of(8, 12.0, recipe="tf32"))).sort("images_per_s", descending=True)
    (figure,) = by_batch.bars(cells.to_dicts(), "")
    assert [row["value"] for row in marks(figure, "bar")] == [12.0, 9.0]
    assert by_batch.bars(cells.to_dicts()[:1], "") == []


def test_an_interval_beyond_the_axis_is_cut_off() -> None:
    """Three cards with 8, 10 and 18 have an interval of 12 +/- 13."""
    rows = runs_of(8, 8.0, 10.0, 18.0, cards=("GPU-1", "GPU-2", "GPU-3"))
    figure = throughput([*rows, *runs_of(16, 12.0)])
    (whisker,) = marks(figure, "rule", encodes=("y2",), clip=True)
    scaled = (layer["encoding"]["y"] for layer in layers(figure.spec) if "scale" in layer["encoding"]["y"])
    top = next(scaled)["scale"]["domain"][1]
    assert 19 < top < 25 < whisker["high"]  # 60 % more than the mean, and a margin
    assert base.CUT_NOTE in figure.caption


def test_two_cards_have_a_range_without_caps_and_no_interval() -> None:
    """Regression: their interval, thirteen standard errors either side, made every figure unreadable."""
    figure = throughput([*runs_of(8, 8.0, 12.0, cards=("GPU-1", "GPU-2")), *runs_of(16, 12.0)])
    (span,) = marks(figure, "rule", encodes=("y2",))
    assert (span["least"], span["most"], span["low"]) == (8.0, 12.0, None)
    assert not marks(figure, "tick")
    assert "without caps the range of too few runs" in figure.caption
    assert "95 %" not in figure.caption


def test_a_ladder_has_confidence_intervals_and_no_range() -> None:
    rows = [study_run("ladder", "baseline", 10.0 + seed, seed=seed) for seed in (0, 1, 2)]
    rows.append(study_run("ladder", "baseline,tf32", 12.0))
    figure = study_tables.draw(study.comparisons(frame(*rows))[0])
    assert figure is not None
    (whisker,) = marks(figure, "rule", encodes=("x2",))
    half = 4.302653 / math.sqrt(3)
    assert (whisker["low"], whisker["high"]) == pytest.approx((11 - half, 11 + half))
    assert [row["label"] for row in marks(figure, "bar")] == ["baseline", "+ tf32"]
    assert "95 % confidence interval" in figure.caption


# --- throughput against energy ------------------------------------------------------------------------


def cell(batch: int, speed: float, joules: float, **more: Any) -> Row:
    """Return a cell of one run."""
    return runs_of(batch, speed, **more)[0] | {"joules_per_image": joules}


def drawn_pareto(*rows: Row) -> list[Figure]:
    """Draw throughput against energy of these runs."""
    return point_figures.draw_energy(build_cells(frame(*rows)))


def test_the_frontier_has_the_cells_that_no_other_beats_in_both() -> None:
    (figure,) = drawn_pareto(
        cell(8, 10.0, 20.0),
        cell(16, 12.0, 25.0),
        cell(32, 11.0, 26.0),  # slower than batch 16, and more energy
        cell(8, 30.0, 40.0, gpu="h200"),
        cell(16, 29.0, 40.0, gpu="h200"),  # as much energy as batch 8, and slower
    )
    best = marks(figure, "point", filled=True, opacity=1)
    assert sorted((row["gpu"], row["text"]) for row in best) == [
        ("a40", "baseline, 16"),
        ("a40", "baseline, 8"),
        ("h200", "baseline, 8"),
    ]
    lighter = [row for row in marks(figure, "point", filled=True) if row not in best]
    assert sorted((row["gpu"], row["text"]) for row in lighter) == [("a40", "baseline, 32"), ("h200", "baseline, 16")]
    assert all(layer["mark"]["opacity"] < 0.5 for layer in layers(figure.spec) if lighter[0] in layer["rows"][:2])
    edge = [(row["images_per_s"], row["joules_per_image"]) for row in marks(figure, "line", interpolate="step-before")]
    assert edge == [(10.0, 20.0), (12.0, 25.0), (30.0, 40.0)]
    assert {row["text"] for row in marks(figure, "text")} == {"baseline, 8", "baseline, 16"}
    assert "One axis does not start at zero" not in figure.caption


def test_cells_with_different_work_are_in_separate_figures() -> None:
    rows = [cell(batch, 10.0 + batch, 20.0, resolution_px=side) for batch in (8, 16) for side in (512, 64)]
    assert [len(marks(figure, "point", filled=True)) for figure in drawn_pareto(*rows)] == [2, 2]


def test_one_cell_is_no_comparison_of_throughput_with_energy() -> None:
    assert drawn_pareto(cell(8, 10.0, 20.0)) == []


def test_labels_do_not_overlap() -> None:
    (figure,) = drawn_pareto(*(cell(b, 10.0 + b / 1e4, 20.0 + b / 1e4, workload="w") for b in (8, 9, 10)))
    assert len(marks(figure, "point", filled=True)) == 3
    assert len(marks(figure, "text")) < 3


# --- time per step ------------------------------------------------------------------------------


def with_device(share: float) -> Callable[[pl.DataFrame], pl.DataFrame]:
    """Scale the device time of every step."""
    return lambda rows: rows.with_columns((pl.col("device_ms") * share).alias("device_ms"))


def bars(dataset: Dataset) -> Figure:
    """Draw the time per step."""
    figure = step_time.draw(dataset, build_cells(dataset.runs))
    assert isinstance(figure, Figure)
    return figure


def test_the_parts_of_a_step_add_up_to_its_duration(tmp_path: Path) -> None:
    """Batch 8 at 2 steps/s is 62.5 ms per image: the GPU has 80 % of it, 15 % are waited for, 5 % are the host's."""
    run = write_run(tmp_path / "in", "r-01", wait_share=0.15)
    rewrite(run, "steps", with_device(0.8))
    figure = bars(dataset_of(tmp_path))
    parts = {row["part"]: row["value"] for row in marks(figure, "bar")}
    assert parts == pytest.approx({step_time.DEVICE: 50.0, step_time.WAIT: 9.375, "Host and other": 3.125}, rel=1e-3)
    assert marks(figure, "text")[0]["text"] == "62.5 ms, Device 80.0 %"
    assert "(copy, forward, backward, optimizer)" in figure.caption


def test_data_wait_that_overlaps_device_time_is_not_lost(tmp_path: Path) -> None:
    run = write_run(tmp_path / "in", "r-01", wait_share=0.5)
    rewrite(run, "steps", with_device(0.9))
    parts = {row["part"]: row["value"] for row in marks(bars(dataset_of(tmp_path)), "bar")}
    assert parts == pytest.approx(
        {step_time.DEVICE: 56.25, step_time.WAIT: 6.25, "Host and other": 0.0}, rel=1e-3, abs=1e-9
    )


def test_without_device_times_only_the_data_wait_is_separated(tmp_path: Path) -> None:
    run = write_run(tmp_path / "in", "r-01", wait_share=0.2)
    rewrite(run, "steps", lambda rows: rows.with_columns(pl.lit(None).alias("device_ms")))
    figure = bars(dataset_of(tmp_path))
    parts = {row["part"]: row["value"] for row in marks(figure, "bar")}
    assert parts == pytest.approx({"Step, undivided": 50.0, step_time.WAIT: 12.5}, rel=1e-3)
    assert "no CUDA events" in figure.caption


def test_checkpoints_and_validation_are_averaged_over_all_images(tmp_path: Path) -> None:
    """18 steps of warm-up and 60 measured ones of 8 images; 6.24 s of checkpoints are 10 ms per image."""
    run = write_run(tmp_path / "in", "r-01")

    def trained(windows: list[Row]) -> list[Row]:
        """Add a window of checkpoints."""
        warmup, measure = windows
        warmup |= {"steps": 18, "images": 144}
        start = measure["t_end_mono_ns"]
        times = {"t_start_mono_ns": start, "t_end_mono_ns": start + round(6.24 * S)}
        unix = {"t_start_unix_ns": start + UNIX0, "t_end_unix_ns": start + UNIX0 + round(6.24 * S)}
        saved = {"window_id": "w-2", "kind": "checkpoint", "status": "completed", "steps": 0, "images": 0}
        return [warmup, measure, {**saved, **times, **unix, "reason": None}]

    rewrite_json(run, "windows.json", trained)
    figure = bars(dataset_of(tmp_path))
    parts = {row["part"]: row["value"] for row in marks(figure, "bar")}
    assert parts["Checkpoint"] == pytest.approx(10.0)
    assert "Checkpoint: outside the measurement windows" in figure.caption


def test_a_run_with_an_incomplete_table_of_steps_is_not_valid_and_omitted(tmp_path: Path) -> None:
    rewrite(write_run(tmp_path / "in", "r-01", wait_share=0.15), "steps", with_device(0.8))
    run = write_run(tmp_path / "in", "r-02", batch=16)
    rewrite(run, "steps", lambda rows: rows.head(5))
    dataset = dataset_of(tmp_path)
    assert dataset.runs.filter("valid")["run_id"].to_list() == bars(dataset).run_ids == ["r-01"]


# --- roofline ------------------------------------------------------------------------------------


def test_a_run_at_the_ridge_has_equal_shares_of_peak_compute_and_bandwidth() -> None:
    at_ridge = {"run_id": "r-1", "mfu_pct": 40.0, "dram_active_pct": 40.0, "tensor_active_pct": 50.0}
    bound = {"run_id": "r-2", "mfu_pct": 20.0, "dram_active_pct": 80.0, "tensor_active_pct": 30.0}
    figure = point_figures.draw_roofline(frame(at_ridge, bound, {"run_id": "r-3", "mfu_pct": 10.0}))
    assert isinstance(figure, Figure)
    points = [(row["intensity"], row["mfu_pct"]) for row in marks(figure, "point")]
    assert points == [(1.0, 40.0), (0.25, 20.0)]
    roof = [(row["intensity"], row["mfu_pct"]) for row in marks(figure, "line")]
    assert (1.0, 100.0) in roof
    assert all(height == pytest.approx(min(100, 100 * at)) for at, height in roof)
    assert all(mfu <= 100 * at for at, mfu in points)
    assert "1 of 2 runs left of the ridge." in figure.caption
    assert "1 run without counters or MFU omitted." in figure.caption


def test_without_counters_there_is_no_roofline() -> None:
    runs = frame({"mfu_pct": 40.0})
    assert point_figures.draw_roofline(runs) == point_figures.NO_ROOFLINE


# --- timelines -----------------------------------------------------------------------------------


def timelines(dataset: Dataset) -> list[Figure]:
    """Draw the timelines of a dataset."""
    return timeline.draw(dataset, {})


def axes(figure: Figure) -> list[str]:
    """Return the axis titles of the panels from top to bottom."""
    return [
        next(
            layer["encoding"]["y"]["title"]
            for layer in layers(panel, figure.spec["datasets"])
            if layer["mark"]["type"] == "line"
        )
        for panel in figure.spec["vconcat"]
    ]


def with_counters(run: Path) -> None:
    """Add samples of hardware counters to a run."""
    t = 995 * S + np.arange(20) * S
    head = {"run_id": run.name.removeprefix("run-"), "gpu_uuid": A40, "source": "nvml", "read_us": 90.0}
    times = {"tick_seq": np.arange(20), "t_mono_ns": t, "t_unix_ns": t + UNIX0, "window_ms": 1000.0}
    values = {"sm_active_pct": np.full(20, 70.0), "tensor_active_pct": np.full(20, 40.0)}
    write_part(run / "samples_gpm", "samples_gpm", {**head, **times, **values})


def test_a_timeline_has_a_counter_panel_if_the_run_has_counters(tmp_path: Path) -> None:
    with_counters(write_run(tmp_path / "in", "r-01"))
    write_run(tmp_path / "in", "r-02")
    first, second = timelines(dataset_of(tmp_path))
    assert axes(first) == ["Power [W]", "Util. [%]", "Active [%]", "SM [MHz]", "Temp. [\u00b0C]"]
    assert "Active [%]" not in axes(second)
    lines = [
        layer for layer in layers(first.spec["vconcat"][2], first.spec["datasets"]) if layer["mark"]["type"] == "line"
    ]
    assert [{row["mean"] for row in line["rows"]} for line in lines] == [{70.0}, {40.0}]
    assert ["strokeDash" in line["mark"] for line in lines] == [False, True]


def test_throttling_is_shaded_while_its_counter_grows(tmp_path: Path) -> None:
    """The window opens at 1000 s; the counter of the power cap grows by half of the time from 1005 s to 1010 s."""
    run = write_run(tmp_path / "in", "r-01")
    grown = 0.5 * (pl.col("t_mono_ns").clip(1005 * S, 1010 * S) - 1005 * S)
    counter = grown.cast(pl.Int64).alias("throttle_power_cap_ns")
    rewrite(run, "samples_slow", lambda rows: rows.with_columns(counter))
    (figure,) = timelines(dataset_of(tmp_path))
    (shaded,) = [row for row in marks(figure, "rect") if "cause" in row]
    assert shaded["cause"] == timeline.POWER_CAP
    assert (shaded["t"], shaded["t_end"]) == pytest.approx((5.0, 10.0))
    assert "At the power cap for 8.33 % of the measurement window" in figure.caption


def test_events_of_the_runs_own_cards_are_marked_and_listed(tmp_path: Path) -> None:
    events = (
        ("xid", "79", A40, 3),
        ("ecc", "1", A40, 4),
        ("gpu_lost", None, None, 5),
        ("xid", "13", "b", 6),
    )
    run = write_run(tmp_path / "in", "r-01")
    for at, (kind, detail, uuid, at_s) in enumerate(events):
        write_event(run, kind, detail or "", at_s=at_s, gpu_uuid=uuid)
        (run / "events" / "part-000000.parquet").rename(run / "events" / f"part-{at + 1:06d}.parquet")
    (figure,) = timelines(dataset_of(tmp_path))
    top = figure.spec["vconcat"][0]
    assert "text" not in {layer["mark"]["type"] for layer in layers(top, figure.spec["datasets"])}
    assert {row["t"] for row in marks(figure, "rule")} == {3.0, 5.0}
    assert "Xid 79 at 3.0 s; GPU lost at 5.0 s" in figure.caption


# --- all of them ---------------------------------------------------------------------------------


def every_kind(tmp_path: Path, name: str) -> list[Figure]:
    """Draw runs of two cards whose names are all the same string, with data for every figure."""
    cards = ("GPU-1", "GPU-2")
    names = {"site": name, "recipe": name, "model": name, "node": name, "gpu": name}
    more = {"mfu_pct": 9.0, "dram_active_pct": 30.0, "tensor_active_pct": 9.0, "energy_ratio": 1.0, "energy_j": 1.0}
    more |= {
        "gpu_util_pct": 90.0,
        "temp_gpu_c_mean": 60.0,
        "vram_pct": 50.0,
        "runtime_h": 1.0,
        "runtime_kind": "projected",
    }
    rows = runs_of(8, 9.0, 11.0, 10.0, 12.0, cards=cards, **names, **more)
    rows += runs_of(16, 9.0, 11.0, cards=cards, **(names | {"recipe": "baseline", "gpu": "h200"}), **more)
    times = {"t_start_mono_ns": 0, "t_end_mono_ns": 10 * S, "steps": 20, "images": 160}
    windows = [
        {"run_id": row["run_id"], "window_id": "w", "kind": "measure", "status": "completed"} | times for row in rows
    ]
    for row in rows:
        folder = tmp_path / "steps" / "site=a" / "gpu=b" / f"run={row['run_id'].encode().hex()[:40]}"
        step = {"window_id": "w", "step": np.arange(20), "t_start_mono_ns": 0, "t_end_mono_ns": 1, "images": 8}
        write_part(folder, "steps", {"run_id": row["run_id"], "data_wait_ns": 1000, "device_ms": 400.0, **step})
    dataset = Dataset(
        folder=tmp_path,
        metadata={},
        notes=[],
        runs=frame(*rows),
        windows=pl.DataFrame(windows),
        skipped=pl.DataFrame(),
    )
    cells = build_cells(dataset.runs)
    drawn = [
        *by_batch.draw(cells),
        *point_figures.draw_energy(cells),
        step_time.draw(dataset, cells),
        point_figures.draw_roofline(dataset.runs),
    ]
    figures = [each for each in drawn if isinstance(each, Figure)]
    assert len(figures) == len(drawn)
    return figures


@pytest.mark.parametrize("name", ["plain", EVIL])
def test_hostile_names_are_escaped_and_do_not_widen_a_figure(tmp_path: Path, name: str) -> None:
    figures = every_kind(tmp_path, name)
    assert len(figures) == len({figure.id for figure in figures}) == 9
    for figure in figures:
        root = ET.fromstring(svg.standalone(figure.svg))
        assert not [tag for tag in root.iter() if "script" in tag.tag]
        assert float(root.attrib["viewBox"].split()[2]) < 640, figure.id
        assert "n = " in figure.caption
        assert figure.run_ids


def test_a_hostile_run_id_gives_a_safe_and_unique_file_name(tmp_path: Path) -> None:
    chart = alt.Chart(alt.InlineData(values=[])).mark_point()
    figure = base.figure(f"timeline-{EVIL}", "t", "s", ["c"], chart, [])
    other = base.figure(f"timeline-{EVIL}y", "t", "s", ["c"], chart, [])
    (tmp_path / f"{figure.id}.svg").write_text(figure.svg)
    assert figure.id != other.id
    assert set(figure.id) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.")


def test_without_valid_runs_nothing_is_drawn(tmp_path: Path) -> None:
    write_run(tmp_path / "in", "r-01", status="failed", reason="oom_gpu", windows=False)
    dataset = dataset_of(tmp_path)
    assert contents.charts(dataset) == {}


def test_a_run_without_telemetry_has_the_figures_of_its_steps_only(tmp_path: Path) -> None:
    run = write_run(tmp_path / "in", "r-01", telemetry={"source": "none"}, wait_share=0.15)
    rewrite(run, "steps", with_device(0.8))
    for table in ("samples_fast", "samples_slow"):
        for part in (run / table).iterdir():
            part.unlink()
    dataset = dataset_of(tmp_path)
    assert dataset.runs["valid"].to_list() == [True]
    assert contents.charts(dataset).keys() == {"fig-step-time"}
    assert timelines(dataset) == []


def test_figures_of_900_runs_show_a_limited_number_of_series() -> None:
    """Fifty recipes on three GPUs at three batches, two seeds each: a note says what a figure omits."""
    rows = [
        {**run, "run_id": f"{gpu}-{recipe}-{batch}-{seed}"}
        for gpu, speed in (("a40", 10.0), ("a100", 17.0), ("h200", 44.0))
        for recipe in range(50)
        for batch in (8, 16, 32)
        for seed in range(2)
        for run in runs_of(batch, speed + recipe / 10 + seed / 100, gpu=gpu, recipe=f"lever_{recipe}")
    ]
    for figure in by_batch.draw(build_cells(frame(*rows))):
        assert len({row["series"] for row in marks(figure, "point")}) <= len(svg.SERIES)
        assert "The tables have 142 more series" in figure.caption
    (figure,) = drawn_pareto(*rows)
    assert len(marks(figure, "point", filled=True)) == 450
    assert len(marks(figure, "text")) < 40
