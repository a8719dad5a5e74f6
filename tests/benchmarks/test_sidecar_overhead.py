"""The sidecar overhead experiment: the order of blocks, the statistics, and the real command at a tiny scale."""

from __future__ import annotations

import io
import json
import math
import statistics
from collections import Counter
from contextlib import redirect_stdout
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from benchmarks.sidecar_overhead import __main__ as command
from benchmarks.sidecar_overhead import design
from benchmarks.sidecar_overhead.design import OFF, Estimate
from tests.run.support import TINY

ARMS = [*OFF, "10 Hz", "20 Hz"]
QUICK = (
    *(override for override in TINY if not override.startswith(("telemetry", "hydra"))),
    "telemetry=replay",
    "telemetry.capture=h200",
    "workload.module=tests.run.support",  # a workload that needs no time to build
)
T_1 = 12.706  # Student's t, 95 %, one degree of freedom


class TestOrders:
    @pytest.mark.parametrize("arms", [ARMS, ARMS[:3], [*ARMS, "5 Hz"]])
    def test_every_arm_has_every_position_and_every_neighbour_equally_often(self, arms: list[str]) -> None:
        n = len(arms)
        square = design.orders(arms, n if n % 2 == 0 else 2 * n, Random(1))
        places = Counter((arm, place) for order in square for place, arm in enumerate(order))
        neighbours = Counter(pair for order in square for pair in pairwise(order))
        assert set(places.values()) == {len(square) // n}
        assert len(places) == n * n
        assert set(neighbours.values()) == {len(square) // n}
        assert len(neighbours) == n * (n - 1)


def trial(
    seed: int, rounds: int, *, noise: float = 0.0, drift: float = 0.0, cost: float = 0.0
) -> list[dict[str, float]]:
    """Return simulated rounds in ms per step; `drift` over the whole trial and `cost` of 20 Hz are shares."""
    draw = np.random.default_rng(seed)
    rounds_ms, time = [], 0
    for order in design.orders(ARMS, rounds, Random(seed)):
        times = {}
        for arm in order:
            extra = math.log1p(cost) if arm == "20 Hz" else 0.0
            times[arm] = 450 * math.exp(drift * time / (rounds * len(ARMS)) + draw.normal(0, noise) + extra)
            time += 1
        rounds_ms.append(times)
    return rounds_ms


class TestEstimates:
    def test_linear_drift_cancels_exactly(self) -> None:
        rounds = trial(0, 6, drift=0.05, cost=0.01)
        assert design.cost(rounds, "20 Hz").value == pytest.approx(0.01, abs=1e-12)
        assert design.cost(rounds, "10 Hz").value == pytest.approx(0, abs=1e-12)
        assert design.off_against_off(rounds).value == pytest.approx(0, abs=1e-12)

    def test_cost_of_one_percent_is_found_amid_noise_and_drift(self) -> None:
        estimate = design.cost(trial(5, 12, noise=0.001, drift=0.005, cost=0.01), "20 Hz")
        assert estimate.low is not None
        assert estimate.high is not None
        assert 0.008 < estimate.low < 0.01 < estimate.high < 0.012
        verdict = design.verdict(estimate, 0.3)
        assert "the cost is above" in verdict
        assert "A cost is shown" in verdict

    def test_interval_without_a_cost_includes_zero_in_about_95_of_100(self) -> None:
        trials = [trial(seed, 8, noise=0.001) for seed in range(600)]
        costs, baselines = [design.cost(t, "10 Hz") for t in trials], [design.off_against_off(t) for t in trials]
        for estimates in (costs, baselines):
            assert 0.93 < sum(estimate.includes_zero for estimate in estimates) / len(estimates) < 0.97


class TestVerdict:
    @pytest.mark.parametrize(
        ("low", "value", "high", "phrases"),
        [
            (
                -0.1,
                0.0,
                0.1,
                ["below 0.3 %: shown", "ends at 0.1 %", "No cost is shown; the scatter could hide up to 0.1 %"],
            ),
            (0.1, 0.15, 0.2, ["below 0.3 %: shown", "A cost is shown, 0.1 to 0.2 %"]),
            (-0.2, 0.1, 0.4, ["not shown", "No cost is shown; the scatter could hide up to 0.4 %"]),
            (0.2, 0.4, 0.6, ["not shown, the interval ends at 0.6 %", "A cost is shown, 0.2 to 0.6 %"]),
            (0.4, 0.5, 0.6, ["the cost is above, the interval begins at 0.4 %"]),
            (-0.3, -0.2, -0.1, ["faster with it on, which it cannot cause"]),
        ],
    )
    def test_verdict_follows_from_the_interval_and_never_claims_zero(
        self, low: float, value: float, high: float, phrases: list[str]
    ) -> None:
        verdict = design.verdict(Estimate(value=value / 100, low=low / 100, high=high / 100, n=8), 0.3)
        assert all(phrase in verdict for phrase in phrases), verdict

    def test_verdict_of_a_single_round_shows_nothing(self) -> None:
        estimate = design.cost([dict.fromkeys(ARMS, 450.0)], "10 Hz")
        assert "not shown, a single round has no interval" in design.verdict(estimate, 0.3)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], str]:
    """Run the command beside a training that needs no time to build: its folder, its result, its output."""
    folder = tmp_path_factory.mktemp("overhead")
    options = ["--rounds", "2", "--block-s", "0.4", "--settle-s", "0.05", "--order-seed", "7", "--rates", "10,20"]
    screen = io.StringIO()
    with redirect_stdout(screen), pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINY_STEP_S", "0.01")
        code = command.main([*QUICK, f"out={folder / 'runs'}", *options, "--out", str(folder / "overhead.json")])
    assert code == 0
    return folder, json.loads((folder / "overhead.json").read_text()), screen.getvalue()


