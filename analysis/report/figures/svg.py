"""Vega-Lite -> SVG that follows the page's light or dark scheme.

Charts are drawn in sentinel colours that nobody would choose; afterwards each becomes a CSS variable, so one
SVG is readable on both grounds. Contrast of the palette: at least 3:1 against either.
"""

from __future__ import annotations

import html
import re
from typing import Any

TEXT, MUTED, GRID = "#0a0b01", "#0a0b02", "#0a0b03"
SERIES = tuple(f"#0a0c{index:02x}" for index in range(1, 9))
_VARIABLES = {TEXT: "--fig-text", MUTED: "--fig-muted", GRID: "--fig-grid"} | {
    colour: f"--fig-{index}" for index, colour in enumerate(SERIES, 1)
}
# After Okabe and Ito (distinct for the common kinds of colour blindness), darkened or lightened to the ground.
LIGHT = ("#0067a5", "#c2410c", "#007a55", "#9d3a86", "#8a6500", "#3b6fd4", "#5f5f5f", "#a3263a")
DARK = ("#62b3f0", "#ff9a62", "#45c79b", "#e594d2", "#e0b83c", "#9db8ff", "#b9b9b9", "#ff8a98")
# vl-convert measures text in Liberation Sans, which has Arial's metrics: in a wider font words would touch.
FONT = "Arial, 'Liberation Sans', Helvetica, sans-serif"


def css() -> str:
    """Variables of both schemes, for the page and for each SVG on its own."""
    light = {"--fig-text": "#1c1c1a", "--fig-muted": "#5c5b57", "--fig-grid": "#e2e0da"}
    dark = {"--fig-text": "#eceae4", "--fig-muted": "#a9a79f", "--fig-grid": "#3a3935"}
    light |= {f"--fig-{i}": colour for i, colour in enumerate(LIGHT, 1)}
    dark |= {f"--fig-{i}": colour for i, colour in enumerate(DARK, 1)}
    rules = ["".join(f"{name}:{value};" for name, value in each.items()) for each in (light, dark)]
    return f":root{{{rules[0]}}}@media (prefers-color-scheme:dark){{:root{{{rules[1]}}}}}"


def config() -> dict[str, Any]:
    """Look of every chart."""
    return {
        "aria": False,
        "background": None,
        "font": "sans-serif",
        "padding": 4,
        "view": {"stroke": None},
        "axis": {
            "labelColor": TEXT,
            "titleColor": MUTED,
            "gridColor": GRID,
            "domainColor": MUTED,
            "tickColor": MUTED,
            "labelFontSize": 12,
            "titleFontSize": 12,
            "titleFontWeight": "normal",
            "tickSize": 4,
        },
        "axisX": {"grid": False, "labelAngle": 0},
        "axisY": {
            "domain": False,
            "ticks": False,
            "labelPadding": 6,
            "tickCount": 5,
            "titlePadding": 10,
            "minExtent": 34,
        },
        "legend": {
            "orient": "top",
            "title": None,
            "labelColor": TEXT,
            "labelFontSize": 12,
            "symbolSize": 90,
            "labelLimit": 260,
            "offset": 8,
            "columns": 4,
            "columnPadding": 26,  # the reader's font may be wider than the one that the rows were set in
        },
        "title": {
            "anchor": "start",
            "color": TEXT,
            "subtitleColor": MUTED,
            "fontSize": 14,
            "fontWeight": 600,
            "subtitleFontSize": 12,
            "subtitlePadding": 5,
            "offset": 12,
            "limit": 460,
        },
        "text": {"color": TEXT, "fontSize": 11},
    }


def render(spec: dict[str, Any], name: str, title: str) -> str:
    """Inline SVG: ids made unique by `name`, no namespace (HTML needs none), `title` for screen readers."""
    import vl_convert

    raw: str = vl_convert.vegalite_to_svg({**spec, "config": config()})
    for colour, variable in _VARIABLES.items():
        raw = raw.replace(f'"{colour}"', f'"var({variable})"')
    # var() is only read in CSS, not in presentation attributes of every renderer: use style instead.
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
    """The same figure as a file of its own."""
    look = f"<style>{css()}svg{{background:Canvas;color-scheme:light dark}}text{{font-family:{FONT}}}</style>"
    start = inline.index(">") + 1
    head = inline[:start].replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    return head + look + inline[start:] + "\n"


def on_paper(inline: str) -> str:
    """The same figure in the light scheme, its colours written out: for renderers that read no CSS variables."""
    colours = dict(re.findall(r"(--fig-[a-z0-9]+):(#[0-9a-f]{6})", css().partition("@media")[0]))
    plain = re.sub(r"var\((--fig-[a-z0-9]+)\)", lambda found: colours[found[1]], inline)
    start = plain.index(">") + 1
    head = plain[:start].replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" ', 1)
    return f'{head}<rect width="100%" height="100%" fill="#ffffff"/>{plain[start:]}'
