"""Predict training on 8 GPUs of a node and on two nodes from measured runs of one and two GPUs. Not measured.

A step on n GPUs takes the step of one GPU, and the part of the communication that the backward pass does not hide:

    communication(n) = 2 (n - 1) / n * bytes of gradients / rate of the slowest link in the ring
    exposed(n) = max(share * communication(n), communication(n) - window)

`share` is calibrated: what two GPUs of one node lose per step, over communication(2), at the same batch per GPU. If
it is above 1, the exchange costs more than the link's rate explains: its kernels take multiprocessors and bandwidth
from the others, or the link stays below its rate. Between nodes, where the network is what takes time, it counts as
at most 1: an assumption. The window is the part of a step in which gradients can travel, assumed as BACKWARD of it.
Within a node the link's rate cancels out while `share` decides. The interval is from nothing exposed but what the
window cannot hold, to everything. Assumed is that data arrives as fast on every GPU, that all ranks are equally fast,
and that DDP sends gradients of the type of the weights; latency is not in it, and ZeRO and FSDP2 send other bytes.

Rates are of one direction: NVLink's from NVIDIA's data sheets (published, half of the figure for both directions), the
network's by default that of one HDR100 port per node, as TAMU's pages state of Grace (published). NCCL stays below
both: the faster end of the interval is a bound, and so is the slower one where nothing is calibrated.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from analysis.dataset import Dataset
from analysis.stats.cells import CELL_KEYS, build_cells, withhold_means
from inpaint_bench.core.errors import UserError

from .claims import METRIC, Claim, ClaimedCell, named, now

PARAMETERS = {"sd15_inpaint": 859_535_364}  # of the UNet, which DDP averages
# GB/s in one direction, of all NVLinks of a GPU: half of the data sheets' 600 and 900.
NVLINK_GB_S = {"a100": 300.0, "h100": 450.0, "h200": 450.0}
HDR100_GB_S, SOURCE = 12.5, "published: one HDR100 port per node"
BACKWARD = 2 / 3  # of a step: a backward pass computes about twice what the forward pass does
NARROW = re.compile(r"\b(bf16_(master|split|stochastic)|compress_bf16)\b")  # levers with gradients of two bytes


@dataclass(frozen=True, kw_only=True)
class Model:
    """A measured step of one GPU, and of two where there is one."""

    batch: int  # per GPU
    step_ms_1: float
    step_ms_2: float | None
    gradient_bytes: float
    nvlink: float  # GB/s, of one direction
    network: float  # likewise between nodes, of all ports of a node together

    def communication_ms(self, gpus: int, nodes: int) -> float:
        """Return how long a ring takes to average the gradients."""
        rate = self.nvlink if nodes == 1 else min(self.nvlink, self.network)
        return 2 * (gpus - 1) / gpus * self.gradient_bytes / (rate * 1e9) * 1e3

    @property
    def share(self) -> float | None:
        """Return what the communication costs, as a share of its time by the link's rate; None: not calibrated."""
        if self.step_ms_2 is None:
            return None
        return max(0.0, self.step_ms_2 - self.step_ms_1) / self.communication_ms(2, 1)

    def step_ms(self, gpus: int, nodes: int) -> tuple[float | None, float, float]:
        """Return the time of a step, None where it is not calibrated, and the range that the assumptions allow."""
        sent_ms = self.communication_ms(gpus, nodes)
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


def models(
    dataset: Dataset, network: float, recipe: str | None, batch: int | None
) -> Iterator[tuple[ClaimedCell, Model]]:
    """Yield each measured cell of one GPU, calibrated by that of two GPUs of a node with the same batch per GPU.

    `network` is in GB/s. Raises UserError where the weights of a model or the links of a GPU are not known.
    """
    levers = dict(dataset.runs.select("run_id", "levers").iter_rows())
    cells = withhold_means(build_cells(dataset.runs)).filter(workload="finetune_inpaint", demonstration=False)
    same = [name for name in CELL_KEYS if name not in ("gpus", "nodes")]
    measured = {}
    for cell in cells.drop_nulls(METRIC).iter_rows(named=True):
        measured[(cell["gpus"], cell["nodes"], *(cell[name] for name in same))] = cell
    for (gpus, _, *keys), cell in measured.items():
        if gpus != 1 or recipe not in (None, cell["recipe"]) or batch not in (None, cell["batch"]):
            continue
        two = measured.get((2, 1, *keys))
        if cell["model"] not in PARAMETERS:
            have = ", ".join(PARAMETERS)
            raise UserError(f"model {cell['model']}: its number of weights is not known here ({have})")
        if cell["gpu"] not in NVLINK_GB_S:
            raise UserError(f"gpu {cell['gpu']}: no rate of NVLink is known; have: {', '.join(NVLINK_GB_S)}")
        narrow = NARROW.search(levers[cell["run_ids"][0]] or "")
        claimed = ClaimedCell(model=cell["model"], recipe=cell["recipe"], gpu=cell["gpu"], batch=cell["batch"])
        yield (
            claimed,
            Model(
                batch=cell["batch"],
                step_ms_1=1e3 * cell["batch"] / cell[METRIC],
                step_ms_2=2e3 * two["batch"] / two[METRIC] if two else None,
                gradient_bytes=PARAMETERS[cell["model"]] * (2 if narrow else 4),
                nvlink=NVLINK_GB_S[cell["gpu"]],
                network=network,
            ),
        )


def predict(
    dataset: Dataset,
    *,
    network: float,
    per_node: int,
    recipe: str | None = None,
    batch: int | None = None,
    source: str | None = None,
) -> list[Claim]:
    """Return claims for up to `per_node` GPUs of a node, and for two nodes.

    `source` says where the rate of the network is from. Raises UserError without a run to start from.
    """
    claims = []
    for cell, model in models(dataset, network, recipe, batch):
        fewer = [n for n in (2, 4, 8) if n < per_node and (n > 2 or model.step_ms_2 is None)]
        for gpus, nodes in (*((n, 1) for n in (*fewer, per_node)), (2 * per_node, 2)):
            step_ms, least_ms, most_ms = model.step_ms(gpus, nodes)
            share = "not calibrated" if model.share is None else f"exposed {model.share:.2g} times the communication"
            claim = Claim(
                kind="scaling",
                cell=ClaimedCell(
                    model=cell.model, recipe=cell.recipe, gpu=cell.gpu, batch=cell.batch, gpus=gpus, nodes=nodes
                ),
                value=None if step_ms is None else model.rate(gpus, step_ms),
                low=model.rate(gpus, most_ms),
                high=model.rate(gpus, least_ms),
                made_at=now(),
                inputs=[named(dataset.folder)],
                label="one node" if nodes == 1 else "two nodes",
                note=share if nodes == 1 else f"{share}; {network:g} GB/s between nodes ({source or SOURCE})",
            )
            claims.append(claim)
    if not claims:
        raise UserError(f"{dataset.folder}: no valid run of finetune_inpaint on one GPU (with this recipe and batch)")
    return claims
