"""Checks of windows.json and of the step table: against their clocks, each other, and the manifest."""

import datetime as dt
from collections.abc import Iterator

import polars as pl

from analysis.metrics.facts import CLOCKS_AGREE_S, Facts, number
from analysis.metrics.gpu_samples import Span
from analysis.metrics.steadiness import find_stalls
from inpaint_bench.core.console import pluralize, share
from inpaint_bench.core.records import Window
from inpaint_bench.core.schema import Status, WindowKind
from inpaint_bench.core.workloads import declarations

from .inputs import Finished

SHORT_WINDOW_S, SHORT_WINDOW_STEPS = 20.0, 50
CLOCK_TOLERANCE_S, CLOCK_TOLERANCE = 0.5, 0.01
EARLIEST_NS = int(dt.datetime(2020, 1, 1, tzinfo=dt.UTC).timestamp()) * 10**9  # before any version of this program
LATEST_NS = int(dt.datetime(2100, 1, 1, tzinfo=dt.UTC).timestamp()) * 10**9
LATE_RECORD_S = 1.5  # losses are read and some rows written in between
RATE_TOLERANCE = 1e-6  # the manifest's last rate is computed from the same window
# CUDA events of one stream do not overlap: together they last as long as the window at most. In 89 windows on H200
# cards they were 20 to 100 % of it, and with the wait for data 96.5 to 102 %; the rest is the host between two steps.
MAX_DEVICE_SHARE = 1.01
MIN_EXPLAINED_SHARE = 0.85


def clock_tolerance_s(seconds: float) -> float:
    """Return by how much the wall clock and the monotonic clock may drift apart over this time."""
    return max(CLOCK_TOLERANCE_S, CLOCK_TOLERANCE * seconds)


def check_length(_: Facts, window: Window, span: Span) -> Iterator[str]:
    seconds = (span[1] - span[0]) * 1e-9
    if seconds < SHORT_WINDOW_S or 0 < window.steps < SHORT_WINDOW_STEPS:
        yield f"short window: {seconds:.1f} s" + (f", {window.steps} steps" if window.steps else "")


def check_clocks(_: Facts, window: Window, span: Span) -> Iterator[str]:
    if window.t_end_unix_ns is None:
        return
    seconds, wall_s = (span[1] - span[0]) * 1e-9, (window.t_end_unix_ns - window.t_start_unix_ns) * 1e-9
    if abs(wall_s - seconds) > clock_tolerance_s(seconds):
        durations = f"{seconds:.2f} s by the monotonic clock, {wall_s:.2f} s by the wall clock"
        yield f"clock jump: the window lasted {durations}"


def check_overlaps(facts: Facts, window: Window, _: Span) -> Iterator[str]:
    """Look for time that a measure window shares with another window of the run.

    Windows of an earlier boot may have equal monotonic times by chance: both clocks must agree.
    """
    for other in facts.windows:
        shared_ns = [_shared_ns(window, other, clock) for clock in ("mono", "unix")]
        if other is not window and min(shared_ns) > 0:
            prefix = "warm-up included: " if other.kind == WindowKind.WARMUP else ""
            time = "the start" if other.t_end_mono_ns is None else f"{shared_ns[0] * 1e-9:.2f} s"
            yield f"{prefix}the measure window shares {time} with {other.kind} window {other.window_id}"


def _shared_ns(window: Window, other: Window, clock: str) -> int:
    """Return how long both are open at once. A window without an end is open at its start only."""
    starts, ends = ([getattr(w, f"t_{edge}_{clock}_ns") for w in (window, other)] for edge in ("start", "end"))
    ends = [start + 1 if end is None else end for start, end in zip(starts, ends, strict=True)]
    return int(min(ends) - max(starts))


def check_names(facts: Facts) -> Iterator[str]:
    names = [window.window_id for window in facts.windows]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        yield f"windows.json lists {', '.join(repeated)} more than once"
    for window in facts.windows:
        kind = window.window_id.partition("-")[0]
        if kind in set(WindowKind) and kind != window.kind:
            yield f"windows.json calls {window.window_id} a {window.kind} window"
    unknown = set(facts.tables["steps"]["window_id"].unique().drop_nulls().cast(pl.String)) - set(names)
    if unknown:
        yield f"the step table has steps of {', '.join(sorted(unknown))}, which windows.json does not list"


