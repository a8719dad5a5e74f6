"""Checks of the step table against the measure windows: places, numbers, images, times and losses."""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl

from analysis.metrics.facts import Facts
from analysis.metrics.gpu_samples import Span
from analysis.metrics.stalls import find_stalls
from inpaint_bench.core.records import Window

# CUDA events of one stream do not overlap: together they last as long as the window at most. In 89 windows on H200
# cards they were 20 to 100 % of it, and with the wait for data 96.5 to 102 %; the rest is the host between two steps.
MAX_DEVICE_SHARE = 1.01
MIN_EXPLAINED_SHARE = 0.85


def check_places(_: Facts, __: Window, span: Span, steps: pl.DataFrame) -> Iterator[str]:
    start, end = pl.col("t_start_mono_ns"), pl.col("t_end_mono_ns")
    problems = {
        "warm-up included: {} step(s) began before the measure window opened": start < span[0],
        "{} step(s) ended after the measure window closed": end > span[1],
        "clock jump: the times of steps go back in {} places": (start < end.shift(1)) | (end < start),
        "{} step(s) waited longer for data than they lasted": pl.col("data_wait_ns") > end - start,
    }
    counts = steps.select(condition.sum().alias(text) for text, condition in problems.items())
    yield from (text.format(count) for text, count in counts.row(0, named=True).items() if count)


def check_rows(facts: Facts, window: Window, _: Span, steps: pl.DataFrame) -> Iterator[str]:
    numbers = steps["step"].cast(pl.Int64)
    if repeated := steps.height - numbers.n_unique():
        yield f"the step table repeats {repeated} step(s) of {window.window_id}"
    elif steps.height > window.steps or (steps.height < window.steps and "steps" not in facts.files.incomplete):
        yield f"the step table holds {steps.height} steps of {window.window_id}, which counts {window.steps}"
    elif steps.height == window.steps and steps.height and numbers[-1] - numbers[0] != steps.height - 1:
        yield f"the {steps.height} steps of {window.window_id} are numbered {numbers[0]} to {numbers[-1]}"
    counted = steps.height == window.steps and not (facts.is_command and steps.is_empty())
    if counted and (images := int(steps["images"].sum())) != window.images:
        yield f"the step table counts {images} images in {window.window_id}, which counts {window.images}"
    elif steps["images"].n_unique() > 1:
        sizes = ", ".join(map(str, steps["images"].unique().sort()[:5]))
        yield f"the steps of {window.window_id} differ in images: {sizes}"


def check_device_time(facts: Facts, window: Window, span: Span, steps: pl.DataFrame) -> Iterator[str]:
    if steps.height != window.steps or steps.is_empty():
        return
    seconds = (span[1] - span[0]) * 1e-9
    host_s = float((steps["t_end_mono_ns"] - steps["t_start_mono_ns"]).sum()) * 1e-9
    wait_s = float(steps["data_wait_ns"].sum()) * 1e-9
    if steps["device_ms"].null_count():
        kind, busy_s = "on the host", host_s
    else:
        kind, busy_s = "on the GPU", float(steps["device_ms"].cast(pl.Float64).sum()) * 1e-3
        if busy_s > MAX_DEVICE_SHARE * seconds:
            yield f"the steps took {busy_s:.2f} s on the GPU, in a window of {seconds:.2f} s"
    # Stalls are told elsewhere; on the host, steps include the wait for data.
    explained_s = busy_s + _idle_host_s(steps, span) + find_stalls(steps, span).seconds
    explained_s += 0 if kind == "on the host" else wait_s
    # Between calls of different work lie warm-ups that are not timed.
    if facts.uniform_steps and explained_s < MIN_EXPLAINED_SHARE * seconds:
        yield (
            f"the steps took {busy_s:.2f} s {kind}, and waited {wait_s:.2f} s for data: "
            f"that does not explain a window of {seconds:.2f} s"
        )


def _idle_host_s(rows: pl.DataFrame, span: Span) -> float:
    """Return the time in which no step was being queued, before the last one."""
    starts, ends = rows["t_start_mono_ns"], rows["t_end_mono_ns"].shift(1, fill_value=span[0])
    return float((starts - ends).clip(0).sum()) * 1e-9


def check_losses(_: Facts, window: Window, __: Span, steps: pl.DataFrame) -> Iterator[str]:
    losses = steps["loss"].drop_nulls()
    if count := int((~losses.is_finite()).sum()):
        yield f"{count} of {len(losses)} losses of {window.window_id} are not finite"
