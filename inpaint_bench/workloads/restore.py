"""Repaint the masked parts of a folder of images with saved weights, positions included.

Images are cropped and resized as in training (data/transform.py), and read one at a time. Unlike in training, those
without a position are used too.
"""

from __future__ import annotations

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

from inpaint_bench.core.config.bench import ModelConfig
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.files import replacing_folder
from inpaint_bench.core.records import SkippedImage, write_record
from inpaint_bench.data import geotags, transform
from inpaint_bench.data.folder import SUFFIXES, check_row, list_images, rows_without_image, skipped_image
from inpaint_bench.data.geotags import MetadataRow, PositionError
from inpaint_bench.data.masks import make_mask
from inpaint_bench.data.source import Mask, Pixels
from inpaint_bench.data.transform import UnusableImageError
from inpaint_bench.models import pipeline_folder
from inpaint_bench.models.architectures.location import LONGEST_M
from inpaint_bench.models.networks import Networks, build_networks
from inpaint_bench.models.weights_folder import weights_path
from inpaint_bench.quality import grid
from inpaint_bench.quality.sampling import restore

BATCH = 4
GRID_ROWS = 8
REPORT = "restore.json"
GRID = "grid.png"


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to restore, and how."""

    weights: Path
    images: Path
    output: Path
    masks: Path | None
    mask_kind: str
    steps: int
    seed: int
    device: str


class RestoredImage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One result. `position` is None where the image was restored with the tokens for an unknown position."""

    file: str
    output: str  # relative to the folder of results
    position: tuple[float, float] | None  # latitude, longitude in degrees
    position_from: str  # metadata, EXIF, or why it is unknown
    text: str
    mask_from: str
    mask_share: float
    note: str = ""


class RestoreReport(msgspec.Struct, kw_only=True):
    """Content of restore.json."""

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


def restore_folder(options: Options) -> RestoreReport:
    """Restore every usable image and write the results, a grid and the report.

    Raises UserError for impossible options, unusable weights, and a folder without a usable image.
    """
    images, out = options.images.absolute(), options.output.absolute()
    # Results among the images would be restored by the next run; a folder of results is replaced as a whole, and images
    # in it would be lost.
    if out.resolve().is_relative_to(images.resolve()) or images.resolve().is_relative_to(out.resolve()):
        raise UserError(f"-o {options.output}: lies in the folder of images or holds it; name another folder")
    networks = _load_networks(options)
    if not 1 <= options.steps <= len(networks.sqrt_alphas_cumprod):
        raise UserError(f"--steps {options.steps}: must lie between 1 and {len(networks.sqrt_alphas_cumprod)}")
    # diffusers saves a UNet's training resolution, in latents, as its sample_size.
    sample_size = networks.unet.config.sample_size
    if not isinstance(sample_size, int):
        raise UserError(f"{options.weights}: unet.sample_size is {sample_size}, must be one number")
    side = sample_size * networks.downscale
    masks = options.masks.absolute() if options.masks else None
    report = RestoreReport(
        weights=str(options.weights.absolute()),
        images=str(images),
        masks=str(masks) if masks else None,
        mask_kind=options.mask_kind,
        steps=options.steps,
        seed=options.seed,
        device=options.device,
        resolution_px=side,
        location_tokens=networks.location.tokens if networks.location else 0,
    )
    folder = RestoreFolder.open(images, masks, options.mask_kind, options.seed, side)
    with replacing_folder(out, REPORT) as partial:
        _restore_all(networks, folder, options, partial, report)
        write_record(partial / REPORT, report)
    return report


def _load_networks(options: Options) -> Networks:
    if options.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: no CUDA device here; use --device cpu")
    folder = weights_path(str(options.weights))
    location = pipeline_folder.read_location_description(folder)
    config = ModelConfig(name=folder.name, weights=str(folder), location_tokens=location.tokens if location else 0)
    try:
        return build_networks(config, torch.device(options.device))
    except UserError as error:
        # The folder is an argument here, not a key of the configuration.
        raise UserError(str(error).replace("model.weights=", "")) from None


