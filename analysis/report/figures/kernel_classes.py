"""The time of profiled calls by classes of kernels, a bar per call."""

from __future__ import annotations

import altair as alt

from inpaint_bench.core.kernels import IDLE, KernelClass

from . import base, svg
from .base import Figure, Row

MAX_BARS = 24
_ROW_PX, _BAR_PX = 38, 15
_C = KernelClass
# Classes of one family share a colour, from dark to light: their names in the legend, in the order of the stack.
_CONV, _ATTENTION, _COPIES = (
    "convolution: forward, dgrad, wgrad",
    "attention, cross-attention",
    "layout conversion, copy",
)
_OTHER = "other, communication"
STYLES: dict[str, tuple[str, str, float]] = {
    _C.CONV_FORWARD: (_CONV, svg.SERIES[0], 1.0),
    _C.CONV_DGRAD: (_CONV, svg.SERIES[0], 0.7),
    _C.CONV_WGRAD: (_CONV, svg.SERIES[0], 0.45),
    _C.CONVOLUTION: (_CONV, svg.SERIES[0], 0.45),
    _C.GEMM: ("GEMM", svg.SERIES[1], 1.0),
    _C.ATTENTION: (_ATTENTION, svg.SERIES[2], 1.0),
    _C.CROSS_ATTENTION: (_ATTENTION, svg.SERIES[2], 0.55),
    _C.NORM: ("norm", svg.SERIES[3], 1.0),
    _C.POINTWISE: ("pointwise", svg.SERIES[4], 1.0),
    _C.LAYOUT: (_COPIES, svg.SERIES[7], 1.0),
    _C.COPY: (_COPIES, svg.SERIES[7], 0.55),
    _C.OPTIMIZER: ("optimizer", svg.SERIES[5], 1.0),
    _C.OTHER: (_OTHER, svg.SERIES_GREY, 1.0),
    _C.COMMUNICATION: (_OTHER, svg.SERIES_GREY, 0.6),
    IDLE: (IDLE, svg.GRID, 1.0),
}


def draw(bars: list[tuple[str, dict[str, float]]], caption: list[str], run_ids: list[str]) -> Figure:
    """Draw labels and their milliseconds by class, at most MAX_BARS of them."""
    shown = bars[:MAX_BARS]
    order = {kind: place for place, kind in enumerate(STYLES)}
    rows: list[Row] = [
        {"label": label, "family": STYLES[kind][0], "shade": STYLES[kind][2], "ms": ms, "order": order[kind]}
        for label, times in shown
        for kind, ms in times.items()
    ]
    heads = [{"label": label, "ms": 0, "text": f"{label}: {_text(times)}"} for label, times in shown]
    used = {name: colour for kind, (name, colour, _) in STYLES.items() if any(kind in times for _, times in shown)}
    omitted = [f"The first {MAX_BARS} of {len(bars)} calls."] if len(bars) > MAX_BARS else []
    subtitle = "Milliseconds of one profiled step or call by class of kernels"
    chart = _chart(rows, heads, used)
    return base.figure("fig-kernel-classes", "Where a step's time goes", subtitle, [*caption, *omitted], chart, run_ids)


def _text(times: dict[str, float]) -> str:
    total = sum(times.values())
    idle = f", idle {100 * times[IDLE] / total:.1f} %" if IDLE in times else ""
    return f"{total:,.1f} ms{idle}"


def _chart(rows: list[Row], heads: list[Row], used: dict[str, str]) -> alt.LayerChart:
    longest = max(sum(row["ms"] for row in rows if row["label"] == head["label"]) for head in heads)
    x = alt.X("ms:Q").title("ms").axis(tickCount=6).scale(domain=[0, longest], nice=False)
    # The label stands above its bar, so that a bar is as wide as the figure.
    y = alt.Y("label:N").sort([head["label"] for head in heads]).title(None).axis(None)
    # Columns of the legend are as wide as its longest name.
    colour = alt.Color("family:N").scale(domain=list(used), range=list(used.values())).legend(columns=2)
    shade = alt.Opacity("shade:Q").scale(None).legend(None)
    bars = alt.Chart(alt.InlineData(values=rows)).mark_bar(size=_BAR_PX, yOffset=_ROW_PX / 4)
    text = alt.Chart(alt.InlineData(values=heads)).mark_text(align="left", yOffset=-_ROW_PX / 4, fontSize=12)
    layers = alt.layer(
        bars.encode(x.stack("zero"), y, colour, shade, order="order:Q"), text.encode(x, y, text="text:N")
    )
    return layers.properties(width=svg.WIDTH + 40, height=alt.Step(_ROW_PX))
