"""What befell a run's cards: the stretches in which the driver held them back, and the events worth a mark."""

from __future__ import annotations

from typing import Any

import polars as pl

CAP, HEAT = "power cap", "temperature"
_REASONS = {  # cumulative counters of samples_slow
    CAP: ("throttle_power_cap_ns",),
    HEAT: ("throttle_sw_thermal_ns", "throttle_hw_thermal_ns", "throttle_power_brake_ns"),
}
COUNTERS = [name for columns in _REASONS.values() for name in columns]
LEAST_SHARE = 0.01  # of the time between two samples; less is the regulator at work
EVENTS = {"xid": "Xid", "co_tenant": "co-tenant", "power_limit": "power limit", "gpu_lost": "GPU lost"}
Rows = list[dict[str, Any]]


def throttled(samples: pl.LazyFrame, origin_ns: int, stretches: int) -> Rows:
    """(why, t0, t1) in seconds since the origin, in which a counter of any card grew; no more of each than asked for.

    Stretches closer to each other than the whole over that number are joined.
    """
    rows = samples.select("gpu_uuid", "t_mono_ns", *(pl.col(name).cast(pl.Int64) for name in COUNTERS)).collect()
    if rows.height < 2:
        return []
    times = rows["t_mono_ns"].sort()
    join_s = (times[-1] - times[0]) * 1e-9 / stretches
    found: Rows = []
    for why, columns in _REASONS.items():
        spans = sorted(
            span for card in rows.partition_by("gpu_uuid") for span in _grown(card.sort("t_mono_ns"), columns)
        )
        merged: Rows = []
        for start_ns, end_ns in spans:
            start, end = (start_ns - origin_ns) * 1e-9, (end_ns - origin_ns) * 1e-9
            if merged and start - merged[-1]["t1"] <= join_s:
                merged[-1]["t1"] = max(end, merged[-1]["t1"])
            else:
                merged.append({"why": why, "t0": start, "t1": end})
        found += merged
    return found


def _grown(card: pl.DataFrame, columns: tuple[str, ...]) -> list[tuple[int, int]]:
    """Pairs of neighbouring samples between which any of the counters grew by more than the least share."""
    time = pl.col("t_mono_ns")
    grew = pl.any_horizontal((pl.col(name).diff() > LEAST_SHARE * time.diff()).fill_null(False) for name in columns)
    pairs = card.select(time.shift(1).alias("start"), time.alias("end"), grew.alias("grew"))
    return pairs.filter("grew").select("start", "end").rows()


def events(table: pl.LazyFrame, cards: list[str], span_ns: tuple[int, int], origin_ns: int) -> Rows:
    """(t, words, detail) of what happened to these cards, or to none by name, within a span of the run's clock."""
    ours = pl.col("gpu_uuid").cast(pl.String)
    wanted = pl.col("kind").cast(pl.String).is_in(list(EVENTS)) & pl.col("t_mono_ns").is_between(*span_ns)
    if cards:
        wanted &= ours.is_in(cards) | ours.is_null()
    rows = table.select(pl.col("kind").cast(pl.String), "t_mono_ns", ours, "detail").filter(wanted)
    found = []
    for row in rows.sort("t_mono_ns").collect().iter_rows(named=True):
        short = EVENTS[row["kind"]] + (f" {row['detail'][:8]}" if row["kind"] == "xid" and row["detail"] else "")
        detail = short if row["kind"] == "xid" else ": ".join(filter(None, (short, row["detail"])))
        found.append({"t": (row["t_mono_ns"] - origin_ns) * 1e-9, "words": short, "detail": detail})
    return found
