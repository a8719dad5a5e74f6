"""Classes of runs by tier of evidence, the runner-up, the document made from the rules, and advice that composes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hydra import compose, initialize_config_dir

from analysis.report.tables import Builder
from analysis.stats import bottleneck, cells
from analysis.stats.bottleneck import SweepEvidence
from inpaint_bench.core.config import typed
from inpaint_bench.core.hydra_setup import register
from inpaint_bench.core.paths import ROOT, conf_dir
from tests.analysis.report.test_tables import frame

CAPPED = {"throttle_power_pct": 6.0, "sm_clock_mhz_mean": 1900.0, "sm_clock_mhz_limit": 1980.0}
EVEN = {"tensor_active_pct": 19.0, "dram_active_pct": 36.0}
UNHURT = CAPPED | {"throttle_power_pct": 98.0, "sm_clock_mhz_mean": 1960.0, "gpu_util_pct": 99.0, "data_wait_pct": 1.0}
HOT = {"power_w": 299.0, "power_limit_w": 300.0, "sm_clock_mhz_mean": 1400.0, "sm_clock_mhz_limit": 1740.0}


def found(row: dict[str, Any], sweep: SweepEvidence | None = None, **counters: float) -> bottleneck.Finding:
    return bottleneck.classify(frame(row).row(0, named=True) | counters, sweep)


@pytest.mark.parametrize(
    ("row", "name"),
    [
        ({"reason": "oom_gpu"}, "oom"),
        ({"throttle_thermal_pct": 1.5, "throttle_power_pct": 50.0}, "thermal_throttled"),
        (CAPPED | {"data_wait_pct": 50.0}, "power_capped"),
        (UNHURT, "mixed"),
        (HOT, "power_capped"),
        ({"data_wait_pct": 12.0, "gpu_util_pct": 60.0}, "data_starved"),
        ({"data_wait_pct": 1.0, "gpu_util_pct": 60.0}, "host_bound"),
        ({"data_wait_pct": 1.0, "gpu_util_pct": 99.0}, "mixed"),
        ({}, "unknown"),
    ],
)
def test_the_first_rule_that_matches_names_the_bottleneck(row: dict[str, Any], name: str) -> None:
    finding = found(row)
    assert finding.name == name
    assert finding.tier == (None if name in ("mixed", "unknown") else bottleneck.RUN)
    assert finding.evidence
    assert finding.advice


IDLE = {"data_wait_pct": 1.0, "gpu_util_pct": 70.0}
BUSY = {"data_wait_pct": 1.0, "gpu_util_pct": 99.0}


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
            UNHURT,
            SweepEvidence(),
            EVEN | {"sm_active_pct": 85.0},
            "latency_bound",
            1,
        ),
        (BUSY, SweepEvidence(), EVEN | {"sm_active_pct": 50.0}, "mixed", None),
        (BUSY, SweepEvidence(elasticity=0.4, at_the_wall=True), {}, "vram_limited", 2),
        (BUSY, SweepEvidence(elasticity=0.1, at_the_wall=True), {}, "mixed", None),
    ],
)
def test_sweeps_and_counters_tell_what_one_run_cannot(
    row: dict[str, Any], sweep: SweepEvidence, counters: dict[str, float], name: str, tier: int | None
) -> None:
    finding = found(row, sweep, **counters)
    assert (finding.name, finding.tier) == (name, tier)


def test_the_runner_up_is_the_next_that_matches_or_the_nearest() -> None:
    both = found(CAPPED | {"data_wait_pct": 50.0})
    assert both.runner_up == "data_starved, matches too"
    near = found({"data_wait_pct": 8.0, "gpu_util_pct": 99.0})
    assert (near.name, near.runner_up) == ("mixed", "data_starved, 80 % of the way")
    far = found({"data_wait_pct": 1.0, "gpu_util_pct": 99.0})
    assert far.runner_up == "none near"
    assert found({"reason": "oom_gpu"}).runner_up == "\u2013"


def test_a_figure_that_is_not_known_is_no_evidence() -> None:
    assert found({"gpu_util_pct": 99.0, "power_w": 299.0, "power_limit_w": 300.0}).name == "mixed"


def test_elasticity_and_the_wall_come_from_the_runs_of_the_series() -> None:
    rows: list[dict[str, Any]] = [
        {"run_id": f"r-{batch}", "batch": batch, "images_per_s": speed}
        for batch, speed in ((8, 10.0), (16, 20.0), (32, 20.0))
    ]
    rows += [{"run_id": "r-64", "batch": 64, "valid": False, "status": "failed", "reason": "oom_gpu"}]
    rows += [{"run_id": "r-other", "batch": 8, "images_per_s": 1.0, "gpu": "h200"}]
    runs = frame(*rows)
    around = bottleneck.sweep_evidence(cells.build_cells(runs), runs)
    assert around["r-8"] == SweepEvidence(elasticity=pytest.approx(1.0), at_the_wall=False)
    assert around["r-16"] == SweepEvidence(elasticity=pytest.approx(0.0), at_the_wall=False)
    assert around["r-32"] == SweepEvidence(elasticity=pytest.approx(0.0), at_the_wall=True)
    assert around["r-other"] == SweepEvidence()


def test_the_table_names_tier_and_runner_up() -> None:
    table, _ = Builder(runs=frame({"data_wait_pct": 31.0, "gpu_util_pct": 60.0})).bottlenecks()
    row = dict(zip(table.columns, table.rows[0], strict=True))
    assert (row["Class"], row["Tier"]) == ("data_starved", "3")
    assert row["Evidence"] == "waiting for data 31.0 %, GPU idle 40.0 %"
    assert row["Runner-up"] == "host_bound, matches too"


def test_advice_is_told_once_per_class_with_the_runs_own_site_gpu_and_recipe() -> None:
    starved = {"data_wait_pct": 31.0, "gpu_util_pct": 60.0, "recipe": "tf32", "recipe_parts": "baseline,tf32"}
    rows = [starved | {"run_id": f"r-{batch}", "batch": batch} for batch in (16, 8)]
    rows += [{"run_id": "r-hot", "throttle_thermal_pct": 9.0, "node": "g007"}]
    _, table = Builder(runs=frame(*rows)).bottlenecks()
    assert [row[:6] for row in table.rows] == [
        ["data_starved", "A40", "grace", "tf32", "8, 16", "2"],
        ["thermal_throttled", "A40", "grace", "baseline", "8", "1"],
    ]
    assert "recipe.num_workers=16" in table.rows[0][-1]
    assert "--cpus-per-task: sites.grace.gpus.a40.cpus_per_gpu=16" in table.rows[0][-1]
    assert "recipe=[baseline,tf32,memmap]" in table.rows[0][-1]
    assert table.rows[1][-1].endswith("--exclude=g007")


def test_what_is_known_already_is_not_advised() -> None:
    assert [one.command for one in found(BUSY).advice] == ["batch=8,16,32", "gpu=h200"]
    assert [one.command for one in found(BUSY, SweepEvidence(elasticity=0.5)).advice] == ["gpu=h200"]
    row = BUSY | {"gpu": "h200"}
    assert "gpu=h200" not in bottleneck.format_advice(found(row).advice, frame(row).row(0, named=True))


def test_levers_that_a_run_has_are_not_advised() -> None:
    row = IDLE | {"recipe": "tuned", "recipe_parts": "tuned", "levers": json.dumps([{"name": "compile"}])}
    finding = found(row)
    words = bottleneck.format_advice(finding.advice, frame(row).row(0, named=True))
    assert "recipe=[tuned,cuda_graph]" in words
    everything = row | {"levers": json.dumps([{"name": name} for name in ("compile", "cuda_graph", "adamw_fused")])}
    words = bottleneck.format_advice(finding.advice, frame(everything).row(0, named=True))
    assert words == "a larger batch: batch=auto"


def test_the_document_is_the_table_of_rules() -> None:
    """Stale: `python -m analysis.stats.bottleneck > docs/bottlenecks.md`."""
    assert (ROOT / "docs" / "bottlenecks.md").read_text() == bottleneck.document()


@pytest.fixture
def hydra() -> Iterator[None]:
    register()
    with initialize_config_dir(version_base="1.3", config_dir=str(conf_dir())):
        yield


ADVICE = [(rule.name, one) for rule in bottleneck.RULES for one in rule.advice]
ADVICE += [(bottleneck.MIXED, one) for one in bottleneck.MIXED_ADVICE]


@pytest.mark.parametrize(("name", "advice"), ADVICE, ids=[f"{name}-{one.words}" for name, one in ADVICE])
def test_every_piece_of_advice_is_made_of_overrides_that_compose(
    hydra: None, name: str, advice: bottleneck.Advice
) -> None:
    row = frame({"node": "g007"}).row(0, named=True)
    words = bottleneck.format_advice([advice], row).removeprefix(advice.words).removeprefix(": ")
    overrides = [word.split(",")[0] if word.startswith("batch=") else word for word in words.split()]
    assert bool(overrides) is bool(advice.command)
    prepared = ["data=prepared", "data.root=prepared"] if "prepared" in advice.words else []
    if not words.startswith("--"):
        typed(compose("config", overrides=[*overrides, *prepared]))
