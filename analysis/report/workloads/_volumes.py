"""What the sections of both workloads of volume diffusion share: a row per run, means over cells, published figures."""

import math
from collections.abc import Sequence
from typing import Any

import polars as pl

from analysis import published
from analysis.report import names
from analysis.report.estimate import few_runs, mean_of_runs
from analysis.report.figures import base
from analysis.report.figures.base import Figure
from analysis.report.tables import COUNTS, DASH, Section, Table, TableBuilder, cell, counts
from analysis.stats.cells import RUN_COUNTS
from analysis.units import gpu_label, gpu_order, number

SOURCE = "arXiv 2606.19365 (Ryoo et al., ICPE '26), its abstract; networks counted from Med-DDPM's public code"
KEYS = ["site", "gpu", "model", "batch", "recipe", "precision", "variant", "comparability_key"]
PUBLISHED_NAMES = {"whole_head": "whole_head", "brats": "brats_4mod"}
MAKES = {"whole_head": "a scan of a whole head", "brats": "four scans of a brain with a tumour"}
CLAIMS = {
    "sm_cycles_reduction_max": "SM cycles, largest reduction",
    "dynamic_instruction_reduction_max": "executed instructions, largest reduction",
    "tensor_core_utilization_gain": "tensor core utilisation, gain",
    "ipc_gain": "instructions per cycle, gain",
    "quality_degradation": "loss of synthesis quality",
    "dominant_kernels": "kernels that take most time",
}
TFLOP_TOLERANCE = 0.01
PLAIN = ("fp32", "cpu")  # recipes that the others are compared with
FIGURES = ["steps_per_s", "images_per_s", "joules_per_image", "energy_error_pct", "vram_used_mib_peak"]
FIGURES += ["vram_run_mib_peak", "torch_allocated_peak_mib", "parity_prediction_rel", "parity_gradient_rel"]


def cells(results: pl.DataFrame, runs: pl.DataFrame, own: Sequence[str]) -> list[dict[str, Any]]:
    """Return means over the runs of each cell, `own` being columns of the results: of a run the mean of what it has."""
    per_run = results.group_by("run_id").agg(pl.col(name).mean() for name in own)
    keys = [name for name in KEYS if name in runs.columns]
    of_run = runs.select("run_id", *keys, *FIGURES, "gpu_uuid", "node", "seed", "steady")
    joined = per_run.join(of_run, on="run_id").sort("run_id")
    joined = joined.with_columns(joules_per_step=pl.col("joules_per_image") * pl.col("batch"))
    means = pl.col(*FIGURES, "joules_per_step", *own).mean()
    each = pl.struct("run_id", "gpu_uuid", "node", "seed", *FIGURES, "joules_per_step", *own)
    rows = joined.group_by(keys, maintain_order=True).agg(means, n=pl.len(), each=each, **RUN_COUNTS).to_dicts()
    for row in rows:
        plain = _plain(row, rows)
        known = plain and plain["images_per_s"] and row["images_per_s"]
        row["speedup"] = row["images_per_s"] / plain["images_per_s"] if plain and known else None
    return sorted(rows, key=lambda row: (gpu_order(row["gpu"]), row["model"], row["batch"], row["precision"] != "fp32"))


