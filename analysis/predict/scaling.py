"""Predict training on 8 GPUs of a node and on two nodes from measured runs of one and two GPUs. Not measured.

A step on n GPUs takes the step of one GPU, and the part of the communication that the backward pass does not hide:

    communication(n) = 2 (n - 1) / n * bytes of gradients / rate of the slowest link in the ring
    exposed(n) = max(share * communication(n), communication(n) - window)

`share` is what two GPUs of one node lose per step, over communication(2), at the same batch per GPU; between nodes it
counts as at most 1. The window, in which gradients can travel, is assumed as BACKWARD of a step. The interval is from
nothing exposed but what the window cannot hold, to everything. Assumed is that data arrives as fast on every GPU, that
all are equally fast, and that DDP sends gradients of the type of the weights; ZeRO and FSDP2 send other bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from analysis.dataset import Dataset
from inpaint_bench.core.config import recipe as recipes
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.estimates import memory, rates

from .claims import Claim, ClaimedCell, named, now

# GB/s in one direction, of all NVLinks of a GPU: half of the 600 and 900 of NVIDIA's data sheets (published).
NVLINK_GB_S = {"a100": 300.0, "h100": 450.0, "h200": 450.0}
HDR100_GB_S = 12.5  # of one port per node, as TAMU's pages state of Grace (published)
BACKWARD = 2 / 3  # of a step: a backward pass computes about twice what the forward pass does
PLACES = ((2, 1), (4, 1), (8, 1), (16, 2))  # GPUs and nodes


@dataclass(frozen=True, kw_only=True)
class Model:
    """A measured step of one GPU, and of two where there is one."""

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
        exposed_ms = None
        if self.share is not None:
            exposed_ms = max((self.share if nodes == 1 else min(self.share, 1.0)) * sent_ms, beyond_ms)
        most_ms = max(sent_ms, exposed_ms or 0.0)
        step_ms = None if exposed_ms is None else self.step_ms_1 + exposed_ms
        return step_ms, self.step_ms_1 + beyond_ms, self.step_ms_1 + most_ms


def predict(dataset: Dataset, *, recipe: str | None = None, batch: int | None = None) -> Iterator[Claim]:
    """Yield claims for up to 8 GPUs of a node, and for two nodes.

    Raises UserError without a run to start from, or where the weights of a model or the links of a GPU are not known.
    """
    cells = {(cell.work, cell.gpu, cell.batch, cell.place): cell for cell in rates.read_cells(dataset.folder)}
    found = False
    for (work, gpu, size, place), cell in cells.items():
        chosen = recipe in (None, work.recipe) and batch in (None, size)
        if not chosen or work.workload != "finetune_inpaint" or place != (1, 1):
            continue
        found, two, fields = True, cells.get((work, gpu, size, (2, 1))), recipes.fields_of(work.recipe)
        narrow = str(fields.get("weights")).startswith("bf16") or fields.get("compress") == "bf16"  # gradients
        if (trained := memory.trained_mib(work.model, fields)) is None:
            raise UserError(f"model {work.model}: benchmarks/trace_memory.py has not traced its weights")
        if gpu not in NVLINK_GB_S:
            raise UserError(f"gpu {gpu}: no rate of NVLink is known; have: {', '.join(NVLINK_GB_S)}")
        model = Model(
            step_ms_1=1e3 * size / cell.images_per_s,
            step_ms_2=2e3 * size / two.images_per_s if two else None,
            gradient_bytes=trained * 2**20 / (2 if narrow else 1),
            nvlink=NVLINK_GB_S[gpu],
            network=HDR100_GB_S,
        )
        note = f"exposed {model.share:.2g} times the communication" if two else "not calibrated"
        for gpus, nodes in PLACES[1 if two else 0 :]:
            images, (step_ms, least_ms, most_ms) = 1e3 * gpus * size, model.step_ms(gpus, nodes)
            yield Claim(
                kind="scaling",
                cell=ClaimedCell(model=work.model, recipe=work.recipe, gpu=gpu, batch=size, gpus=gpus, nodes=nodes),
                value=None if step_ms is None else images / step_ms,
                low=images / most_ms,
                high=images / least_ms,
                made_at=now(),
                inputs=[named(dataset.folder)],
                label="one node" if nodes == 1 else "two nodes",
                note=note if nodes == 1 else f"{note}; {HDR100_GB_S:g} GB/s between nodes",
            )
    if not found:
        raise UserError(f"{dataset.folder}: no valid run of finetune_inpaint on one GPU (with this recipe and batch)")
