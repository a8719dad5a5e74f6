"""The theme of every chart, and Vega-Lite drawn as SVG that follows the reader's light or dark scheme.

Charts are drawn in placeholder colours that no chart would use otherwise; a style sheet turns each into a CSS variable.
Every colour of the series has a contrast of at least 3:1 against the background of either scheme.
"""

import html
import json
import re
from typing import Any

import altair as alt
import vl_convert

TEXT, MUTED, GRID = "#0a0b01", "#0a0b02", "#0a0b03"
SERIES = tuple(f"#0a0c{index:02x}" for index in range(1, 9))
SERIES_GREY = SERIES[6]  # can hardly be told from MUTED
_PLACEHOLDERS = (TEXT, MUTED, GRID, *SERIES)
# After Okabe and Ito (safe for the common kinds of colour blindness), darkened or lightened for the background.
LIGHT = ("#0067a5", "#c2410c", "#007a55", "#9d3a86", "#8a6500", "#3b6fd4", "#5f5f5f", "#a3263a")
DARK = ("#62b3f0", "#ff9a62", "#45c79b", "#e594d2", "#e0b83c", "#9db8ff", "#b9b9b9", "#ff8a98")
# For print: the first four differ in lightness, so that they are told apart in grey.
PAPER = ("#0b3c6f", "#d55e00", "#56b4e9", "#000000", "#e69f00", "#7b3294", "#999999", "#b2182b")
COLUMN_MM, COLUMN_PX = 84, 357  # at this width text of 12 px has 8 pt
_PAPER_SCHEME = ("#000000", "#333333", "#d9d9d9", *PAPER)
_LIGHT_SCHEME = ("#1c1c1a", "#5c5b57", "#e2e0da", *LIGHT)
_DARK_SCHEME = ("#eceae4", "#a9a79f", "#3a3935", *DARK)
_ROOT = '<svg xmlns="http://www.w3.org/2000/svg" '
# vl-convert measures text in Liberation Sans, which has Arial's metrics: in a wider font labels would overlap.
FONT = "Arial, 'Liberation Sans', Helvetica, sans-serif"
THEME = "inpaint_bench"
WIDTH, HEIGHT = 400, 230  # size of a view that sets none of its own

alt.data_transformers.enable("default", max_rows=None, consolidate_datasets=False)


@alt.theme.register(THEME, enable=False)  # its colours are of no use to other charts of the process
def _theme() -> dict[str, Any]:
    axis = {"labelFontSize": 12, "titleFontSize": 12, "titleFontWeight": "normal", "tickSize": 4}
    axis |= {"labelColor": TEXT, "titleColor": MUTED, "gridColor": GRID, "domainColor": MUTED, "tickColor": MUTED}
    value_axis = {"domain": False, "ticks": False, "tickCount": 5, "labelPadding": 6, "titlePadding": 10}
    # columnPadding: the reader's font may be wider than the one in which vl-convert laid out the legend
    legend = {"orient": "top", "title": None, "columns": 4, "columnPadding": 26, "offset": 8}
    legend |= {"labelColor": TEXT, "labelFontSize": 12, "labelLimit": WIDTH, "symbolSize": 90}
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
        "text": {"color": TEXT, "fontSize": 12},
    }
    return {"config": config}


def to_spec(chart: alt.TopLevelMixin) -> dict[str, Any]:
    """Return the Vega-Lite of a chart in this theme."""
    with alt.theme.enable(THEME):
        # Altair's validation against the JSON schema would take longer than drawing the chart.
        spec: dict[str, Any] = chart.to_dict(validate=False)
    return spec


def in_light_scheme(spec: dict[str, Any]) -> dict[str, Any]:
    """Return the spec with colours in place of the placeholders, on white."""
    text = json.dumps(spec)
    for placeholder, colour in zip(_PLACEHOLDERS, _LIGHT_SCHEME, strict=True):
        text = text.replace(f'"{placeholder}"', f'"{colour}"')
    light: dict[str, Any] = json.loads(text)
    light["config"]["background"] = "#ffffff"
    return light


