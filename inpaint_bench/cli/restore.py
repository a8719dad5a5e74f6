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

    from inpaint_bench.models.networks import Models
    from inpaint_bench.quality.photos import Picture

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
    from inpaint_bench.models.pipeline_folder import replacing_folder
    from inpaint_bench.quality.photos import Folder

    if options.seed < 0:
        raise UserError(f"--seed {options.seed}: must not be negative")
    images, out = options.images.absolute(), options.output.absolute()
    if out.resolve().is_relative_to(images.resolve()) or images.resolve().is_relative_to(out.resolve()):
        raise UserError(f"-o {options.output}: lies in the folder of images or holds it; name another folder")
    nets = _networks(options)
    if not 1 <= options.steps <= len(nets.signal):
        raise UserError(f"--steps {options.steps}: must lie between 1 and {len(nets.signal)}")
    latents = nets.unet.config.sample_size
    if not isinstance(latents, int):
        raise UserError(f"{options.weights}: unet.sample_size is {latents}, one number of latents is needed")
    side = latents * nets.downscale
    masks = options.masks.absolute() if options.masks else None
    folder = Folder.open(images, masks, options.mask_kind, options.seed, side)
    with replacing_folder(out, RESULT) as new:
        account = _restore_all(nets, folder, options, new)
        about = {
            "weights": str(options.weights.absolute()),
            "images": str(images),
            "masks": str(masks) if masks else None,
            "mask_kind": options.mask_kind,
            "steps": options.steps,
            "seed": options.seed,
            "device": options.device,
            "resolution_px": side,
            "location_tokens": nets.location.tokens if nets.location else 0,
        }
        (new / RESULT).write_text(json.dumps({**about, **account}, indent=1) + "\n", encoding="utf-8")
    _say(account, nets.location is not None, options.output)


def _networks(options: Options) -> Models:
    import torch
    from transformers.utils import logging

    from inpaint_bench.core.config import ModelConfig
    from inpaint_bench.models import builders, pipeline_folder

    logging.disable_progress_bar()
    if options.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: no CUDA device here; use --device cpu")
    folder = options.weights
    tokens = pipeline_folder.location_tokens(folder)
    config = ModelConfig(name=folder.name, weights=str(folder), location_tokens=tokens)
    try:
        return builders.build(config, torch.device(options.device))
    except UserError as error:
        raise UserError(str(error).removeprefix("model.weights=")) from None


def _restore_all(nets: Models, folder: Any, options: Options, out: Path) -> dict[str, Any]:
    """Write images and grid below `out`. Raises UserError where no image could be used."""
    import torch

    from inpaint_bench.data.source import Skipped
    from inpaint_bench.quality import grid

    done: list[dict[str, Any]] = []
    skipped: list[dict[str, str]] = []
    rows: list[tuple[Tensor, Tensor, Tensor]] = []
    waiting: list[Picture] = []
    taken: set[str] = set()

    def flush() -> None:
        if not waiting:
            return
        images, masks, restored = _batch(nets, waiting, options)
        for number, picture in enumerate(waiting):
            done.append(_write(picture, restored[number], out, taken, nets))
            if len(rows) < GRID_ROWS:
                rows.append((images[number], masks[number], restored[number]))
        waiting.clear()

    for found in folder:
        if isinstance(found, Skipped):
            skipped.append({"file": found.file, "reason": found.reason})
            continue
        waiting.append(_placed(found, nets))
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


def _placed(picture: Picture, nets: Models) -> Picture:
    """A picture from another city is one of unknown position: what the model knows of places ends with its ground."""
    from inpaint_bench.models.location import LONGEST_M

    if nets.location is None or picture.position is None:
        return picture
    away = nets.location.away_m(*picture.position)
    if away <= LONGEST_M / 2:
        return picture
    why = f"{away / 1000:,.0f} km from the ground that the weights were trained on"
    return replace(picture, position=None, position_from=why)


def _batch(nets: Models, pictures: list[Picture], options: Options) -> tuple[Tensor, Tensor, Tensor]:
    """Images, masks and restored images, on the processor."""
    import numpy as np
    import torch

    from inpaint_bench.quality.photos import own_seed
    from inpaint_bench.quality.sampling import restore

    pixels = torch.from_numpy(np.stack([picture.pixels for picture in pictures]))
    images = pixels.permute(0, 3, 1, 2).float() / 127.5 - 1
    masks = torch.from_numpy(np.stack([picture.mask for picture in pictures]))[:, None].float()
    places: torch.Tensor = torch.tensor(
        [picture.position or (torch.nan, torch.nan) for picture in pictures], dtype=torch.float64
    )
    tokens = nets.tokenize([picture.text for picture in pictures])
    seeds = [own_seed(options.seed, picture.name) for picture in pictures]
    restored = restore(nets, images, masks, tokens, places[:, 0], places[:, 1], options.steps, seeds)
    return images, masks, restored.cpu()


def _write(picture: Picture, restored: Tensor, out: Path, taken: set[str], nets: Models) -> dict[str, Any]:
    from PIL import Image

    from inpaint_bench.quality import grid

    output = Path("images", picture.name).with_suffix(".png").as_posix()
    if output in taken:  # house.jpg beside house.png
        output = f"images/{picture.name}.png"
    taken.add(output)
    (out / output).parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(grid.pixels(restored)).save(out / output)
    note = {}
    if nets.location and picture.position is None:
        note["note"] = "restored as of unknown position"
    elif nets.location is None:
        note["note"] = "the weights have no location encoder, the position was not used"
    return {
        "file": picture.name,
        "output": output,
        "position": picture.position,
        "position_from": picture.position_from,
        "text": picture.text,
        "mask_from": picture.mask_from,
        "mask_share": round(float(picture.mask.mean()), 4),
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