@pytest.mark.faults
class TestCommand:
    def test_blocks_have_equal_steps_and_the_order_of_the_seed(self, measured: Any) -> None:
        _, result, _ = measured
        assert {block["steps"] for block in result["blocks"]} == {result["steps_per_block"]}
        order = design.orders(ARMS, 2, Random(7))
        assert [block["arm"] for block in result["blocks"]] == order[0] + order[1]
        assert (result["order_seed"], result["rounds_done"], result["batch"]) == (7, 2, 2)

    def test_a_sidecar_sampled_within_its_blocks_only(self, measured: Any) -> None:
        for block in measured[1]["blocks"]:
            assert (block["sidecar"] is None) == (block["arm"] in OFF)
            if block["sidecar"]:
                expected = block["hz"] * block["seconds"]
                skipped = block["sidecar"]["ticks_skipped"]  # a busy machine
                assert expected - skipped - 2 <= len(block["sidecar"]["read_us"]["fast"]) <= expected + 2
                assert block["sidecar"]["start_cpu_s"] > 0
                assert 0 <= block["sidecar"]["cpu_s"] < block["seconds"]
                assert block["sidecar"]["seconds"] == block["seconds"]
                assert block["sidecar"]["rate_hz"] <= 1.1 * block["hz"]
                assert block["sidecar"]["ticks_due"] > expected

    def test_figures_follow_from_the_blocks(self, measured: Any) -> None:
        result = measured[1]
        ms = {(block["round"], block["arm"]): 1000 * block["seconds"] / block["steps"] for block in result["blocks"]}
        off = [ms[number, arm] for number in (1, 2) for arm in OFF]
        assert result["off_step_ms"] == pytest.approx(statistics.mean(off))
        for arm in result["arms"]:
            ratios = [math.log(ms[n, arm["arm"]] / math.sqrt(ms[n, OFF[0]] * ms[n, OFF[1]])) for n in (1, 2)]
            self._is_interval_of(ratios, arm["cost"])
            assert arm["step_ms"] == pytest.approx(statistics.mean(ms[n, arm["arm"]] for n in (1, 2)))
            sidecars = [block["sidecar"] for block in result["blocks"] if block["arm"] == arm["arm"]]
            reads = [us for sidecar in sidecars for us in sidecar["read_us"]["fast"]]
            assert arm["sidecar"]["fast_read_us_p50"] == pytest.approx(statistics.median(reads))
            rate_hz = statistics.mean(sidecar["rate_hz"] for sidecar in sidecars)
            assert arm["sidecar"]["rate_off_pct"] == pytest.approx(100 * (rate_hz / arm["hz"] - 1))
            share = sum(sidecar["cpu_s"] for sidecar in sidecars) / sum(sidecar["seconds"] for sidecar in sidecars)
            assert arm["sidecar"]["cpu_pct_of_a_core"] == pytest.approx(100 * share)
            assert arm["sidecar"]["ticks_skipped"] == sum(sidecar["ticks_skipped"] for sidecar in sidecars)
        self._is_interval_of([math.log(ms[n, OFF[1]] / ms[n, OFF[0]]) for n in (1, 2)], result["off_against_off"])

    @staticmethod
    def _is_interval_of(logs: list[float], cost: dict[str, Any]) -> None:
        middle, half = statistics.mean(logs), T_1 * statistics.stdev(logs) / math.sqrt(2)
        for key, end in (("pct", middle), ("low_pct", middle - half), ("high_pct", middle + half)):
            assert cost[key] == pytest.approx(100 * math.expm1(end), rel=1e-3, abs=1e-9)
        assert cost["n"] == 2

    def test_cost_and_verdict_are_printed_and_nothing_but_the_result_is_left(self, measured: Any) -> None:
        folder, result, text = measured
        assert all(f"{arm['arm']}: {arm['verdict']}" in text for arm in result["arms"])
        assert "off against off" in text
        assert "A start, once per run and not in these figures" in text
        assert not list((folder / "runs").iterdir())


