"""When the driver throttled a run's cards, and the events of the run that a timeline marks."""

from __future__ import annotations

import polars as pl

POWER_CAP, THERMAL = "power cap", "temperature"
_COUNTERS = {  # cause -> cumulative counters of samples_slow
    POWER_CAP: ("throttle_power_cap_ns",),
    THERMAL: ("throttle_sw_thermal_ns", "throttle_hw_thermal_ns", "throttle_power_brake_ns"),
}
COUNTERS = [name for columns in _COUNTERS.values() for name in columns]
MIN_SHARE = 0.01  # of the time between two samples; less is normal clock regulation
EVENTS = {"xid": "Xid", "co_tenant": "co-tenant", "power_limit": "power limit", "gpu_lost": "GPU lost"}


def throttled(samples: pl.LazyFrame, origin_ns: int, resolution: int) -> pl.DataFrame:
    """Return (cause, t, t_end) in seconds since the origin: when a counter of any card grew.

    Intervals closer to each other than the samples' time span divided by `resolution` are joined.
    """
    now = pl.col("t_mono_ns")
    rows = samples.select("gpu_uuid", now, *(pl.col(name).cast(pl.Int64) for name in COUNTERS)).collect()
    rows = rows.sort("gpu_uuid", now)
    empty = pl.DataFrame(schema={"cause": pl.String, "t": pl.Float64, "t_end": pl.Float64})
    if rows.height < 2:
        return empty
    gap_ns = (rows["t_mono_ns"].max() - rows["t_mono_ns"].min()) / resolution  # type: ignore[operator]
    frames = [empty]
    for cause, columns in _COUNTERS.items():
        grew = pl.any_horizontal(pl.col(name).diff() > MIN_SHARE * now.diff() for name in columns).over("gpu_uuid")
        pairs = rows.select(start=now.shift(1).over("gpu_uuid"), end=now, grew=grew).filter("grew").sort("start")
        is_new = (pl.col("start") - pl.col("end").cum_max().shift(1) > gap_ns).fill_null(True)
        merged = pairs.group_by(is_new.cum_sum().alias("interval"), maintain_order=True).agg(
            pl.col("start").min(), pl.col("end").max()
        )
        seconds = {name: (pl.col(column) - origin_ns) * 1e-9 for name, column in (("t", "start"), ("t_end", "end"))}
        frames.append(merged.select(cause=pl.lit(cause), **seconds))
    return pl.concat(frames)


def events(table: pl.LazyFrame, gpu_uuids: list[str], span_ns: tuple[int, int], origin_ns: int) -> pl.DataFrame:
    """Return (t, label, detail) of what happened to these cards, or to no particular one, within the time span."""
    uuid, kind, detail = pl.col("gpu_uuid").cast(pl.String), pl.col("kind").cast(pl.String), pl.col("detail")
    relevant = kind.is_in(list(EVENTS)) & pl.col("t_mono_ns").is_between(*span_ns)
    if gpu_uuids:
        relevant &= uuid.is_in(gpu_uuids) | uuid.is_null()
    name, detail = kind.replace_strict(EVENTS), detail.cast(pl.String).fill_null("")
    # The detail of an Xid is its number: with it the label is short and says everything.
    label = pl.when(kind == "xid").then(name + " " + detail.str.slice(0, 8)).otherwise(name).str.strip_chars()
    text = pl.when((kind == "xid") | (detail == "")).then(label).otherwise(name + ": " + detail)
    rows = table.filter(relevant).sort("t_mono_ns")
    return rows.select(t=(pl.col("t_mono_ns") - origin_ns) * 1e-9, label=label, detail=text).collect()
