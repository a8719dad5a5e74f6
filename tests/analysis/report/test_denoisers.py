"""What the report says of the denoisers' memory, fed with the predicted peaks as if they had been measured."""

import re
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from analysis import published
from analysis.columns import SCHEMA
from analysis.dataset import open_dataset
from analysis.report.tables import DASH, TableBuilder
from analysis.report.workloads import Section, denoise_patch, denoise_shape, sections
from inpaint_bench.core.workloads import result_columns, results

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"

WEIGHTS_MIB = 160.0
RUN: dict[str, Any] = {"run_id": "r-1", "site": "delta", "gpu": "h200", "gpus": 1, "recipe": "fp32", "variant": None}
RUN |= {"precision": "fp32", "gpu_uuid": "GPU-1", "steady": None}
RUN |= {"t_start_mono_ns": 0, "t_end_mono_ns": 2_000_000_000, "counter_update_s": 0.1}
RUN |= {"counter_start_j": 100.0, "counter_end_j": 500.0}

NO_RUNS = pl.DataFrame(schema=SCHEMA)


def _shape_rows(**changes: Any) -> pl.DataFrame:
    """A row per width and network, whose peak is the prediction and 3 %."""
    rows = []
    for at in published.read("denoiser_predicted_shape.csv").to_dicts():
        for model in ("drunet", "unet", "dncnn"):
            row: dict[str, Any] = {
                **RUN,
                "model": model,
                "series_px": at["step"],
                "height_px": 2048,
                "width_px": at["width"],
                "batch": 1,
                "published_plan": True,
                "tiling": "library",
                "input_mode": "device_resident",
                "branch": at["drunet_branch"] if model == "drunet" else "direct",
                "calls": at["drunet_unet_calls"] if model == "drunet" else 1,
                "tile_h_px": at["drunet_tile_h"],
                "tile_w_px": at["drunet_tile_w"],
                "time_ms": 0.1 * at["width"],
                "mpx_per_s": 20.0,
                "weights_mib": WEIGHTS_MIB,
                "allocated_peak_mib": WEIGHTS_MIB + 1.03 * at[f"{model}_peak_mib"],
                "reserved_peak_mib": 7000.0,
                "nvml_used_mib": 7600.0,
                "out_of_memory": None,
            }
            rows.append(row | changes)
    assert {name for name, _, _ in result_columns(results()["denoise_shape"])} <= {*rows[0], "window_id", "step"}
    return pl.DataFrame(rows)


def _column(section: Section, name: str, table: int = 0) -> list[str]:
    shown = section.tables[table]
    return [row[shown.columns.index(name)] for row in shown.rows]


def _section(rows: pl.DataFrame) -> Section:
    return denoise_shape.section(TableBuilder(runs=NO_RUNS), rows, NO_RUNS)


def test_peaks_of_an_h200_are_the_algorithms_but_for_named_workspace():
    dataset = open_dataset(RESULTS / "2026-11-23-h200-denoisers")
    patches, shapes = sections(dataset, TableBuilder(runs=dataset.runs))
    predicted = [reason for reason in _column(shapes, "Explained by") if reason != "no prediction for this setting"]
    assert len(predicted) == 99
    assert all(reason.startswith("algorithm: ") for reason in predicted)
    above, predictions = (_column(shapes, name) for name in ("Above weights [MiB]", "Predicted [MiB]"))
    peaks = [(a, p) for a, p in zip(above, predictions, strict=True) if p != DASH]
    for measured_mib, predicted_mib in peaks:
        assert float(measured_mib.replace(",", "")) == pytest.approx(float(predicted_mib.replace(",", "")), rel=0.01)
    workspace = [reason for reason in _column(patches, "Explained by") if not reason.startswith("algorithm: ")]
    assert len(workspace) == 6
    assert all(re.fullmatch(r"algorithm \(.+\) and \+[\d,]+ MiB of the backend", reason) for reason in workspace)


