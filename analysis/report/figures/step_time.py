"""Where the time of a step goes, per cell: only what was measured, stacked to the whole.

Between two CUDA events lie copy, forward, backward and optimizer: nothing measured parts them. Time in which the
loader was waited for while the GPU still worked off earlier steps costs nothing, so of the waiting only what does
not fit beside the GPU's own time is drawn: at most that much was lost to it.
"""

from __future__ import annotations

import polars as pl

from analysis import recipe_labels
from analysis.dataset import Dataset
from analysis.units import number
from inpaint_bench.core.console import pluralize
from inpaint_bench.core.schema import WindowKind, WindowStatus

from . import base, svg
from .base import Figure, Row, Spec, layer

CELLS = 24  # bars of one figure
WORDS_PX = 150  # room for the words behind the longest bar
DEVICE, WHOLE, WAIT, REST = "CUDA events", "Step, undivided", "Data wait", "Host and rest"
VALIDATION, CHECKPOINT = "Validation", "Checkpoint"
_COLOURS = {
    DEVICE: svg.SERIES[0],
    WHOLE: svg.SERIES[5],
    WAIT: svg.SERIES[1],
    REST: svg.SERIES[6],
    VALIDATION: svg.SERIES[2],
    CHECKPOINT: svg.SERIES[3],
}
_BESIDE = {WindowKind.VALIDATION: VALIDATION, WindowKind.CHECKPOINT: CHECKPOINT}
ABSENT = "Time of a step: no run that counts has a table of its steps."


def draw(dataset: Dataset, cells: pl.DataFrame, *, prefix: str) -> Figure | str:
    """Milliseconds per image of every cell, fastest cells first to be kept; else the sentence why there is none."""
    shares = per_run(dataset, base.in_cells(cells))
    found = [(cell, of_cell(cell, shares)) for cell in cells.to_dicts()]
    known = [(cell, parts) for cell, parts in found if parts]
    if not known:
        return ABSENT
    kept = sorted(known, key=lambda one: -one[0]["images_per_s"])[:CELLS]
    kept = [one for one in known if one in kept]  # in the order of the tables
    rows, totals = [], []
    for cell, parts in kept:
        label = f"{cell['series']}, {cell['batch']}"
        whole = sum(parts.values())
        rows += [{"label": label, "part": part, "ms": ms, "place": _place(part)} for part, ms in parts.items()]
        main = max(parts, key=lambda part: parts[part])
        words = f"{number(whole)} ms, {main} {100 * parts[main] / whole:.1f} %"
        totals.append({"label": label, "ms": whole, "words": words})
    ids = [run_id for cell, _ in kept for run_id in cell["run_ids"] if run_id in shares]
    used = [part for part in _COLOURS if any(row["part"] == part for row in rows)]
    title = f"{prefix}Where a step's time goes"
    said = [*_words(used), _left_out(cells.height, len(known), len(kept)), base.of_runs(ids, len(kept))]
    caption = " ".join(filter(None, [*said, recipe_labels.legend_text(cells)]))
    subtitle = "Milliseconds per image, mean over runs; series, batch"
    return base.figure("fig-step-time", title, subtitle, caption, _spec(rows, totals, used), ids)


def _place(part: str) -> int:
    return list(_COLOURS).index(part)


