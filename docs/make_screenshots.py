"""Take screenshots of a dataset's report: `python docs/make_screenshots.py DATASET`.

Writes report-light.png, report-dark.png and report-narrow.png beside this file.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image

from analysis.report.report import write_report
from tests.browser import Browser
from tests.browser.packages import require

# Name: the id of the section at which the screenshot begins, and the window.
VIEWS: dict[str, tuple[str, dict[str, Any]]] = {
    "light": ("top", {"width": 1400, "height": 1500, "scheme": "light"}),
    "dark": ("timelines", {"width": 1400, "height": 1200, "scheme": "dark"}),
    "narrow": ("top", {"width": 390, "height": 844, "scheme": "light", "scale": 2}),
}


def main(dataset: Path) -> None:
    """Write the screenshots."""
    with tempfile.TemporaryDirectory() as scratch, Browser(require()) as browser:
        page, shot = browser.page(), Path(scratch) / "shot.png"
        page.open(write_report(dataset, Path(scratch) / "report"))
        for name, (section, window) in VIEWS.items():
            page.emulate(**window)
            page.evaluate(f"document.getElementById({section!r}).scrollIntoView()")
            page.screenshot(shot)
            target = Path(__file__).with_name(f"report-{name}.png")
            Image.open(shot).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(target, optimize=True)
            print(f"{target}: {target.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