def test_peaks_that_meet_the_prediction_are_the_algorithms():
    section = _section(_shape_rows())
    reasons = dict(
        zip(
            zip(_column(section, "Model"), _column(section, "Image [px]"), strict=True),
            _column(section, "Explained by"),
            strict=True,
        )
    )
    assert reasons["DRUNet", "2048x1228"] == "algorithm: 4 tiles of 1088x640 px"
    assert reasons["DRUNet", "2048x1296"] == "algorithm: whole image at once"
    assert all(reason.startswith("algorithm: ") for reason in reasons.values())


def test_what_exceeds_the_prediction_by_more_than_a_tenth_is_the_backends():
    rows = _shape_rows().with_columns(pl.col("allocated_peak_mib") + 1000)
    assert "algorithm (4 tiles of 1088x640 px) and +1,033 MiB of the backend" in _column(_section(rows), "Explained by")


@pytest.mark.parametrize("change", [{"tiling": "off"}, {"batch": 2}, {"precision": "bf16"}, {"published_plan": False}])
def test_a_setting_of_another_kind_has_no_prediction(change):
    section = _section(_shape_rows(**change))
    assert set(_column(section, "Explained by")) == {"no prediction for this setting"}


def test_stated_points_stand_beside_what_was_measured():
    section = _section(_shape_rows())
    pairs = zip(_column(section, "Published peak [GB]", 1), _column(section, "Measured peak [GB]", 1), strict=True)
    # Predicted peak and weights, in units of 10^9 bytes: the two points of the page.
    assert list(pairs) == [("1.3", "1.35"), ("4", "4.37")]
    assert _column(section, "Agrees", 1) == ["yes", "yes"]
    twice = _section(_shape_rows().with_columns(pl.col("allocated_peak_mib") * 2))
    assert _column(twice, "Agrees", 1) == ["no", "no"]


def test_panels_show_time_memory_and_throughput_by_series():
    section = _section(_shape_rows())
    assert [figure.id.rpartition("-")[2] for figure in section.figures] == ["memory", "time", "rate"]
    assert all("widths by 68 px" in figure.svg for figure in section.figures)


def test_patches_have_a_panel_per_size_for_each_figure():
    rows = [
        {
            **RUN,
            "model": model,
            "patch_px": at["patch"],
            "num_patches": at["num_patches"],
            "height_px": 2048,
            "width_px": 2048,
            "times_by_rank_ms": None,
            "peaks_by_rank_mib": None,
            "batch": at["batch"],
            "published_plan": True,
            "tiling": "library",
            "input_mode": "host_random",
            "branch": "direct",
            "calls": at["num_patches"] // at["batch"],
            "tile_h_px": at["patch"],
            "tile_w_px": at["patch"],
            "time_ms": 100.0,
            "patches_per_s": 10.0 * at["num_patches"],
            "images_per_s": 10.0,
            "weights_mib": WEIGHTS_MIB,
            "allocated_peak_mib": WEIGHTS_MIB + at[f"{model}_peak_mib"],
            "reserved_peak_mib": 7000.0,
            "nvml_used_mib": 7600.0,
            "out_of_memory": None,
        }
        for at in published.read("denoiser_predicted_batch.csv").to_dicts()
        for model in ("drunet", "unet", "dncnn")
    ]
    section = denoise_patch.section(TableBuilder(runs=NO_RUNS), pl.DataFrame(rows), NO_RUNS)
    assert [figure.id.rpartition("-")[2] for figure in section.figures] == ["memory", "time", "patches", "images"]
    assert all(f"patches of {size} px" in figure.svg for figure in section.figures for size in (128, 256, 512))
    assert all("stroke-dasharray" in figure.svg for figure in section.figures)  # a line shows below an equal one
    assert set(_column(section, "Explained by")) == {"algorithm: whole image at once"}
    assert section.answer == (
        "Take for DnCNN patches of 128 px, 1 at a time (41.9 Mpx/s, 168 MiB); "
        "DRUNet patches of 128 px, 1 at a time (41.9 Mpx/s, 184 MiB); "
        "UNet patches of 128 px, 1 at a time (41.9 Mpx/s, 184 MiB): the least memory of what "
        "reaches 90 % of the fastest."
    )
    assert any(
        "UNet: patches of 128 px, 1 at a time" in text and "needs the least memory" in text
        for text in section.paragraphs
    )
    # All are as fast as each other, so the published best is among the best.
    assert set(_column(section, "Agrees", 1)) == {"yes"}
    faster = pl.when((pl.col("patch_px") == 512) & (pl.col("batch") == 2)).then(20.0).otherwise("images_per_s")
    slower = denoise_patch.section(
        TableBuilder(runs=NO_RUNS), pl.DataFrame(rows).with_columns(images_per_s=faster), NO_RUNS
    )
    assert set(_column(slower, "Measured best", 1)) == {"512 px, 2"}
    assert set(_column(slower, "Published / measured best", 1)) == {"0.500"}
    assert set(_column(slower, "Agrees", 1)) == {"no"}