def per_run(dataset: Dataset, run_ids: list[str]) -> dict[str, dict[str, float]]:
    """Parts of each run, in ms per image of its measure windows; runs without a whole table of steps are not there."""
    windows = dataset.windows.filter(
        pl.col("run_id").is_in(run_ids) & (pl.col("status") == WindowStatus.COMPLETED.value)
    ).with_columns((1e-6 * (pl.col("t_end_mono_ns") - pl.col("t_start_mono_ns"))).alias("ms"))
    measured = windows.filter(pl.col("kind") == WindowKind.MEASURE.value)
    counts = measured.group_by("run_id").agg(pl.col("ms").sum(), pl.col("steps").sum(), pl.col("images").sum())
    steps = (
        dataset.scan("steps")
        .select(pl.col("run_id").cast(pl.String), pl.col("window_id").cast(pl.String), "data_wait_ns", "device_ms")
        .join(measured.lazy().select("run_id", "window_id"), on=["run_id", "window_id"], how="semi")
        .group_by("run_id")
        .agg(
            pl.len().alias("rows"),
            (1e-6 * pl.col("data_wait_ns").sum()).alias("wait"),
            pl.col("device_ms").cast(pl.Float64).sum().alias("device"),
            pl.col("device_ms").null_count().alias("unknown"),
        )
        .collect()
    )
    found = {}
    for row in counts.join(steps, on="run_id").iter_rows(named=True):
        if row["images"] and row["rows"] == row["steps"]:
            parts = _inside(row["ms"], row["wait"], None if row["unknown"] else row["device"])
            found[row["run_id"]] = {part: ms / row["images"] for part, ms in parts.items()}
    trained = windows.filter(pl.col("kind").is_in([WindowKind.MEASURE.value, WindowKind.WARMUP.value]))
    images = dict(trained.group_by("run_id").agg(pl.col("images").sum()).iter_rows())
    for kind, part in _BESIDE.items():
        spent = windows.filter(pl.col("kind") == kind.value).group_by("run_id").agg(pl.col("ms").sum())
        for run_id, ms in spent.iter_rows():
            if run_id in found and images.get(run_id):
                found[run_id][part] = ms / images[run_id]
    return found


def _inside(whole: float, wait: float, device: float | None) -> dict[str, float]:
    """Parts that add up to the windows' time. On a processor nothing runs ahead, so that all waiting is time lost."""
    if device is None:
        return {WHOLE: max(0.0, whole - wait), WAIT: min(wait, whole)}
    idle = max(0.0, whole - device)
    lost = min(wait, idle)
    return {DEVICE: whole - idle, WAIT: lost, REST: idle - lost}


def of_cell(cell: Row, shares: dict[str, dict[str, float]]) -> dict[str, float]:
    """Means over the runs of a cell; empty where its runs do not all have the same division, or none."""
    known = [shares[run_id] for run_id in cell["run_ids"] if run_id in shares]
    if not known or len({DEVICE in one for one in known}) > 1:
        return {}
    parts = sorted({part for one in known for part in one}, key=_place)
    return {part: sum(one.get(part, 0.0) for one in known) / len(known) for part in parts}


def _words(used: list[str]) -> list[str]:
    words = []
    if DEVICE in used:
        words.append(
            f"{DEVICE}: between those around a step, with the gaps in which the GPU had no kernel; copy, forward, "
            f"backward and optimizer are not told apart. {WAIT}: at most so much, what the GPU's own time did not hide."
        )
    if WHOLE in used:
        words.append(f"{WHOLE}: there are no CUDA events, and nothing parts it but the wait for data.")
    beside = [part for part in (VALIDATION, CHECKPOINT) if part in used]
    if beside:
        words.append(f"{' and '.join(beside)}: outside the measure windows, spread over all images trained on.")
    else:
        words.append("No run validated or wrote a checkpoint.")
    return words


def _left_out(cells: int, known: int, kept: int) -> str:
    words = [f"The {kept} fastest of {known} cells."] if kept < known else []
    if known < cells:
        words.append(f"{pluralize(cells - known, 'cell')} without a whole table of steps left out.")
    return " ".join(words)


def _spec(rows: list[Row], totals: list[Row], used: list[str]) -> Spec:
    labels = [row["label"] for row in totals]
    width = max(220, base.WIDTH + 40 - base.label_px(labels))
    furthest = max(row["ms"] for row in totals) * width / (width - WORDS_PX)
    x: Spec = {"field": "ms", "type": "quantitative", "title": "ms per image", "stack": "zero"}
    x["scale"] = {"domain": [0, furthest], "nice": False}
    y = base.row_axis(labels)
    scale = {"domain": used, "range": [_COLOURS[part] for part in used]}
    colour = {"field": "part", "type": "nominal", "scale": scale, "legend": {"columns": 3}}
    order = {"field": "place", "type": "quantitative"}
    text = {"type": "text", "align": "left", "dx": 6, "color": svg.MUTED}
    return {
        "width": width,
        "height": {"step": 22},
        "layer": [
            layer(rows, {"type": "bar"}, x=x, y=y, color=colour, order=order),
            layer(totals, text, x={**x, "stack": None}, y=y, text={"field": "words", "type": "nominal"}),
        ],
    }
