"""Benchmarking the fine-tuning of diffusion models across GPUs and Slurm sites.

For scripts and notebooks:

    dataset = inpaint_bench.open_dataset("dataset")  # dataset.runs, .windows, .scan("samples_fast"): polars frames
    cells = inpaint_bench.build_cells(dataset.runs)  # means of equal runs, with their intervals
    charts = inpaint_bench.charts(dataset)  # the report's figures, by name: Altair charts
    state = inpaint_bench.status("runs/2026-11-21/08-30-00-123456-inpaint")  # what `status --json` prints

They raise inpaint_bench.UserError, with one sentence.
"""

from __future__ import annotations

import os
import sys

# `python -m inpaint_bench...` puts the working directory first on the path, where a yaml.py or a folder launchers/ of
# the user's would be imported in place of the real one. A checkout that is not installed is found there.
if (
    sys.argv[:1] == ["-m"]
    and "-m inpaint_bench" in " ".join(sys.orig_argv)
    and not sys.flags.safe_path
    and not os.path.samefile(sys.path[0], os.path.dirname(__path__[0]))  # noqa: PTH120, PTH121
):
    del sys.path[0]

import importlib
import signal
from typing import TYPE_CHECKING, Any

# `python -m inpaint_bench...` imports this first. Until the command begins (commands/exit_codes.py) Ctrl-C ends it
# without a traceback out of an import. A process that ignores SIGINT goes on ignoring it.
if sys.argv[:1] == ["-m"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from .core import __version__
from .core.errors import UserError

if TYPE_CHECKING:
    from analysis.dataset import Dataset, open_dataset
    from analysis.report.contents import charts
    from analysis.stats.cells import build_cells

    from .cli.status import sweep_status as status

__all__ = ["Dataset", "UserError", "__version__", "build_cells", "charts", "open_dataset", "status"]

# Imported when they are first used: `import inpaint_bench` loads neither polars nor anything of Slurm.
_LAZY = {
    "Dataset": ("analysis.dataset", "Dataset"),
    "build_cells": ("analysis.stats.cells", "build_cells"),
    "charts": ("analysis.report.contents", "charts"),
    "open_dataset": ("analysis.dataset", "open_dataset"),
    "status": ("inpaint_bench.cli.status", "sweep_status"),
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _LAZY[name]
    return getattr(importlib.import_module(module), attribute)
