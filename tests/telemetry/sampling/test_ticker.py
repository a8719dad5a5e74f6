"""When ticks are due."""

from __future__ import annotations

from inpaint_bench.telemetry.sampling.sampler import Ticker


def test_deadlines_do_not_shift_after_late_ticks() -> None:
    ticker = Ticker(100_000_000, 0)
    taken = [ticker.take(now * 1_000_000) for now in (0, 99, 130, 199, 201, 300)]
    assert taken == [0, None, 1, None, 2, 3]
    assert (ticker.due, ticker.done, ticker.skipped) == (4, 4, 0)


def test_tick_more_than_a_period_late_is_skipped_and_counted() -> None:
    ticker = Ticker(100_000_000, 0)
    taken = [ticker.take(now * 1_000_000) for now in (0, 450, 500, 550)]
    assert taken == [0, 4, 5, None]
    assert (ticker.due, ticker.done, ticker.skipped) == (6, 3, 3)


def test_two_ticks_are_at_least_50_ms_apart() -> None:
    ticker = Ticker(100_000_000, 0)
    ticker.take(0)
    assert ticker.take(190_000_000) == 1
    assert ticker.take(200_000_000) is None
    assert ticker.next_ns == 240_000_000
    assert ticker.take(240_000_000) == 2
    assert ticker.earliest_ns == 290_000_000