def check_counts(facts: Facts) -> Iterator[str]:
    gpus, batch = facts.manifest.gpus or 1, facts.manifest.batch
    declared = declarations().get(facts.manifest.workload or "")
    copies = 1 if declared and declared.Config.divides_images else gpus  # copies of a batch
    measured = {window.window_id for window, _ in facts.measured}
    for window in facts.windows:
        of = "measure window" if window.window_id in measured else window.window_id
        if window.steps < 0 or window.images < 0:
            yield f"{of} counts {window.steps} steps and {window.images} images"
        elif window.window_id in measured and not window.images and not facts.is_command:
            yield "the measure window counts no images"
        elif batch is not None and window.images != window.steps * batch * copies:
            expected = f"{pluralize(window.steps, 'step')} of batch {batch} on {pluralize(gpus, 'GPU')}"
            yield f"{window.images} images are not {expected}" + ("" if of == "measure window" else f" in {of}")
    stated = number((facts.manifest.workload_facts or {}).get("images_stated"))
    if stated not in (None, counted := sum(window.images for window, _ in facts.measured)):
        yield f"--images {stated:.0f} was stated, and the measure window counts {counted} images"


def check_run_times(facts: Facts) -> Iterator[str]:
    manifest, slack_ns = facts.manifest, round(CLOCK_TOLERANCE_S * 1e9)
    started, ended = manifest.started_unix_ns, manifest.ended_unix_ns
    for text, time_ns in (("started", started), ("ended", ended)):
        if time_ns is not None and not EARLIEST_NS < time_ns < LATEST_NS:
            yield f"the manifest says that the run {text} at {time_ns} ns since 1970, which is not in 2020 to 2100"
            return
    if started is None or ended is None:
        return
    if ended < started:
        yield f"the manifest says that the run ended {(started - ended) * 1e-9:.1f} s before it started"
    stated = manifest.workload_facts or {}
    opened_ns = min((window.t_start_unix_ns for window, _ in facts.measured), default=ended)
    for name in ("setup_s", "compile_s"):
        seconds, before_s = number(stated.get(name)) or 0.0, (opened_ns - started) * 1e-9
        if seconds > before_s + CLOCK_TOLERANCE_S and not facts.started_before:
            yield f"{name} is {seconds:.1f}, and the measure window opened {before_s:.1f} s after the start"
    for window in facts.windows:
        early_s = (started - window.t_start_unix_ns) * 1e-9
        if early_s * 1e9 > slack_ns and not facts.started_before:
            yield f"{window.window_id} opened {early_s:.1f} s before the run started, which was started only once"
        late_s = ((window.t_end_unix_ns or window.t_start_unix_ns) - ended) * 1e-9
        if late_s * 1e9 > slack_ns:
            yield f"{window.window_id} closed {late_s:.1f} s after the run ended"


def check_progress(facts: Facts) -> Iterator[str]:
    last, late_s = _last_recorded(facts)
    progress = facts.manifest.progress
    if progress is None or last is None or last.status != Status.COMPLETED or not last.seconds or last.seconds <= 0:
        return
    if late_s < -CLOCKS_AGREE_S:
        yield f"{last.window_id} closed {-late_s:.2f} s after the manifest recorded its end"
    rate = last.images / last.seconds
    if progress.images_per_s is not None and abs(progress.images_per_s / rate - 1) > RATE_TOLERANCE:
        recorded = f"the manifest recorded {progress.images_per_s:.6g} images/s as it closed"
        counted = f"{last.images} images in the {last.seconds:.3f} s of {last.window_id}"
        yield f"{counted} are {rate:.6g} images/s; {recorded}"
    numbers = facts.steps_of(last)["step"].to_list()
    if numbers and progress.step != max(numbers) + 1:
        yield f"the manifest counts {progress.step} steps, and the step table ends with number {max(numbers)}"


