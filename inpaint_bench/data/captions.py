"""Prompts from a file of captions as COCO has them, `captions_val2014.json`: drawn by a seed, the same everywhere."""

import hashlib

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


def draw_captions(given: str, count: int, seed: int) -> list[Caption]:
    """Return `count` captions of a file in the order of their ids; `given` is `data.captions` as it was written.

    Those whose digests with the seed are the smallest: a draw without replacement that no version of a library changes.
    Raises UserError, also if the file has fewer.
    """
    label = f"data.captions={given}"
    try:
        captions = decode_record(read_plain(expand_path(given), follow_links=True), _File).annotations
    except OSError as error:
        raise UserError(f"{label}: cannot be read ({error.strerror})") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        needed = '{"annotations": [{"id": 1, "caption": "A street."}, ...]}, such as captions_val2014.json'
        raise UserError(f"{label}: not captions in COCO's format ({error}); it needs {needed}") from None
    if len(captions) < count:
        raise UserError(f"{label}: has {len(captions):,} captions, and a run needs {count:,} different ones")
    captions.sort(key=lambda caption: hashlib.sha256(f"{seed} {caption.id}".encode()).digest())
    return sorted(captions[:count], key=lambda caption: caption.id)