def _patch_rows(*cases: dict[str, Any]) -> pl.DataFrame:
    case = {"model": "drunet", "published_plan": True, "tiling": "library", "input_mode": "pinned", "calls": 20}
    case |= {"patch_px": 128, "num_patches": 256, "height_px": 2048, "width_px": 2048, "times_by_rank_ms": None}
    case |= {"peaks_by_rank_mib": None, "batch": 1, "branch": "direct", "tile_h_px": 128, "tile_w_px": 128}
    case |= {"time_ms": 300.0, "patches_per_s": 853.0, "images_per_s": 3.33, "weights_mib": 125.0}
    case |= {"allocated_peak_mib": 400.0, "reserved_peak_mib": 500.0, "nvml_used_mib": 900.0, "out_of_memory": None}
    return pl.DataFrame([RUN | case | each for each in cases], infer_schema_length=None)


@pytest.mark.parametrize(
    ("cases", "answer", "extremes"),
    [
        ([{}], "One case each, nothing to choose from: DRUNet patches of 128 px, 1 at a time", 0),
        ([{}, {"batch": 2}], "Take for DRUNet patches of 128 px, 1 at a time", 1),
        (
            [{"allocated_peak_mib": None, "batch": batch} for batch in (1, 2)],
            "1 at a time (14.0 Mpx/s): the fastest.",
            0,
        ),
        ([{}, {"recipe": "tf32", "images_per_s": 9.0}], "Take for DRUNet (tf32) patches of 128 px, 1 at a time (37", 1),
    ],
)
def test_the_answer_on_patches_claims_what_the_cases_show(
    cases: list[dict[str, Any]], answer: str, extremes: int
) -> None:
    """Regression: one case was the fastest and the leanest, a CPU's `the least memory`, and no recipe was named."""
    section = denoise_patch.section(TableBuilder(runs=NO_RUNS), _patch_rows(*cases), NO_RUNS)
    assert answer in section.answer
    assert len(section.paragraphs) == extremes  # and none on input_mode=host_random, which no case has


def test_the_answer_on_shapes_compares_peaks_of_one_card_and_recipe() -> None:
    """Regression: of two cards the smaller peak of each network was shown, without the card."""
    rows = pl.concat([_shape_rows(), _shape_rows(gpu="h100", run_id="r-2").with_columns(pl.col("time_ms") * 2)])
    answer = _section(rows).answer
    assert "DRUNet (H200) needs" in answer
    assert "DRUNet (H100) needs" in answer
    assert len(re.findall(r"UNet \(H[12]00\) [\d,]+ MiB", answer)) == 6
    assert not _section(rows.filter(pl.col("model") == "unet")).paragraphs  # that DRUNet's memory rises and falls


