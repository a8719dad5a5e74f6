"""Capture files: what one GPU returned, call by call, failures included, for replay without a GPU.

A capture is gzipped JSON, `NAME.json.gz`. It is recorded by `doctor gpu --out` or made up (`synthetic`), and holds
no UUID, no serial number and no process id. Keys of `calls`:

    driver_version, nvml_version     NVML's own
    name, utilization, ...           queries, see `real.QUERIES`
    field:<id>:<scope>               elements of field queries
    fields:<id>:<scope>,...          the duration of such a query
    gpm:<metric>, gpm_window_ms      elements of GPM reads, and the length of their window
    compute_processes, xids          whether a process list is given, and whether Xids can be watched for; not replayed
"""

from __future__ import annotations

import gzip
from bisect import bisect_right
from pathlib import Path
from typing import Any, Final

import msgspec

from inpaint_bench.core.files import replace_bytes
from inpaint_bench.core.records import decode_record
from inpaint_bench.telemetry.report import CaptureMeta

from .api import FIELDS, METRICS

FORMAT: Final = 1
SUFFIX: Final = ".json.gz"
PACKAGED: Final = Path(__file__).parent / "captures"


def field_key(name: str) -> str:
    """Return the key of one of FIELDS."""
    return "field:{}:{}".format(*FIELDS[name])


def gpm_key(name: str) -> str:
    """Return the key of one of METRICS."""
    return f"gpm:{METRICS[name]}"


class Series(msgspec.Struct, omit_defaults=True):
    """The results of one call over time."""

    t_ms: list[float]  # since the start of the recording
    code: int | list[int]  # NVML return code; one number if it never changed
    value: list[Any]
    us: list[float] = []  # how long each call took; for a field, as the driver reports it

    def at(self, t_ms: float) -> tuple[int, Any]:
        """Return code and value of the last result at or before `t_ms` (the first one, if earlier)."""
        # A value holds until the next recorded one, as it does between two polls of a sensor.
        index = max(0, bisect_right(self.t_ms, t_ms) - 1)
        return self.codes[index], self.value[index]

    @property
    def codes(self) -> list[int]:
        return [self.code] * len(self.t_ms) if isinstance(self.code, int) else self.code


class Capture(msgspec.Struct, kw_only=True):
    """A capture file."""

    format: int
    meta: CaptureMeta
    calls: dict[str, Series]


def available() -> list[str]:
    """Return the names of the packaged captures."""
    return sorted(path.name.removesuffix(SUFFIX) for path in PACKAGED.glob(f"*{SUFFIX}"))


def load(name: str) -> Capture:
    """Read a packaged capture by its name, or any capture by its path. Raises ValueError."""
    path = Path(name) if name.endswith(SUFFIX) else PACKAGED / f"{name}{SUFFIX}"
    if not path.is_file():
        raise ValueError(f"no capture {name!r}; available: {', '.join(available()) or 'none'}")
    try:
        capture = decode_record(gzip.decompress(path.read_bytes()), Capture)
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(f"{path} is not a readable capture: {error}") from None
    if capture.format != FORMAT:
        raise ValueError(f"{path} has capture format {capture.format}, this version reads {FORMAT}")
    # Replay divides by the length of the loop.
    if not 0 <= capture.meta.loop_from_ms < capture.meta.duration_ms:
        raise ValueError(f"{path}: loop_from_ms must lie within the capture")
    capture.meta.name = path.name.removesuffix(SUFFIX)
    return capture


def save(path: Path, capture: Capture) -> None:
    """Write a capture atomically; equal content gives equal bytes."""
    replace_bytes(path, gzip.compress(msgspec.json.encode(capture), mtime=0))
