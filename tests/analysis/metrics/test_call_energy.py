"""The energy counter at the times of calls."""

import polars as pl
import pytest

from analysis.metrics.energy import add_counter

S = 1_000_000_000
CALLS = pl.DataFrame({"t_start_mono_ns": [S, 2 * S, None, 99 * S], "t_end_mono_ns": [2 * S, 3 * S, None, 100 * S]})


def samples() -> pl.DataFrame:
    """Return 10 s at 10 Hz of one GPU at 200 W."""
    ticks = pl.DataFrame({"tick_seq": range(101)})
    times, energy = pl.col("tick_seq") * (S // 10), 1000 * 20 * pl.col("tick_seq")
    return ticks.with_columns(pl.lit("GPU-1").alias("gpu_uuid"), times.alias("t_mono_ns"), energy.alias("energy_mj"))


def test_counter_grows_by_the_energy_of_a_call() -> None:
    rows = add_counter(CALLS, samples())
    growth = rows["counter_end_j"] - rows["counter_start_j"]
    assert growth.to_list() == [pytest.approx(200), pytest.approx(200), None, None]
    assert rows["counter_update_s"][0] == pytest.approx(0.1)


def test_a_run_without_samples_has_no_counter() -> None:
    assert add_counter(CALLS, samples().clear())["counter_end_j"].null_count() == CALLS.height


@pytest.mark.parametrize(
    "energy", [pl.lit(None, pl.Int64), pl.lit(5), 5_000_000 - pl.col("energy_mj")], ids=["unknown", "stuck", "falling"]
)
def test_a_counter_that_cannot_be_trusted_gives_nothing(energy: pl.Expr) -> None:
    rows = add_counter(CALLS, samples().with_columns(energy.alias("energy_mj")))
    assert rows["counter_end_j"].null_count() == CALLS.height
