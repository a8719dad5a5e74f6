"""Repetitions of the cells of a sweep: their seeds, their numbers, and the order in which they run.

Every cell runs once before any runs again, and each time in an order of its own: what drifts meanwhile (a room, a
neighbour, a file system) falls on no cell more than on another. Order and numbers follow from `order_seed` alone, so
they are the same whenever they are worked out again, and a repetition sent later has the number that it always had.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from inpaint_bench.core.config import BenchConfig
from inpaint_bench.core.console import pluralize
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.validation import check

from .point import Point
from .stopping import looks

KEYS = ("repeats", "repeats_target", "repeats_max", "order_seed")  # one for the whole sweep
AUTO = "auto"


@dataclass(frozen=True, kw_only=True)
class Order:
    """How a sweep is repeated. A cell is one of the combinations that were asked for, by its place among them."""

    cells: int
    repeats: int  # complete repetitions that the sweep begins with
    seed: int  # of the first repetition; each has one more than the one before
    order_seed: int | None  # None: every repetition in the order as typed

    @classmethod
    def asked(cls, cells: Sequence[BenchConfig]) -> Order | None:
        """As the cells say. None where the seed is swept by hand: then nothing is repeated, and nothing can be.

        Raises UserError where the cells disagree.
        """
        first = cells[0]
        for key in KEYS:
            if len({getattr(cell, key) for cell in cells}) > 1:
                raise UserError(f"{key} differs between points: it is one for the whole sweep")
        repeats = min(looks(first.repeats_max)) if first.repeats == AUTO else int(first.repeats)
        if len({cell.seed for cell in cells}) > 1:
            if first.repeats == 1 and first.order_seed is None:
                return None
            key = "repeats" if first.repeats != 1 else "order_seed"
            raise UserError(
                f"{key}={getattr(first, key)}: the seed is swept too, and repetitions have seeds of their own. "
                "Leave the seed out, or set one to count from"
            )
        drawn = None if first.repeats == 1 else secrets.randbelow(2**31)
        order_seed = drawn if first.order_seed is None else first.order_seed
        return cls(cells=len(cells), repeats=repeats, seed=first.seed, order_seed=order_seed)

    @classmethod
    def recorded(cls, content: Any) -> Order | None:
        return cls(**content) if content else None

    def record(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def as_typed(self) -> bool:
        """Nothing is repeated or moved: the points are the cells as they are."""
        return self.repeats == 1 and self.order_seed is None

    def row(self, repetition: int) -> list[int]:
        """The cells in the order in which this repetition runs them: a shuffle that no library's version changes."""

        def rank(cell: int) -> bytes:
            return hashlib.sha256(f"{self.order_seed} {repetition} {cell}".encode()).digest()

        cells = range(self.cells)
        return list(cells) if self.order_seed is None else sorted(cells, key=rank)

    def place(self, num: int) -> tuple[int, int]:
        """Cell and repetition of a point."""
        repetition, position = divmod(num, self.cells)
        return self.row(repetition)[position], repetition

    def number(self, cell: int, repetition: int) -> int:
        """The point's number: repetitions have ranges of their own, and what is not run leaves its number unused."""
        return repetition * self.cells + self.row(repetition).index(cell)

    def overrides(self, cell: Sequence[str], repetition: int) -> list[str]:
        """The cell's overrides with the repetition's seed in place of its own."""
        return [*(one for one in cell if not _of_seed(one)), f"seed={self.seed + repetition}"]

    def grid(self, cells: Sequence[Sequence[str]]) -> list[list[str]]:
        """From the cells' overrides those of every point that the sweep begins with, in order of numbers."""
        if self.as_typed:
            return [list(cell) for cell in cells]
        return [self.overrides(cells[cell], repetition) for cell, repetition in self._begun()]

    def points(self, cells: Sequence[Point]) -> list[Point]:
        """From the placed cells every point that the sweep begins with, in order of numbers."""
        return [self.point(cells[cell], cell, repetition) for cell, repetition in self._begun()]

    def point(self, like: Point, cell: int, repetition: int) -> Point:
        """A repetition of a cell, from any other one: number and seed are all that differs. Raises UserError.

        Composed anew it would be the same, but for Hydra's override_dirname, of which no folder here is made.
        """
        num, overrides = self.number(cell, repetition), self.overrides(like.overrides, repetition)
        bench = replace(like.bench, seed=self.seed + repetition)
        check(bench)
        edits = {"seed": bench.seed, "hydra.job.num": num, "hydra.overrides.task": overrides}
        return replace(like, num=num, overrides=overrides, composed=like.composed.edited(edits), bench=bench)

    def _begun(self) -> Iterator[tuple[int, int]]:
        """Cell and repetition, in order of numbers."""
        return ((cell, repetition) for repetition in range(self.repeats) for cell in self.row(repetition))

    def __str__(self) -> str:
        cells = pluralize(self.cells, "cell")
        times = "once" if self.repeats == 1 else f"{self.repeats} times"
        return f"{cells}, {times}, " + ("as typed" if self.order_seed is None else f"order_seed={self.order_seed}")


def _of_seed(override: str) -> bool:
    return override.partition("=")[0].strip().lstrip("+") == "seed"
