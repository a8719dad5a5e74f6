"""A mean as tables print it, which still knows its number, interval or range, and remarks for the exports."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self

from analysis.report import names
from analysis.stats.intervals import MIN_DF, mean_interval, observations
from analysis.units import number


class Estimate(str):
    """The text of a cell: `mean unit (low to high, remarks)`, behind a verdict if there is one.

    Without an interval it is `mean unit (range least to most, remarks)`, if the runs differ.
    """

    value: float
    low: float | None
    high: float | None
    least: float | None
    most: float | None
    unit: str
    remarks: tuple[str, ...]
    range: tuple[str, ...]  # the ends of the range if they are printed

    def __new__(
        cls,
        value: float,
        low: float | None = None,
        high: float | None = None,
        *,
        least: float | None = None,
        most: float | None = None,
        form: Callable[[float], str],
        unit: str = "",
        remarks: Sequence[str] = (),
        verdict: str = "",
        narrow: bool = True,
    ) -> Self:
        """`form` formats a number. A range whose ends print alike is left out, and unless `narrow` such an interval."""
        ends = () if low is None or high is None else (form(low), form(high))
        # `16.1 (16.1 to 16.1)` would say no more than 16.1.
        ends = ends if narrow or len(set(ends)) == 2 else ()
        # The range of the runs is shown only in place of an interval.
        span = () if low is not None or least is None or most is None else (form(least), form(most))
        span = span if len(set(span)) == 2 else ()
        spread = [" to ".join(ends)] if ends else [f"range {' to '.join(span)}"] if span else []
        inside = ", ".join([*spread, *remarks])
        mean = f"{form(value)} {unit}".strip()
        if verdict:
            text = f"{verdict} ({', '.join(filter(None, (mean, inside)))})"
        else:
            text = f"{mean} ({inside})" if inside else mean
        self = super().__new__(cls, text)
        self.value, self.low, self.high, self.least, self.most = value, low, high, least, most
        self.unit, self.range, self.remarks = unit, span, tuple(filter(None, (verdict, *remarks)))
        return self


def mean_of_runs(runs: Iterable[Mapping[str, Any]], column: str) -> Estimate | None:
    """Return the mean over the runs that have a figure, with its 95 % interval, or the range of too few runs.

    `runs` have the columns `gpu_uuid`, `node`, `seed` and `run_id` too. None if no run has a figure.
    """
    known = observations(runs, column)
    if not known:
        return None
    values = [float(value) for _, value in known]
    low, high = mean_interval(known, min_df=MIN_DF) or (None, None)
    mean = sum(values) / len(values)
    return Estimate(mean, low, high, least=min(values), most=max(values), form=number, narrow=False)


def few_runs(runs: Sequence[Mapping[str, Any]], column: str) -> str:
    """Return ` (3 runs, no interval)` to stand beside the mean of these runs, nothing if it has an interval."""
    mean = mean_of_runs(runs, column)
    return f" ({names.count_runs(len(runs))})" if mean is None or mean.low is None else ""
