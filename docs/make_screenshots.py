"""Take screenshots of reports: `python docs/make_screenshots.py` takes all, `... NAME...` those named.

They are PNG files beside this one, of reports of the committed datasets.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from PIL import Image

from analysis.report.report import write_report
from tests.browser import Browser, Page
from tests.browser.packages import require

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"


@dataclass(frozen=True)
class Window:
    """A window of the browser, in CSS px; `scale` are device px for each."""

    width: int = 1000
    height: int = 900
    scheme: str = "light"
    scale: float = 1


@dataclass(frozen=True)
class View:
    """A screenshot: the window from an element on, or with `crop` this element alone."""

    dataset: str
    element: str  # its id
    crop: bool = True
    window: Window = Window()
    colours: int = 64


CARDS = "2026-11-23-h100-h200"
VIEWS = {
    "answer": View("2026-11-27-h200-yardstick", "answer-1", window=Window(1400)),
    "report-light": View(CARDS, "top", crop=False, window=Window(1400, 1500), colours=256),
    "report-dark": View(CARDS, "fold-6", crop=False, window=Window(1400, 1200, "dark"), colours=256),
    "report-narrow": View(CARDS, "top", crop=False, window=Window(390, 844, scale=2), colours=256),
    "gallery-training": View("2026-11-23-h200-finetune", "decision"),
    "gallery-batches": View(CARDS, "fig-images_per_s"),
    "gallery-ladder": View("2026-11-23-h200-ladder", "fig-ladder-0"),
    "gallery-scaling": View("2026-11-29-h200-two-gpus", "fig-scaling"),
    "gallery-inference": View("2026-11-23-h200-inference", "fig-inference"),
    "gallery-denoisers": View("2026-11-23-h200-denoisers", "fig-denoise-shape-memory"),
    "gallery-volumes": View("2026-11-23-h200-volumes", "volume3d-train"),
}


def main(names: list[str]) -> None:
    """Write the screenshots."""
    with tempfile.TemporaryDirectory() as scratch, Browser(require()) as browser:
        page = browser.page()
        report = cache(lambda dataset: write_report(RESULTS / dataset, Path(scratch) / dataset))
        for name in names or VIEWS:
            view = VIEWS[name]
            page.emulate(**asdict(view.window))
            page.open(report(view.dataset))
            image = shoot(page, view, Path(scratch) / "shot.png")
            target = Path(__file__).with_name(f"{name}.png")
            image.quantize(view.colours, dither=Image.Dither.NONE).save(target, optimize=True)
            print(f"{target.name}: {target.stat().st_size:,} bytes")


def shoot(page: Page, view: View, path: Path) -> Image.Image:
    """Return the screenshot of a view."""
    box = page.evaluate(
        f"(() => {{ const element = document.getElementById({view.element!r});"
        " for (let each = element; each; each = each.parentElement) if (each.tagName === 'DETAILS') each.open = true;"
        " element.scrollIntoView();"
        " const box = element.getBoundingClientRect(); return [box.left, box.top, box.right, box.bottom]; })()"
    )
    page.screenshot(path)
    image = Image.open(path).convert("RGB")
    return image.crop([round(edge * view.window.scale) for edge in box]) if view.crop else image


if __name__ == "__main__":
    main(sys.argv[1:])