def check_record(facts: Facts) -> Iterator[str]:
    last, late_s = _last_recorded(facts)
    if last is not None and late_s > LATE_RECORD_S:
        reasons = "the disk was slow, or the times of the worker are not those of the run"
        yield f"the manifest recorded the end of {last.window_id} {late_s:.2f} s after it: {reasons}"


def _last_recorded(facts: Facts) -> tuple[Window | None, float]:
    """Return the last window of steps, None if its end is unknown, and how much later the manifest recorded it."""
    progress = facts.manifest.progress
    last = next((window for window in reversed(facts.own_windows) if window.steps), None)
    if progress is None or progress.t_unix_ns is None or last is None or last.t_end_unix_ns is None:
        return None, 0.0
    return last, (progress.t_unix_ns - last.t_end_unix_ns) * 1e-9


def check_places(_: Facts, __: Window, span: Span, steps: pl.DataFrame) -> Iterator[str]:
    start, end = pl.col("t_start_mono_ns"), pl.col("t_end_mono_ns")
    problems = {
        "warm-up included: {} began before the measure window opened": start < span[0],
        "{} ended after the measure window closed": end > span[1],
        "clock jump: the times of steps go back at {}": (start < end.shift(1)) | (end < start),
        "{} waited longer for data than they lasted": pl.col("data_wait_ns") > end - start,
    }
    counts = steps.select(condition.sum().alias(text) for text, condition in problems.items())
    yield from (text.format(pluralize(count, "step")) for text, count in counts.row(0, named=True).items() if count)


def check_rows(facts: Facts, window: Window, _: Span, steps: pl.DataFrame) -> Iterator[str]:
    numbers = steps["step"].cast(pl.Int64)
    if repeated := steps.height - numbers.n_unique():
        yield f"the step table repeats {pluralize(repeated, 'step')} of {window.window_id}"
    elif steps.height > window.steps or (steps.height < window.steps and "steps" not in facts.files.incomplete):
        yield f"the step table has {pluralize(steps.height, 'step')} of {window.window_id}, which counts {window.steps}"
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
    # Idle: no step was being queued. Stalls are told elsewhere; on the host, steps include the wait for data.
    idle = steps["t_start_mono_ns"] - steps["t_end_mono_ns"].shift(1, fill_value=span[0])
    explained_s = busy_s + float(idle.clip(0).sum()) * 1e-9 + find_stalls(steps, span).seconds
    explained_s += 0 if kind == "on the host" else wait_s
    # Between calls of different work lie warm-ups that are not timed.
    if facts.uniform_steps and explained_s < MIN_EXPLAINED_SHARE * seconds:
        yield (
            f"the steps took {busy_s:.2f} s {kind}, and waited {wait_s:.2f} s for data: "
            f"that does not explain a window of {seconds:.2f} s"
        )


def check_losses(_: Facts, window: Window, __: Span, steps: pl.DataFrame) -> Iterator[str]:
    losses = steps["loss"].drop_nulls()
    if count := int((~losses.is_finite()).sum()):
        yield f"{window.window_id}: {share(count, len(losses), 'loss', 'are')} not finite"


def cut_short(facts: Facts) -> Iterator[str]:
    measured = sum(window.kind == WindowKind.MEASURE for window in facts.windows)
    if cut := measured - len(facts.measured):
        yield f"{pluralize(cut, 'measure window')} cut short and left out"


def warnings(run: Finished) -> Iterator[str]:
    row, steady, held = run.row, run.rates.steadiness, run.rates.steps_in_table
    if held not in (None, row["n_steps"]):
        yield f"step table holds {share(held or 0, row['n_steps'] or 0, 'step')}"
    if steady is not None and steady.verdict == "no":
        yield steady.explanation
    if row["stalls"]:
        cost = " stalled for {stall_s:.1f} s, {stall_pct:.1f} % of the measure window; "
        rates = "{images_per_s_steady:.4g} images/s without, in place of {images_per_s:.4g}"
        yield pluralize(row["stalls"], "step") + (cost + rates).format(**row)
    if run.facts.is_command and not run.facts.uniform_steps and row["images"]:
        yield "the images are those of --images, over the whole command, its start included"
