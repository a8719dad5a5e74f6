"""Bottleneck classes by tier of evidence, the runner-up, the documented table of rules, and advice that composes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir

from analysis.columns import COUNTERS
from analysis.report.tables import TableBuilder
from analysis.stats import bottleneck, cells
from analysis.stats.bottleneck import SharedEvidence
from benchmarks import results_page
from inpaint_bench.core.config.parse import parse_config
from inpaint_bench.core.config.recipe import levers
from inpaint_bench.core.hydra_support import register
from inpaint_bench.core.paths import ROOT, conf_dir
from tests.analysis.report.test_tables import frame

from . import committed_classes

CAPPED = {"throttle_power_pct": 6.0, "sm_clock_mhz_mean": 1900.0, "sm_clock_mhz_limit": 1980.0}
LOW_COUNTERS = {"tensor_active_pct": 19.0, "dram_active_pct": 26.0}
FULL_CLOCK = CAPPED | {
    "throttle_power_pct": 98.0,
    "sm_clock_mhz_mean": 1960.0,
    "gpu_util_pct": 99.0,
    "data_wait_pct": 1.0,
}
AT_POWER_LIMIT = {"power_w": 299.0, "power_limit_w": 300.0, "sm_clock_mhz_mean": 1400.0, "sm_clock_mhz_limit": 1740.0}


def classify(row: dict[str, Any], sweep: SharedEvidence | None = None, **counters: float) -> bottleneck.Bottleneck:
    return bottleneck.classify(frame(row).row(0, named=True) | counters, sweep)


@pytest.mark.parametrize(
    ("row", "name"),
    [
        ({"reason": "oom_gpu"}, "oom"),
        ({"throttle_thermal_pct": 1.5, "throttle_power_pct": 50.0}, "thermal_throttled"),
        (CAPPED | {"data_wait_pct": 50.0}, "power_capped"),
        (FULL_CLOCK, "mixed"),
        (AT_POWER_LIMIT, "power_capped"),
        ({"data_wait_pct": 12.0, "gpu_util_pct": 60.0}, "data_starved"),
        ({"data_wait_pct": 12.0, "gpu_util_pct": 100.0}, "mixed"),  # the host waits, and the GPU has work
        ({"data_wait_pct": 1.0, "gpu_util_pct": 45.0}, "host_bound"),
        ({"data_wait_pct": 2.0, "gpu_util_pct": 65.0}, "host_bound"),
        (CAPPED | {"data_wait_pct": 2.0, "gpu_util_pct": 65.0}, "power_capped"),
        ({"data_wait_pct": 2.0, "gpu_util_pct": 89.0}, "mixed"),
        ({"data_wait_pct": 1.0, "gpu_util_pct": 99.0}, "mixed"),
        ({}, "unknown"),
    ],
)
def test_first_matching_rule_gives_the_class(row: dict[str, Any], name: str) -> None:
    result = classify(row)
    assert result.name == name
    assert result.tier == (None if name in ("mixed", "unknown") else bottleneck.RUN)
    assert result.evidence
    assert result.advice


IDLE = {"data_wait_pct": 7.0, "gpu_util_pct": 70.0}
MOSTLY_IDLE = {"data_wait_pct": 1.0, "gpu_util_pct": 40.0}
BUSY = {"data_wait_pct": 1.0, "gpu_util_pct": 99.0}
FP32, TF32 = {"precision": "fp32"}, {"levers": '[{"name": "tf32"}]'}
# Of the committed volumes in fp32: one kernel takes 58 % of the time, and no other is far from a convolution.
PRODUCTS = SharedEvidence(products_pct=92.0, memory_kernels_pct=7.9, gaps_pct=0.1)


@pytest.mark.parametrize(
    ("row", "sweep", "counters", "name", "tier"),
    [
        (IDLE, SharedEvidence(elasticity=0.02), {}, "data_starved", 3),
        (IDLE, SharedEvidence(elasticity=0.9), {}, "host_bound", 3),
        (IDLE, SharedEvidence(elasticity=0.5), {}, "mixed", None),
        (BUSY, SharedEvidence(), {"tensor_active_pct": 55.0, "sm_active_pct": 90.0}, "tensor_bound", 1),
        (BUSY, SharedEvidence(), {"tensor_active_pct": 55.0, "sm_active_pct": 50.0}, "mixed", None),
        (BUSY, SharedEvidence(), {"dram_active_pct": 62.0, "tensor_active_pct": 20.0}, "dram_bound", 1),
        (
            FULL_CLOCK,
            SharedEvidence(),
            LOW_COUNTERS | {"sm_active_pct": 85.0},
            "latency_bound",
            1,
        ),
        (BUSY | FP32, SharedEvidence(), LOW_COUNTERS | {"sm_active_pct": 93.0}, "compute_bound", 1),
        (BUSY | FP32, SharedEvidence(), LOW_COUNTERS | {"sm_active_pct": 70.0}, "latency_bound", 1),
        (BUSY | FP32, PRODUCTS, LOW_COUNTERS | {"sm_active_pct": 77.0}, "compute_bound", 2),
        (BUSY | FP32 | TF32, PRODUCTS, LOW_COUNTERS | {"sm_active_pct": 93.0}, "latency_bound", 1),
        (BUSY | FP32, SharedEvidence(), {}, "mixed", None),
        (BUSY, SharedEvidence(), LOW_COUNTERS | {"sm_active_pct": 50.0}, "mixed", None),
        (BUSY, SharedEvidence(elasticity=0.4, at_memory_limit=True), {}, "vram_limited", 3),
        (BUSY, SharedEvidence(elasticity=0.1, at_memory_limit=True), {}, "mixed", None),
    ],
)
def test_sweep_and_counters_give_classes_that_one_run_cannot(
    row: dict[str, Any], sweep: SharedEvidence, counters: dict[str, float], name: str, tier: int | None
) -> None:
    result = classify(row, sweep, **counters)
    assert (result.name, result.tier) == (name, tier)


# Bytes per second of copies, and FLOP/s of products, over the peaks of a card.
COPIES_ON_H200 = {"dram_active_pct": 100 * 2.35 / 4.8, "tensor_active_pct": 0.0, "sm_active_pct": 70.0}
A100 = BUSY | {"gpu": "a100", "power_w": 300.0, "power_limit_w": 400.0}
PRODUCTS_ON_A100 = A100 | {"mfu_pct": 100 * 187.2 / 312}
PLAIN_ON_A100 = A100 | {"mfu_pct": 100 * 46.8 / 312}


@pytest.mark.parametrize(
    ("row", "shared", "name"),
    [
        (BUSY | COPIES_ON_H200, None, "dram_bound"),
        (BUSY | COPIES_ON_H200 | {"tensor_active_pct": 55.0}, None, "tensor_bound"),
        (PRODUCTS_ON_A100, None, "tensor_bound"),
        (PRODUCTS_ON_A100 | FP32, None, "compute_bound"),
        (PLAIN_ON_A100, None, "mixed"),  # nothing more is known
        (PLAIN_ON_A100, SharedEvidence(elasticity=0.02, larger_batch=True), "dram_bound"),
        (PLAIN_ON_A100, SharedEvidence(elasticity=0.5, larger_batch=True), "latency_bound"),
        # The slope towards the largest batch is no statement on what a larger one would bring.
        (PLAIN_ON_A100, SharedEvidence(elasticity=0.5), "mixed"),
        (PLAIN_ON_A100, SharedEvidence(products_pct=30.0, memory_kernels_pct=65.0, gaps_pct=5.0), "dram_bound"),
        (A100 | {"mfu_pct": 35.0}, SharedEvidence(products_pct=70.0, gaps_pct=2.0), "tensor_bound"),
        (A100 | FP32, PRODUCTS, "compute_bound"),
    ],
)
def test_class_follows_from_the_arithmetic_of_the_row(
    row: dict[str, Any], shared: SharedEvidence | None, name: str
) -> None:
    result = classify(row, shared)
    assert (result.name, bool(result.shares)) == (name, True)


@pytest.mark.parametrize(
    ("figure", "low", "high", "name"),
    [
        ("tensor_active_pct", 49.9, 50.1, "tensor_bound or latency_bound"),
        ("dram_active_pct", 34.9, 35.1, "dram_bound or latency_bound"),
        ("sm_active_pct", 59.9, 60.1, "latency_bound or mixed"),
        ("gpu_util_pct", 84.9, 85.1, "host_bound or latency_bound"),
    ],
)
def test_two_cards_on_both_sides_of_a_threshold_get_the_same_class(
    figure: str, low: float, high: float, name: str
) -> None:
    row = BUSY | LOW_COUNTERS | {"sm_active_pct": 80.0}
    assert {classify(row | {figure: value}).name for value in (low, high)} == {name}


def test_advice_near_a_limit_is_that_of_both_classes() -> None:
    result = classify(BUSY | LOW_COUNTERS | {"sm_active_pct": 80.0, "dram_active_pct": 35.1})
    assert {*result.advice} == {*bottleneck.ADVICE["dram_bound"], *bottleneck.ADVICE["latency_bound"]}


def test_shares_stand_beside_the_class() -> None:
    row = BUSY | {"dram_active_pct": 49.0, "tensor_active_pct": 20.0, "sm_active_pct": 70.0}
    _, table, _ = TableBuilder(runs=frame(row)).bottlenecks()
    shown = dict(zip(table.columns, table.rows[0], strict=True))
    assert (shown["Class"], shown["Shares"]) == (
        "dram_bound",
        "memory traffic 49 %, tensor cores 20 %, SMs 70 %, idle 1 %",
    )


def test_no_share_is_below_zero_or_an_empty_text() -> None:
    """Regression: `idle -0 %` of a GPU that was busy by 100.004 %, and a blank beside `mixed` without any share."""
    assert classify({"gpu_util_pct": 100.004, "data_wait_pct": 1.0}).shares == "idle 0 %"
    assert classify({"data_wait_pct": 1.0}).shares == bottleneck.NO_VALUE


def test_every_committed_run_has_the_class_of_the_table() -> None:
    """Write the table anew as committed_classes.py says where this fails, and judge what changed."""
    assert committed_classes.table() == (Path(__file__).parent / "committed_classes.tsv").read_text()


def test_classes_without_counters_do_not_contradict_those_with_them() -> None:
    judged, hidden = 0, dict.fromkeys(COUNTERS)
    for _, row, shared in committed_classes.rows():
        if not row["valid"] or row["tensor_active_pct"] is None:
            continue
        known = bottleneck.classify(row, shared)
        guessed = {*bottleneck.classify(row | hidden, shared).name.split(" or ")}
        # Without counters less is known, and of the largest batch it is left to say that it is the largest.
        assert guessed & {*known.name.split(" or "), known.runner_up, "mixed", "vram_limited"}, (row["run_id"], known)
        judged += not guessed & {"mixed", "vram_limited"}
    assert judged > 100


def test_runs_that_the_results_page_calls_limited_by_the_cpu_are_host_bound() -> None:
    (entry,) = (entry for entry in results_page.PAGE if "limited by the CPU" in getattr(entry, "text", ""))
    runs = [(row, shared) for name, row, shared in committed_classes.rows() if name in entry.datasets and row["valid"]]
    smallest = min(row["batch"] for row, _ in runs)
    plain = [pair for pair in runs if pair[0]["batch"] == smallest and not pair[0]["recipe"].startswith("tuned")]
    assert len(plain) > 10
    assert {bottleneck.classify(*pair).name.split(" or ")[0] for pair in plain} == {"host_bound"}


def test_runner_up_is_the_next_class_that_matches() -> None:
    both = classify(CAPPED | {"data_wait_pct": 50.0, "gpu_util_pct": 60.0})
    assert (both.name, both.runner_up) == ("power_capped", "data_starved")
    near = classify({"data_wait_pct": 8.0, "gpu_util_pct": 99.0})
    assert (near.name, near.runner_up) == ("mixed", "\u2013")
    assert classify({"reason": "oom_gpu"}).runner_up == "\u2013"


def test_unknown_indicator_matches_no_rule() -> None:
    assert classify({"gpu_util_pct": 99.0, "power_w": 299.0, "power_limit_w": 300.0}).name == "mixed"


def test_elasticity_and_memory_limit_come_from_the_runs_of_the_series() -> None:
    rows: list[dict[str, Any]] = [
        {"run_id": f"r-{batch}", "batch": batch, "images_per_s": speed}
        for batch, speed in ((8, 10.0), (16, 20.0), (32, 20.0))
    ]
    rows += [{"run_id": "r-64", "batch": 64, "valid": False, "status": "failed", "reason": "oom_gpu"}]
    rows += [{"run_id": "r-other", "batch": 8, "images_per_s": 1.0, "gpu": "h200"}]
    runs = frame(*rows)
    evidence = bottleneck.shared_evidence(cells.build_cells(runs), runs)
    assert evidence["r-8"] == SharedEvidence(elasticity=pytest.approx(1.0), larger_batch=True)
    assert evidence["r-16"] == SharedEvidence(elasticity=pytest.approx(0.0), larger_batch=True)
    assert evidence["r-32"] == SharedEvidence(elasticity=pytest.approx(0.0), at_memory_limit=True)
    assert evidence["r-other"] == SharedEvidence()


def test_table_shows_tier_evidence_and_runner_up() -> None:
    _, table, _ = TableBuilder(runs=frame({"data_wait_pct": 31.0, "gpu_util_pct": 45.0})).bottlenecks()
    row = dict(zip(table.columns, table.rows[0], strict=True))
    assert (row["Class"], row["Tier"]) == ("data_starved", "4")
    assert row["Evidence"] == "host waits for data 31.0 %, GPU idle 55.0 %"
    assert row["Runner-up"] == "host_bound"


def test_advice_is_listed_once_per_class_with_the_own_site_gpu_and_recipe() -> None:
    starved = {"data_wait_pct": 31.0, "gpu_util_pct": 60.0, "recipe": "tf32", "recipe_parts": "baseline,tf32"}
    rows = [starved | {"run_id": f"r-{batch}", "batch": batch} for batch in (16, 8)]
    rows += [{"run_id": "r-hot", "throttle_thermal_pct": 9.0, "node": "g007"}]
    table, *_ = TableBuilder(runs=frame(*rows)).bottlenecks()
    assert [row[:7] for row in table.rows] == [
        ["data_starved", "A40", "grace", "sd15_inpaint", "tf32", "8, 16", "2"],
        ["thermal_throttled", "A40", "grace", "sd15_inpaint", "baseline", "8", "1"],
    ]
    assert "recipe.num_workers=16" in table.rows[0][-1]
    assert "--cpus-per-task: sites.grace.gpus.a40.cpus_per_gpu=16" in table.rows[0][-1]
    assert "recipe=[baseline,tf32,memmap]" in table.rows[0][-1]
    assert table.rows[1][-1].endswith("--exclude=g007")


def test_known_indicators_are_not_advised() -> None:
    assert [advice.command for advice in classify(BUSY).advice] == ["batch=8,16,32", "gpu=h200"]
    assert [advice.command for advice in classify(BUSY, SharedEvidence(elasticity=0.5)).advice] == ["gpu=h200"]
    row = BUSY | {"gpu": "h200"}
    assert "gpu=h200" not in bottleneck.format_advice(classify(row).advice, frame(row).row(0, named=True))


def test_power_cap_at_full_clock_is_named_beside_mixed() -> None:
    """Regression: `at the power cap for 99.0 %` stood beside `mixed`, without a word on the clock."""
    clock = {"throttle_power_pct": 99.0, "sm_clock_mhz_mean": 1950.0, "sm_clock_mhz_limit": 1980.0}
    result = classify(BUSY | clock)
    assert result.name == bottleneck.MIXED
    assert "power cap active 99.0 %, SM clock 98.5 % of its maximum" in result.evidence
    assert bottleneck.AT_FULL_CLOCK in result.advice
    assert bottleneck.AT_FULL_CLOCK not in classify(BUSY | {"throttle_power_pct": 99.0}).advice


def test_levers_of_the_run_are_not_advised() -> None:
    row = MOSTLY_IDLE | {"recipe": "tuned", "recipe_parts": "tuned", "levers": json.dumps([{"name": "compile"}])}
    result = classify(row)
    text = bottleneck.format_advice(result.advice, frame(row).row(0, named=True))
    assert "recipe=[tuned,cuda_graph]" in text
    everything = row | {"levers": json.dumps([{"name": name} for name in ("compile", "cuda_graph", "adamw_fused")])}
    text = bottleneck.format_advice(result.advice, frame(everything).row(0, named=True))
    assert text == "a larger batch: batch=auto"


def test_run_of_an_earlier_version_is_advised_on_the_recipe_that_it_ran() -> None:
    """Regression: what was `baseline` then is `earlier_baseline`, and `baseline` adds levers to a bundle."""
    for recipe, parts, base in [("earlier_baseline", "baseline", "earlier_baseline"), ("tuned", None, "tuned")]:
        row = MOSTLY_IDLE | {"recipe": recipe, "recipe_parts": parts, "levers": None}
        text = bottleneck.format_advice(classify(row).advice, frame(row).row(0, named=True))
        assert f"recipe=[{base},compile,cuda_graph]" in text


def test_levers_that_another_one_excludes_are_not_advised() -> None:
    advice = bottleneck.ADVICE["vram_limited"]
    row = frame({"recipe": "lora_rank=8"}).row(0, named=True)
    assert bottleneck.format_advice(advice, row).startswith("trade compute time for memory: ")
    row = frame(IDLE | {"levers": json.dumps([{"name": "unet_nhwc"}, {"name": "bf16_split"}])}).row(0, named=True)
    text = bottleneck.format_advice([a for group in bottleneck.ADVICE.values() for a in group], row)
    assert not re.search(r"compile|grad_checkpoint|adamw_fused|bf16_stochastic", text)


def test_what_several_gpus_cannot_do_is_not_advised() -> None:
    """Regression: `batch=auto` searches on one GPU, and divided weights are not captured in a CUDA graph."""
    rows = [MOSTLY_IDLE | {"gpus": 2, "levers": json.dumps([{"name": name}])} for name in ("bucket_view", "fsdp2")]
    ddp, divided = (bottleneck.format_advice(classify(row).advice, frame(row).row(0, named=True)) for row in rows)
    assert ddp.startswith(
        "a larger batch; fewer kernel launches: recipe=[baseline,compile,cuda_graph] workload.warmup_"
    )
    captured = rows[0] | {"recipe": "tuned_hopper", "levers": json.dumps([{"name": "cuda_graph"}])}
    (memmap,) = (item for item in bottleneck.ADVICE["data_starved"] if "memmap" in item.command)
    text = bottleneck.format_advice([memmap], frame(captured).row(0, named=True))
    assert text.endswith("recipe=[tuned_hopper,memmap] workload.warmup_steps=13")
    assert divided == "a larger batch; a fused optimizer: recipe=[baseline,adamw_fused]"


def test_levers_that_a_workload_does_not_obey_are_not_advised() -> None:
    row = MOSTLY_IDLE | {"workload": "sd_inference"}
    text = bottleneck.format_advice(classify(row).advice, frame(row).row(0, named=True))
    assert text == "fewer kernel launches: recipe=[baseline,compile,cuda_graph]"


LABELS = [*bottleneck.INDICATORS.values()]


def test_document_holds_the_table_of_rules() -> None:
    """Replace the table by the output of `python -m analysis.stats.bottleneck` where this fails."""
    document = (ROOT / "docs" / "bottlenecks.md").read_text()
    bands = [f"{label} [{unit}] | {band:g} |" if unit else f"{label} | {band:g} |" for label, unit, band in LABELS]
    assert [row for row in bands if f"\n| {row}" not in document] == []
    assert f"\n\n{bottleneck.markdown()}\n\n" in document
    assert [name for name in bottleneck.ADVICE if f"- **{name}**: " not in document] == []


@pytest.fixture
def hydra() -> Iterator[None]:
    register()
    with initialize_config_dir(version_base="1.3", config_dir=str(conf_dir())):
        yield


ADVICE = [(name, advice) for name, group in bottleneck.ADVICE.items() for advice in group]
ADVICE += [(bottleneck.MIXED, advice) for advice in bottleneck.MIXED_ADVICE.values()]


def test_advice_that_needs_a_lever_is_for_runs_with_it_alone() -> None:
    advice = bottleneck.ADVICE["latency_bound"][:1]
    texts = [
        bottleneck.format_advice(advice, frame({"recipe_parts": parts}).row(0, named=True))
        for parts in ("fp32", "fp32,tf32", "baseline")
    ]
    assert texts == ["tensor cores for fp32: recipe=[fp32,tf32]", bottleneck.NO_VALUE, bottleneck.NO_VALUE]


@pytest.mark.slow  # composes with Hydra
@pytest.mark.parametrize(("name", "advice"), ADVICE, ids=[f"{name}-{advice.text}" for name, advice in ADVICE])
def test_overrides_of_every_advice_compose(hydra: None, name: str, advice: bottleneck.Advice) -> None:
    recipe = ["baseline", *advice.needs]
    row = frame({"node": "g007", "recipe_parts": ",".join(recipe)}).row(0, named=True)
    text = bottleneck.format_advice([advice], row).removeprefix(advice.text).removeprefix(": ")
    overrides = [override.split(",")[0] if override.startswith("batch=") else override for override in text.split()]
    assert bool(overrides) is bool(advice.command)
    prepared = ["data=prepared", "data.root=prepared"] if "prepared" in advice.text else []
    if not text.startswith("--"):
        bench = parse_config(compose("config", overrides=[*overrides, *prepared]))
        had = levers(parse_config(compose("config", overrides=[f"recipe=[{','.join(recipe)}]"])).recipe)
        changed = {*levers(bench.recipe), *(["batch"] if bench.batch == "auto" else [])} - {*had}
        assert changed == {*advice.fields}
