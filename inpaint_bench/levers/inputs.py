"""The data path: who decodes, from what, and how it reaches the device."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from .lever import Effective, Lever, Machine

if TYPE_CHECKING:
    from ..workloads.finetune_inpaint import FinetuneInpaint
    from .observe import Seen


class _Loader(Lever):
    """A setting that the loader reads from the recipe and accounts for."""

    def verify(self, workload: FinetuneInpaint, seen: Seen) -> Effective:
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

    def verify(self, workload: FinetuneInpaint, seen: Seen) -> Effective:
        pinned = all(value.is_pinned() for value in seen.batch.values())
        text = f"{sum(v.is_pinned() for v in seen.batch.values())} of {len(seen.batch)} tensors of a batch are pinned"
        return Effective(effective=pinned, active=pinned, evidence=text)


class NonBlocking(_Loader):
    field = "non_blocking"

    def available(self, machine: Machine) -> str | None:
        return None if machine.cuda else "there is no copy to a GPU"


class Format(Lever):
    field = "format"

    def available(self, machine: Machine) -> str | None:
        kind, wanted = machine.bench.data.kind, machine.recipe.format
        return None if kind == "prepared" else f"needs data=prepared with format {wanted}, this is data={kind}"

    def verify(self, workload: FinetuneInpaint, seen: Seen) -> Effective:
        found = getattr(workload.assembly.source, "format", None)
        wanted = workload.bench.recipe.format
        return Effective(effective=found, active=found == wanted, evidence="the opened dataset's own account")


class Stage(Lever):
    field = "stage"

    def available(self, machine: Machine) -> str | None:
        kind = machine.bench.data.kind
        return None if kind == "prepared" else f"needs data=prepared, this is data={kind}"

    def verify(self, workload: FinetuneInpaint, seen: Seen) -> Effective:
        staged = getattr(workload.assembly.source, "staged", None)
        if not staged:
            return Effective(effective=None, active=False, evidence="nothing was copied")
        return Effective(effective=staged, active=True, evidence="the opened dataset's own account")


class Decode(Lever):
    field = "decode"

    def available(self, machine: Machine) -> str | None:
        if find_spec("nvidia") is None or find_spec("nvidia.dali") is None:
            return "NVIDIA DALI is not installed: pip install 'inpaint-bench[dali]'"
        if machine.bench.data.kind != "prepared" or machine.recipe.format != "files":
            return "DALI decodes the files of a prepared dataset (data=prepared, format=files)"
        if machine.recipe.cache_image and machine.recipe.cache_masked:
            return "with images and masked images cached nothing is decoded"
        return None

    def verify(self, workload: FinetuneInpaint, seen: Seen) -> Effective:
        image = seen.batch.get("image")
        where = None if image is None else str(image.device.type)
        text = f"decoded images lie on {where}; the loader is {type(workload.batches).__name__}"
        wanted = "cuda" if workload.device == torch.device("cuda", 0) else "cpu"
        return Effective(effective=where, active=where == wanted, evidence=text)
