"""Bottleneck classes of all committed runs. The table is written by

python -m tests.analysis.stats.committed_classes > tests/analysis/stats/committed_classes.tsv
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from analysis.dataset import open_dataset
from analysis.stats import bottleneck, cells
from analysis.stats.bottleneck import SharedEvidence
from inpaint_bench.core.schema import KERNEL_TIMES
from tests.analysis.committed import DATASETS, RESULTS


def rows() -> Iterator[tuple[str, dict[str, Any], SharedEvidence | None]]:
    """Yield dataset, row and shared evidence of every committed run."""
    for name in DATASETS:
        dataset = open_dataset(RESULTS / name)
        table = cells.build_cells(dataset.runs)
        shared = bottleneck.shared_evidence(table, dataset.runs, dataset.rows(KERNEL_TIMES))
        for row in dataset.runs.iter_rows(named=True):
            yield name, row, shared.get(row["run_id"])


def table() -> str:
    """Return dataset, GPU, model, recipe, batch, class and number of runs, separated by tabs."""
    counts = Counter(
        (name, row["gpu"], row["model"] or "", row["recipe"] or "", row["batch"] or 0, classified.name)
        for name, row, shared in rows()
        for classified in [bottleneck.classify(row, shared)]
    )
    lines = ["\t".join(map(str, (*key, count))) for key, count in sorted(counts.items())]
    return "\n".join(["dataset\tgpu\tmodel\trecipe\tbatch\tclass\truns", *lines]) + "\n"


if __name__ == "__main__":
    print(table(), end="")
