"""`sweep.json`: what was launched, with every point and the site files of the time."""

from __future__ import annotations

import secrets
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from inpaint_bench.core.console import sanitize
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.files import replace_bytes
from inpaint_bench.core.schema import JOBS, LEDGER, SWEEP

from .launch_context import LaunchContext
from .run_order import RunOrder

FORMAT_VERSION = 2  # 1: before the record was typed


class PointSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A point as it was composed: its overrides and what they request from a site."""

    point: int
    overrides: list[str]
    gpu: str | None
    batch: int | str | None
    site: str
    time_min: int | None = None  # over all starts of its job
    service_units: float | None = None  # at that limit; None: the site's charging rule is not known


class SweepRecord(msgspec.Struct, kw_only=True):
    """Content of `sweep.json`. Written with all points before anything is submitted."""

    sweep_id: str
    format_version: int = FORMAT_VERSION
    created_unix: float = msgspec.field(default_factory=lambda: round(time.time(), 3))
    command: list[str] = msgspec.field(default_factory=lambda: list(sys.argv))
    overrides: list[str] = []  # of the command line, before the sweep was expanded
    order: RunOrder | None = None  # None: the seed was swept, so nothing can be repeated
    launch_context: LaunchContext = LaunchContext()
    sites: dict[str, dict[str, Any]] = {}  # contents of the site files, by name
    points: list[PointSpec] = []

    @classmethod
    def read(cls, folder: Path) -> SweepRecord:
        """Read the record of a sweep directory. Raises UserError where there is none or it is damaged."""
        path = folder / SWEEP
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            raise UserError(_missing(folder)) from None
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}; `merge` reads the runs without it") from None
        try:
            version = msgspec.json.decode(content, type=_Version).format_version
            if version != FORMAT_VERSION:
                raise UserError(
                    f"{path}: has format {version}, and this version of inpaint_bench reads {FORMAT_VERSION}; use the "
                    f"version that launched the sweep, or `merge`, which reads the runs without it"
                )
            record = msgspec.json.decode(content, type=cls)
            unknown = [point for point in record.points if point.site not in record.sites]
            if unknown:
                raise msgspec.ValidationError(f"point {unknown[0].point}: no site named {unknown[0].site}")
        except msgspec.MsgspecError as error:
            raise UserError(f"{path}: damaged ({sanitize(str(error))}); `merge` reads the runs without it") from None
        return record

    def write(self, folder: Path) -> None:
        """Replace the record of a sweep directory."""
        replace_bytes(folder / SWEEP, msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")


class _Version(msgspec.Struct):
    format_version: int = 1


def new_sweep_id() -> str:
    """Return an id that no other sweep has: date and six random hex digits."""
    return f"s{time.strftime('%y%m%d', time.gmtime())}{secrets.token_hex(3)}"


def _missing(folder: Path) -> str:
    """Explain a folder without a record. Nothing is rebuilt from what else lies in it."""
    if folder.is_file():
        return f"{folder}: not a sweep directory (it is a file); give the folder that `launch -m` printed"
    if not folder.is_dir():
        return f"{folder}: not a sweep directory (no such folder); give the folder that `launch -m` printed"
    if (folder / LEDGER).exists() or (folder / JOBS).exists() or any(folder.glob("*/attempt-*")):
        return (
            f"{folder}: {SWEEP} is missing, so nobody can tell which jobs were submitted. Restore it from a backup, or "
            "launch the sweep again; `merge` reads the runs without it"
        )
    return (
        f"{folder}: not a sweep directory (no {SWEEP}: a dry run or a launch that ended before it submitted anything); "
        "give the folder that `launch -m` printed"
    )
