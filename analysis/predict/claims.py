"""A prediction as a record: of which cell, from what, and when. It is scored where the cell is measured."""

from __future__ import annotations

import datetime as dt
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import polars as pl

from analysis.units import gpu_label, scale_labels
from inpaint_bench.core import records
from inpaint_bench.core.errors import UserError

METRIC = "images_per_s"


class ClaimedCell(msgspec.Struct, kw_only=True, frozen=True):
    """The keys of the predicted cell, spelled as in runs.parquet."""

    workload: str = "finetune_inpaint"
    model: str
    recipe: str
    gpu: str
    batch: int  # per GPU
    gpus: int = 1
    nodes: int = 1

    def __str__(self) -> str:
        words = [gpu_label(self.gpu), *scale_labels(self.gpus, self.nodes), self.recipe, f"batch {self.batch}"]
        return ", ".join(words)


class Claim(msgspec.Struct, kw_only=True, frozen=True):
    """A prediction of images/s."""

    kind: str  # cards or scaling
    cell: ClaimedCell
    value: float | None  # None: only the interval is predicted
    low: float
    high: float
    made_at: dt.datetime
    inputs: list[str]  # files and datasets, each with the first digits of its SHA-256
    label: str = ""  # such as `extrapolated from Hopper`
    note: str = ""

    def __str__(self) -> str:
        value = "-" if self.value is None else f"{self.value:.1f}"
        remarks = "".join(f"; {text}" for text in (self.label, self.note) if text)
        return f"{self.cell}: {value} images/s ({self.low:.1f} to {self.high:.1f}){remarks}"


class Score(NamedTuple):
    """A claim beside a measured cell."""

    claim: Claim
    cell: dict[str, Any]
    error: float | None  # predicted over measured, less 1
    inside: bool
    before: bool  # made before the first run of the cell began, by the clocks of both


def now() -> dt.datetime:
    """Return the time for `made_at`."""
    return dt.datetime.now(dt.UTC).replace(microsecond=0)


def named(path: Path) -> str:
    """Return the name of an input with the first digits of the SHA-256 of it, or of its dataset.json."""
    file = path / "dataset.json" if path.is_dir() else path
    return f"{path.resolve().name} {hashlib.sha256(file.read_bytes()).hexdigest()[:12]}"


def read_claims(path: Path) -> list[Claim]:
    """Read a file of claims. Raises UserError where it is missing or holds something else."""
    try:
        claims = records.read_record(path, list[Claim])
    except (ValueError, OSError) as error:
        raise UserError(f"{error}; give a file that `inpaint-bench predict` wrote") from None
    if claims is None:
        raise UserError(f"{path} does not exist; `inpaint-bench predict` writes such a file")
    if naive := [claim for claim in claims if claim.made_at.tzinfo is None]:
        raise UserError(f"{path}: made_at {naive[0].made_at} has no time zone; write it as 2026-11-23T12:00:00Z")
    return claims


def add_claims(path: Path, claims: Iterable[Claim]) -> int:
    """Append the claims that the file does not hold yet and return their number. Older claims are never changed."""
    known = read_claims(path) if path.exists() else []
    stated = {(claim.kind, claim.cell, claim.value, claim.low, claim.high) for claim in known}
    new = [claim for claim in claims if (claim.kind, claim.cell, claim.value, claim.low, claim.high) not in stated]
    records.write_record(path, [*known, *new])
    return len(new)


def score(claims: Sequence[Claim], cells: pl.DataFrame, runs: pl.DataFrame) -> Iterator[Score]:
    """Yield every claim beside each measured cell that has its keys; `cells` are those of `runs`."""
    started = dict(runs.select("run_id", "started").iter_rows())
    for claim in claims:
        keys = msgspec.structs.asdict(claim.cell)
        for cell in cells.filter(~pl.col("demonstration"), **keys).drop_nulls(METRIC).iter_rows(named=True):
            begun = [time for run_id in cell["run_ids"] if (time := started[run_id])]
            error = None if claim.value is None else claim.value / cell[METRIC] - 1
            inside = claim.low <= cell[METRIC] <= claim.high
            yield Score(claim, cell, error, inside, before=bool(begun) and claim.made_at < min(begun))
