"""What the sidecar costs: the order of blocks, the arithmetic, and the real command at a tiny scale."""

from __future__ import annotations

import io
import json
import math
import os
import signal
import statistics
from collections import Counter
from contextlib import redirect_stdout
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from analysis.stats.intervals import Gain
from benchmarks.sidecar_overhead import design, main
from benchmarks.sidecar_overhead.blocks import Alternation, Beside, Block, SidecarBlock, Sidecars, alternation
from benchmarks.sidecar_overhead.design import OFF
from inpaint_bench.core.errors import UserError
from tests.run.support import TINY, bench

ARMS = [*OFF, "10 Hz", "20 Hz"]
QUICK = (
    *(one for one in TINY if not one.startswith(("telemetry", "hydra"))),
    "telemetry=replay",
    "telemetry.capture=h200",
    "workload.module=tests.run.support",  # a workload that is there at once
)
T_1 = 12.706  # Student's t, 95 %, one degree of freedom


class TestTheOrderOfBlocks:
    @pytest.mark.parametrize("arms", [ARMS, ARMS[:3], [*ARMS, "5 Hz"]])
    def test_gives_every_arm_every_place_and_every_neighbour_equally_often(self, arms: list[str]) -> None:
        n = len(arms)
        square = design.orders(arms, n if n % 2 == 0 else 2 * n, Random(1))
        places = Counter((arm, place) for order in square for place, arm in enumerate(order))
        neighbours = Counter(pair for order in square for pair in pairwise(order))
        assert set(places.values()) == {len(square) // n}
        assert len(places) == n * n
        assert set(neighbours.values()) == {len(square) // n}
        assert len(neighbours) == n * (n - 1)

    def test_is_followed_by_its_mirror_image(self) -> None:
        found = design.orders(ARMS, 14, Random(2))
        assert len(found) == 14
        assert all(second == first[::-1] for first, second in zip(found[::2], found[1::2], strict=True))

    def test_is_that_of_its_seed(self) -> None:
        assert design.orders(ARMS, 12, Random(3)) == design.orders(ARMS, 12, Random(3))
        assert design.orders(ARMS, 12, Random(3)) != design.orders(ARMS, 12, Random(4))


def trial(
    seed: int, rounds: int, *, noise: float = 0.0, drift: float = 0.0, cost: float = 0.0
) -> list[dict[str, float]]:
    """Invented rounds: milliseconds per step. `drift`: of the whole trial, a share; `cost`: of 20 Hz, a share."""
    draw = np.random.default_rng(seed)
    found, time = [], 0
    for order in design.orders(ARMS, rounds, Random(seed)):
        one = {}
        for arm in order:
            extra = math.log1p(cost) if arm == "20 Hz" else 0.0
            one[arm] = 450 * math.exp(drift * time / (rounds * len(ARMS)) + draw.normal(0, noise) + extra)
            time += 1
        found.append(one)
    return found


class TestTheArithmetic:
    def test_a_steady_drift_falls_out_exactly(self) -> None:
        rounds = trial(0, 6, drift=0.05, cost=0.01)
        assert design.cost(rounds, "20 Hz").value == pytest.approx(0.01, abs=1e-12)
        assert design.cost(rounds, "10 Hz").value == pytest.approx(0, abs=1e-12)
        assert design.nothing(rounds).value == pytest.approx(0, abs=1e-12)

    def test_a_cost_of_one_percent_is_found_amid_noise_and_drift(self) -> None:
        found = design.cost(trial(5, 12, noise=0.001, drift=0.005, cost=0.01), "20 Hz")
        assert found.low is not None
        assert found.high is not None
        assert 0.008 < found.low < 0.01 < found.high < 0.012
        said = design.verdict(found, 0.3)
        assert "above is shown" in said
        assert "A cost is shown" in said

    def test_where_there_is_no_cost_the_interval_holds_zero_in_about_95_of_100(self) -> None:
        trials = [trial(seed, 8, noise=0.001) for seed in range(600)]
        for found in ([design.cost(one, "10 Hz") for one in trials], [design.nothing(one) for one in trials]):
            assert 0.93 < sum(one.tie for one in found) / len(found) < 0.97

    def test_drift_makes_the_interval_wider_never_narrower(self) -> None:
        covered = [design.cost(trial(seed, 8, noise=0.001, drift=0.02), "10 Hz").tie for seed in range(300)]
        assert sum(covered) / len(covered) > 0.94


class TestABlockThatStandsOut:
    def _disturbed(self, seed: int, by: float) -> list[dict[str, float]]:
        rounds = trial(seed, 8, noise=0.001)
        rounds[6]["20 Hz"] *= 1 + by
        return rounds

    def test_is_named_and_still_counts_in_the_mean_but_hardly_moves_the_median(self) -> None:
        """As one of eight blocks on an H200 did: 470 ms per step among 425."""
        for seed in range(40):
            rounds = self._disturbed(seed, 0.1)
            largest = max(design.outlying(rounds), key=lambda one: one.above_median)
            assert (largest.place, largest.arm) == (6, "20 Hz")
            assert largest.above_median == pytest.approx(0.1, abs=0.004)
            assert design.cost(rounds, "20 Hz").value == pytest.approx(0.012, abs=0.002)
            assert design.median(rounds, "20 Hz") == pytest.approx(0, abs=0.003)

    def test_may_be_too_fast_as_well(self) -> None:
        smallest = min(design.outlying(self._disturbed(1, -0.1)), key=lambda one: one.above_median)
        assert (smallest.place, smallest.arm) == (6, "20 Hz")
        assert smallest.above_median == pytest.approx(-0.1, abs=0.004)

    def test_is_rarely_seen_where_there_is_none(self) -> None:
        assert sum(bool(design.outlying(trial(seed, 8, noise=0.001))) for seed in range(200)) <= 20
        assert not any(design.outlying(trial(seed, 8, noise=0.001, drift=0.02)) for seed in range(50))

    def test_is_not_looked_for_in_few_rounds(self) -> None:
        rounds = trial(1, 4, noise=0.001)
        rounds[0]["20 Hz"] *= 2
        assert design.outlying(rounds) == []

    def test_is_told_with_its_round_and_where_its_time_went(self, capsys: pytest.CaptureFixture[str]) -> None:
        """Round 2 is left out, so that the block's round is not its place among those that count."""
        draw = Random(1)
        blocks = [
            replace(invented(number, arm), seconds=1 + draw.uniform(0, 0.001), device_ms=99.5, data_wait_pct=0.25)
            for number in range(1, 9)
            for arm in ARMS[:3]
        ]
        blocks[4] = replace(blocks[4], whole=False)
        blocks[20] = replace(blocks[20], seconds=1.1)
        found = main.figures(blocks, {"10 Hz": 10}, 0.3)
        assert [(one["round"], one["arm"]) for one in found["outlying"]] == [(7, "10 Hz")]
        main._tell({**found, "steps_per_block": 10, "rarely_s": {}})
        said = capsys.readouterr().out
        assert "Stands out: 10 Hz in round 7, 110 ms per step, 9.9" in said
        assert "above the median of its blocks (99.5 ms of it on the device, 0.25 % waiting for data)" in said


def test_a_99th_percentile_needs_a_hundred_reads() -> None:
    account = invented(1, "10 Hz").sidecar
    assert account is not None
    reads = [float(us) for us in range(100)]
    few, enough = (replace(account, read_us={"fast": reads[:n], "slow": []}) for n in (99, 100))
    assert main._together([few])["fast_read_us_p99"] is None
    assert main._together([few])["fast_read_us_p50"] == 49
    assert main._together([enough])["fast_read_us_p99"] == pytest.approx(98.01)
    assert main._together([few, few])["fast_read_us_p99"] is not None  # of all blocks together
    assert main._together([few])["slow_read_us_p50"] is None


class TestTheVerdict:
    @pytest.mark.parametrize(
        ("low", "value", "high", "words"),
        [
            (-0.1, 0.0, 0.1, ["below 0.3 %: shown", "ends at 0.1 %", "No cost is shown; up to 0.1 % could hide"]),
            (0.1, 0.15, 0.2, ["below 0.3 %: shown", "A cost is shown, 0.1 to 0.2 %"]),
            (-0.2, 0.1, 0.4, ["not shown", "No cost is shown; up to 0.4 % could hide"]),
            (0.2, 0.4, 0.6, ["not shown, the interval ends at 0.6 %", "A cost is shown, 0.2 to 0.6 %"]),
            (0.4, 0.5, 0.6, ["above is shown, the interval begins at 0.4 %"]),
            (-0.3, -0.2, -0.1, ["faster with the sidecar, which it cannot cause"]),
        ],
    )
    def test_is_that_of_the_interval_and_never_claims_zero(
        self, low: float, value: float, high: float, words: list[str]
    ) -> None:
        found = Gain(value=value / 100, low=low / 100, high=high / 100, n=8, paired=True)
        said = design.verdict(found, 0.3)
        assert all(word in said for word in words), said

    def test_says_how_many_rounds_could_show_it(self) -> None:
        found = Gain(value=0.001, low=-0.003, high=0.0049, n=8, paired=True)  # 0.39 % wide, 0.2 % are wanted
        assert "about 32 such rounds" in design.verdict(found, 0.3)

    def test_of_a_single_round_shows_nothing(self) -> None:
        found = design.cost([dict.fromkeys(ARMS, 450.0)], "10 Hz")
        assert "not shown, a single round has no interval" in design.verdict(found, 0.3)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], str]:
    """The real command beside a training that is there at once: where it ran, what it wrote, what it printed."""
    folder = tmp_path_factory.mktemp("overhead")
    wanted = ["--rounds", "2", "--block-s", "0.4", "--settle-s", "0.05", "--order-seed", "7", "--rates", "10,20"]
    screen = io.StringIO()
    with redirect_stdout(screen), pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINY_STEP_S", "0.01")
        code = main.main([*QUICK, f"out={folder / 'runs'}", *wanted, "--out", str(folder / "overhead.json")])
    assert code == 0
    return folder, json.loads((folder / "overhead.json").read_text()), screen.getvalue()


