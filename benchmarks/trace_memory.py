"""Trace the peak memory of a training step on shapes alone, and check what was predicted against measured cells.

One step of the real training code runs on PyTorch's fake tensors, which have shapes and no values: no GPU is needed.
The sizes of all tensors that live at the same time are added up, rounded to 512 bytes as the CUDA allocator rounds.
A CPU build of PyTorch has no fake tensors of a GPU, so they lie on the CPU: norms and the loss are cast to fp32 here,
as autocast does on CUDA, and attention is one fused operation. Workspaces of cuBLAS and cuDNN are not in it.

Triton's kernels, compilers, CUDA graphs and 8-bit optimizers do not run on fake tensors: `--fit` fits their factors.

usage: python -m benchmarks.trace_memory MODEL [--recipes RECIPE ...] [--px PX]   adds rows to memory.csv
       python -m benchmarks.trace_memory --fit       writes memory_factors.csv from the committed datasets
       python -m benchmarks.trace_memory --check     prints the error of every committed cell
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import sys
import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import polars as pl

from analysis.dataset import open_dataset
from inpaint_bench.commands.exit_codes import guarded
from inpaint_bench.core.config.levers import INDUCTOR_GRAPHS
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.estimates import memory

RESULTS = Path(__file__).parent / "results"
BATCHES = (4, 16)  # the line over the batch is made from these
MIB = 2**20


# --- trace ---------------------------------------------------------------------------------------


class Tally:
    """Bytes of the tensors that live now, and the most so far."""

    def __init__(self) -> None:
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}

    def add(self, tensor: Any) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._sizes:
            return
        self._sizes[key] = size = -(-storage.nbytes() // 512) * 512
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self.now -= self._sizes.pop(key)


@contextmanager
def _fake(tally: Tally) -> Iterator[None]:
    """Run the block on fake tensors, with CUDA's rules of autocast, and tally them."""
    import torch
    import torch.nn.functional as F
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Tallying(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten._local_scalar_dense.default:  # shapes do not tell values
                return 1.0 if args[0].dtype.is_floating_point else 1
            result = func(*args, **(kwargs or {}))
            for tensor in tree_leaves(result):
                if isinstance(tensor, torch.Tensor):
                    tally.add(tensor)
            return result

    def in_fp32(function: Any) -> Any:
        def call(value: Any, *args: Any, **kwargs: Any) -> Any:
            return function(value.float() if torch.is_autocast_enabled("cpu") else value, *args, **kwargs)

        return call

    def attention(
        query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
        scale: float | None = None, **_: Any,
    ) -> Any:  # fmt: skip
        inputs, width = [query, key, value], query.shape[-1]
        if torch.is_autocast_enabled("cpu"):
            inputs = [each.to(torch.get_autocast_dtype("cpu")) for each in inputs]
        if inputs[0].dtype != torch.float32 and width <= 256 and attn_mask is None:  # what FlashAttention takes
            inputs = [F.pad(each, (0, -width % 8)) if width % 8 else each for each in inputs]
            flash = torch.ops.aten._scaled_dot_product_flash_attention
            return flash(*inputs, dropout_p, is_causal, scale=scale)[0][..., :width]
        if attn_mask is not None:
            attn_mask = attn_mask.to(inputs[0].dtype).expand(*query.shape[:3], key.shape[2])
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention
        return efficient(*inputs, attn_mask, True, dropout_p, is_causal, scale=scale)[0]

    class RmsNorm(torch.autograd.Function):
        """As CUDA's kernel, which keeps its input and a number of each row."""

        @staticmethod
        def forward(ctx: Any, x: Any, weight: Any) -> Any:
            ctx.save_for_backward(x, weight, torch.empty(x.shape[:-1]))
            return torch.empty_like(x)

        @staticmethod
        def backward(ctx: Any, _: Any) -> Any:
            return tuple(torch.empty_like(saved) for saved in ctx.saved_tensors[:2])

    with ExitStack() as stack:
        enter = stack.enter_context
        for name in ("group_norm", "layer_norm", "mse_loss", "softmax"):
            enter(patch.object(F, name, in_fp32(getattr(F, name))))
        enter(patch.object(F, "scaled_dot_product_attention", attention))
        enter(patch.object(F, "rms_norm", lambda x, shape, weight, eps: RmsNorm.apply(x, weight)))
        enter(patch("torch.utils.swap_tensors", lambda old, new: setattr(old, "data", new.data)))
        enter(FakeTensorMode(allow_non_fake_inputs=True))
        enter(Tallying())
        yield


def trace(bench: Any, batch: int) -> tuple[float, float, float, float]:
    """Return in MiB the peaks of both passes and of the optimizer, trained parameters, and a transformer's encoders."""
    from dataclasses import replace

    import torch

    from inpaint_bench import levers
    from inpaint_bench.models.networks import build_run_networks
    from inpaint_bench.models.optimizers import baseline_adamw
    from inpaint_bench.models.training_step import StepComponents, TrainingStep

    recipe = replace(bench.recipe, pin_memory=False, non_blocking=False)  # the batch is there, and no GPU
    bench, tally = replace(bench, batch=batch, recipe=recipe), Tally()
    with _fake(tally):
        device = torch.device("cpu")
        networks = build_run_networks(bench, device, (0.0, 0.0))
        source: Any = None  # nothing is loaded
        components = StepComponents(bench=bench, device=device, networks=networks, source=source)
        components.autocast_dtype = torch.bfloat16  # the baseline of a GPU, which precision changes
        levers.apply(components)
        if components.make_optimizers is baseline_adamw:
            components.make_optimizers = lambda parameters, lr: [torch.optim.AdamW(parameters, lr=lr, foreach=True)]
        step = TrainingStep(components, 1e-5, 0)
        step.scaler = torch.amp.GradScaler("cpu", enabled=False)  # it would read values
        optimizer = step.optimizers[0]
        for parameter in step.parameters:
            parameter.grad = torch.empty_like(parameter)
        optimizer.step()  # makes the moments, as a step before
        optimizer.zero_grad()
        peaks = []
        optimizer.register_step_pre_hook(lambda *_: (peaks.append(tally.peak), setattr(tally, "peak", tally.now))[1])
        side, empty = bench.data.resolution_px, torch.empty
        images = {name: empty(batch, 3, side, side) for name in ("image", "masked_image")}
        positions = {name: empty(batch, dtype=torch.float64) for name in ("latitude", "longitude")}
        tokens = torch.zeros(batch, networks.tokenize([""]).shape[1], dtype=torch.long)
        tally.peak = tally.now
        step({**images, **positions, "mask": empty(batch, 1, side, side), "tokens": tokens})
        trained = sum(parameter.numel() for parameter in step.parameters) * 4
        encoders = networks.text_encoder if networks.architecture.large else torch.nn.Module()
        texts = sum(parameter.nbytes for parameter in encoders.parameters())
    return peaks[0] / MIB, tally.peak / MIB, trained / MIB, texts / MIB


def _compose(*overrides: str, trains: bool = True) -> Any:
    from hydra import compose, initialize_config_dir

    from inpaint_bench.core.config.parse import parse_config
    from inpaint_bench.core.hydra_support import register
    from inpaint_bench.core.paths import conf_dir
    from inpaint_bench.core.recipe_names import split_choices

    register()
    with initialize_config_dir(version_base="1.3", config_dir=str(conf_dir())):
        return parse_config(compose("config", overrides=split_choices(list(overrides))), trains=trains)


def add_traces(model: str, recipes: Sequence[str], px: int) -> None:
    """Trace a model with recipes, and write the rows. Raises UserError for a recipe that cannot be traced."""
    warnings.simplefilter("ignore")
    known = dict(memory.traces()) if (memory.FOLDER / "memory.csv").exists() else {}
    for recipe in recipes:
        options = ("gpu=h200", f"model={model}", f"data.resolution_px={px}", f"recipe={recipe}")
        text_to_image = _compose(*options, trains=False).model.text_to_image
        bench = _compose(*options, f"workload={'finetune_text2image' if text_to_image else 'finetune_inpaint'}")
        fields = memory.signature(vars(bench.recipe))
        if untraced := [name for name in fields if name in memory.UNTRACED or fields[name].startswith("bf16")]:
            raise UserError(f"recipe={recipe}: {', '.join(untraced)} does not run on fake tensors; --fit has a factor")
        (low, *_), (high, optimizer, trained, texts) = (trace(bench, batch) for batch in BATCHES)
        slope = (high - low) / (BATCHES[1] - BATCHES[0])
        row = memory.Trace(
            fixed_mib=low - slope * BATCHES[0],
            per_image_mib=slope,
            optimizer_mib=optimizer,
            trained_mib=trained,
            texts_mib=texts,
        )
        known[bench.model.name, memory.text(fields), px] = row
        print(f"{model}, {recipe}, {px} px: {row.fixed_mib:,.0f} MiB + {slope:,.1f} per image, ", end="")
        print(f"optimizer {optimizer:,.0f} MiB", flush=True)
    with (memory.FOLDER / "memory.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["model", "recipe", "resolution_px", *memory.Trace.__annotations__])
        for key, found in sorted(known.items()):
            writer.writerow([*key, *(f"{value:.1f}" for value in asdict(found).values())])
    memory.traces.cache_clear()


# --- measured cells ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A cell of a committed dataset: the least and most of its runs, MiB."""

    dataset: str
    gpu: str
    model: str
    recipe: str
    fields: dict[str, Any]
    px: int
    batch: int
    ranks: int
    peak_mib: float  # allocated; with CUDA graphs reserved
    total_mib: float  # free of the driver, of the card


def measured() -> list[Measured]:
    """Return the cells of all committed datasets that have a peak of the allocator."""
    cells: list[Measured] = []
    for folder in sorted(path.parent for path in RESULTS.glob("*/dataset.json")):
        runs = open_dataset(folder).runs.filter(pl.col("valid") & pl.col("torch_allocated_peak_mib").is_not_null())
        runs = runs.filter(pl.col("workload").is_in(memory.WORKLOADS))
        for _, group in runs.group_by("gpu", "model", "recipe", "batch", "gpus", maintain_order=True):
            row = group.row(0, named=True)
            fields = {lever["field"]: lever["requested"] for lever in json.loads(row["levers"] or "[]")}
            graphs = fields.get("cuda_graph") or fields.get("compile") in INDUCTOR_GRAPHS
            column = "torch_reserved_peak_mib" if graphs else "torch_allocated_peak_mib"
            used, share = group["vram_used_mib_peak"].max(), group["vram_pct"].max()
            cells.append(
                Measured(
                    dataset=folder.name,
                    **{name: row[name] for name in ("gpu", "model", "recipe", "batch")},
                    fields=fields,
                    px=row["resolution_px"] or 512,  # older datasets do not tell; all of them had 512
                    ranks=row["gpus"] * row["nodes"],
                    peak_mib=group[column].mean(),  # type: ignore[arg-type]
                    total_mib=100 * used / share if used and share else float("inf"),  # type: ignore[operator]
                )
            )
    return cells


def fit() -> None:
    """Fit the factors of recipes that cannot be traced, and write them. Prints the error of each cell left out."""
    groups: dict[tuple[str, str], list[tuple[memory.Trace, Measured]]] = {}
    for cell in measured():
        fields = memory.signature(cell.fields)
        found = memory.traces().get((cell.model, memory.traced(fields), cell.px))
        traced = (cell.model, memory.text(fields), cell.px) in memory.traces()
        if found and not traced and cell.ranks == 1:
            key = found.family(cell.model), memory.text(fields)
            groups.setdefault(key, []).append((found.of(cell.fields), cell))
    with (memory.FOLDER / "memory_factors.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["model", "recipe", "fixed", "per_image", "n", "error_pct"])
        for (model, recipe), pairs in sorted(groups.items()):
            factors = _factors(pairs)
            errors = []
            for left_out in pairs:
                trace, cell = left_out
                rest = [pair for pair in pairs if (pair[1].batch, pair[1].model) != (cell.batch, cell.model)]
                if rest:
                    fixed, images = _factors(rest)
                    predicted = fixed * trace.fixed_mib + images * trace.per_image_mib * cell.batch
                    errors.append(100 * abs(predicted / cell.peak_mib - 1))
            error = f"{max(errors):.1f}" if errors else ""
            writer.writerow([model, recipe, *(f"{factor:.4f}" for factor in factors), len(pairs), error])
            print(f"{model or 'UNets'}, {recipe}: factors {factors[0]:.3f} and {factors[1]:.3f}, ", end="")
            print(f"n = {len(pairs)}, ", end="")
            print(f"largest error of cells left out {error} %" if errors else "one batch: its error is not known")


def _factors(pairs: Sequence[tuple[memory.Trace, Measured]]) -> tuple[float, float]:
    """Return the factors on the fixed part and on that per image; one for both if the cells have one batch."""
    parts = np.array([[t.fixed_mib, t.per_image_mib * cell.batch] for t, cell in pairs])
    peaks = np.array([cell.peak_mib for _, cell in pairs])
    if len({cell.batch for _, cell in pairs}) == 1:
        factor = float(np.mean(peaks / parts.sum(axis=1)))
        return factor, factor
    fixed, images = np.linalg.lstsq(parts / peaks[:, None], np.ones(len(pairs)), rcond=None)[0]
    return float(fixed), float(images)


def check() -> int:
    """Print the error of every measured cell. Return 1 if the median is above 5 % or a run that fit is refused."""
    errors, refused, unknown = [], 0, []
    head = f"{'dataset':34} {'gpu':5} {'model':13} {'batch':>5} {'GPUs':>4}"
    print(f"{head} {'measured':>9} {'predicted':>9}  error  recipe; MiB of the allocator")
    for cell in measured():
        peak = memory.predict(cell.model, cell.fields, cell.px, cell.batch, cell.ranks)
        name = f"{cell.dataset:34} {cell.gpu:5} {cell.model:13} {cell.batch:5} {cell.ranks:4}"
        if peak is None:
            unknown.append(f"{name}  {cell.recipe}")
            continue
        error = 100 * (peak.allocator_mib / cell.peak_mib - 1)
        errors.append(abs(error))
        over = peak.exceeds(cell.total_mib)
        refused += over
        remark = (", REFUSED" if over else "") + (f" ({peak.basis})" if peak.basis != "traced" else "")
        print(f"{name} {cell.peak_mib:9,.0f} {peak.allocator_mib:9,.0f} {error:+5.1f} %  {cell.recipe}{remark}")
    for line in unknown:
        print(f"{line}: not predicted")
    median = statistics.median(errors)
    print(f"{len(errors)} cells: median error {median:.1f} %, largest {max(errors):.1f} %; ", end="")
    print(f"{refused} that fit are refused; {len(unknown)} not predicted")
    return int(median > 5 or refused > 0)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="of conf/model")
    parser.add_argument("--recipes", nargs="+", default=["baseline"], metavar="RECIPE", help="as recipe=")
    parser.add_argument("--px", type=int, default=512, help="side of the images")
    parser.add_argument("--fit", action="store_true", help="fit what cannot be traced to the committed datasets")
    parser.add_argument("--check", action="store_true", help="compare with the committed datasets")
    options = parser.parse_args(argv)
    if options.model:
        add_traces(options.model, options.recipes, options.px)
    if options.fit:
        fit()
    if not (options.model or options.fit or options.check):
        raise UserError("name a model of conf/model, or --fit or --check")
    return check() if options.check else 0


if __name__ == "__main__":
    sys.exit(guarded(main))
