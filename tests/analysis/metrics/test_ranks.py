"""Contradictions between the ranks of a run, and between its cards: each makes it invalid, with a sentence."""

from __future__ import annotations

import json
from typing import Any

import polars as pl
import pytest

from inpaint_bench.core import schema
from tests.analysis import real_run
from tests.analysis.metrics.test_audit import RUN_ID, Change, Planted, S, column, judged, load, manifest, rows

SECOND = "GPU-00000000-0000-0000-0000-000000000002"
OTHER = 3  # number of the run whose samples the second card has
ON_SECOND = pl.col("gpu_uuid").cast(pl.String) == SECOND


@pytest.fixture(scope="module")
def two_cards(tmp_path_factory: pytest.TempPathFactory) -> Planted:
    """Write a run on two cards of one node."""
    folder = real_run.write_run(tmp_path_factory.mktemp("two") / "run", RUN_ID)
    report = json.loads((folder / schema.TELEMETRY).read_text())
    record = json.loads((folder / schema.MANIFEST).read_text())
    first = report["devices"][0]["uuid"]
    for table in ("samples_fast", "samples_slow", "samples_gpm"):
        columns, second = (real_run.columns_of(table, RUN_ID, index) for index in (0, OTHER))
        for name, values in second.items():
            late = OTHER * real_run.BETWEEN_RUNS_NS if name.startswith("t_") else 0
            columns[name] = [*columns[name], *(value - late if late else value for value in values)]
        columns["gpu_uuid"] = [first] * len(second["run_id"]) + [SECOND] * len(second["run_id"])
        for part in (folder / table).iterdir():
            part.unlink()
        real_run.write_table(folder / table / schema.PART_PATTERN.format(0), table, columns, RUN_ID)
        report["tables"][table] = {"rows": len(columns["run_id"]), "parts": 1}
    report["devices"].append(report["devices"][0] | {"uuid": SECOND})
    (folder / schema.TELEMETRY).write_text(json.dumps(report))
    rank: dict[str, Any] = {"node": "gpue01", "device": "cuda"}
    other = {"rank": 1, "local_rank": 1, "pid": 2, "gpu_uuid": SECOND, "steps": 60, "data_wait_s": 1.0}
    record |= {"batch": 16, "gpus": 2, "devices": [*record["devices"], record["devices"][0] | {"uuid": SECOND}]}
    record["ranks"] = [
        rank | {"rank": 0, "local_rank": 0, "pid": 1, "gpu_uuid": first},
        rank | other | {"allocated_peak_mib": 52_702.9},
    ]
    record["workload_facts"]["batch_requested"] = 16
    (folder / schema.MANIFEST).write_text(json.dumps(record | {"overrides": []}))
    return load(folder)


def of_second(table: str, name: str, value: pl.Expr) -> Change:
    return column(table, name, pl.when(ON_SECOND).then(value).otherwise(name))


def test_a_run_on_two_cards_is_valid(two_cards: Planted) -> None:
    row = judged(two_cards)
    assert row["valid"], row["invalid_reason"]


def test_where_steps_differ_in_their_work_the_results_tell_what_a_rank_did(two_cards: Planted) -> None:
    """Regression: denoise_patch on two GPUs was not valid, `rank 1 states no allocated_peak_mib`."""
    nothing = dict.fromkeys(("ranks__1__steps", "ranks__1__data_wait_s", "ranks__1__allocated_peak_mib"))
    row = judged(two_cards, manifest(workload_facts__uniform_steps=False, **nothing))
    assert row["valid"], row["invalid_reason"]


def test_steps_in_which_levers_are_read_back_are_no_contradiction(two_cards: Planted) -> None:
    """Regression: the other ranks count two steps more than rank 0 where the recipe has levers."""
    lever = {"name": "static_graph", "field": "static_graph", "requested": True, "effective": True, "active": True}
    change = manifest(ranks__1__steps=62, levers=[lever], recipe="static_graph")
    row = judged(two_cards, change)
    assert row["valid"], row["invalid_reason"]


CONTRADICTIONS: dict[str, tuple[list[Change], str]] = {
    "a rank that states nothing": (
        [manifest(ranks__1__steps=None, ranks__1__data_wait_s=None, ranks__1__allocated_peak_mib=None)],
        "rank 1 states no steps, data_wait_s, allocated_peak_mib",
    ),
    "a rank that states no GPU": ([manifest(ranks__1__gpu_uuid=None)], "rank 1 states no gpu_uuid"),
    "a card over its limit beside one far below": (
        [manifest(devices__0__power_limit_w=1000.0, devices__1__power_limit_w=400.0)],
        f"GPU {SECOND}: mean power of 675 W, with a limit of 400 W",
    ),
    "a card that draws less than an idle one": (
        [
            of_second("samples_fast", name, pl.col(name) // 100 if name == "energy_mj" else pl.col(name) / 100)
            for name in ("energy_mj", "power_instant_w", "power_avg1s_w")
        ],
        f"GPU {SECOND}: mean power of 6.75 W, with a limit of 700 W",
    ),
    "a rank with fewer steps": ([manifest(ranks__1__steps=57)], "ranks differ in steps: rank 0 has 60, rank 1 has 57"),
    "a rank that waited longer than the run": (
        [manifest(ranks__1__data_wait_s=600.0)],
        "rank 1 waited 600.0 s for data, in windows of 50.3 s",
    ),
    "a rank with less memory": (
        [manifest(ranks__0__allocated_peak_mib=52_702.9, ranks__1__allocated_peak_mib=42_000.0)],
        "ranks differ in the memory that they allocated: rank 0 52,703 MiB, rank 1 42,000 MiB",
    ),
    "a rank with more memory than its card": (
        [manifest(ranks__1__allocated_peak_mib=152_000.0)],
        "a rank allocated 152,000 MiB, of 143,771 MiB",
    ),
    "a card that holds less than its rank allocated": (
        [
            of_second("samples_slow", "vram_free_mib", pl.col("vram_free_mib") + pl.col("vram_used_mib") - 100),
            of_second("samples_slow", "vram_used_mib", pl.lit(100.0)),
        ],
        "rank 1 allocated 52,703 MiB, and at most 100 MiB of its GPU's memory were in use by NVML",
    ),
    "two ranks on one card": (
        [manifest(ranks__0__gpu_uuid=SECOND)],
        f"two ranks of one node have GPU {SECOND}",
    ),
    "two ranks in one process": ([manifest(ranks__1__pid=1)], "two ranks of one node have process 1"),
    "two ranks with one number": ([manifest(ranks__1__rank=0)], "the manifest numbers its ranks 0, 0"),
    "cards with different clocks": (
        [
            of_second(table, f"t_{clock}_ns", pl.col(f"t_{clock}_ns") - 2 * S)
            for table in ("samples_fast", "samples_slow")
            for clock in ("mono", "unix")
        ],
        "are 2.00 s apart in the rows of one tick",
    ),
    "a card with fewer rows": (
        [rows("samples_fast", lambda frame: frame.filter(~(ON_SECOND & (pl.col("tick_seq") % 5 == 0))))],
        f"GPU {SECOND} has 317 rows in samples_fast, another one of the node 396",
    ),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_contradiction_makes_the_run_invalid(name: str, two_cards: Planted) -> None:
    changes, text = CONTRADICTIONS[name]
    assert text in str(judged(two_cards, *changes)["invalid_reason"])
