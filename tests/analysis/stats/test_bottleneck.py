"""Bottleneck classes by tier of evidence, the runner-up, the documented table of rules, and advice that composes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from hydra import compose, initialize_config_dir

from analysis.report.tables import TableBuilder
from analysis.stats import bottleneck, cells
from analysis.stats.bottleneck import SweepEvidence
from inpaint_bench.core.config.parse import parse_config
from inpaint_bench.core.config.recipe import levers
from inpaint_bench.core.hydra_support import register
from inpaint_bench.core.paths import ROOT, conf_dir
from tests.analysis.report.test_tables import frame

CAPPED = {"throttle_power_pct": 6.0, "sm_clock_mhz_mean": 1900.0, "sm_clock_mhz_limit": 1980.0}
LOW_COUNTERS = {"tensor_active_pct": 19.0, "dram_active_pct": 36.0}
FULL_CLOCK = CAPPED | {
    "throttle_power_pct": 98.0,
    "sm_clock_mhz_mean": 1960.0,
    "gpu_util_pct": 99.0,
    "data_wait_pct": 1.0,
}
AT_POWER_LIMIT = {"power_w": 299.0, "power_limit_w": 300.0, "sm_clock_mhz_mean": 1400.0, "sm_clock_mhz_limit": 1740.0}


def classify(row: dict[str, Any], sweep: SweepEvidence | None = None, **counters: float) -> bottleneck.Bottleneck:
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
        ({"data_wait_pct": 1.0, "gpu_util_pct": 45.0}, "host_bound"),
        ({"data_wait_pct": 1.0, "gpu_util_pct": 69.0}, "mixed"),
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


IDLE = {"data_wait_pct": 1.0, "gpu_util_pct": 70.0}
MOSTLY_IDLE = {"data_wait_pct": 1.0, "gpu_util_pct": 40.0}
BUSY = {"data_wait_pct": 1.0, "gpu_util_pct": 99.0}
FP32, TF32 = {"precision": "fp32"}, {"levers": '[{"name": "tf32"}]'}


@pytest.mark.parametrize(
    ("row", "sweep", "counters", "name", "tier"),
    [
        (IDLE, SweepEvidence(elasticity=0.02), {}, "data_starved", 2),
        (IDLE, SweepEvidence(elasticity=0.9), {}, "host_bound", 2),
        (IDLE, SweepEvidence(elasticity=0.5), {}, "mixed", None),
        (BUSY, SweepEvidence(), {"tensor_active_pct": 55.0, "sm_active_pct": 90.0}, "tensor_bound", 1),
        (BUSY, SweepEvidence(), {"tensor_active_pct": 55.0, "sm_active_pct": 50.0}, "mixed", None),
        (BUSY, SweepEvidence(), {"dram_active_pct": 62.0, "tensor_active_pct": 20.0}, "dram_bound", 1),
        (
            FULL_CLOCK,
            SweepEvidence(),
            LOW_COUNTERS | {"sm_active_pct": 85.0},
            "latency_bound",
            1,
        ),
        (BUSY | FP32, SweepEvidence(), LOW_COUNTERS | {"sm_active_pct": 93.0}, "compute_bound", 1),
        (BUSY | FP32, SweepEvidence(), LOW_COUNTERS | {"sm_active_pct": 70.0}, "latency_bound", 1),
        (BUSY | FP32 | TF32, SweepEvidence(), LOW_COUNTERS | {"sm_active_pct": 93.0}, "latency_bound", 1),
        (BUSY | FP32, SweepEvidence(), {}, "mixed", None),
        (BUSY, SweepEvidence(), LOW_COUNTERS | {"sm_active_pct": 50.0}, "mixed", None),
        (BUSY, SweepEvidence(elasticity=0.4, at_memory_limit=True), {}, "vram_limited", 2),
        (BUSY, SweepEvidence(elasticity=0.1, at_memory_limit=True), {}, "mixed", None),
    ],
)
def test_sweep_and_counters_give_classes_that_one_run_cannot(
    row: dict[str, Any], sweep: SweepEvidence, counters: dict[str, float], name: str, tier: int | None
) -> None:
    result = classify(row, sweep, **counters)
    assert (result.name, result.tier) == (name, tier)


def test_runner_up_is_the_next_class_that_matches() -> None:
    both = classify(CAPPED | {"data_wait_pct": 50.0})
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
    evidence = bottleneck.sweep_evidence(cells.build_cells(runs), runs)
    assert evidence["r-8"] == SweepEvidence(elasticity=pytest.approx(1.0), at_memory_limit=False)
    assert evidence["r-16"] == SweepEvidence(elasticity=pytest.approx(0.0), at_memory_limit=False)
    assert evidence["r-32"] == SweepEvidence(elasticity=pytest.approx(0.0), at_memory_limit=True)
    assert evidence["r-other"] == SweepEvidence()


def test_table_shows_tier_evidence_and_runner_up() -> None:
    _, table, _ = TableBuilder(runs=frame({"data_wait_pct": 31.0, "gpu_util_pct": 45.0})).bottlenecks()
    row = dict(zip(table.columns, table.rows[0], strict=True))
    assert (row["Class"], row["Tier"]) == ("data_starved", "3")
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
    assert [advice.command for advice in classify(BUSY, SweepEvidence(elasticity=0.5)).advice] == ["gpu=h200"]
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


def test_levers_that_another_one_excludes_are_not_advised() -> None:
    advice = bottleneck.ADVICE["vram_limited"]
    row = frame({"recipe": "lora_rank=8"}).row(0, named=True)
    assert bottleneck.format_advice(advice, row).startswith("trade compute time for memory: ")
    row = frame(IDLE | {"levers": json.dumps([{"name": "unet_nhwc"}, {"name": "bf16_split"}])}).row(0, named=True)
    text = bottleneck.format_advice([a for group in bottleneck.ADVICE.values() for a in group], row)
    assert not re.search(r"compile|grad_checkpoint|adamw_fused|bf16_stochastic", text)


def test_levers_that_a_workload_does_not_obey_are_not_advised() -> None:
    row = MOSTLY_IDLE | {"workload": "sd_inference"}
    text = bottleneck.format_advice(classify(row).advice, frame(row).row(0, named=True))
    assert text == "fewer kernel launches: recipe=[baseline,compile,cuda_graph]"


def test_document_holds_the_table_of_rules() -> None:
    """Replace the table by the output of `python -m analysis.stats.bottleneck` where this fails."""
    document = (ROOT / "docs" / "bottlenecks.md").read_text()
    assert f"\n\n{bottleneck.markdown()}\n\n" in document
    labels = [label for label, _ in bottleneck.INDICATORS.values()]
    assert [label for label in labels if f"\n| {label}" not in document] == []
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
