"""A mean as tables print it that still knows its figure, interval or range, and remarks: exports need them apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence


class Estimate(str):
    """Text of a cell, `mean unit (low to high, remarks)`; `verdict` stands before it where there is one.

    Without an interval `mean unit (range least to most, remarks)`, where the runs behind it are known to differ.
    """

    value: float
    low: float | None
    high: float | None
    least: float | None
    most: float | None
    shown: tuple[str, ...]  # mean, and the ends of the interval where that is printed
    spanned: tuple[str, ...]  # the ends of the range where that is printed
    unit: str
    remarks: tuple[str, ...]

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
    ) -> Estimate:
        """`form` prints a figure; an interval whose ends print alike is not shown unless `narrow`."""
        ends = () if low is None or high is None else (form(low), form(high))
        if len(set(ends)) == 1 and not narrow:
            ends = ()
        if low is not None or least is None or most is None or form(least) == form(most):
            span: tuple[str, ...] = ()
        else:
            span = (form(least), form(most))
        mean, interval = form(value), [" to ".join(ends)] if ends else []
        interval += [f"range {' to '.join(span)}"] if span else []
        inside = ", ".join([*interval, *remarks])
        figure = f"{mean} {unit}".strip()
        if verdict:
            text = f"{verdict} ({', '.join(filter(None, (figure, inside)))})"
        else:
            text = f"{figure} ({inside})" if inside else figure
        self = super().__new__(cls, text)
        self.value, self.low, self.high = value, low, high
        self.least, self.most = least, most
        self.shown, self.spanned = (mean, *ends), span
        self.unit, self.remarks = unit, tuple(filter(None, (verdict, *remarks)))
        return self
