"""Find the points of a sweep that the changes of a rerun make equal, by their config_hash."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from inpaint_bench.core.config.config_hash import config_hash
from inpaint_bench.core.errors import UserError
from launchers.points.point import Point


def refuse_equal(
    points: Iterable[Point],
    recorded: Mapping[int, Sequence[str]],
    compose: Callable[[int, Sequence[str]], Point],
    changes: Sequence[str],
) -> None:
    """Raise UserError if `changes` make one of the points equal to another point of the sweep, which it was not.

    `recorded` are the overrides of every point, or cell, without the changes.
    """

    def executed(num: int, point: Point | None = None) -> object:
        try:
            point = point or compose(num, recorded[num])
        except (UserError, HydraException, OmegaConfBaseException):
            return num  # as it was launched, it does not compose any more
        return config_hash(point.composed.build_app()), point.bench.seed, point.bench.profiler, point.site.name

    if not changes:
        return
    changed, same = {point.num: point for point in points}, dict[object, list[int]]()
    for num in sorted(recorded):
        same.setdefault(executed(num, changed.get(num)), []).append(num)
    for nums in same.values():
        if changed.keys() & set(nums) and len({executed(num) for num in nums}) > 1:
            listed = f"{', '.join(map(str, nums[:-1]))} and {nums[-1]}"
            raise UserError(
                f"{' '.join(changes)}: would make points {listed} the same measurement; "
                "launch a sweep of its own with it"
            )