def css() -> str:
    """Return the style sheet of the figures: a variable per colour and scheme, and rules that replace placeholders."""
    variables = ["".join(f"--fig-{i}:{c};" for i, c in enumerate(scheme)) for scheme in (_LIGHT_SCHEME, _DARK_SCHEME)]
    rules = "".join(
        f'.fig [{paint}="{colour}"]{{{paint}:var(--fig-{i})}}'
        for i, colour in enumerate(_PLACEHOLDERS)
        for paint in ("fill", "stroke")
    )
    return f":root{{{variables[0]}}}@media (prefers-color-scheme:dark){{:root{{{variables[1]}}}}}{rules}"


def render(spec: dict[str, Any], name: str, title: str) -> str:
    """Return an inline SVG: its ids are prefixed with `name`, `title` is its label for screen readers."""
    raw: str = vl_convert.vegalite_to_svg(spec)
    # Every chart has the same ids, of clip paths for one: on one page they would collide.
    raw = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', raw)
    raw = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", raw)
    # Without the attribute its text takes the font of the page.
    raw = raw.replace('font-family="sans-serif"', "")
    label = html.escape(title, quote=True)
    width, height = _size(raw)
    head = f'<svg class="fig" role="img" aria-label="{label}" viewBox="0 0 {width:g} {height:g}" width="{width:g}">'
    return head + raw[raw.index(">", raw.index("<svg")) + 1 :]


def standalone(inline: str) -> str:
    style = f"<style>{css()}svg{{background:Canvas;color-scheme:light dark}}text{{font-family:{FONT}}}</style>"
    head, body = _split(inline)
    return f"{head.replace('<svg ', _ROOT, 1)}{style}{body}\n"


def column(spec: dict[str, Any], name: str, title: str) -> dict[str, bytes]:
    """Return a chart as `svg` and `pdf` for a column of a paper: 84 mm wide, 8 pt, untitled, readable in grey."""
    spec = json.loads(json.dumps({key: value for key, value in spec.items() if key != "title"}))
    side_by_side = spec.get("hconcat", [])
    views = side_by_side or spec.get("vconcat") or [spec]
    drawn = render(spec, name, title)
    for _ in range(4):  # text behind a bar may take more room in a narrower view
        excess = _size(drawn)[0] - COLUMN_PX
        for view in views:
            view["width"] = max(40, view.get("width", WIDTH) - excess / max(1, len(side_by_side)))
        drawn = render(spec, name, title)
    width, height = _size(drawn)
    text = on_paper(drawn, _PAPER_SCHEME)
    # A unit is a point in the PDF; in the SVG the width is stated in millimetres.
    scale = COLUMN_MM / 25.4 * 72 / width
    sizes = (
        f'width="{COLUMN_MM}mm" height="{COLUMN_MM * height / width:.2f}mm"',
        f'width="{scale * width}" height="{scale * height}"',
    )
    as_svg, as_pdf = (re.sub(r'(viewBox="[^"]*") width="[^"]*"', rf"\1 {size}", text, count=1) for size in sizes)
    as_svg = as_svg.replace('font-family="sans-serif"', f'font-family="{FONT}"', 1)
    return {"svg": as_svg.encode(), "pdf": bytes(vl_convert.svg_to_pdf(as_pdf))}


def on_paper(inline: str, scheme: tuple[str, ...] = _LIGHT_SCHEME) -> str:
    """Return the SVG in these colours on white, for renderers that read no style sheets."""
    for placeholder, colour in zip(_PLACEHOLDERS, scheme, strict=True):
        inline = inline.replace(f'"{placeholder}"', f'"{colour}"')
    head, body = _split(inline)
    head = head.replace("<svg ", f'{_ROOT}font-family="sans-serif" ', 1)
    return f'{head}<rect width="100%" height="100%" fill="#ffffff"/>{body}'


def _size(inline: str) -> tuple[float, float]:
    size = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', inline)
    assert size is not None
    return float(size[1]), float(size[2])


def _split(inline: str) -> tuple[str, str]:
    start = inline.index(">") + 1
    return inline[:start], inline[start:]