def test_published_peaks_of_a_reconstruction_stand_beside_the_same_image():
    case = {"gpus": 1, "model": "drunet", "published_plan": True, "tiling": "library", "input_mode": "pinned"}
    case |= {
        "branch": "direct",
        "calls": 20,
        "tile_h_px": 512,
        "tile_w_px": 512,
        "time_ms": 300.0,
        "out_of_memory": None,
    }
    case |= {"patches_per_s": 66.7, "images_per_s": 3.33, "weights_mib": 125.0, "reserved_peak_mib": 7000.0}
    case |= {"nvml_used_mib": 7600.0, "height_px": 2048, "width_px": 1366, "patch_px": 512, "num_patches": 20}
    case |= {"times_by_rank_ms": None, "peaks_by_rank_mib": None}
    changes: list[dict[str, Any]] = [
        {"patch_px": 2048, "num_patches": 1, "batch": 1, "branch": "onesplit4", "allocated_peak_mib": 1335.0},
        {"batch": 10, "allocated_peak_mib": 3965.0},
        {"batch": 10, "allocated_peak_mib": 3965.0, "gpus": 2, "peaks_by_rank_mib": "3965.0, 3960.0"},
    ]
    rows = pl.DataFrame([RUN | case | change for change in changes])
    section = denoise_patch.section(TableBuilder(runs=NO_RUNS), rows, NO_RUNS)
    assert _column(section, "Peak by GPU [MiB]") == [DASH, DASH, "3,965, 3,960"]
    assert _column(section, "Published peak [GB]", 2) == ["1.6", DASH, "4.3"]
    assert _column(section, "Measured peak [GB]", 2) == ["1.40", "4.16", "4.16"]
    assert _column(section, "Agrees", 2) == ["yes", DASH, "yes"]


def test_energy_of_a_case_is_shown_where_it_lasts_for_enough_updates_of_the_counter():
    assert set(_column(_section(_shape_rows()), "J per call")) == {"400"}
    for change in ({"t_end_mono_ns": 1_900_000_000}, {"counter_end_j": None}):
        section = _section(_shape_rows().with_columns(pl.lit(v).alias(name) for name, v in change.items()))
        assert set(_column(section, "J per call")) == {"\u2013"}


def test_a_case_out_of_memory_has_no_figures_and_says_what_was_asked_for():
    failed = pl.col("width_px") == 2048
    nothing = [
        pl.when(~failed).then(name).alias(name)
        for name in ("time_ms", "mpx_per_s", "allocated_peak_mib", "reserved_peak_mib", "nvml_used_mib")
    ]
    asked = pl.when(failed).then(pl.lit("Tried to allocate 2.00 GiB")).alias("out_of_memory")
    section = _section(_shape_rows(out_of_memory="").with_columns(asked, *nothing))
    rows = [row for row in section.tables[0].rows if "2048x2048" in row]
    column = section.tables[0].columns.index
    assert rows
    assert {(row[column("Time [ms]")], row[column("Explained by")]) for row in rows} == {
        ("\u2013", "out of memory: Tried to allocate 2.00 GiB")
    }


def test_runs_of_another_variant_are_cases_of_their_own():
    rows = pl.concat([_shape_rows(variant=text, run_id=text) for text in ("tiling=library, sigma=0.2", "sigma=0.3")])
    settings = _column(_section(rows), "Setting")
    assert set(settings) == {f"fp32, library, device_resident, sigma={sigma}" for sigma in (0.2, 0.3)}


def test_batches_are_lines_of_their_own_and_the_figure_names_what_it_leaves_out():
    rows = pl.concat([_shape_rows(run_id=f"r-{batch}", batch=batch) for batch in (1, 2, 4)])
    figure = _section(rows).figures[0]
    assert all(f"DRUNet, batch {batch}" in figure.svg for batch in (1, 2, 4))
    assert "Not drawn, but in the table: DnCNN, batch 4." in figure.caption
