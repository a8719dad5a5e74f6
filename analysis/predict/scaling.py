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


def sent_ms(gradient_bytes: float, gpus: int, gb_s: float) -> float:
    """Return how long a ring takes to average the gradients over links of this rate."""
    return 2 * (gpus - 1) / gpus * gradient_bytes / (gb_s * 1e9) * 1e3


def step_ms(one_ms: float, sent: float, share: float | None) -> tuple[float | None, float, float]:
    """Return the time of a step, None without a `share`, and the range that the assumptions allow.

    `one_ms` is the step of one GPU, `sent` the time of the communication.
    """
    beyond = max(0.0, sent - BACKWARD * one_ms)
    if share is None:
        return None, one_ms + beyond, one_ms + sent
    exposed = max(share * sent, beyond)
    return one_ms + exposed, one_ms + beyond, one_ms + max(sent, exposed)


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
        size_bytes, links = trained * 2**20 / (2 if narrow else 1), NVLINK_GB_S[gpu]
        one_ms, share = 1e3 * size / cell.images_per_s, None
        if two:
            share = max(0.0, 2e3 * size / two.images_per_s - one_ms) / sent_ms(size_bytes, 2, links)
        note = "not calibrated" if share is None else f"exposed {share:.2g} times the communication"
        for gpus, nodes in PLACES[1 if two else 0 :]:
            sent = sent_ms(size_bytes, gpus, links if nodes == 1 else HDR100_GB_S)
            at_most = share if share is None or nodes == 1 else min(share, 1.0)
            images, (step, least, most) = 1e3 * gpus * size, step_ms(one_ms, sent, at_most)
            yield Claim(
                kind="scaling",
                cell=ClaimedCell(model=work.model, recipe=work.recipe, gpu=gpu, batch=size, gpus=gpus, nodes=nodes),
                value=None if step is None else images / step,
                low=images / most,
                high=images / least,
                made_at=now(),
                inputs=[named(dataset.folder)],
                label="one node" if nodes == 1 else "two nodes",
                note=note if nodes == 1 else f"{note}; {HDR100_GB_S:g} GB/s between nodes",
            )
    if not found:
        raise UserError(f"{dataset.folder}: no valid run of finetune_inpaint on one GPU (with this recipe and batch)")
