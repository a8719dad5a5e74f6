"""When ticks are due, and how long reads took."""

from __future__ import annotations

import pytest

from inpaint_bench.telemetry.sampling.ticker import Durations, Ticker


class TestTicker:
    def test_deadlines_do_not_shift_after_late_ticks(self) -> None:
        ticker = Ticker(100_000_000, 0)
        taken = [ticker.take(now * 1_000_000) for now in (0, 99, 130, 199, 201, 300)]
        assert taken == [0, None, 1, None, 2, 3]
        assert (ticker.due, ticker.done, ticker.skipped) == (4, 4, 0)

    def test_tick_more_than_a_period_late_is_skipped_and_counted(self) -> None:
        ticker = Ticker(100_000_000, 0)
        taken = [ticker.take(now * 1_000_000) for now in (0, 450, 500, 550)]
        assert taken == [0, 4, 5, None]
        assert (ticker.due, ticker.done, ticker.skipped) == (6, 3, 3)

    def test_two_ticks_are_at_least_50_ms_apart(self) -> None:
        ticker = Ticker(100_000_000, 0)
        ticker.take(0)
        assert ticker.take(190_000_000) == 1
        assert ticker.take(200_000_000) is None
        assert ticker.next_ns == 240_000_000
        assert ticker.take(240_000_000) == 2
        assert ticker.earliest_ns == 290_000_000


def test_quantiles_of_read_times_are_within_five_percent() -> None:
    durations = Durations()
    assert durations.quantile_us(0.5) is None
    for us in range(1, 1001):
        durations.add(us)
    assert durations.quantile_us(0.5) == pytest.approx(500, rel=0.05)
    assert durations.quantile_us(0.99) == pytest.approx(990, rel=0.05)
    assert durations.max_us == 1000
    slow = Durations()
    slow.add(1000.0)  # the nearest bucket begins above it
    assert slow.quantile_us(0.99) == slow.max_us == 1000
