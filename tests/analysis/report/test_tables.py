"""Aggregates, ratios, best batch, bottleneck rules, and the published layer."""

from __future__ import annotations

import json
from typing import Any

import polars as pl
import pytest

from analysis import columns, published, units
from analysis.report import render, tables
from analysis.report.sections import poster
from analysis.stats.cells import build_cells

BASELINE = json.dumps([{"name": "encoders_half", "field": "encoders", "requested": "half", "active": True}])


def frame(*rows: dict[str, Any]) -> pl.DataFrame:
    """Return a table of valid runs with these values."""
    base = dict.fromkeys(columns.SCHEMA) | {
        "run_id": "r-01",
        "site": "grace",
        "gpu": "a40",
        "batch": 8,
        "gpus": 1,
        "recipe": "baseline",
        "levers": BASELINE,
        "model": "sd15_inpaint",
        "workload": "finetune_inpaint",
        "status": "completed",
        "valid": True,
        "demonstration": False,
        "source": "nvml",
    }
    return pl.DataFrame([base | row for row in rows], schema=columns.SCHEMA)


def test_only_proven_and_likely_values_are_shown() -> None:
    shown = published.shown()
    assert set(shown["status"]) == {"proven", "likely"}
    power = shown.filter((pl.col("metric") == "power_w") & (pl.col("gpu") == "a100"))
    assert power["batch"].to_list() == [4]
    assert shown.filter(pl.col("metric") == "temp_gpu_c_mean").select("gpu", "value").rows() == [
        ("h200", 58.5),
        ("h200", 50.9),
    ]
    assert "ambiguous" in set(published.load()["status"])


def test_published_values_never_enter_an_aggregate() -> None:
    cells = build_cells(frame({"runtime_h": 9.0, "power_w": 100.0, "images_per_s": 1.0}))
    assert cells.height == 1
    assert cells.select("runtime_h", "runtime_h_min", "runtime_h_max", "power_w", "n").row(0) == (9, 9, 9, 100, 1)


def test_runs_of_one_cell_that_differ_in_what_is_not_compared_are_noted() -> None:
    rows: list[dict[str, Any]] = [
        {"run_id": "r-1", "seed": 7, "node": "n", "cuda": "12.8", "cudnn": "91002", "power_limit_w": 700.0},
        {"run_id": "r-2", "seed": 7, "node": "n", "cuda": "13.0", "cudnn": "91300", "power_limit_w": None},
    ]
    (differences,) = build_cells(frame(*rows))["differences"]
    assert differences == "2 CUDA versions, 2 cuDNN versions, unknown power limit: 1 runs, 2 runs of one seed"


def test_incomparable_runs_are_not_averaged_or_the_mix_is_noted() -> None:
    cells = build_cells(
        frame(
            {"run_id": "r-1", "driver": "570", "images_per_s": 10.0},
            {"run_id": "r-2", "driver": "580", "images_per_s": 12.0},
            {"run_id": "r-3", "demonstration": True, "images_per_s": 90.0},
            {"run_id": "r-4", "site": "delta", "images_per_s": 50.0},
        )
    )
    pooled = cells.filter((pl.col("site") == "grace") & ~pl.col("demonstration")).row(0, named=True)
    assert (pooled["n"], pooled["images_per_s"], pooled["differences"]) == (2, 11.0, "2 drivers")
    assert cells["n"].sum() == 4
    assert set(cells["series"]) == {
        "A40 \u00b7 real \u00b7 grace",
        "A40 \u00b7 demo \u00b7 grace",
        "A40 \u00b7 real \u00b7 delta",
    }
    assert tables.mean_text(pooled, "images_per_s") == "11.0 (range 10.0 to 12.0)"  # two cards


def test_runs_of_another_variant_are_a_cell_of_their_own() -> None:
    variants = [None, None, "tiling=off", "weights=0a1b2c3d"]
    runs = frame(*({"run_id": f"r-{i}", "variant": name, "power_w": 100.0 + i} for i, name in enumerate(variants)))
    cells = build_cells(runs)
    assert cells.sort("power_w").select("variant", "n", "power_w").rows() == [
        (None, 2, 100.5),
        ("tiling=off", 1, 102.0),
        ("weights=0a1b2c3d", 1, 103.0),
    ]
    assert set(cells["series"]) == {"A40", "A40 \u00b7 tiling=off", "A40 \u00b7 weights=0a1b2c3d"}
    table = tables.TableBuilder(runs=runs).summary("throughput")
    assert {row[table.columns.index("Variant")] for row in table.rows} == {"\u2013", "tiling=off", "weights=0a1b2c3d"}


def test_gpus_are_compared_only_with_the_same_model_and_recipe() -> None:
    runs = frame(
        {"run_id": "r-1", "gpu": "a40", "images_per_s": 10.0},
        {"run_id": "r-2", "gpu": "a100", "images_per_s": 20.0},
        {"run_id": "r-3", "gpu": "h200", "images_per_s": 900.0, "model": "tiny_inpaint"},
    )
    pairs = [row[:2] for row in tables.TableBuilder(runs=runs).gpu_ratios().rows if "published" not in row[0]]
    assert [text for _, text in pairs] == ["2.0"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "\u2013"),
        (0, "0"),
        (0.9997, "1.00"),
        (99.96, "100"),
        (99.25, "99.2"),
        (0.00342, "0.00342"),
        (1234.5, "1,234"),
        (2.517, "2.52"),
        (661.2, "661"),
        (3e-6, "3.00e-06"),
        (-0.5, "-0.500"),
    ],
)
def test_numbers_have_three_significant_digits(value: float | None, text: str) -> None:
    assert units.number(value) == text


