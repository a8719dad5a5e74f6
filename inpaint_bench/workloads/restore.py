"""Repaint the masked parts of a folder of images with saved weights, positions included.

Images are cropped and resized as in training (data/transform.py), and read one at a time. Unlike in training, those
without a position are used too.
"""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import msgspec
import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import default_collate

from inpaint_bench.core.config.bench import ModelConfig
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.files import check_can_be_made, replacing_folder
from inpaint_bench.core.records import SkippedImage, write_record
from inpaint_bench.data import folder as photographs
from inpaint_bench.data import geotags, transform
from inpaint_bench.data.folder import SUFFIXES
from inpaint_bench.data.geotags import MetadataRow
from inpaint_bench.data.masks import make_mask
from inpaint_bench.data.samples import Batch
from inpaint_bench.data.source import Mask
from inpaint_bench.data.transform import UnusableImageError
from inpaint_bench.models import architectures, pipeline_folder
from inpaint_bench.models.architectures.location import LONGEST_M
from inpaint_bench.models.generation import restore
from inpaint_bench.models.networks import Networks, build_networks
from inpaint_bench.models.weights_folder import architecture, weights_path
from inpaint_bench.quality import grid

BATCH = 4
MAX_SAMPLE_SIZE = 1024  # side of the latents
REPORT = "restore.json"
GRID = "grid.png"


