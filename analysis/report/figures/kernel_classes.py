"""The time of profiled calls by classes of kernels, a bar per call."""

from __future__ import annotations

from typing import Any

import altair as alt

from inpaint_bench.core.kernel_names import IDLE, KernelClass

from . import base, svg
from .base import Figure, Row

MAX_BARS = 24
_TEXT_PX = 130  # room for the text behind the longest bar
_C = KernelClass
# Colour and opacity, in the order of the stack. Classes of one family share a colour.
STYLES: dict[str, tuple[str, float]] = {
    _C.CONV_FORWARD: (svg.SERIES[0], 1.0),
    _C.CONV_DGRAD: (svg.SERIES[0], 0.7),
    _C.CONV_WGRAD: (svg.SERIES[0], 0.45),
    _C.CONVOLUTION: (svg.SERIES[0], 0.25),
    _C.GEMM: (svg.SERIES[1], 1.0),
    _C.ATTENTION: (svg.SERIES[2], 1.0),
    _C.CROSS_ATTENTION: (svg.SERIES[2], 0.55),
    _C.NORM: (svg.SERIES[3], 1.0),
    _C.POINTWISE: (svg.SERIES[4], 1.0),
    _C.LAYOUT: (svg.SERIES[7], 1.0),
    _C.COPY: (svg.SERIES[7], 0.55),
    _C.OPTIMIZER: (svg.SERIES[5], 1.0),
    _C.COMMUNICATION: (svg.SERIES[5], 0.5),
    _C.OTHER: (svg.SERIES_GREY, 0.75),
    IDLE: (svg.SERIES_GREY, 0.3),
}


def draw(bars: list[tuple[str, dict[str, float]]], caption: list[str], run_ids: list[str]) -> Figure:
    """Draw labels and their milliseconds by class, at most MAX_BARS of them."""
    shown = bars[:MAX_BARS]
    order = {kind: place for place, kind in enumerate(STYLES)}
    rows: list[Row] = [
        {"label": label, "kind": str(kind), "ms": ms, "order": order[kind]}
        for label, times in shown
        for kind, ms in times.items()
    ]
    totals = [{"label": label, "ms": sum(times.values()), "text": _text(times)} for label, times in shown]
    used = [kind for kind in STYLES if any(kind in times for _, times in shown)]
    omitted = [f"The first {MAX_BARS} of {len(bars)} calls."] if len(bars) > MAX_BARS else []
    subtitle = "Milliseconds of one profiled step or call by class of kernels"
    chart = _chart(rows, totals, used)
    return base.figure("fig-kernel-classes", "Where a step's time goes", subtitle, [*caption, *omitted], chart, run_ids)


def _text(times: dict[str, float]) -> str:
    total = sum(times.values())
    idle = f", idle {100 * times[IDLE] / total:.1f} %" if IDLE in times else ""
    return f"{total:,.1f} ms{idle}"


def _chart(rows: list[Row], totals: list[Row], used: list[str]) -> alt.LayerChart:
    labels = [row["label"] for row in totals]
    width = base.plot_width(labels)
    # Beyond the longest bar there is room for its text.
    domain = [0, max(row["ms"] for row in totals) * width / (width - _TEXT_PX)]
    x = alt.X("ms:Q").title("ms").axis(tickCount=5).scale(domain=domain, nice=False)
    y = base.row_axis(labels)
    names = list(map(str, used))
    legend: dict[str, Any] = {"columns": 3}
    # Of one field and with equal legends, colour and opacity share one legend.
    colour = alt.Color("kind:N").scale(domain=names, range=[STYLES[kind][0] for kind in used]).legend(**legend)
    opacity = alt.Opacity("kind:N").scale(domain=names, range=[STYLES[kind][1] for kind in used]).legend(**legend)
    bars = alt.Chart(alt.InlineData(values=rows)).mark_bar()
    text = alt.Chart(alt.InlineData(values=totals)).mark_text(align="left", dx=6, color=svg.MUTED)
    layers = alt.layer(
        bars.encode(x.stack("zero"), y, colour, opacity, order="order:Q"), text.encode(x, y, text="text:N")
    )
    return layers.properties(width=width, height=alt.Step(24))
