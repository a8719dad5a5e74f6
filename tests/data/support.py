"""Datasets made by `prepare`, and short ways to read them."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from inpaint_bench.cli import app
from inpaint_bench.core.config.bench import DataConfig
from inpaint_bench.data.loader import Batches
from inpaint_bench.data.open import open_source
from inpaint_bench.data.prepared_source import PreparedSource
from inpaint_bench.data.samples import Batch, Samples
from inpaint_bench.data.source import Source
from inpaint_bench.models.pipeline_folder import hash_tokenizer
from tests.run.support import bench

FORMATS = ("files", "memmap", "hdf5", "webdataset")
SMALL = ("data.resolution_px=32", "prepare.shard_images=8", f"prepare.formats=[{','.join(FORMATS)}]")


def prepared(out: Path, *overrides: str) -> Path:
    """Run `prepare` with the generator, in every format unless `overrides` say otherwise."""
    kind = [] if any(override.startswith("data=") for override in overrides) else ["data=synthetic"]
    assert app.main(["prepare", *kind, f"prepare.out={out}", *SMALL, *overrides]) == 0
    return out


def open_prepared(root: Path, format: str = "files", stage_to: str = "none", **settings: Any) -> PreparedSource:
    """Open a prepared dataset of 32 px."""
    config = DataConfig(kind="prepared", root=str(root), **{"resolution_px": 32, **settings})
    return PreparedSource(config, format, stage_to)


def synthetic(count: int = 5, side: int = 32, seed: int = 0) -> Source:
    """Open the generator."""
    return open_source(DataConfig(kind="synthetic", num_images=count, resolution_px=side, seed=seed))


def samples(source: Source, *, pixels: bool = True) -> Samples:
    """Return the samples of a source with a tokenizer that needs no files."""
    return Samples(source, hash_tokenizer(1000, 77), seed=0, masks="sd", full_mask_share=0.25, pixels=pixels)


def batches(source: Source, batch: int, *overrides: str, **arguments: Any) -> Batches:
    """Return the stream of batches of a source under a recipe."""
    whole = {"start": 0, "indices": np.arange(len(source)), "rank": 0, "ranks": 1}
    return Batches(samples(source), batch, bench(*overrides).recipe, seed=0, **{**whole, **arguments})


def take(stream: Batches, count: int) -> list[Batch]:
    """Return the first batches of a stream and close it."""
    result = list(islice(stream, count))
    stream.close()
    return result


def same(first: list[Batch], second: list[Batch]) -> bool:
    """Return whether two lists of batches are equal to the bit."""
    return len(first) == len(second) and all(
        batch.keys() == other.keys() and all(torch.equal(batch[name], other[name]) for name in batch)
        for batch, other in zip(first, second, strict=True)
    )


def draws(taken: list[Batch]) -> list[int]:
    """Return the draw numbers of the batches' samples."""
    return [int(draw) for batch in taken for draw in batch["draw"]]
