"""Checks of the step table against the measure windows: places, numbers, images, times and losses."""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl

from analysis.metrics.gpu_samples import Span
from analysis.metrics.stalls import find_stalls

from .evidence import Evidence

# CUDA events of one stream do not overlap: together they last as long as the window at most. Of 89 windows on H200
# cards they were 20 to 100 %, and with the wait for data 96.5 to 102 %; the rest is the host between two steps.
MAX_DEVICE_SHARE = 1.01
MIN_EXPLAINED_SHARE = 0.85


def check_places(evidence: Evidence) -> Iterator[str]:
    """Check that the window's steps lie inside it, one after the other."""
    for window, span in evidence.measured:
        start, end = pl.col("t_start_mono_ns"), pl.col("t_end_mono_ns")
        problems = {
            "warm-up included: {} step(s) began before the measure window opened": start < span[0],
            "{} step(s) ended after the measure window closed": end > span[1],
            "clock jump: the times of steps go back in {} places": (start.diff() < 0) | (end < start),
            "{} step(s) waited longer for data than they lasted": pl.col("data_wait_ns") > end - start,
        }
        counts = evidence.steps_of(window).select(condition.sum().alias(text) for text, condition in problems.items())
        yield from (text.format(count) for text, count in counts.row(0, named=True).items() if count)


def check_rows(evidence: Evidence) -> Iterator[str]:
    """Compare number and images of the rows with the window. Rows of a file that was left out may be missing."""
    for window, _ in evidence.measured:
        rows = evidence.steps_of(window)
        numbers = rows["step"].cast(pl.Int64)
        if repeated := rows.height - numbers.n_unique():
            yield f"the step table repeats {repeated} step(s) of {window.window_id}"
        elif rows.height > window.steps or (rows.height < window.steps and "steps" not in evidence.files.incomplete):
            yield f"the step table holds {rows.height} steps of {window.window_id}, which counts {window.steps}"
        elif rows.height == window.steps and rows.height and numbers[-1] - numbers[0] != rows.height - 1:
            yield f"the {rows.height} steps of {window.window_id} are numbered {numbers[0]} to {numbers[-1]}"
        counted = rows.height == window.steps and not (evidence.is_command and rows.is_empty())
        if counted and (images := int(rows["images"].sum())) != window.images:
            yield f"the step table counts {images} images in {window.window_id}, which counts {window.images}"
        elif rows["images"].n_unique() > 1:
            sizes = ", ".join(map(str, rows["images"].unique().sort()[:5]))
            yield f"the steps of {window.window_id} differ in images: {sizes}"


def check_device_time(evidence: Evidence) -> Iterator[str]:
    """Compare the steps' own times, by CUDA events or the host's clock, with the wall time of their window."""
    for window, span in evidence.measured:
        rows = evidence.steps_of(window)
        if rows.height != window.steps or rows.is_empty():
            continue
        seconds = (span[1] - span[0]) * 1e-9
        host_s = float((rows["t_end_mono_ns"] - rows["t_start_mono_ns"]).sum()) * 1e-9
        wait_s = float(rows["data_wait_ns"].sum()) * 1e-9
        if rows["device_ms"].null_count():
            kind, busy_s = "on the host", host_s
        else:
            kind, busy_s = "on the GPU", float(rows["device_ms"].cast(pl.Float64).sum()) * 1e-3
            if busy_s > MAX_DEVICE_SHARE * seconds:
                yield f"the steps took {busy_s:.2f} s on the GPU, in a window of {seconds:.2f} s"
        # Stalls are told elsewhere; on the host, steps include the wait for data.
        explained_s = busy_s + _idle_host_s(rows, span) + find_stalls(rows, span).seconds
        explained_s += 0 if kind == "on the host" else wait_s
        # Between calls of different work lie warm-ups that are not timed.
        if evidence.uniform_steps and explained_s < MIN_EXPLAINED_SHARE * seconds:
            yield (
                f"the steps took {busy_s:.2f} s {kind}, and waited {wait_s:.2f} s for data: "
                f"that does not explain a window of {seconds:.2f} s"
            )


def _idle_host_s(rows: pl.DataFrame, span: Span) -> float:
    """Return the time in which no step was being queued, before the last one."""
    starts, ends = rows["t_start_mono_ns"], rows["t_end_mono_ns"].shift(1, fill_value=span[0])
    return float((starts - ends).clip(0).sum()) * 1e-9


def check_losses(evidence: Evidence) -> Iterator[str]:
    """Look for losses that are not finite: they are no training, and NaNs draw less power than numbers."""
    for window, _ in evidence.measured:
        losses = evidence.steps_of(window)["loss"].drop_nulls()
        if count := int((~losses.is_finite()).sum()):
            yield f"{count} of {len(losses)} losses of {window.window_id} are not finite"


CHECKS = (check_places, check_rows, check_device_time, check_losses)
