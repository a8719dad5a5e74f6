"""What a model in training is asked about images it is not trained on, and what is left when training ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from inpaint_bench.data.samples import Batch, Samples
from inpaint_bench.models.assembly import Assembly
from inpaint_bench.models.ema import Average
from inpaint_bench.models.pipeline_folder import save_pipeline
from inpaint_bench.quality import grid, metrics, sampling, validation_loss
from inpaint_bench.quality.inputs import Predict

SEED = 7_919  # of the held-out images' masks: the same in every run, whatever its seed
AT_ONCE = 8  # images; evaluation is not what is measured
GRID_ROWS = 8
GRID = Path("quality") / "grid.png"
WEIGHTS = Path("weights")

Indices = npt.NDArray[np.int64]


def validate(assembly: Assembly, held: Indices) -> dict[str, float]:
    """`loss` on fixed noise, times and masks, and `n`; with locations also `loss_shuffled`: positions exchanged.

    Empty where nothing is held out.
    """
    chosen = _chosen(held, assembly.bench.workload.validation_images)
    if not len(chosen):
        return {}

    def ask(positions: str) -> dict[str, Any]:
        batches = _batches(assembly, chosen)
        return validation_loss.validate(assembly.nets, batches, predict=_predict(assembly), positions=positions)

    found = ask("true")
    if assembly.nets.location and len(chosen) > 1:
        found["loss_shuffled"] = ask("shuffled")["loss"]
    return found


def finish(assembly: Assembly, held: Indices, run_dir: Path, average: Average | None) -> dict[str, Any]:
    """Restore held-out images, judge and show them, and save the weights, as the configuration asks.

    Where an average of the weights is kept, it is what is judged and saved.
    """
    wanted = assembly.bench.workload
    result: dict[str, Any] = {"metrics": {}, "pictures": None, "weights": None}
    with _averaged(assembly, average):
        chosen = _chosen(held, wanted.sample_images)
        if len(chosen):
            result |= _restored(assembly, chosen, run_dir)
        if wanted.save_weights:
            save_pipeline(assembly.nets, run_dir / WEIGHTS)
            result["weights"] = WEIGHTS.as_posix()
    return result


def _restored(assembly: Assembly, chosen: Indices, run_dir: Path) -> dict[str, Any]:
    bench, nets, device = assembly.bench, assembly.nets, assembly.device
    judge = metrics.Judge(bench.quality, len(chosen), device)
    shown: list[tuple[Tensor, Tensor, Tensor]] = []
    for batch in _batches(assembly, chosen):
        with assembly.cast(), assembly.attention():
            painted = sampling.restore(
                nets,
                batch["image"],
                batch["mask"],
                batch["tokens"],
                batch["latitude"],
                batch["longitude"],
                bench.workload.sample_steps,
                [SEED + int(index) for index in batch["index"]],
                predict=_predict(assembly),
            )
        judge.add(batch["image"], painted, batch["mask"])
        if sum(len(part[0]) for part in shown) < GRID_ROWS:
            shown.append((batch["image"], batch["mask"], painted.cpu()))
    (run_dir / GRID).parent.mkdir(exist_ok=True)
    names = [assembly.source.names[index] for index in chosen[:GRID_ROWS]]
    originals, masks, restored = (torch.cat(parts) for parts in zip(*shown, strict=True))
    grid.write(run_dir / GRID, originals, masks, restored, names=names, rows=GRID_ROWS)
    return {"metrics": judge.figures(), "pictures": GRID.as_posix()}


def _chosen(held: Indices, most: int) -> Indices:
    """Evenly over what is held out: neighbours in the index are neighbours on the ground."""
    if len(held) <= most:
        return held
    return held[np.linspace(0, len(held) - 1, most).round().astype(np.int64)] if most else held[:0]


def _batches(assembly: Assembly, chosen: Indices) -> Iterator[Batch]:
    data = assembly.bench.data
    # A hole that is the whole picture leaves nothing to restore it from: it tells about the prior alone.
    samples = Samples(assembly.source, assembly.nets.tokenize, SEED, masks=data.masks, full_mask_share=0.0)
    for start in range(0, len(chosen), AT_ONCE):
        given = [samples[int(index), 0] for index in chosen[start : start + AT_ONCE]]
        yield {
            name: torch.stack([one[name] for one in given]).to(assembly.device if name == "tokens" else "cpu")
            for name in given[0]
        }


def _predict(assembly: Assembly) -> Predict:
    """The UNet itself, not compiled: these shapes come once."""
    unet, dtype = assembly.nets.unet, assembly.input_dtype

    def predict(state: Tensor, times: Tensor, context: Tensor) -> Tensor:
        state = state.to(dtype).contiguous(memory_format=assembly.layout)
        with assembly.cast(), assembly.attention():
            noise: Tensor = unet(state, times, context.to(dtype), return_dict=False)[0]
        return noise

    return predict


@contextmanager
def _averaged(assembly: Assembly, average: Average | None) -> Iterator[None]:
    """The averaged weights in the networks' place for the length of the block."""
    if average is None:
        yield
        return
    parameters: list[Tensor] = list(assembly.nets.trained())
    kept = [p.detach().clone(memory_format=torch.preserve_format) for p in parameters]
    with torch.no_grad():
        torch._foreach_copy_(parameters, average.tensors)
    try:
        yield
    finally:
        with torch.no_grad():
            torch._foreach_copy_(parameters, kept)