def _plain(row: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the cell of fp32 (IEEE) without another lever, on the same GPU and work."""
    same = ("site", "gpu", "model", "batch", "variant", "comparability_key")
    alike = (other for other in rows if all(other.get(key) == row.get(key) for key in same))
    return next((other for other in alike if other["recipe"] in PLAIN), None)


def section(
    build: TableBuilder, rows: list[dict[str, Any]], columns: dict[str, str], note: str, run_ids: list[str], verb: str
) -> Section:
    """Return answer, table and figure of the cells. `columns` are their figures by heading, the rate first."""
    rate, joules = list(columns.values())[:2]
    unit = "step" if rate == "steps_per_s" else "volume"
    order = sorted((i for i, row in enumerate(rows) if row[rate]), key=lambda i: -rows[i][rate])
    fastest = {(rows[i]["model"], rows[i]["batch"]): rows[i] for i in reversed(order)}
    texts, gpus = [], {row["gpu"] for row in fastest.values()}
    for row in reversed(fastest.values()):
        few = few_runs(row["each"], rate)
        energy = f" and {number(row[joules])} J/{unit}" if row[joules] else ""
        where = f" on {names.gpu(row['gpu'])}" if len(gpus) > 1 else ""
        text = f"{row['model']}: {number(row[rate])} {unit}s/s{energy} with {row['recipe']}{where}{few}"
        ratio = f", {names.versus(row['speedup'], 'the plain recipe')} (fp32)" if (row["speedup"] or 1) != 1 else ""
        texts.append(f"{text}{ratio}")
    networks = dict.fromkeys(row["model"].partition(" ")[0] for row in reversed(fastest.values()))
    makes = names.join([f"{name} makes {MAKES[name]}" for name in networks if name in MAKES])
    explained = f" Med-DDPM's {makes}." if makes else ""
    place = f"On {names.gpu(rows[order[0]]['gpu'])}, " if len(gpus) == 1 else ""
    keys = ["GPU", "Site", "Network", "Batch", "Recipe", "Precision", *COUNTS]
    cells = []
    for row in rows:
        own = (str(row[name] or DASH) for name in ("site", "model", "batch", "recipe", "precision"))
        runs = row["each"]  # without the speed-up
        means = (mean_of_runs(runs, x) or DASH if x in runs[0] else cell(row[x]) for x in columns.values())
        cells.append([gpu_label(row["gpu"]), *own, *counts(row), *means])
    by_fastest = list(dict.fromkeys(rows[i]["model"] for i in order))
    shown = sorted(order, key=lambda i: by_fastest.index(rows[i]["model"]))  # in the table and in the figure
    lead = ("Network", "Recipe", *list(columns)[:2], "Speed-up", "GPU", "n", "Cards")
    options: dict[str, Any] = {"note": note, "lead_columns": lead, "lead_rows": tuple(shown)}
    id, title = f"volume3d-{verb}", f"Volume diffusion, {verb}: by recipe"
    return Section(
        title=f"Volume diffusion: {verb}",
        answer=f"{place}{'; '.join(texts)}.{explained}" if texts else "",
        best=f"{number(rows[order[0]][rate])} {unit}s/s" if texts else "",
        tables=[build.table(id, title, [*keys, *columns], cells, **options)],
        figures=[_figure(f"fig-{id}", [rows[i] for i in shown], rate, unit, run_ids)] if texts else [],
    )


def _figure(id: str, rows: list[dict[str, Any]], rate: str, unit: str, run_ids: list[str]) -> Figure:
    shades = {gpu_label(gpu): shade for gpu, shade in base.gpu_colours(row["gpu"] for row in rows).items()}
    bars = [
        {"label": f"{row['model'].partition(' ')[0]}, {row['recipe']}", "part": gpu_label(row["gpu"]), "order": 0}
        | {"value": row[rate], "text": number(row[rate]) + (f", {number(row['speedup'])} x" if row["speedup"] else "")}
        for row in rows
    ]
    chart = base.stacks(bars, bars, shades, f"{unit}s/s")
    known = "the rate, and its ratio to the plain recipe" if any(row["speedup"] for row in rows) else "the rate"
    notes = [f"Beside each bar: {known}.", base.n_note(run_ids, len(bars))]
    return base.figure(id, f"{unit.capitalize()}s per second", "Mean over runs", notes, chart, run_ids)


def networks(build: TableBuilder, results: pl.DataFrame) -> Table:
    """Return the published networks beside those that ran."""
    own = {row["network"]: row for row in results.sort("run_id").unique("network", keep="first").to_dicts()}
    rows = []
    stated = {row["variant"]: row for row in published.read("medddpm_models.csv").to_dicts()}
    for name, published_name in PUBLISHED_NAMES.items():
        known, ran = stated[published_name], own.get(name)
        rows.append([published_name, known["volume"], f"{known['params']:,}", f"{known['fwd_tflop']:.3f}"])
        if not ran:
            rows[-1] += [DASH] * 3 + ["not measured"]
            continue
        sides = [ran[side] for side in ("depth", "height", "width")]
        per_voxel = ran["forward_tflop"] / math.prod(sides)
        ratio = per_voxel / (known["fwd_tflop"] / math.prod(map(int, known["volume"].split("x"))))
        agrees = ran["parameters"] == known["params"] and abs(ratio - 1) <= TFLOP_TOLERANCE
        measured = f"{ran['forward_tflop']:.3f} at {'x'.join(map(str, sides))}"
        rows[-1] += [f"{ran['parameters']:,}", measured, f"{ratio:.4f}", "yes" if agrees else "no"]
    columns = ["Network", "Published volume", "Published parameters", "Published forward [TFLOP]"]
    columns += ["Parameters of the runs", "Forward of the runs [TFLOP]", "FLOP per voxel / published", "Agrees"]
    note = (
        f"Published: {SOURCE}. Agrees: the same number of parameters, and FLOP per voxel within "
        f"{100 * TFLOP_TOLERANCE:g} %; attention makes them depend on the volume a little."
    )
    return build.table("volume3d-networks", "Published 3-D networks", columns, rows, note=note)
