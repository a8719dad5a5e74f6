"""Where the time of an image goes, per cell: the parts that were measured, stacked to the total."""

import polars as pl

from analysis.dataset import Dataset
from analysis.units import number
from inpaint_bench.core.console import pluralize
from inpaint_bench.core.schema import Status, WindowKind

from . import base, svg
from .base import Figure, Row

MAX_CELLS = 24  # bars of one figure
DEVICE, UNDIVIDED, WAIT, OTHER = "Device", "Step, undivided", "Lost to data", "Host and other"
VALIDATION, CHECKPOINT = "Validation", "Checkpoint"
_COLOURS = {
    DEVICE: svg.SERIES[0],
    UNDIVIDED: svg.SERIES[5],
    WAIT: svg.SERIES[1],
    OTHER: svg.SERIES_GREY,
    VALIDATION: svg.SERIES[2],
    CHECKPOINT: svg.SERIES[3],
}
_ORDER = list(_COLOURS)  # order of the stack
_OUTSIDE_STEPS = {WindowKind.VALIDATION: VALIDATION, WindowKind.CHECKPOINT: CHECKPOINT}
ONE_PART = 0.95  # a bar of which one part has this share shows nothing else
DIVIDED = f"Time per image: one part is at least {ONE_PART:.0%} of every bar; a profile divides it by kernels."
ABSENT = "Time per image: no valid run has a table of its steps."


def draw(dataset: Dataset, cells: pl.DataFrame) -> Figure | str:
    """Draw the milliseconds per image of the fastest cells; return the reason if no cell has them."""
    cells = cells.drop_nulls("images_per_s")  # null if the steps of a workload differ in their work
    parts_of_run = per_run(dataset, base.run_ids_of(cells))
    known = [(cell, parts) for cell in cells.to_dicts() if (parts := per_cell(cell, parts_of_run))]
    if not known:
        return ABSENT
    fastest = sorted(range(len(known)), key=lambda index: -known[index][0]["images_per_s"])[:MAX_CELLS]
    shown = [known[index] for index in sorted(fastest)]  # in the order of the tables
    if min(max(parts.values()) / sum(parts.values()) for _, parts in shown) >= ONE_PART:
        return DIVIDED
    rows, totals = [], []
    for cell, parts in shown:
        label, total = f"{cell['series']}, {cell['batch']}", sum(parts.values())
        rows += [{"label": label, "part": part, "value": ms, "order": _ORDER.index(part)} for part, ms in parts.items()]
        largest = max(parts, key=lambda part: parts[part])
        text = f"{number(total)} ms, {largest} {100 * parts[largest] / total:.1f} %"
        totals.append({"label": label, "value": total, "text": text})
    run_ids = [run_id for cell, _ in shown for run_id in cell["run_ids"] if run_id in parts_of_run]
    omitted = cells.height - len(known)
    used = [part for part in _ORDER if any(part in parts for _, parts in shown)]
    caption = [
        *_part_notes(used),
        f"The {len(shown)} fastest of {len(known)} cells." if len(shown) < len(known) else "",
        f"{pluralize(omitted, 'cell')} without a complete table of steps omitted." if omitted else "",
        base.n_note(run_ids, len(shown)),
    ]
    subtitle = "Milliseconds per image, mean over runs; rows: series, batch size"
    chart = base.stacks(rows, totals, {part: _COLOURS[part] for part in used}, "ms per image")
    return base.figure("fig-step-time", "Time per image", subtitle, caption, chart, run_ids)


def per_run(dataset: Dataset, run_ids: list[str]) -> dict[str, dict[str, float]]:
    """Return the parts of each run in ms per image of its measurement windows.

    Runs whose table of steps is missing or incomplete are left out.
    """
    completed = (pl.col("status") == Status.COMPLETED.value) & pl.col("run_id").is_in(run_ids)
    windows = dataset.windows.filter(completed)
    kind, ms = pl.col("kind"), 1e-6 * (pl.col("t_end_mono_ns") - pl.col("t_start_mono_ns"))
    measured = kind == WindowKind.MEASURE.value
    totals = windows.group_by("run_id").agg(
        pl.col("steps", "images").filter(measured).sum(),
        ms=ms.filter(measured).sum(),
        trained=pl.col("images").filter(measured | (kind == WindowKind.WARMUP.value)).sum(),
        **{part: ms.filter(kind == window.value).sum() for window, part in _OUTSIDE_STEPS.items()},
    )
    device = pl.col("device_ms").cast(pl.Float64)
    steps = (
        dataset.scan("steps")
        .select(pl.col("run_id", "window_id").cast(pl.String), "data_wait_ns", "device_ms")
        .join(windows.lazy().filter(measured).select("run_id", "window_id"), on=["run_id", "window_id"], how="semi")
        .group_by("run_id")
        .agg(
            rows=pl.len(),
            wait=1e-6 * pl.col("data_wait_ns").sum(),
            # The sum over some of the steps would look like a fast device.
            device=pl.when(device.null_count() == 0).then(device.sum()),
        )
        .collect()
    )
    # Only with a row for every step: the parts must add up to the windows.
    complete = totals.join(steps, on="run_id").filter((pl.col("images") > 0) & (pl.col("rows") == pl.col("steps")))
    parts_of_run = {}
    for row in complete.iter_rows(named=True):
        total, wait, device = row["ms"], row["wait"], row["device"]
        # At most this long the device had nothing to do. On a CPU nothing runs ahead, so all waiting is lost time.
        idle = total if device is None else max(0.0, total - device)
        lost = min(wait, idle)
        parts = {DEVICE: total - idle, WAIT: lost, OTHER: idle - lost}
        parts = {UNDIVIDED: max(0.0, total - wait), WAIT: lost} if device is None else parts
        # Validations and checkpoints belong to the whole training, so to the images of the warm-up as well.
        outside = {part: row[part] / row["trained"] for part in _OUTSIDE_STEPS.values() if row[part]}
        parts_of_run[row["run_id"]] = {part: total / row["images"] for part, total in parts.items()} | outside
    return parts_of_run


def per_cell(cell: Row, parts_of_run: dict[str, dict[str, float]]) -> dict[str, float]:
    """Return the means over the runs of a cell; empty if none has parts, or if they are divided differently."""
    known = [parts_of_run[run_id] for run_id in cell["run_ids"] if run_id in parts_of_run]
    if not known or len({DEVICE in parts for parts in known}) > 1:
        return {}
    used = {part for parts in known for part in parts}
    return {part: sum(parts.get(part, 0.0) for parts in known) / len(known) for part in _ORDER if part in used}


def _part_notes(used: list[str]) -> list[str]:
    texts = {
        DEVICE: "between the CUDA events around a step (copy, forward, backward, optimizer), with gaps between kernels",
        WAIT: "at most, because the host waits for the next data while the device still works off earlier steps",
        UNDIVIDED: "there are no CUDA events, so only the wait for data is separated",
        VALIDATION: "outside the measurement windows, averaged over all training images",
        CHECKPOINT: "outside the measurement windows, averaged over all training images",
    }
    return [f"{part}: {texts[part]}." for part in used if part in texts and (part != WAIT or DEVICE in used)]
