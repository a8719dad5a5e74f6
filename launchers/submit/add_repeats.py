"""Repetitions that a sweep gets after it was sent: which cells it has, how they stand, and sending what they lack."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra.types import TaskFunction

from inpaint_bench.core.errors import UserError
from inpaint_bench.core.schema import PointState
from launchers.points.compose import composer
from launchers.points.point import Point
from launchers.points.repetitions import Order
from launchers.status.survey import PointStatus, poll_sweep
from launchers.sweep.ledger import Ledger

from .rerun_overrides import check_changes
from .submit import Sending, send


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A combination of the sweep with the points that it has so far."""

    number: int  # its place among the combinations
    next: Point  # what its next repetition would be
    sent: int  # repetitions so far
    standings: list[PointStatus]

    def of(self, *states: PointState) -> list[PointStatus]:
        return [standing for standing in self.standings if standing.state in states]

    @property
    def service_units(self) -> float | None:
        """What its points may have cost, or may yet where they wait; None where the site's rule is not known."""
        taken = [sum(a.refused is None for a in s.record.attempts) for s in self.standings]
        return None if self.next.service_units is None else self.next.service_units * sum(max(1, n) for n in taken)


def extend(
    folder: Path,
    task: TaskFunction,
    judge: Callable[[list[Cell]], Sequence[int]],
    *,
    changes: Sequence[str] = (),
    dry_run: bool = False,
    wait: bool = False,
) -> bool:
    """Send as many further repetitions of each cell as `judge` says, complete repetitions first, under the lock.

    A cell is sent as it was first asked for, with `changes`. Returns whether anything was sent and waited for.
    Raises UserError where the sweep cannot be repeated, and what `send` raises.
    """
    check_changes(changes, repeating=True)
    ledger = Ledger.open(folder.absolute())
    order = Order.recorded(ledger.sweep.get("order"))
    if order is None:
        raise UserError(f"{folder}: its seeds were swept by hand or it came in batches; launch with repeats= instead")
    with composer(ledger.surroundings) as compose:

        def cell(number: int, known: dict[int, PointStatus], asked: dict[int, list[str]]) -> Cell:
            sent = max(known) + 1
            overrides = order.overrides(asked[known[min(known)].record.num], sent)
            following = compose(order.number(number, sent), [*overrides, *changes])
            return Cell(number=number, next=following, sent=sent, standings=list(known.values()))

        def choose() -> list[Point]:
            known: dict[int, dict[int, PointStatus]] = {}
            for standing in poll_sweep(ledger, holding_lock=not dry_run).points:
                number, repetition = order.place(standing.record.num)
                known.setdefault(number, {})[repetition] = standing
            asked = {entry["point"]: entry["overrides"] for entry in ledger.sweep["points"]}
            cells = [cell(number, mine, asked) for number, mine in sorted(known.items())]
            lacking = [
                order.point(one.next, one.number, repetition)
                for one, more in zip(cells, judge(cells), strict=True)
                for repetition in range(one.sent, one.sent + more)
            ]
            return sorted(lacking, key=lambda point: point.num)

        sending = Sending(
            folder=ledger.folder, hydra_context=compose.context, task_function=task, wait=wait, dry_run=dry_run
        )
        send(choose, sending)
        return sending.waited