def _restore_all(networks: Networks, folder: RestoreFolder, options: Options, out: Path, report: RestoreReport) -> None:
    """Write images and grid below `out` and add them to the report. Raises UserError if no image is usable."""
    grid_rows: list[tuple[Tensor, Tensor, Tensor]] = []
    outputs: set[str] = set()
    photos = _usable_photos(networks, folder, report)
    # One batch at a time is in memory, however large the folder is.
    while batch := list(islice(photos, BATCH)):
        images, masks, restored = _restore_batch(networks, batch, options)
        for number, photo in enumerate(batch):
            output = Path("images", photo.name).with_suffix(".png").as_posix()
            if output in outputs:  # house.jpg beside house.png
                output = f"images/{photo.name}.png"
            outputs.add(output)
            (out / output).parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(grid.to_pixels(restored[number])).save(out / output)
            report.restored.append(_describe(photo, output, networks))
            if len(grid_rows) < GRID_ROWS:
                grid_rows.append((images[number], masks[number], restored[number]))
    if not report.restored:
        # All skipped images are in the report by now: `photos` adds them while it is consumed.
        reasons = "; ".join(sorted({image.reason for image in report.skipped})[:3])
        raise UserError(f"{folder.root}: none of {len(report.skipped)} images can be used: {reasons}")
    columns = [torch.stack(column) for column in zip(*grid_rows, strict=True)]
    names = [image.file for image in report.restored[:GRID_ROWS]]
    grid.write(out / GRID, columns[0], columns[1], columns[2], names, GRID_ROWS)


def _usable_photos(networks: Networks, folder: RestoreFolder, report: RestoreReport) -> Iterator[RestoreInput]:
    for photo in folder:
        if isinstance(photo, SkippedImage):
            report.skipped.append(photo)
        else:
            yield _without_distant_position(photo, networks)


def _without_distant_position(photo: RestoreInput, networks: Networks) -> RestoreInput:
    """Drop a position far from the training data: the encoder's wavelengths do not reach that far."""
    if networks.location is None or photo.position is None:
        return photo
    distance_m = networks.location.distance_m(*photo.position)
    if distance_m <= LONGEST_M / 2:
        return photo
    reason = f"{distance_m / 1000:,.0f} km from the area that the weights were trained on"
    return replace(photo, position=None, position_from=reason)


def _restore_batch(networks: Networks, photos: list[RestoreInput], options: Options) -> tuple[Tensor, Tensor, Tensor]:
    """Return images [B, 3, R, R], masks [B, 1, R, R] and restored images [B, 3, R, R] on the CPU."""
    pixels = torch.from_numpy(np.stack([photo.pixels for photo in photos]))
    images = pixels.permute(0, 3, 1, 2).float() / 127.5 - 1
    masks = torch.from_numpy(np.stack([photo.mask for photo in photos]))[:, None].float()
    # The location encoder's input for an unknown position: it returns the learned null tokens then.
    unknown = (torch.nan, torch.nan)
    positions = torch.tensor([photo.position or unknown for photo in photos], dtype=torch.float64)
    tokens = networks.tokenize([photo.text for photo in photos])
    seeds = [image_seed(options.seed, photo.name) for photo in photos]
    restored = restore(networks, images, masks, tokens, positions[:, 0], positions[:, 1], options.steps, seeds)
    return images, masks, restored.cpu()


def _describe(photo: RestoreInput, output: str, networks: Networks) -> RestoredImage:
    note = ""
    if networks.location is None:
        note = "the weights have no location encoder, the position was not used"
    elif photo.position is None:
        note = "restored with the tokens for an unknown position"
    return RestoredImage(
        file=photo.name,
        output=output,
        position=photo.position,
        position_from=photo.position_from,
        text=photo.text,
        mask_from=photo.mask_from,
        mask_share=round(float(photo.mask.mean()), 4),
        note=note,
    )


