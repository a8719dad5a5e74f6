"""Points that can be one Slurm array: equal site, partition and shape, no longer than the site allows."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .point import Point


@dataclass(frozen=True, kw_only=True)
class Group:
    name: str
    points: tuple[Point, ...]

    @property
    def first(self) -> Point:
        """Stands for all: site and request are the same."""
        return self.points[0]


def group_points(points: list[Point], *, taken: int = 0) -> list[Group]:
    """In the order of the first point of each; numbers go on after `taken`, names are unique in a sweep."""

    def shape(point: Point) -> tuple[str, str]:
        return (repr(point.site), repr(point.request))  # any key of the site may be swept

    by_shape: dict[tuple[str, str], list[Point]] = {}
    for point in points:
        by_shape.setdefault(shape(point), []).append(point)
    groups: list[Group] = []
    for alike in by_shape.values():
        limits = alike[0].site.limits
        size = min(limits.max_array_size, limits.max_submit_jobs or limits.max_array_size)
        for start in range(0, len(alike), size):
            name = _name(alike[start], taken + len(groups))
            groups.append(Group(name=name, points=tuple(alike[start : start + size])))
            for point in groups[-1].points:
                point.group = name
    return groups


def _name(point: Point, number: int) -> str:
    parts = [f"{number:02d}", point.site.name, point.request.partition or "", point.bench.gpu.name]
    return "-".join(re.sub(r"[^A-Za-z0-9_]+", "_", part) for part in parts if part)
