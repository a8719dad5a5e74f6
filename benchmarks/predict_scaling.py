"""Predict training on 8 GPUs of a node and on two nodes from measured runs of one and two GPUs. Not measured.

A step on n GPUs takes the step of one GPU, and the part of the communication that the backward pass does not hide:

    communication(n) = 2 (n - 1) / n * bytes of gradients / rate of the slowest link in the ring
    exposed(n) = max(share * communication(n), communication(n) - window)

`share` is calibrated: what two GPUs of one node lose per step, over communication(2), at the same batch per GPU. If
it is above 1, the exchange costs more than the link's rate explains: its kernels take multiprocessors and bandwidth
from the others, or the link stays below its rate. Between nodes, where the network is what takes time, it counts as
at most 1: an assumption. The window is the part of a step in which gradients can travel, assumed as BACKWARD of it.
Within a node the link's rate cancels out while `share` decides. The range is from nothing exposed but what the window
cannot hold, to everything. Assumed is that data arrives as fast on every GPU, that all ranks are equally fast, and
that DDP sends gradients of the type of the weights; latency is not in it, and ZeRO and FSDP2 send other bytes.

Rates are of one direction: NVLink's from NVIDIA's data sheets (published, half of the figure for both directions), the
network's by default that of one HDR100 port per node, as TAMU's pages state of Grace (published). NCCL stays below
both: the faster end of the range is a bound, and so is the slower one where nothing is calibrated.

usage: python -m benchmarks.predict_scaling DATASET [--recipe NAME] [--batch N] [--per-node 8] [--nvlink-gb-s RATE]
           [--network-gb-s RATE] [--source TEXT]
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from analysis import recipe_labels
from analysis.dataset import Dataset, open_dataset
from analysis.report.sections.scaling import find_series
from analysis.report.tables import TableBuilder
from analysis.stats.cells import Cell
from inpaint_bench.cli.exit_codes import guarded
from inpaint_bench.core.errors import UserError

PARAMETERS = {"sd15_inpaint": 859_535_364}  # of the UNet, which DDP averages
# GB/s in one direction, of all NVLinks of a GPU: half of the data sheets' 600 and 900.
NVLINK_GB_S = {"a100": 300.0, "h100": 450.0, "h200": 450.0}
HDR100_GB_S = 12.5
BACKWARD = 2 / 3  # of a step: a backward pass computes about twice what the forward pass does
NARROW = re.compile(r"\b(bf16_(master|split|stochastic)|compress_bf16)\b")  # levers with gradients of two bytes


@dataclass(frozen=True, kw_only=True)
class Links:
    """Rates in GB/s, of one direction."""

    nvlink: float
    network: float  # between nodes, of all ports of a node together

    def communication_ms(self, gpus: int, nodes: int, gradient_bytes: float) -> float:
        """Return how long a ring takes to average the gradients."""
        rate = self.nvlink if nodes == 1 else min(self.nvlink, self.network)
        return 2 * (gpus - 1) / gpus * gradient_bytes / (rate * 1e9) * 1e3


@dataclass(frozen=True, kw_only=True)
class Model:
    """A measured step of one GPU, and of two where there is one."""

    batch: int  # per GPU
    step_ms_1: float
    step_ms_2: float | None
    gradient_bytes: float
    links: Links

    @property
    def share(self) -> float | None:
        """Return what the communication costs, as a share of its time by the link's rate; None: not calibrated."""
        if self.step_ms_2 is None:
            return None
        return max(0.0, self.step_ms_2 - self.step_ms_1) / self.links.communication_ms(2, 1, self.gradient_bytes)

    def step_ms(self, gpus: int, nodes: int) -> tuple[float | None, float, float]:
        """Return the time of a step, None where it is not calibrated, and the range that the assumptions allow."""
        sent_ms = self.links.communication_ms(gpus, nodes, self.gradient_bytes)
        beyond_ms = max(0.0, sent_ms - BACKWARD * self.step_ms_1)
        share = self.share
        if share is not None and nodes > 1:
            share = min(share, 1.0)
        exposed_ms = None if share is None else max(share * sent_ms, beyond_ms)
        most_ms = max(sent_ms, exposed_ms or 0.0)
        step_ms = None if exposed_ms is None else self.step_ms_1 + exposed_ms
        return step_ms, self.step_ms_1 + beyond_ms, self.step_ms_1 + most_ms

    def rate(self, gpus: int, step_ms: float) -> float:
        """Return images/s."""
        return 1e3 * gpus * self.batch / step_ms


def measured(dataset: Dataset) -> Iterator[tuple[Cell, Cell | None]]:
    """Yield the cells of one GPU of a training, each with that of two GPUs of a node with the same batch per GPU."""
    cells = TableBuilder(runs=dataset.runs.filter("valid")).cells
    pairs = {}
    for series in find_series(cells):
        cell_1, *others = series.cells
        if series.kind == "weak" and cell_1["gpus"] == 1:
            pairs[tuple(cell_1["run_ids"])] = next((c for c in others if (c["gpus"], c["nodes"]) == (2, 1)), None)
    known = cells.filter(pl.col("workload") == "finetune_inpaint", pl.col("gpus") == 1).drop_nulls("images_per_s")
    for cell in known.to_dicts():
        yield cell, pairs.get(tuple(cell["run_ids"]))


