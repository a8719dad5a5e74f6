"""Capture files: what one GPU answered, call by call, failures kept.

A `.json.gz` of {"format": 1, "meta": {...}, "calls": {key: {"t_ms": [...], "code": ..., "value": [...],
"us": [...]}}}. Keys are method names of `Nvml`, or "field:<id>:<scope>", "gpm:<metric>" with "gpm_window_ms",
and "xids" (first whether one may listen, then the numbers that came). Of a process list there is a word per
process: ours, foreign, unknown. `code` is one number where every answer had the same; `us` is how long the
call took, absent for elements of one query. Meta says whether the file was recorded or made up (`synthetic`),
where from, and on what day.
"""

from __future__ import annotations

import gzip
import json
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from inpaint_bench.core.files import replacing

FORMAT: Final = 1
SUFFIX: Final = ".json.gz"
PACKAGED: Final = Path(__file__).parent / "captures"


class CaptureError(Exception):
    """A capture is not there or not readable; one sentence."""


@dataclass(frozen=True)
class Series:
    """The answers to one call over time."""

    t_ms: list[float]
    code: int | list[int]
    value: list[Any]

    def at(self, t_ms: float) -> tuple[int, Any]:
        """Return code and value of the last answer at or before `t_ms` (the first one, if earlier)."""
        index = max(0, bisect_right(self.t_ms, t_ms) - 1)
        return (self.code if isinstance(self.code, int) else self.code[index]), self.value[index]


@dataclass(frozen=True)
class Capture:
    name: str
    meta: dict[str, Any]
    calls: dict[str, Series]

    @property
    def duration_ms(self) -> float:
        return float(self.meta["duration_ms"])

    @property
    def loop_from_ms(self) -> float:
        """Where replay starts again after the end; what lies before is played once."""
        return float(self.meta.get("loop_from_ms", 0.0))

    @property
    def summary(self) -> dict[str, Any]:
        """What a reader must know of where the numbers come from."""
        keys = ("synthetic", "recorded_on", "tool", "note")
        return {"name": self.name, **{key: self.meta.get(key) for key in keys}}


def available() -> list[str]:
    """Names of the packaged captures."""
    return sorted(path.name.removesuffix(SUFFIX) for path in PACKAGED.glob(f"*{SUFFIX}"))


def load(name: str) -> Capture:
    """A packaged capture by name, or any by its file. Raises CaptureError, which lists the packaged ones."""
    path = Path(name) if name.endswith(SUFFIX) else PACKAGED / f"{name}{SUFFIX}"
    if not path.is_file():
        raise CaptureError(f"no capture {name!r}; available: {', '.join(available()) or 'none'}")
    try:
        content = json.loads(gzip.decompress(path.read_bytes()))
        if content["format"] != FORMAT:
            raise CaptureError(f"{path}: capture format {content['format']}, this version reads {FORMAT}")
        calls = {key: Series(item["t_ms"], item["code"], item["value"]) for key, item in content["calls"].items()}
        capture = Capture(path.name.removesuffix(SUFFIX), content["meta"], calls)
        if not 0 <= capture.loop_from_ms < capture.duration_ms:
            raise CaptureError(f"{path}: the loop must start before the capture ends")
    except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
        raise CaptureError(f"{path}: not a readable capture ({error!r})") from None
    return capture


def save(path: Path, meta: dict[str, Any], calls: Mapping[str, Mapping[str, Any]]) -> None:
    """Write a capture, whole or not at all; the same content gives the same bytes."""
    short = {key: {**item, "code": _one(item["code"])} for key, item in calls.items()}
    text = json.dumps({"format": FORMAT, "meta": meta, "calls": short}, separators=(",", ":"))
    with replacing(path) as out:
        out.write(gzip.compress(text.encode(), mtime=0))


def _one(codes: list[int]) -> int | list[int]:
    return codes[0] if len(set(codes)) == 1 else codes
