"""`prepare` as on the command line, and what reads its result."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import torch

from inpaint_bench.cli import app
from inpaint_bench.core.config import DataConfig
from inpaint_bench.data.loader import Batches
from inpaint_bench.data.prepared.source import PreparedSource
from inpaint_bench.data.samples import Batch, Samples
from inpaint_bench.data.source import Source
from inpaint_bench.models.tokenizer import hash_tokenizer
from tests.run.support import bench

FORMATS = ("files", "memmap", "hdf5", "webdataset")
SMALL = ("data.resolution_px=32", "prepare.shard_images=8", f"prepare.formats=[{','.join(FORMATS)}]")


def prepared(out: Path, *overrides: str) -> Path:
    assert app.main(["prepare", "data=synthetic", f"prepare.out={out}", *SMALL, *overrides]) == 0
    return out


def opened(root: Path, format: str = "files", stage: str = "none", **settings: Any) -> PreparedSource:
    config = DataConfig(kind="prepared", root=str(root), **{"resolution_px": 32, **settings})
    return PreparedSource.open(config, format, stage)


def samples(source: Source, *, pixels: bool = True) -> Samples:
    return Samples(source, hash_tokenizer(1000, 77), seed=0, masks="sd", full_mask_share=0.25, pixels=pixels)


def batches(source: Source, batch: int, *overrides: str, **where: Any) -> Batches:
    return Batches(samples(source), batch, bench(*overrides).recipe, seed=0, **where)


def take(stream: Batches, count: int) -> list[Batch]:
    result = list(islice(stream, count))
    stream.close()
    return result


def same(ours: list[Batch], theirs: list[Batch]) -> bool:
    """To the bit."""
    return len(ours) == len(theirs) and all(
        one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
        for one, other in zip(ours, theirs, strict=True)
    )


def draws(taken: list[Batch]) -> list[int]:
    return [int(draw) for batch in taken for draw in batch["draw"]]