def table(
    dataset: Dataset, folder: str, nvlink: float | None, network: float, per_node: int, source: str,
    recipe: str | None = None, batch: int | None = None,
) -> str:  # fmt: skip
    """Return the predictions as text. Raises UserError where the dataset has no run to start from."""
    levers = dict(dataset.runs.select("run_id", "levers").iter_rows())
    blocks = []
    for cell_1, cell_2 in measured(dataset):
        if recipe not in (None, cell_1["recipe"]) or batch not in (None, cell_1["batch"]):
            continue
        if cell_1["model"] not in PARAMETERS:
            raise UserError(
                f"model {cell_1['model']}: its number of weights is not known here ({', '.join(PARAMETERS)})"
            )
        rate = nvlink or NVLINK_GB_S.get(cell_1["gpu"])
        if rate is None:
            raise UserError(f"gpu {cell_1['gpu']}: no rate of NVLink is known; give --nvlink-gb-s, and --source for it")
        narrow = NARROW.search(levers[cell_1["run_ids"][0]] or "")
        model = Model(
            batch=cell_1["batch"],
            step_ms_1=1e3 * cell_1["batch"] / cell_1["images_per_s"],
            step_ms_2=cell_2 and 2e3 * cell_2["batch"] / cell_2["images_per_s"],
            gradient_bytes=PARAMETERS[cell_1["model"]] * (2 if narrow else 4),
            links=Links(nvlink=rate, network=network),
        )
        blocks.append("\n".join(_block(model, cell_1, cell_2, folder, per_node, source)))
    if not blocks:
        raise UserError(f"{folder}: no valid run of finetune_inpaint on one GPU (with this recipe and batch)")
    return "\n\n".join(blocks)


def _block(model: Model, cell_1: Cell, cell_2: Cell | None, folder: str, per_node: int, source: str) -> Iterator[str]:
    yield (
        f"PREDICTION, NOT MEASURED: {cell_1['gpu']}, {cell_1[recipe_labels.COLUMN] or cell_1['recipe']}, "
        f"{cell_1['model']}, batch {cell_1['batch']} per GPU (weak scaling)"
    )
    if cell_2 is None:
        yield f"NOT CALIBRATED: {folder} has no runs of two GPUs like these; only the range is known."
    else:
        yield (
            f"Calibrated on {folder}: {cell_1['n']} runs of one GPU and {cell_2['n']} of two; "
            f"a step loses {model.share or 0:.2g} times what the communication takes at the link's rate."
        )
    yield (
        f"Gradients {model.gradient_bytes / 1e9:.2f} GB; NVLink {model.links.nvlink:g} GB/s, between nodes "
        f"{model.links.network:g} GB/s ({source})"
    )
    yield f"{'GPUs':>5}{'nodes':>6}{'communication [ms]':>20}{'step [ms]':>28}{'images/s':>30}{'efficiency [%]':>26}"
    alone = model.rate(1, model.step_ms_1)
    yield f"{1:5}{1:6}{'-':>20}{f'{model.step_ms_1:.1f} measured':>28}{f'{alone:.1f} measured':>30}{'-':>26}"
    if model.step_ms_2 is not None:
        sent_ms, rate = model.links.communication_ms(2, 1, model.gradient_bytes), model.rate(2, model.step_ms_2)
        yield (
            f"{2:5}{1:6}{sent_ms:20.1f}{f'{model.step_ms_2:.1f} measured':>28}{f'{rate:.1f} measured':>30}"
            f"{f'{50 * rate / alone:.1f} measured':>26}"
        )
    counts = [n for n in (2, 4, 8) if n < per_node and (n > 2 or model.step_ms_2 is None)]
    for gpus, nodes in (*((n, 1) for n in (*counts, per_node)), (2 * per_node, 2)):
        step_ms, least_ms, most_ms = model.step_ms(gpus, nodes)
        rates = [None if ms is None else model.rate(gpus, ms) for ms in (step_ms, most_ms, least_ms)]
        shares = [None if rate is None else 100 * rate / gpus / alone for rate in rates]
        sent_ms = model.links.communication_ms(gpus, nodes, model.gradient_bytes)
        yield (
            f"{gpus:5}{nodes:6}{sent_ms:20.1f}{_range(step_ms, least_ms, most_ms):>28}{_range(*rates):>30}"
            f"{_range(*shares):>26}"
        )
    yield "In parentheses: all hidden that fits beside the backward pass, and nothing. Assumptions: see the docstring."


def _range(value: float | None, low: float | None, high: float | None) -> str:
    return f"{'-' if value is None else f'{value:.1f}'} ({low:.1f} to {high:.1f})"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", type=Path, help="merged runs of one and, to calibrate, two GPUs")
    parser.add_argument("--recipe", help="only this recipe, as the dataset names it")
    parser.add_argument("--batch", type=int, help="only this batch per GPU")
    parser.add_argument("--per-node", type=int, default=8, metavar="N", help="GPUs of a node")
    parser.add_argument("--nvlink-gb-s", type=float, metavar="RATE", help="of one direction; else the data sheet's")
    parser.add_argument(
        "--network-gb-s", type=float, default=HDR100_GB_S, metavar="RATE", help="of all ports of a node"
    )
    source = "published: NVIDIA's data sheets; one HDR100 port per node"
    parser.add_argument("--source", default=source, help="where the rates are from")
    options = parser.parse_args(argv)
    for name in ("nvlink_gb_s", "network_gb_s", "per_node", "batch"):
        if (value := getattr(options, name)) is not None and value <= 0:
            raise UserError(f"--{name.replace('_', '-')} {value:g}: must be above 0")
    if options.per_node < 2:
        raise UserError(f"--per-node {options.per_node}: one GPU has nobody to exchange gradients with")
    rates_given = options.nvlink_gb_s is not None or options.network_gb_s != HDR100_GB_S
    if rates_given and options.source == source:
        raise UserError("--nvlink-gb-s, --network-gb-s: say where the rates are from, with --source")
    print(
        table(
            open_dataset(options.dataset),
            options.dataset.name,
            options.nvlink_gb_s,
            options.network_gb_s,
            options.per_node,
            options.source,
            recipe=options.recipe,
            batch=options.batch,
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(guarded(main))
