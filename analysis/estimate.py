"""A mean as the tables print it that still knows its figure, interval and remarks: exports need them apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence


class Estimate(str):
    """Text of a cell, `mean unit (low to high, remarks)`; `verdict` stands before it where there is one."""

    value: float
    low: float | None
    high: float | None
    shown: tuple[str, ...]  # mean, and the ends of the interval where that is printed
    unit: str
    remarks: tuple[str, ...]

    def __new__(
        cls,
        value: float,
        low: float | None = None,
        high: float | None = None,
        *,
        form: Callable[[float], str],
        unit: str = "",
        remarks: Sequence[str] = (),
        verdict: str = "",
        narrow: bool = True,
    ) -> Estimate:
        """`form` prints a figure; an interval whose ends print alike is not shown unless `narrow`."""
        ends = () if low is None or high is None else (form(low), form(high))
        if len(set(ends)) == 1 and not narrow:
            ends = ()
        mean, interval = form(value), [" to ".join(ends)] if ends else []
        inside = ", ".join([*interval, *remarks])
        figure = f"{mean} {unit}".strip()
        if verdict:
            text = f"{verdict} ({', '.join(filter(None, (figure, inside)))})"
        else:
            text = f"{figure} ({inside})" if inside else figure
        self = super().__new__(cls, text)
        self.value, self.low, self.high = value, low, high
        self.shown = (mean, *ends)
        self.unit, self.remarks = unit, tuple(filter(None, (verdict, *remarks)))
        return self
