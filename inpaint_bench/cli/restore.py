"""`restore`: repaint the masked parts of a folder of images, and print what was done."""

from __future__ import annotations

import sys

from inpaint_bench.workloads.restore import GRID, Options, restore_folder


def run_restore(options: Options) -> None:
    """Restore a folder of images and list what was skipped. Raises UserError."""
    report = restore_folder(options)
    for image in report.skipped:
        print(f"skipped {image.file}: {image.reason}", file=sys.stderr)
    unknown = [image for image in report.restored if image.position is None]
    if report.location_tokens:
        for restored in unknown:
            print(f"{restored.file}: restored with unknown position ({restored.position_from})", file=sys.stderr)
    print(f"images: {len(report.restored)} restored, {len(report.skipped)} skipped")
    if report.location_tokens:
        print(f"positions: {len(report.restored) - len(unknown)} known, {len(unknown)} unknown")
    else:
        print("positions: not used, the weights have no location encoder")
    print(options.output / GRID)
