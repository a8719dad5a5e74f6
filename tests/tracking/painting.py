"""A workload that leaves a picture, and trackers that fail: workload.module and track.module name this module."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from inpaint_bench.core.config.bench import BenchConfig
from inpaint_bench.core.schema import Status
from inpaint_bench.tracking.api import TrackedRun, Value
from tests.run.support import TinyTraining

PICTURE = Path("quality/grid.png")


class Painting(TinyTraining):
    def finish(self, run_dir: Path) -> dict[str, Any]:
        path = run_dir / PICTURE
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3)).save(path)
        return {"metrics": {"psnr": {"value": 21.5, "n": 1}, "fid": {"unavailable": "no"}}, "pictures": str(PICTURE)}


def build(config: BenchConfig, device: torch.device) -> Painting:
    return Painting(config)


class BadTracker:
    """Fails where BAD_TRACKER says: log, finish; hangs where it says hang."""

    link = "https://tracker.example/1"
    tracked_run = None

    def __init__(self) -> None:
        self.where = os.environ["BAD_TRACKER"]

    def log(self, values: Sequence[Value]) -> None:
        if self.where == "log":
            raise ConnectionError("the server is\ngone")

    def picture(self, name: str, path: Path, step: int) -> None:
        pass

    def finish(self, status: Status) -> None:
        if self.where == "hang":
            time.sleep(600)
        raise ConnectionError("the server is gone")


def start(run: TrackedRun) -> BadTracker:
    return BadTracker()