class RestoredImage(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One result. `position` is None if the image was restored with the tokens for an unknown position."""

    file: str  # relative to the folder of images
    output: str = ""  # relative to the folder of results
    position: tuple[float, float] | None  # latitude, longitude in degrees
    position_from: str  # metadata, EXIF, or why it is unknown
    text: str
    mask_from: str  # its file, or the kind that was generated
    mask_share: float
    note: str = ""


class RestoreReport(msgspec.Struct, kw_only=True):
    """Content of restore.json: the options, and what was done."""

    weights: str
    images: str
    masks: str | None
    mask_kind: str
    steps: int
    seed: int
    device: str
    resolution_px: int
    location_tokens: int  # 0: the weights have no location encoder
    restored: list[RestoredImage] = []
    skipped: list[SkippedImage] = []


@dataclass(frozen=True, kw_only=True)
class Photo:
    """An image to restore."""

    sample: Batch  # what `generation.restore` reads of it
    seed: int
    description: RestoredImage


def restore_folder(
    *, weights: Path, images: Path, output: Path, masks: Path | None, mask_kind: str, steps: int, seed: int, device: str
) -> RestoreReport:
    """Restore every usable image and write the results, a grid and the report.

    Raises UserError for impossible options, unusable weights, and a folder without a usable image.
    """
    # Results among the images would be restored by the next run; a folder of results is replaced as a whole, and images
    # in it would be lost.
    if output.resolve().is_relative_to(images.resolve()) or images.resolve().is_relative_to(output.resolve()):
        raise UserError(f"-o {output}: lies in the folder of images or holds it; name another folder")
    if masks and not masks.is_dir():
        raise UserError(f"{masks}: no such folder")
    check_can_be_made(output.absolute().parent)  # before the weights are loaded
    networks = _load_networks(weights, device)
    if not 1 <= steps < len(networks.signal_weights):
        raise UserError(f"--steps {steps}: must lie between 1 and {len(networks.signal_weights) - 1}")
    sample_size = networks.architecture.sample_side(networks)
    if type(sample_size) is not int or not 0 < sample_size <= MAX_SAMPLE_SIZE:
        raise UserError(f"{weights}: unet.sample_size is {sample_size}, must be one number, 1 to {MAX_SAMPLE_SIZE}")
    report = RestoreReport(
        weights=str(weights.absolute()),
        images=str(images.absolute()),
        masks=str(masks.absolute()) if masks else None,
        mask_kind=mask_kind,
        steps=steps,
        seed=seed,
        device=device,
        resolution_px=sample_size * networks.downscale,
        location_tokens=networks.location.tokens if networks.location else 0,
    )
    photos = _photos(report, networks)
    with replacing_folder(output.absolute(), REPORT) as partial:
        _restore_all(networks, photos, partial, report)
        write_record(partial / REPORT, report)
    return report


def _load_networks(weights: Path, device: str) -> Networks:
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: no CUDA device here; use --device cpu")
    folder = weights_path(str(weights))
    location = pipeline_folder.read_location_description(folder)
    config = ModelConfig(name=folder.name, weights=str(folder), location_tokens=location.tokens if location else 0)
    if kind := architecture(folder):
        config.transformer = {"architecture": kind, "inpaints": True}
        config.guidance = architectures.of_model(config).restoring_guidance
    return build_networks(config, torch.device(device))


def _restore_all(networks: Networks, photos: Iterator[Photo], out: Path, report: RestoreReport) -> None:
    """Write images and grid below `out` and add them to the report. Raises UserError if no image is usable."""
    grid_rows: list[tuple[Tensor, Tensor, Tensor]] = []
    # One batch at a time is in memory, however large the folder is.
    while batch := list(islice(photos, BATCH)):
        inputs: Batch = default_collate([photo.sample for photo in batch])
        inputs["image"] = inputs["image"].contiguous(memory_format=torch.channels_last)  # as files are decoded
        restored = restore(networks, inputs, report.steps, [photo.seed for photo in batch]).cpu()
        if not restored.isfinite().all():
            raise UserError(f"{report.weights}: the networks make pixels that are NaN or infinite")
        for photo, *row in zip(batch, inputs["image"], inputs["mask"], restored, strict=True):
            image = photo.description
            path = Path("images", image.file).with_suffix(".png")
            if (out / path).exists():  # house.jpg beside house.png
                path = Path("images", f"{image.file}.png")
            image.output = path.as_posix()
            (out / path).parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(grid.to_pixels(row[-1])).save(out / path)
            report.restored.append(image)
            if len(grid_rows) < grid.ROWS:
                grid_rows.append(tuple(row))
    if not report.restored:
        # All skipped images are in the report by now: `photos` adds them while it is consumed.
        reasons = "; ".join(sorted({image.reason for image in report.skipped})[:3])
        raise UserError(f"{report.images}: none of {len(report.skipped)} images can be used: {reasons}")
    grid.write(out / GRID, grid_rows, [image.file for image in report.restored])


# --- images and masks ------------------------------------------------------------------------


def _photos(report: RestoreReport, networks: Networks) -> Iterator[Photo]:
    """Return the usable images of the folder in alphabetical order; the others join the report as it is consumed.

    Hidden files and masks are no images. Raises UserError if there is none, or the metadata cannot be read.
    """
    root = Path(report.images)
    files, left_out = photographs.list_files(root)
    rows = photographs.named_as_files(geotags.read_metadata(root) or {}, files)
    masks = {row.mask for row in rows.values()}
    names = [name for name in files if name not in masks]
    if report.masks and report.masks != report.images:  # a folder of masks may lie below the images
        names = [name for name in names if not (root / name).is_relative_to(Path(report.masks))]
    if not names:
        raise UserError(f"{root}: no image in it ({', '.join(SUFFIXES)})")
    report.skipped += [file for file in left_out if file.reason == photographs.TABLE_REASON]

    def read_all() -> Iterator[Photo]:
        for name in names:
            try:
                yield _read(name, rows.get(name, MetadataRow()), report, networks)
            except transform.DECODE_ERRORS as error:
                report.skipped.append(photographs.skipped_image(name, error))
        report.skipped += photographs.rows_without_image(root, rows, set(names))

    return read_all()


def _read(name: str, row: MetadataRow, report: RestoreReport, networks: Networks) -> Photo:
    if report.masks is not None:
        row = replace(row, mask=None)
    image, mask, read = photographs.read_photo(Path(report.images), name, row, report.resolution_px)
    position, position_from = read.position, read.position_from
    # The encoder's wavelengths do not reach far from the training data.
    distance_m = networks.location.distance_m(*position) if networks.location and position else 0.0
    if distance_m > LONGEST_M / 2:
        position_from = f"{distance_m / 1000:,.0f} km from the area that the weights were trained on"
        position = None
    # It depends on the image's name, not on the other images of its folder.
    seed = int(np.random.SeedSequence((report.seed, zlib.crc32(name.encode()))).generate_state(1)[0])
    mask_from = str(Path(report.images, row.mask or ""))
    if mask is None:
        mask, mask_from = _mask(name, image.size, seed, report)
    note = "" if position else "restored with the tokens for an unknown position"
    if networks.location is None:
        note = "the weights have no location encoder, the position was not used"
    if not read.profile_used:
        note = "; ".join(filter(None, (note, f"has {photographs.NO_PROFILE}")))
    description = RestoredImage(
        file=name,
        position=position,
        position_from=position_from,
        text=read.text,
        mask_from=mask_from,
        mask_share=round(float(mask.mean()), 4),
        note=note,
    )
    pixels = torch.tensor(transform.center_square(image, report.resolution_px)).permute(2, 0, 1)
    # The location encoder's input for an unknown position: it returns the learned null tokens then.
    latitude, longitude = torch.tensor(position or (torch.nan, torch.nan), dtype=torch.float64)
    sample = {
        "image": pixels.float() / 127.5 - 1,
        "mask": torch.from_numpy(mask)[None].float(),
        "tokens": networks.tokenize([read.text])[0],
        "latitude": latitude,
        "longitude": longitude,
    }
    return Photo(sample=sample, seed=seed, description=description)


def _mask(name: str, size: tuple[int, int], seed: int, report: RestoreReport) -> tuple[Mask, str]:
    """Return the mask from the folder of masks, or a generated one, and its source."""
    if report.masks is None:
        generated = make_mask(report.resolution_px, (seed,), report.mask_kind, full_mask_share=0)
        return generated, f"generated: {report.mask_kind}"
    # The mask of house.jpg may be house.jpg or house.png.
    for mask in (name, *(str(Path(name).with_suffix(suffix)) for suffix in SUFFIXES)):
        if (path := Path(report.masks, mask)).is_file():
            return photographs.read_mask(Path(report.masks), mask, size, report.resolution_px)[1], str(path)
    raise UnusableImageError(f"no mask {Path(report.masks, name)}")
