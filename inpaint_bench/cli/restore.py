"""`restore`: repaint the masked parts of a folder of images, and print what was done."""

from pathlib import Path
from typing import Any

from inpaint_bench.core.console import echo
from inpaint_bench.core.errors import UserError
from inpaint_bench.kernels.cache import check_given
from inpaint_bench.models.weights_folder import check_weights_folder, weights_path


def run_restore(*, weights: Path, images: Path, output: Path, **others: Any) -> None:
    """Restore a folder of images and list what was skipped; `others` are those of restore_folder. Raises UserError."""
    for name, folder in (("WEIGHTS", weights), ("IMAGES", images)):
        if not (folder.is_dir() or (folder.exists() and name == "WEIGHTS")):  # a file of weights is named below
            kind = "a diffusers folder, as training saves it" if name == "WEIGHTS" else "a folder of images"
            raise UserError(f"{folder}: no such folder; {name} is {kind}")
    try:
        check_weights_folder(weights_path(str(weights)), str(weights))
        check_given()
        from inpaint_bench.workloads.restore import GRID, restore_folder  # torch takes seconds to import

        report = restore_folder(weights=weights, images=images, output=output, **others)
    except UserError as error:  # the folder is an argument here, not a key of the configuration
        raise UserError(str(error).replace("model.weights=", "")) from None
    for image in report.skipped:
        echo(f"skipped {image.file}: {image.reason}", error=True)
    unknown = [image for image in report.restored if image.position is None]
    if report.location_tokens:
        for restored in unknown:
            echo(f"{restored.file}: restored with unknown position ({restored.position_from})", error=True)
    print(f"images: {len(report.restored)} restored, {len(report.skipped)} skipped")
    if report.location_tokens:
        print(f"positions: {len(report.restored) - len(unknown)} known, {len(unknown)} unknown")
    else:
        print("positions: not used, the weights have no location encoder")
    echo(str(output / GRID))
