"""Numbers and order of a sweep's points when its cells run more than once.

Every cell runs once before any cell runs again, in another random order each time, so that drift (room temperature,
neighbours, a file system) does not favour a cell. Order and numbers follow from `order_seed` alone: a repetition that
is added later gets the number that it always had.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Annotated

import msgspec

from inpaint_bench.core.console import pluralize


class RunOrder(msgspec.Struct, frozen=True, kw_only=True):
    """How a sweep repeats its cells. A cell is one combination of the sweep, known by its position in it."""

    cells: Annotated[int, msgspec.Meta(ge=1)]
    repeats: int  # complete repetitions that the sweep starts with
    seed: int  # of the first repetition; each further one adds 1
    order_seed: int | None  # None: every repetition in the order of the command line

    @property
    def is_plain(self) -> bool:
        """True where nothing is repeated or shuffled: the points are the cells."""
        return self.repeats == 1 and self.order_seed is None

    def shuffled(self, repetition: int) -> list[int]:
        """Return the cells in the order in which this repetition runs them.

        Sorted by hash, not by `random.shuffle`: the order must survive a change of Python version.
        """

        def rank(cell: int) -> bytes:
            return hashlib.sha256(f"{self.order_seed} {repetition} {cell}".encode()).digest()

        cells = range(self.cells)
        return list(cells) if self.order_seed is None else sorted(cells, key=rank)

    def locate(self, num: int) -> tuple[int, int]:
        """Return cell and repetition of a point number."""
        repetition, position = divmod(num, self.cells)
        return self.shuffled(repetition)[position], repetition

    def number(self, cell: int, repetition: int) -> int:
        """Return the point number of a repetition. Numbers of repetitions that never run stay unused."""
        return repetition * self.cells + self.shuffled(repetition).index(cell)

    def initial_runs(self) -> Iterator[tuple[int, int]]:
        """Yield cell and repetition of every point that the sweep starts with, in order of point numbers."""
        return ((cell, repetition) for repetition in range(self.repeats) for cell in self.shuffled(repetition))

    def overrides(self, cell: Sequence[str], repetition: int) -> list[str]:
        """Return the cell's overrides with the seed of the repetition instead of their own."""
        others = (override for override in cell if override.partition("=")[0].strip().lstrip("+") != "seed")
        return [*others, f"seed={self.seed + repetition}"]

    def __str__(self) -> str:
        times = "once" if self.repeats == 1 else f"{self.repeats} times"
        order = "in the order typed" if self.order_seed is None else f"order_seed={self.order_seed}"
        return f"{pluralize(self.cells, 'cell')}, {times}, {order}"
