"""The GPUs that a program will use, by CUDA_VISIBLE_DEVICES, or uses, by NVML's lists of processes; without CUDA."""

from collections.abc import Mapping
from contextlib import suppress
from itertools import takewhile

from inpaint_bench.core.child import is_descendant
from inpaint_bench.core.errors import UserError

from .driver import Driver, DriverError
from .nvml.real import gpu_uuid

VARIABLE = "CUDA_VISIBLE_DEVICES"
_BY_HAND = "name the GPUs with --gpus GPU-..., by commas"


def visible_uuids(nvml: Driver, environment: Mapping[str, str]) -> list[str]:
    """Return the UUIDs of the GPUs that CUDA gives to a program with this environment, in its order.

    Numbers are CUDA's: those of NVML if all GPUs are of one kind, or CUDA_DEVICE_ORDER is PCI_BUS_ID. Raises
    DriverError, and UserError if there is no GPU, for MIG slices, and if a number does not tell which GPU it is.
    """
    listed = nvml.uuids()
    text = environment.get(VARIABLE)
    uuids = listed if text is None else [_resolve(entry, text, listed, nvml, environment) for entry in entries(text)]
    refuse_twice(uuids, f"{VARIABLE}={text}")
    if not uuids:
        where = "NVML lists none" if text is None or not listed else f"{VARIABLE}={text} names none"
        raise UserError(f"the program has no GPU to sample: {where}; --telemetry none runs it without telemetry")
    return uuids


def entries(text: str) -> list[str]:
    """Return the entries of CUDA_VISIBLE_DEVICES. CUDA reads none from a negative one, or Slurm's NoDevFiles, on."""
    named = (entry.strip() for entry in text.split(","))
    return list(takewhile(lambda entry: not entry.startswith(("-", "NoDev")), filter(None, named)))


def refuse_twice(uuids: list[str], text: str) -> None:
    """Raise UserError for a GPU that `text` names twice, by a number and a UUID perhaps."""
    if twice := [uuid for uuid in uuids if uuids.count(uuid) > 1]:
        raise UserError(f"{text}: {twice[0]} is named {len(twice)} times; name each GPU once")


def uuids_of(nvml: Driver, pid: int) -> list[str]:
    """Return the UUIDs of the GPUs on which a process or a descendant computes.

    Raises DriverError, and UserError if NVML names none: it may not know the ids of this container.
    """
    uuids = []
    for uuid in nvml.uuids():
        with suppress(DriverError):  # a GPU may give no list
            if any(is_descendant(each, pid) for each in nvml.compute_processes(nvml.device(uuid))):
                uuids.append(uuid)
    if not uuids:
        raise UserError(f"--attach {pid}: computes on no GPU that NVML lists its processes for; wait, or {_BY_HAND}")
    return uuids


def _resolve(entry: str, text: str, listed: list[str], nvml: Driver, environment: Mapping[str, str]) -> str:
    if not entry.lstrip("-").isdecimal():
        try:
            prefix = gpu_uuid(entry) if not entry.upper().startswith("GPU-") else "GPU-" + entry[4:].lower()
        except ValueError as error:
            raise UserError(f"{VARIABLE}={text}: {error}") from None
        # CUDA takes the beginning of a UUID too, if only one GPU has it.
        matches = [uuid for uuid in listed if uuid.startswith(prefix)]
        if len(matches) != 1:
            raise UserError(f"{VARIABLE}={text}: {entry} is none of the GPUs here: {', '.join(listed) or 'none'}")
        return matches[0]
    if not 0 <= int(entry) < len(listed):
        raise UserError(f"{VARIABLE}={text}: there is no GPU {entry} among {len(listed)}; {_BY_HAND}")
    names = {nvml.query(nvml.device(uuid), "name") for uuid in listed}
    if len(names) > 1 and environment.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        kinds = " and ".join(sorted(names))
        raise UserError(
            f"{VARIABLE}={text}: CUDA may number {kinds} in another order than NVML; set CUDA_DEVICE_ORDER=PCI_BUS_ID, "
            f"or {_BY_HAND}"
        )
    return listed[int(entry)]