# --- images and masks ------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RestoreInput:
    """An image to restore."""

    name: str  # relative to the folder
    pixels: Pixels  # [R, R, 3]
    mask: Mask  # [R, R], 1 = repaint
    mask_from: str  # its file, or the kind that was generated
    position: tuple[float, float] | None  # latitude, longitude in degrees
    position_from: str  # "metadata", "EXIF", or why there is none
    text: str


def image_seed(seed: int, name: str) -> int:
    """Return a seed that depends on the image's name, not on the other images of its folder."""
    return int(np.random.SeedSequence((seed, zlib.crc32(name.encode()))).generate_state(1)[0])


@dataclass(frozen=True, kw_only=True)
class RestoreFolder:
    """The images below `root` in alphabetical order, without hidden files and the metadata's masks.

    The mask is the file of the same name in `masks` where that is given (with any known suffix), else the one that
    the metadata names, else one of `mask_kind`, generated from `seed` and the image's name.
    """

    root: Path
    masks: Path | None
    mask_kind: str
    seed: int
    resolution_px: int
    names: list[str]
    rows: dict[str, MetadataRow]

    @classmethod
    def open(cls, root: Path, masks: Path | None, mask_kind: str, seed: int, resolution_px: int) -> RestoreFolder:
        """List the images. Raises UserError where a folder is missing or empty, or its metadata cannot be read."""
        for folder in (root, masks):
            if folder is not None and not folder.is_dir():
                raise UserError(f"{folder}: no such folder")
        rows = geotags.read_metadata(root) or {}
        metadata_masks = {row.mask for row in rows.values()}
        names = [name for name in list_images(root) if name not in metadata_masks]
        if masks not in (None, root):  # a folder of masks may lie below the images
            names = [name for name in names if masks not in (root / name).parents]
        if not names:
            raise UserError(f"{root}: no image in it ({', '.join(SUFFIXES)})")
        return cls(
            root=root, masks=masks, mask_kind=mask_kind, seed=seed, resolution_px=resolution_px, names=names, rows=rows
        )

    def __iter__(self) -> Iterator[RestoreInput | SkippedImage]:
        for name in self.names:
            try:
                yield self._read(name)
            except transform.DECODE_ERRORS as error:
                yield skipped_image(name, error)
        yield from rows_without_image(self.root, self.rows, set(self.names))

    def _read(self, name: str) -> RestoreInput:
        row = self.rows.get(name, MetadataRow())
        check_row(name, row)
        with transform.open_image(self.root / name) as image:
            upright = transform.upright(image)
            position, position_from = _position(row, image)
        mask, mask_from = self._mask(name, row, upright.size)
        return RestoreInput(
            name=name,
            pixels=transform.center_square(upright, self.resolution_px),
            mask=mask,
            mask_from=mask_from,
            position=position,
            position_from=position_from,
            text=row.text,
        )

    def _mask(self, name: str, row: MetadataRow, size: tuple[int, int]) -> tuple[Mask, str]:
        if self.masks is not None:
            # The mask of house.jpg may be house.jpg or house.png.
            named = self.masks / name
            candidates = (named, *(named.with_suffix(suffix) for suffix in SUFFIXES))
            path = next((path for path in candidates if path.is_file()), named)
        elif row.mask is not None:
            path = self.root / row.mask
        else:
            seed = (image_seed(self.seed, name),)
            generated = make_mask(self.resolution_px, seed, self.mask_kind, full_mask_share=0)
            return generated, f"generated: {self.mask_kind}"
        if not path.is_file():
            raise UnusableImageError(f"no mask {path}")
        try:
            with transform.open_image(path) as mask:
                return transform.center_square_mask(mask, size, self.resolution_px), str(path)
        except UnusableImageError:
            raise
        except transform.DECODE_ERRORS as error:
            raise UnusableImageError(f"its mask {path} cannot be read ({error})") from None


def _position(row: MetadataRow, image: Image.Image) -> tuple[tuple[float, float] | None, str]:
    try:
        return geotags.find_position(row, image)
    except PositionError as error:
        return None, str(error)
