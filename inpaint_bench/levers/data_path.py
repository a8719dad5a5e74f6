"""The data path: who decodes, from what, and how it reaches the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from inpaint_bench.data.prepared import dali

from .base import Effective, Lever, Machine

if TYPE_CHECKING:
    from inpaint_bench.data.source import Source

    from .observation import Running, Seen

COMPARED = 8  # images of a batch
FAR_LEVELS = 3.0  # a guess: DALI's own coarse transform is 1.3 off on noise at quality 95, swapped channels by tens


class _Loader(Lever):
    """A setting that the loader reads from the recipe and accounts for."""

    def verify(self, workload: Running, seen: Seen) -> Effective:
        setting: dict[str, Any] = workload.batches.settings[self.field]
        active = setting["effective"] == setting["requested"]
        return Effective(effective=setting["effective"], active=active, evidence="the loader's own account")


class Workers(_Loader):
    field = "num_workers"


class Prefetch(_Loader):
    field = "prefetch_factor"

    def available(self, machine: Machine) -> str | None:
        return None if machine.recipe.num_workers else "without loader processes nothing is fetched ahead"


class PinMemory(_Loader):
    field = "pin_memory"

    def available(self, machine: Machine) -> str | None:
        return None if machine.cuda else "page-locked memory needs a GPU"

    def verify(self, workload: Running, seen: Seen) -> Effective:
        here = [value for value in seen.batch.values() if value.device.type == "cpu"]  # DALI's lie on the GPU already
        pinned = all(value.is_pinned() for value in here)
        text = f"{sum(value.is_pinned() for value in here)} of {len(here)} tensors of a batch in memory are pinned"
        return Effective(effective=pinned, active=pinned, evidence=text)


class NonBlocking(_Loader):
    field = "non_blocking"

    def available(self, machine: Machine) -> str | None:
        return None if machine.cuda else "there is no copy to a GPU"


def _nothing_is_read(machine: Machine) -> str | None:
    if machine.recipe.cache_image and machine.recipe.cache_masked:
        return "with images and masked images cached no picture is read"
    return None


class Format(_Loader):
    field = "format"

    def available(self, machine: Machine) -> str | None:
        kind, wanted = machine.bench.data.kind, machine.recipe.format
        if kind != "prepared":
            return f"needs data=prepared with format {wanted}, this is data={kind}"
        return _nothing_is_read(machine)


class Stage(Lever):
    field = "stage_to"

    def available(self, machine: Machine) -> str | None:
        kind = machine.bench.data.kind
        return _nothing_is_read(machine) if kind == "prepared" else f"needs data=prepared, this is data={kind}"

    def verify(self, workload: Running, seen: Seen) -> Effective:
        setting = workload.batches.settings["stage_to"]
        active = setting["effective"] == setting["requested"]
        text = f"{setting['bytes']:,} bytes at {setting['path']}" if active else "read where they are"
        return Effective(effective=setting["effective"], active=active, evidence=text)


class Decode(Lever):
    field = "decode"

    def available(self, machine: Machine) -> str | None:
        kind, recipe = machine.bench.data.kind, machine.recipe
        if kind != "prepared" or recipe.format != "files":
            return (
                "DALI decodes the files of a prepared dataset: it needs data=prepared with format files, "
                f"this is data={kind} with format {recipe.format}"
            )
        return _nothing_is_read(machine) or dali.missing()

    def verify(self, workload: Running, seen: Seen) -> Effective:
        """Also how far DALI's pixels are from Pillow's."""
        decoder = workload.batches.decoder
        if decoder is None or not decoder.handed_out:
            return Effective(effective=None, active=False, evidence="no batch came from DALI")
        image = seen.batch["image"]
        mean, most = _levels_apart(image, seen.batch["index"].tolist(), workload.assembly.source)
        text = (
            f"DALI's decoder ({decoder.decoder}) handed out {decoder.handed_out} batches, the last one on "
            f"{image.device.type}; off Pillow's by {mean:.3f} of 255 levels in the mean, {most:.0f} at most"
        )
        active = image.device.type == workload.device.type and mean <= FAR_LEVELS
        return Effective(effective=f"dali {decoder.decoder}", active=active, evidence=text)


def _levels_apart(image: Tensor, indices: list[int], source: Source) -> tuple[float, float]:
    """Mean and largest difference to what Pillow decodes, in levels of 255, of the first images of a batch."""
    theirs = image[:COMPARED].cpu().permute(0, 2, 3, 1).add(1).mul(127.5)
    ours = torch.from_numpy(np.stack([source.pixels(index) for index in indices[:COMPARED]]))
    apart = (theirs - ours).round().abs()
    return float(apart.mean()), float(apart.max())
