"""Prompts from a file of captions as COCO has them, `captions_val2014.json`: drawn by a seed, the same everywhere."""

from __future__ import annotations

import hashlib
import heapq

import msgspec

from inpaint_bench.core.errors import UserError
from inpaint_bench.core.files import expand_path, read_plain
from inpaint_bench.core.records import decode_record


class Caption(msgspec.Struct, frozen=True):
    """A sentence about an image, of which COCO has several."""

    id: int
    caption: str


class _File(msgspec.Struct):
    annotations: list[Caption]


def read_captions(given: str) -> list[Caption]:
    """Return the captions of a file; `given` is `data.captions` as it was written. Raises UserError."""
    label = f"data.captions={given}"
    try:
        captions = decode_record(read_plain(expand_path(given), follow_links=True), _File)
    except OSError as error:
        raise UserError(f"{label}: cannot be read ({error.strerror})") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        needed = '{"annotations": [{"id": 1, "caption": "A street."}, ...]}, such as captions_val2014.json'
        raise UserError(f"{label}: not captions in COCO's format ({error}); it needs {needed}") from None
    found = captions.annotations
    if len({caption.id for caption in found}) < len(found):
        raise UserError(f"{label}: several captions have the same id")
    if empty := [caption.id for caption in found if not caption.caption.strip()]:
        raise UserError(f"{label}: the caption with id {empty[0]} is empty")
    return found


def draw_captions(given: str, count: int, seed: int) -> list[Caption]:
    """Return `count` different captions in the order of their ids. Raises UserError, also where the file has fewer.

    Those whose digests with the seed are the smallest: a draw without replacement that no version of a library changes.
    """
    captions = read_captions(given)
    if len(captions) < count:
        raise UserError(
            f"data.captions={given}: has {len(captions):,} captions, and {count:,} different ones are needed; "
            "lower workload.images"
        )

    def rank(caption: Caption) -> bytes:
        return hashlib.sha256(f"{seed} {caption.id}".encode()).digest()

    return sorted(heapq.nsmallest(count, captions, key=rank), key=lambda caption: caption.id)
