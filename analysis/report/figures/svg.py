"""The theme of every chart, and Vega-Lite drawn as SVG that follows the reader's light or dark scheme.

Charts are drawn in placeholder colours that no chart would use otherwise; in the SVG each of them is replaced by a CSS
variable. Every colour has a contrast of at least 3:1 against the background of both schemes.
"""

from __future__ import annotations

import html
import re
from typing import Any

import altair as alt
import vl_convert

TEXT, MUTED, GRID = "#0a0b01", "#0a0b02", "#0a0b03"
SERIES = tuple(f"#0a0c{index:02x}" for index in range(1, 9))
_VARIABLES = {TEXT: "--fig-text", MUTED: "--fig-muted", GRID: "--fig-grid"} | {
    colour: f"--fig-{index}" for index, colour in enumerate(SERIES, 1)
}
# After Okabe and Ito (safe for the common kinds of colour blindness), darkened or lightened for the background.
LIGHT = ("#0067a5", "#c2410c", "#007a55", "#9d3a86", "#8a6500", "#3b6fd4", "#5f5f5f", "#a3263a")
DARK = ("#62b3f0", "#ff9a62", "#45c79b", "#e594d2", "#e0b83c", "#9db8ff", "#b9b9b9", "#ff8a98")
# vl-convert measures text in Liberation Sans, which has Arial's metrics: in a wider font labels would overlap.
FONT = "Arial, 'Liberation Sans', Helvetica, sans-serif"
WIDTH, HEIGHT = 400, 230  # of a view that sets no size of its own

alt.data_transformers.enable("default", max_rows=None, consolidate_datasets=False)


@alt.theme.register("inpaint_bench", enable=True)
def _theme() -> dict[str, Any]:
    axis = {"labelFontSize": 12, "titleFontSize": 12, "titleFontWeight": "normal", "tickSize": 4}
    axis |= {"labelColor": TEXT, "titleColor": MUTED, "gridColor": GRID, "domainColor": MUTED, "tickColor": MUTED}
    value_axis = {"domain": False, "ticks": False, "tickCount": 5, "labelPadding": 6, "titlePadding": 10}
    # columnPadding: the reader's font may be wider than the one in which vl-convert laid out the legend
    legend = {"orient": "top", "title": None, "columns": 4, "columnPadding": 26, "offset": 8}
    legend |= {"labelColor": TEXT, "labelFontSize": 12, "labelLimit": 260, "symbolSize": 90}
    title = {"anchor": "start", "color": TEXT, "fontSize": 14, "fontWeight": 600, "offset": 12, "limit": 460}
    title |= {"subtitleColor": MUTED, "subtitleFontSize": 12, "subtitlePadding": 5}
    config = {
        "aria": False,
        "background": None,
        "font": "sans-serif",
        "padding": 4,
        "view": {"stroke": None, "continuousWidth": WIDTH, "continuousHeight": HEIGHT, "discreteWidth": WIDTH},
        "axis": axis,
        "axisX": {"grid": False, "labelAngle": 0},
        "axisY": {**value_axis, "minExtent": 34},
        "legend": legend,
        "title": title,
        "text": {"color": TEXT, "fontSize": 11},
    }
    return {"config": config}


def css() -> str:
    """Return the CSS variables of both schemes, for the page and for each SVG file."""
    light = {"--fig-text": "#1c1c1a", "--fig-muted": "#5c5b57", "--fig-grid": "#e2e0da"}
    dark = {"--fig-text": "#eceae4", "--fig-muted": "#a9a79f", "--fig-grid": "#3a3935"}
    light |= {f"--fig-{i}": colour for i, colour in enumerate(LIGHT, 1)}
    dark |= {f"--fig-{i}": colour for i, colour in enumerate(DARK, 1)}
    rules = ["".join(f"{name}:{value};" for name, value in scheme.items()) for scheme in (light, dark)]
    return f":root{{{rules[0]}}}@media (prefers-color-scheme:dark){{:root{{{rules[1]}}}}}"


def render(spec: dict[str, Any], name: str, title: str) -> str:
    """Return an inline SVG: its ids are prefixed with `name`, `title` is its label for screen readers."""
    raw: str = vl_convert.vegalite_to_svg(spec)
    for colour, variable in _VARIABLES.items():
        raw = raw.replace(f'"{colour}"', f'"var({variable})"')
    # Not every renderer reads var() in a presentation attribute: move these colours into `style`.
    raw = re.sub(r'\b(fill|stroke)="(var\(--fig-[a-z0-9]+\))"', r'style-\1="\2"', raw)
    raw = re.sub(r"<[a-z]+ [^>]*style-[^>]*>", _merge_styles, raw)
    raw = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', raw)
    raw = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", raw)
    raw = raw.replace('font-family="sans-serif"', "")
    label = html.escape(title, quote=True)
    size = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', raw)
    assert size is not None
    head = f'<svg class="fig" role="img" aria-label="{label}" viewBox="0 0 {size[1]} {size[2]}" width="{size[1]}">'
    return head + raw[raw.index(">", raw.index("<svg")) + 1 :]


def _merge_styles(tag: re.Match[str]) -> str:
    text = tag[0]
    styles = re.findall(r'style-(fill|stroke)="([^"]+)"', text)
    text = re.sub(r' ?style-(?:fill|stroke)="[^"]+"', "", text)
    rule = ";".join(f"{name}:{value}" for name, value in styles)
    end = "/>" if text.endswith("/>") else ">"
    return f'{text[: -len(end)]} style="{rule}"{end}'


def standalone(inline: str) -> str:
    """Return an inline SVG as a file of its own, which follows the reader's scheme."""
    style = f"<style>{css()}svg{{background:Canvas;color-scheme:light dark}}text{{font-family:{FONT}}}</style>"
    start = inline.index(">") + 1
    head = inline[:start].replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    return head + style + inline[start:] + "\n"


def to_pdf(inline: str) -> bytes:
    """Return the figure in the light scheme as PDF."""
    return bytes(vl_convert.svg_to_pdf(_on_paper(inline)))


def to_png(inline: str, *, scale: float) -> bytes:
    """Return the figure in the light scheme as PNG, with `scale` pixels per CSS pixel."""
    return bytes(vl_convert.svg_to_png(_on_paper(inline), scale=scale))


def _on_paper(inline: str) -> str:
    """Return the SVG in the light scheme on white, for renderers that read no CSS variables."""
    colours = dict(re.findall(r"(--fig-[a-z0-9]+):(#[0-9a-f]{6})", css().partition("@media")[0]))
    literal = re.sub(r"var\((--fig-[a-z0-9]+)\)", lambda match: colours[match[1]], inline)
    start = literal.index(">") + 1
    head = literal[:start].replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" ', 1)
    return f'{head}<rect width="100%" height="100%" fill="#ffffff"/>{literal[start:]}'
