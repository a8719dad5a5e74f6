"""`restore`: repaint the masked parts of a folder of images with a saved pipeline, positions included."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inpaint_bench.core.errors import UserError

if TYPE_CHECKING:  # torch takes seconds to import, --help should not
    import torch
    from torch import Tensor

    from inpaint_bench.models.networks import Networks
    from inpaint_bench.quality.photos import RestoreInput

BATCH = 4
GRID_ROWS = 8
RESULT = "restore.json"


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


def run_restore(options: Options) -> None:
    """Repaint the masked parts of a folder of images. Raises UserError for impossible options."""
    from inpaint_bench.core.files import replacing_folder
    from inpaint_bench.quality.photos import RestoreFolder

    if options.seed < 0:
        raise UserError(f"--seed {options.seed}: must not be negative")
    images, out = options.images.absolute(), options.output.absolute()
    if out.resolve().is_relative_to(images.resolve()) or images.resolve().is_relative_to(out.resolve()):
        raise UserError(f"-o {options.output}: lies in the folder of images or holds it; name another folder")
    networks = _networks(options)
    if not 1 <= options.steps <= len(networks.sqrt_alphas_cumprod):
        raise UserError(f"--steps {options.steps}: must lie between 1 and {len(networks.sqrt_alphas_cumprod)}")
    latents = networks.unet.config.sample_size
    if not isinstance(latents, int):
        raise UserError(f"{options.weights}: unet.sample_size is {latents}, one number of latents is needed")
    side = latents * networks.downscale
    masks = options.masks.absolute() if options.masks else None
    folder = RestoreFolder.open(images, masks, options.mask_kind, options.seed, side)
    with replacing_folder(out, RESULT) as new:
        account = _restore_all(networks, folder, options, new)
        about = {
            "weights": str(options.weights.absolute()),
            "images": str(images),
            "masks": str(masks) if masks else None,
            "mask_kind": options.mask_kind,
            "steps": options.steps,
            "seed": options.seed,
            "device": options.device,
            "resolution_px": side,
            "location_tokens": networks.location.tokens if networks.location else 0,
        }
        (new / RESULT).write_text(json.dumps({**about, **account}, indent=1) + "\n", encoding="utf-8")
    _say(account, networks.location is not None, options.output)


def _networks(options: Options) -> Networks:
    import torch
    from transformers.utils import logging

    from inpaint_bench.core.config import ModelConfig
    from inpaint_bench.models import pipeline_folder
    from inpaint_bench.models.networks import build_networks

    logging.disable_progress_bar()
    if options.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: no CUDA device here; use --device cpu")
    folder = options.weights
    location = pipeline_folder.read_location_description(folder)
    tokens = location.tokens if location else 0
    config = ModelConfig(name=folder.name, weights=str(folder), location_tokens=tokens)
    try:
        return build_networks(config, torch.device(options.device))
    except UserError as error:
        raise UserError(str(error).removeprefix("model.weights=")) from None


def _restore_all(networks: Networks, folder: Any, options: Options, out: Path) -> dict[str, Any]:
    """Write images and grid below `out`. Raises UserError where no image could be used."""
    import torch

    from inpaint_bench.core.records import SkippedImage
    from inpaint_bench.quality import grid

    done: list[dict[str, Any]] = []
    skipped: list[dict[str, str]] = []
    rows: list[tuple[Tensor, Tensor, Tensor]] = []
    waiting: list[RestoreInput] = []
    taken: set[str] = set()

    def flush() -> None:
        if not waiting:
            return
        images, masks, restored = _batch(networks, waiting, options)
        for number, photo in enumerate(waiting):
            done.append(_write(photo, restored[number], out, taken, networks))
            if len(rows) < GRID_ROWS:
                rows.append((images[number], masks[number], restored[number]))
        waiting.clear()

    for found in folder:
        if isinstance(found, SkippedImage):
            skipped.append({"file": found.file, "reason": found.reason})
            continue
        waiting.append(_placed(found, networks))
        if len(waiting) == BATCH:
            flush()
    flush()
    if not done:
        reasons = "; ".join(sorted({one["reason"] for one in skipped})[:3])
        raise UserError(f"{folder.root}: none of {len(skipped)} images can be used: {reasons}")
    originals, masks, restored = (torch.stack(column) for column in zip(*rows, strict=True))
    names = [one["file"] for one in done[: len(rows)]]
    grid.write(out / "grid.png", originals, masks, restored, names, GRID_ROWS)
    return {"restored": done, "skipped": skipped}


def _placed(photo: RestoreInput, networks: Networks) -> RestoreInput:
    """A photo from another city is one of unknown position: what the model knows of places ends with its ground."""
    from inpaint_bench.models.location import LONGEST_M

    if networks.location is None or photo.position is None:
        return photo
    away = networks.location.distance_m(*photo.position)
    if away <= LONGEST_M / 2:
        return photo
    why = f"{away / 1000:,.0f} km from the ground that the weights were trained on"
    return replace(photo, position=None, position_from=why)


def _batch(networks: Networks, photos: list[RestoreInput], options: Options) -> tuple[Tensor, Tensor, Tensor]:
    """Images, masks and restored images, on the processor."""
    import numpy as np
    import torch

    from inpaint_bench.quality.photos import image_seed
    from inpaint_bench.quality.sampling import restore

    pixels = torch.from_numpy(np.stack([photo.pixels for photo in photos]))
    images = pixels.permute(0, 3, 1, 2).float() / 127.5 - 1
    masks = torch.from_numpy(np.stack([photo.mask for photo in photos]))[:, None].float()
    places: torch.Tensor = torch.tensor(
        [photo.position or (torch.nan, torch.nan) for photo in photos], dtype=torch.float64
    )
    tokens = networks.tokenize([photo.text for photo in photos])
    seeds = [image_seed(options.seed, photo.name) for photo in photos]
    restored = restore(networks, images, masks, tokens, places[:, 0], places[:, 1], options.steps, seeds)
    return images, masks, restored.cpu()


def _write(photo: RestoreInput, restored: Tensor, out: Path, taken: set[str], networks: Networks) -> dict[str, Any]:
    from PIL import Image

    from inpaint_bench.quality import grid

    output = Path("images", photo.name).with_suffix(".png").as_posix()
    if output in taken:  # house.jpg beside house.png
        output = f"images/{photo.name}.png"
    taken.add(output)
    (out / output).parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(grid.to_pixels(restored)).save(out / output)
    note = {}
    if networks.location and photo.position is None:
        note["note"] = "restored as of unknown position"
    elif networks.location is None:
        note["note"] = "the weights have no location encoder, the position was not used"
    return {
        "file": photo.name,
        "output": output,
        "position": photo.position,
        "position_from": photo.position_from,
        "text": photo.text,
        "mask_from": photo.mask_from,
        "mask_share": round(float(photo.mask.mean()), 4),
        **note,
    }


def _say(account: dict[str, Any], located: bool, out: Path) -> None:
    for one in account["skipped"]:
        print(f"skipped {one['file']}: {one['reason']}", file=sys.stderr)
    lost = [one for one in account["restored"] if one["position"] is None]
    if located:
        for one in lost:
            print(f"{one['file']}: restored as of unknown position ({one['position_from']})", file=sys.stderr)
    print(f"images: {len(account['restored'])} restored, {len(account['skipped'])} skipped")
    if located:
        print(f"positions: {len(account['restored']) - len(lost)} known, {len(lost)} not known")
    else:
        print("positions: not used, the weights have no location encoder")
    print(f"{out / 'grid.png'}")
