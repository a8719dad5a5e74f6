"""Measure how long `report` takes for many runs, and how long a browser takes to open its page.

usage: python benchmarks/report_open.py OUT [--runs 900] [--samples 1200] [--repeats 7]

Makes --runs run directories below OUT in 60 cells (3 GPUs by 4 batches by 5 recipes; see merge_scale.py), merges them,
and removes them at the end. Then, --repeats times in turn, it runs the command `report` in a new process, and opens the
page in a newly started headless Chromium, wide and narrow, with the file in the page cache. The times of the page are
those of the browser's Performance API, from the start of the navigation.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from inpaint_bench.core import schema
from tests.browser import Browser
from tests.browser.packages import require

from .merge_scale import make

RECIPES = ("baseline", "tf32", "compile", "adamw_fused", "channels_last")
WIDTHS_PX = (1400, 390)
TIMES = """(() => {
    const at = performance.getEntriesByType('navigation')[0];
    const paint = performance.getEntriesByName('first-contentful-paint')[0];
    return {'DOMContentLoaded': at.domContentLoadedEventEnd, 'first contentful paint': paint.startTime,
            'load': at.loadEventEnd};
})()"""
PAINTED = "new Promise(done => requestAnimationFrame(() => setTimeout(done, 0)))"


def main() -> int:
    """Run the benchmark; return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="a folder that does not exist yet")
    parser.add_argument("--runs", type=int, default=900)
    parser.add_argument("--samples", type=int, default=1200, help="fast rows per run")
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    program, out = require(), options.out.absolute()
    out.mkdir(parents=True)
    try:
        _measure(program, out, options)
    finally:
        shutil.rmtree(out, ignore_errors=True)
    return 0


def _measure(program: str, out: Path, options: argparse.Namespace) -> None:
    for index, folder in enumerate(make(out / "runs", options.runs, options.samples, part_rows=6000)):
        manifest = json.loads((folder / schema.MANIFEST).read_text())
        manifest["recipe"] = RECIPES[index // 12 % len(RECIPES)]
        (folder / schema.MANIFEST).write_text(json.dumps(manifest))
    _run("merge", str(out / "runs"), "-o", str(out / "ds"))
    times: dict[str, list[float]] = {}
    for _ in range(options.repeats):
        start = time.monotonic()
        _run("report", str(out / "ds"), "-o", str(out / "report"))
        times.setdefault("`report`", []).append(time.monotonic() - start)
        for label, seconds in _page_times(program, out / "report" / "report.html"):
            times.setdefault(label, []).append(seconds)
    page = (out / "report" / "report.html").stat().st_size
    cores = len(os.sched_getaffinity(0))
    print(f"{options.runs} runs, page of {page / 2**20:.1f} MiB, {cores} cores")
    print("\n| step | s, median (min to max) | n |\n|---|---|---|")
    for label, seconds in times.items():
        spread = f"{statistics.median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f})"
        print(f"| {label} | {spread} | {len(seconds)} |")


def _run(verb: str, *arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "inpaint_bench", verb, *arguments], stdout=subprocess.DEVNULL, check=True)


def _page_times(program: str, report: Path) -> Iterator[tuple[str, float]]:
    """Yield the times of each width in a new browser, so that none finds what another has compiled or cached."""
    for width in WIDTHS_PX:
        with Browser(program) as browser:
            page = browser.page(width=width)
            page.open(report)
            page.evaluate(PAINTED)
            for name, milliseconds in page.evaluate(TIMES).items():
                yield f"page at {width} px: {name}", milliseconds / 1000


if __name__ == "__main__":
    sys.exit(main())