@pytest.mark.faults
def test_cost_of_a_tracker_is_that_beside_a_sidecar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINY_STEP_S", "0.01")
    quick = ["--rates", "10", "--rounds", "2", "--block-s", "1.5", "--settle-s", "0"]
    out, screen = tmp_path / "overhead.json", io.StringIO()
    with redirect_stdout(screen):
        code = command.main(
            [*QUICK, "track=tensorboard", "track.every_s=0.5", f"out={tmp_path / 'runs'}", *quick, "--out", str(out)]
        )
    assert code == 0
    result = json.loads(out.read_text())
    assert (result["measured"], [arm["arm"] for arm in result["arms"]]) == (
        "track=tensorboard",
        ["10 Hz + tensorboard"],
    )
    assert all(block["sidecar"] for block in result["blocks"])
    assert [block["tracker_cpu_s"] is None for block in result["blocks"]] == [
        block["arm"] in OFF for block in result["blocks"]
    ]
    assert result["arms"][0]["cost"]["n"] == 2
    assert "Cost of track=tensorboard in percent of step time" in screen.getvalue()
    assert "A tracker used" in screen.getvalue()
    assert not list((tmp_path / "runs").iterdir())


class TestFailures:
    @pytest.mark.parametrize(
        ("arguments", "sentence"),
        [
            (["track=tensorboard"], "--rates 10,20: one rate with track=tensorboard"),
            (["track=tensorboard", "track.package=no_such", "--rates", "10"], "track=tensorboard needs no_such"),
            (["telemetry=none"], "has no sidecar to measure"),
            (["--rounds", "3"], "--rounds 3: must be even"),
            (["--rounds", "0"], "--rounds 0: must be even"),
            (["--block-s", "nan"], "--block-s nan: must be above 0"),
            (["--rates", "10,often"], "--rates 10,often: must be numbers"),
            (["--rates", "10,30"], "--rates 10,30: telemetry.fast_hz=30"),
            (["--rates", "10,10"], "duplicate rate"),
            (["telemetry.fast_hz=5"], "use --rates"),
            (["workload.train_steps=5"], "leave train_steps unset"),
            (["telemetry=nvml"], "this training uses none"),
            (["telemetry.capture=no_such"], "no_such"),
            (["--out", "/no/such/folder/overhead.json"], "is not a writable folder"),
            (["--out", "."], "--out . is a folder"),
            (["out=/dev/null/runs"], "out=/dev/null/runs: Not a directory"),
            (["batchh=2"], "Did you mean batch?"),
        ],
    )
    def test_user_error_is_a_sentence_and_exit_code_2(
        self, arguments: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert command.main([*QUICK, f"out={tmp_path}", *arguments]) == 2
        assert sentence in capsys.readouterr().err