class TestTheRealCommand:
    def test_times_equally_many_steps_of_every_arm_in_the_seeds_order(self, measured: Any) -> None:
        _, found, _ = measured
        assert {block["steps"] for block in found["blocks"]} == {found["steps_per_block"]}
        order = design.orders(ARMS, 2, Random(7))
        assert [block["arm"] for block in found["blocks"]] == order[0] + order[1]
        assert (found["order_seed"], found["rounds_done"], found["batch"]) == (7, 2, 2)

    def test_a_real_sidecar_sampled_within_the_blocks_and_only_there_where_it_was_on(self, measured: Any) -> None:
        for block in measured[1]["blocks"]:
            assert (block["sidecar"] is None) == (block["arm"] in OFF)
            if block["sidecar"]:
                expected = block["hz"] * block["seconds"]
                late = block["sidecar"]["ticks_late"]  # a busy machine
                assert expected - late - 2 <= len(block["sidecar"]["read_us"]["fast"]) <= expected + 2
                assert block["sidecar"]["start_cpu_s"] > 0 < block["starting"]["steps"]
                assert block["sidecar"]["ticks_due"] > expected

    def test_its_figures_follow_from_its_blocks(self, measured: Any) -> None:
        found = measured[1]
        ms = {(block["round"], block["arm"]): 1000 * block["seconds"] / block["steps"] for block in found["blocks"]}
        off = [ms[number, arm] for number in (1, 2) for arm in OFF]
        assert found["off_step_ms"] == pytest.approx(statistics.mean(off))
        for one in found["arms"]:
            ratios = [math.log(ms[n, one["arm"]] / math.sqrt(ms[n, OFF[0]] * ms[n, OFF[1]])) for n in (1, 2)]
            self._is_interval_of(ratios, one["cost"])
            assert one["step_ms"] == pytest.approx(statistics.mean(ms[n, one["arm"]] for n in (1, 2)))
            own = [block["sidecar"] for block in found["blocks"] if block["arm"] == one["arm"]]
            reads = [us for sidecar in own for us in sidecar["read_us"]["fast"]]
            assert one["sidecar"]["fast_read_us_p50"] == pytest.approx(statistics.median(reads))
            assert one["sidecar"]["ticks_late"] == sum(sidecar["ticks_late"] for sidecar in own)
        self._is_interval_of([math.log(ms[n, OFF[1]] / ms[n, OFF[0]]) for n in (1, 2)], found["off_over_off"])

    @staticmethod
    def _is_interval_of(logs: list[float], found: dict[str, Any]) -> None:
        middle, half = statistics.mean(logs), T_1 * statistics.stdev(logs) / math.sqrt(2)
        for key, end in (("pct", middle), ("low_pct", middle - half), ("high_pct", middle + half)):
            assert found[key] == pytest.approx(100 * math.expm1(end), rel=1e-3, abs=1e-9)
        assert found["n"] == 2

    def test_prints_cost_verdict_and_what_is_not_in_it(self, measured: Any) -> None:
        _, found, said = measured
        assert all(f"{one['arm']}: {one['verdict']}" in said for one in found["arms"])
        assert "off against off" in said
        assert "closing a part (every 60 s)" in said
        assert "A start, once per run and not in these figures" in said

    def test_leaves_nothing_but_its_account(self, measured: Any) -> None:
        assert not list((measured[0] / "runs").iterdir())


