"""Blocks: points of one request that a job runs one after another, so that they wait in the queue once, on one card."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from inpaint_bench.core.errors import UserError

from .point import Point, by_request

AUTO = "auto"
# What a point may take of the time of its job: its likely minutes times this, and the start of a process besides.
MARGIN, START_MIN = 1.5, 2.0


def assign_blocks(points: Sequence[Point], *, repeated: bool = False) -> None:
    """Set block, time limit and share of the cost of every point, as `points_per_job` says.

    `repeated`: other seeds are repetitions, also if the sweep was launched with repeats=1. A point that runs on this
    machine, or in a container, stays alone. Raises UserError if a block of the size that was asked for could take
    longer than its partition allows, or if its site uses a container.
    """
    for block in blocks_of(points, points[0].bench.points_per_job if points else 1, repeated=repeated):
        first = block[0]
        limit, longest = limit_min(block), first.site.gpus[first.bench.gpu.name].max_minutes
        if limit > longest:
            raise UserError(
                f"points_per_job={first.bench.points_per_job}: {len(block)} points may take {limit} min, and "
                f"partition {first.request.partition} of {first.site.name} allows {longest}"
            )
        for point in block:
            point.block, point.block_size = first.num, len(block)
            if point.service_units is not None:  # the whole block is charged once
                point.service_units *= limit / (point.request.time_min * len(block))
            point.request = replace(point.request, time_min=limit)


def advice(points: Sequence[Point]) -> str | None:
    """Return what `points_per_job=auto` would save, if it makes at most half as many jobs."""
    if not points or points[0].bench.points_per_job != 1:
        return None
    blocks = list(blocks_of(points, AUTO))
    minutes = sorted(point.likely_min for block in blocks for point in block if point.likely_min is not None)
    jobs = sum(map(len, blocks))
    if not minutes or 2 * len(blocks) > jobs:
        return None
    return f"{jobs} jobs of {minutes[0]:g} to {minutes[-1]:g} min; points_per_job=auto makes {len(blocks)}"


def blocks_of(points: Sequence[Point], size: int | str, *, repeated: bool = False) -> Iterator[list[Point]]:
    """Yield the points of each block, in their order; nothing for points that get jobs of their own.

    Repetitions of a cell are in blocks of their own: a block has each cell once.
    """
    if size == 1:
        return
    for members in by_request((point for point in points if point.site.connection.has_slurm), any_limit=True):
        if members[0].site.environment.container.image:
            if size == AUTO:
                continue
            name = members[0].site.name
            raise UserError(
                f"points_per_job={size}: jobs of {name} run in a container, which has no srun; leave it out"
            )
        block: list[Point] = []
        for point in members:
            if size == AUTO and point.likely_min is None:
                yield [point]
                continue
            other_seed = bool(block) and point.bench.seed != block[0].bench.seed
            is_full = not _fits([*block, point]) if size == AUTO else len(block) == size
            if block and (is_full or (other_seed and (repeated or point.bench.repeats != 1))):
                yield block
                block = []
            block.append(point)
        if block:
            yield block


def limit_min(block: Sequence[Point]) -> int:
    """Return the time limit of a block's job in minutes: of its likely minutes, else the sum of its points' limits."""
    longest, likely = max(point.request.time_min for point in block), _likely_min(block)
    if len(block) == 1:
        return longest
    return sum(point.request.time_min for point in block) if likely is None else max(longest, math.ceil(likely))


def _fits(block: Sequence[Point]) -> bool:
    likely = _likely_min(block)
    return likely is not None and likely <= min(point.request.time_min for point in block)


def _likely_min(block: Sequence[Point]) -> float | None:
    known = [point.likely_min for point in block if point.likely_min is not None]
    return sum(MARGIN * minutes + START_MIN for minutes in known) if len(known) == len(block) else None