def test_control_characters_and_html_in_a_message_are_harmless() -> None:
    table = tables.Table(id="x", title="T", columns=["Message"], rows=[["a|b <img src=x>\n\x1b[2Jc"]])
    text = render.to_markdown(table)
    assert "<img" not in text
    assert "\x1b" not in text
    assert r"a\|b" in text


def test_a_spreadsheet_formula_in_a_message_is_escaped_in_csv() -> None:
    text = render.runs_csv(frame({"message": '=HYPERLINK("x")'}))
    assert pl.read_csv(text.encode())["message"][0].startswith("'=")


def test_other_precisions_and_resolutions_are_separate_cells_without_ratio() -> None:
    rows = [{"precision": "bf16"}, {"precision": "fp32"}, {"gpu": "a100", "precision": "bf16", "resolution_px": 256}]
    build = tables.TableBuilder(runs=frame(*({"images_per_s": 10.0, "resolution_px": 512} | row for row in rows)))
    assert build.cells["n"].to_list() == [1, 1, 1]
    assert {"Precision", "Resolution [px]"} <= set(build.summary("throughput").columns)
    assert all("published" in row[0] for row in build.gpu_ratios().rows)


def test_a_workload_without_a_resolution_has_none_in_tables_and_labels() -> None:
    rows = [{"workload": "denoise_shape", "model": "UNet"}, {"resolution_px": 512, "images_per_s": 10.0}]
    build = tables.TableBuilder(runs=frame(*rows))
    assert build.cells["n"].to_list() == [1, 1]
    assert not [label for label in build.cells["series"] if "None" in label]
    table = build.summary("throughput")
    assert [row[table.columns.index("Resolution [px]")] for row in table.rows] == [tables.DASH, "512 px"]


def test_n_is_the_number_of_runs_that_have_the_metric() -> None:
    runs = frame({"run_id": "r-1", "images_per_s": 10.0, "power_w": 5.0}, {"run_id": "r-2", "images_per_s": 12.0})
    cell = build_cells(runs).row(0, named=True)
    assert (cell["images_per_s_n"], cell["power_w_n"]) == (2, 1)
    assert tables.mean_text(cell, "power_w") == "5.00 (n = 1)"
    assert tables.mean_text(cell, "joules_per_image") == "\u2013"


def test_cards_are_counted_and_cells_that_mix_them_are_listed_once() -> None:
    runs = frame(
        *(
            {"run_id": f"r-{i}", "gpu_uuid": f"GPU-{i}", "node": f"g{i}", "images_per_s": 10.0, "runtime_h": 3.5}
            for i in range(2)
        )
    )
    build = tables.TableBuilder(runs=runs)
    for name in tables.SUMMARIES:
        assert build.summary(name).rows[0][4:6] == ["2", "2"]
        assert "1 cell: see the table of cells whose runs differ." in build.summary(name).note
    assert build.cell_remarks().rows == [["A40", "8", "2", "2", tables.DASH, "2 cards, 2 nodes", tables.DASH, "0"]]


def test_published_hours_have_a_ratio_only_for_the_same_number_of_images() -> None:
    row = {"runtime_h": 3.5, "images_per_s": 8.0, "dataset_images": 6500}
    for epochs, known in ((16, True), (1, False), (None, False)):
        table = poster.comparison(tables.TableBuilder(runs=frame(row | {"epochs": epochs})))
        ratio = next(r[-1] for r in table.rows if r[1:4] == ["A40", "baseline", "8"])
        assert (ratio != "\u2013") is known


def test_published_speedups_appear_only_between_gpus_that_have_runs_of_the_same_workload() -> None:
    both = [{"images_per_s": 1.0}, {"images_per_s": 2.0, "gpu": "h200"}]
    assert [f"{r.fast}/{r.slow}" for r in poster.ratios(frame(*both))] == ["H200/A40"]
    for change in ({"workload": "other"}, {"demonstration": True}):
        assert poster.ratios(frame(*(row | change for row in both))) == []
    assert poster.ratios(frame(both[0])) == []


def test_the_posters_reading_of_memory_active_is_told_where_its_figures_stand() -> None:
    runs = frame({"gpu": "h200", "batch": 16, "mem_active_pct": 50.0, "images_per_s": 1.0})
    table = poster.comparison(tables.TableBuilder(runs=runs))
    assert any(row[8] != "\u2013" for row in table.rows)
    assert "says nothing about the bandwidth" in table.note


def test_skipped_images_are_listed_once_and_up_to_a_limit() -> None:
    lost = json.dumps([{"file": f"{i}.jpg", "reason": "truncated"} for i in range(60)])
    rows = [{"run_id": f"r-{i}", "images_skipped": 90, "skipped_images": lost} for i in range(2)]
    skipped = pl.DataFrame({"code": ["picture"], "path": ["a.png"], "reason": ["not a PNG"]})
    table = tables.TableBuilder(runs=frame(*rows)).skipped_files(skipped)
    assert len(table.rows) == 51
    assert table.rows[:2] == [["picture", "a.png", "not a PNG"], ["image", "grace: 0.jpg", "truncated"]]
    assert "50 images listed; the run that skipped most skipped 90." in table.note