class TestWhatGoesWrong:
    @pytest.mark.parametrize(
        ("arguments", "sentence"),
        [
            (["telemetry=none"], "no sidecar whose cost could be measured"),
            (["--rounds", "3"], "--rounds 3: must be even"),
            (["--rounds", "0"], "--rounds 0: must be even"),
            (["--block-s", "nan"], "--block-s nan: must be above 0"),
            (["--rates", "10,often"], "--rates 10,often: must be numbers"),
            (["--rates", "10,30"], "--rates 10,30: telemetry.fast_hz=30"),
            (["--rates", "10,10"], "names a rate twice"),
            (["telemetry.fast_hz=5"], "--rates says how often"),
            (["workload.train_steps=5"], "leave train_steps away"),
            (["telemetry=nvml"], "this training uses none"),
            (["telemetry.capture=no_such"], "no_such"),
            (["--out", "/no/such/folder/overhead.json"], "is no folder that can be written to"),
            (["--out", "."], "--out .: is a folder"),
            (["out=/dev/null/runs"], "out=/dev/null/runs: Not a directory"),
            (["batchh=2"], "Did you mean batch?"),
        ],
    )
    def test_is_a_sentence_and_exit_code_2(
        self, arguments: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main.main([*QUICK, f"out={tmp_path}", *arguments]) == 2
        assert sentence in capsys.readouterr().err

    def test_a_sidecar_that_is_killed_spoils_its_round(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        stop = Sidecars.stop

        def kill(self: Sidecars, started: Any) -> Any:
            if started.run_dir.name.startswith("1-"):
                pid = json.loads((started.run_dir / "telemetry.json").read_text())["pid"]
                os.kill(pid, signal.SIGKILL)
            return stop(self, started)

        monkeypatch.setattr(Sidecars, "stop", kill)
        monkeypatch.setenv("TINY_STEP_S", "0.01")
        config = bench("telemetry=replay", "telemetry.capture=h200", QUICK[-1], f"out={tmp_path}")
        with alternation(config, 10) as training:
            blocks = [training.block(1, arm, hz, 5, 0) for arm, hz in ((OFF[0], None), (OFF[1], None), ("10 Hz", 10))]
            assert [block.whole for block in blocks] == [True, True, False]
            with pytest.raises(UserError, match="no round counts"):
                main.figures(blocks, {"10 Hz": 10}, 0.3)
        whole = [invented(number, arm) for number in (2, 3) for arm in ARMS[:3]]
        found = main.figures([*blocks, *whole], {"10 Hz": 10}, 0.3)
        assert (found["rounds_left_out"], found["arms"][0]["cost"]["n"]) == ([1], 2)
        assert len(found["blocks"]) == 9

    def test_what_is_cut_short_keeps_its_whole_rounds(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        real = Alternation.block
        done: list[Block] = []

        def block(self: Alternation, *arguments: Any) -> Block:
            if len(done) == 4:
                signal.raise_signal(signal.SIGTERM)
            done.append(real(self, *arguments))
            return done[-1]

        monkeypatch.setattr(Alternation, "block", block)
        monkeypatch.setenv("TINY_STEP_S", "0.01")
        quick = ["--rates", "10", "--rounds", "2", "--block-s", "0.1", "--settle-s", "0"]
        out = tmp_path / "overhead.json"
        assert main.main([*QUICK, f"out={tmp_path / 'runs'}", *quick, "--out", str(out)]) == 128 + signal.SIGTERM
        assert json.loads(out.read_text())["rounds_done"] == 1
        assert "10 Hz: below 0.3 %: not shown, a single round has no interval" in capsys.readouterr().out
        assert not list((tmp_path / "runs").iterdir())


def invented(number: int, arm: str) -> Block:
    """A block of 10 steps in a second."""
    account = None
    if arm not in OFF:
        account = SidecarBlock(
            status="complete",
            problems=[],
            ready_s=0.5,
            start_cpu_s=0.2,
            cpu_s=0.01,
            sampling_s=1.0,
            max_rss_mib=80.0,
            ticks_due=12,
            ticks_late=0,
            read_us={"fast": [50.0], "slow": [], "gpm": []},
        )
    return Block(
        round=number,
        arm=arm,
        hz=10.0 if account else None,
        steps=10,
        seconds=1.0,
        device_ms=None,
        data_wait_pct=0.0,
        starting=Beside(steps=2, seconds=0.2),
        settling=Beside(steps=2, seconds=0.2),
        whole=True,
        sidecar=account,
    )
