"""Take screenshots of a dataset's report: `python docs/make_screenshots.py DATASET [-o docs]`.

Writes report-light.png, report-dark.png and report-narrow.png, of at most 400 kB each. Each begins at a section of the
page, given by its id.
"""

from __future__ import annotations

import argparse
import io
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from analysis.report.report import write_report
from tests.browser import Browser, Page
from tests.browser.packages import require

MAX_BYTES = 400_000
PALETTES = (256, 128, 64, 32)  # numbers of colours, tried in turn until the file is small enough


@dataclass(frozen=True, kw_only=True)
class View:
    """The part of the page that a screenshot shows, and how."""

    name: str
    section: str
    scheme: str
    width: int
    height: int
    scale: float = 1


VIEWS = (
    View(name="light", section="top", scheme="light", width=1400, height=1500),
    View(name="dark", section="timelines", scheme="dark", width=1400, height=1200),
    View(name="narrow", section="top", scheme="light", width=390, height=844, scale=2),
)


def main() -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", type=Path, help="folder written by `merge`")
    parser.add_argument("-o", "--output", type=Path, default=Path(__file__).parent)
    for view in VIEWS:
        parser.add_argument(f"--{view.name}", metavar="ID", default=view.section, help="default: %(default)s")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, Browser(require()) as browser:
        page = browser.page()
        page.open(write_report(options.dataset, Path(scratch) / "report"))
        for view in VIEWS:
            picture = _screenshot(page, view, getattr(options, view.name), Path(scratch))
            target = options.output / f"report-{view.name}.png"
            target.write_bytes(picture)
            print(f"{target}: {len(picture):,} bytes")
    return 0


def _screenshot(page: Page, view: View, section: str, scratch: Path) -> bytes:
    """Return a PNG with as many colours as its size allows."""
    page.emulate(width=view.width, height=view.height, scheme=view.scheme, scale=view.scale)
    if not page.evaluate(f"document.getElementById({section!r}) !== null"):
        sys.exit(f"The page has no section {section!r}.")
    page.evaluate(f"document.getElementById({section!r}).scrollIntoView()")
    page.screenshot(scratch / "shot.png")
    picture = b""
    for colours in PALETTES:
        out = io.BytesIO()
        with Image.open(scratch / "shot.png") as shot:
            shot.convert("RGB").quantize(colours, dither=Image.Dither.NONE).save(out, "PNG", optimize=True)
        picture = out.getvalue()
        if len(picture) < MAX_BYTES:
            return picture
    sys.exit(f"report-{view.name}.png has {len(picture):,} bytes with {PALETTES[-1]} colours; take a smaller view.")


if __name__ == "__main__":
    sys.exit(main())
