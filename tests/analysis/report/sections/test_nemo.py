"""The NeMo page's figures, through the report's tables, give every speedup that the page prints."""

from __future__ import annotations

import polars as pl
import pytest

from analysis import published
from analysis.report.sections import nemo
from analysis.report.tables import DASH, Table, TableBuilder
from tests.analysis.report.test_tables import frame


@pytest.fixture(scope="module")
def tables() -> dict[str, Table]:
    build = TableBuilder(runs=frame({}))
    makers = (nemo.latency, nemo.scaling, nemo.gpu_comparison, nemo.ladder)
    return {table.id: table for table in (make(build) for make in makers)}


@pytest.mark.parametrize(
    ("table", "file", "column"),
    [
        ("nemo-latency", "nemo_inference_latency.csv", "speedup_printed"),
        ("nemo-scaling", "nemo_scaling.csv", "speedup_printed"),
        ("nemo-gpus", "nemo_gpu_comparison.csv", "speedup_printed"),
        ("nemo-levers", "nemo_controlnet_ablation.csv", "gain"),
    ],
)
def test_every_printed_speedup_is_within_one_unit_of_its_last_place(
    tables: dict[str, Table], table: str, file: str, column: str
) -> None:
    place = tables[table].columns.index("Speedup")
    printed = pl.read_csv(published._FOLDER / file, infer_schema=False)[column].to_list()
    computed = [row[place] for row in tables[table].rows]
    assert len(computed) == len(printed) > 0
    for value, text in zip(computed, printed, strict=True):
        unit = 10.0 ** -len(text.partition(".")[2])
        assert abs(float(value) - float(text)) <= unit + 1e-9, (value, text)


def test_efficiency_falls_on_both_gpus_and_more_on_the_faster(tables: dict[str, Table]) -> None:
    table = tables["nemo-scaling"]
    at_64 = {row[0]: row for row in table.rows if row[1] == "64"}
    efficiency, over = table.columns.index("Efficiency [%]"), table.columns.index("Over A100-80GB")
    assert [at_64[gpu][efficiency] for gpu in ("A100-80GB", "H100-80GB")] == ["92.7", "79.2"]
    assert at_64["H100-80GB"][over] == "1.63"
    assert "Published" in table.title


def test_measured_training_of_sd2_stands_beside_the_published_rates_per_gpu() -> None:
    run = {"workload": "finetune_text2image", "model": "sd2", "resolution_px": 512, "gpu": "h100", "precision": "bf16"}
    cached = {**run, "encodes_online": 0, "text_online": False, "images_per_s": 170.0}
    disagreeing = [{**run, "run_id": f"r-1{n}", "gpus": 2, "images_per_s": 100.0 + 100 * n} for n in range(3)]
    runs = frame(cached, {**run, "run_id": "r-02", "resolution_px": 256}, *disagreeing)
    (section,) = nemo.text_to_image(TableBuilder(runs=runs))
    table, ladder = section.tables
    assert ladder.rows[-1][:4] == ["32", "flash_attention + channels_last + inductor", "66", "27.20"]
    own, two, *stated = table.rows
    assert own == ["measured, baseline", "H100", "1", "8", "bf16", "latents and texts", "170", "1", DASH, DASH]
    assert two[2:4] + two[6:9] == ["2", "8", DASH, "3", DASH]  # a mean is withheld where runs disagree
    rates = {row[0]: row[table.columns.index("Images/s per GPU")] for row in stated if row[1] == "H100"}
    assert rates["published, NVIDIA NeMo page"] == "64.0"
    assert all(row[0].startswith("published, ") for row in stated)
    assert nemo.text_to_image(TableBuilder(runs=frame({}))) == []


def test_measured_training_of_flux_stands_beside_the_published_rates_with_its_pixels() -> None:
    run = {
        "workload": "finetune_inpaint",
        "model": "flux_fill",
        "resolution_px": 512,
        "gpu": "h200",
        "precision": "bf16",
    }
    cached = {**run, "encodes_online": 0, "text_online": False, "images_per_s": 10.5}
    (section,) = nemo.flux(TableBuilder(runs=frame(cached, {**run, "run_id": "r-02", "model": "sd2"})))
    (table,) = section.tables
    own, *stated = table.rows
    assert own == [
        "measured, flux_fill, baseline",
        "512",
        "H200",
        "1",
        "8",
        "bf16",
        "latents and texts",
        "10.5",
        "1",
        DASH,
        DASH,
    ]
    rates = {(row[0], row[2]): row[table.columns.index("Images/s per GPU")] for row in stated}
    assert rates["published, MLPerf v5.1 (NVIDIA)", "GB200"] == "56.4"
    assert {row[1] for row in stated} == {"256"}
    assert "less work" in table.note
    assert nemo.flux(TableBuilder(runs=frame({}))) == []
