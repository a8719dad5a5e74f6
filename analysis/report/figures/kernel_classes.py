"""The time of profiled calls by classes of kernels, a bar per call."""

from __future__ import annotations

from inpaint_bench.core.kernels import IDLE, KernelClass

from . import base, svg
from .base import Figure, Row

MAX_BARS = 24
_C = KernelClass
# Classes of one family share a colour: their names in the legend, in the order of the stack.
_FAMILIES = (
    ("convolution", svg.SERIES[0], (_C.CONV_FORWARD, _C.CONV_DGRAD, _C.CONV_WGRAD, _C.CONVOLUTION)),
    ("GEMM", svg.SERIES[1], (_C.GEMM,)),
    ("attention", svg.SERIES[2], (_C.ATTENTION, _C.CROSS_ATTENTION)),
    ("norm", svg.SERIES[3], (_C.NORM,)),
    ("pointwise", svg.SERIES[4], (_C.POINTWISE,)),
    ("layout conversion, copy", svg.SERIES[7], (_C.LAYOUT, _C.COPY)),
    ("optimizer", svg.SERIES[5], (_C.OPTIMIZER,)),
    ("other, communication", svg.SERIES_GREY, (_C.OTHER, _C.COMMUNICATION)),
    (IDLE, svg.GRID, (IDLE,)),
)
CLASSES = {str(kind): family for family, _, kinds in _FAMILIES for kind in kinds}


def draw(bars: list[tuple[str, dict[str, float]]], caption: list[str], run_ids: list[str]) -> Figure:
    """Draw labels and their milliseconds by class, at most MAX_BARS of them."""
    shown = bars[:MAX_BARS]
    order = {family: place for place, (family, _, _) in enumerate(_FAMILIES)}
    rows: list[Row] = [
        {"label": label, "part": CLASSES[kind], "value": ms, "order": order[CLASSES[kind]]}
        for label, times in shown
        for kind, ms in times.items()
    ]
    totals = [{"label": label, "value": sum(times.values()), "text": _text(times)} for label, times in shown]
    used = {family: colour for family, colour, _ in _FAMILIES if any(row["part"] == family for row in rows)}
    omitted = [f"The first {MAX_BARS} of {len(bars)} calls."] if len(bars) > MAX_BARS else []
    subtitle = "Milliseconds of one profiled step or call by class of kernels"
    chart = base.stacks(rows, totals, used, "ms")
    return base.figure("fig-kernel-classes", "Where a step's time goes", subtitle, [*caption, *omitted], chart, run_ids)


def _text(times: dict[str, float]) -> str:
    total = sum(times.values())
    return f"{total:,.1f} ms" + (f", idle {100 * times[IDLE] / total:.1f} %" if IDLE in times else "")
