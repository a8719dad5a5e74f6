"""A folder of photographs. Each is read and decoded once when the folder is opened, so that unusable images are listed
with the reason before the first step, instead of ending the run in its third hour."""

import hashlib
import io
import logging
import os
import time
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError

from inpaint_bench.core.config.bench import DataConfig
from inpaint_bench.core.console import sanitize
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.files import expand_path, read_plain
from inpaint_bench.core.records import SkippedImage

from . import geotags, transform
from .geotags import MetadataRow, PositionError
from .source import Inventory, Mask, Pixels, Source
from .transform import UnusableImageError

HEIC_SUFFIXES = (".heic", ".heif")
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".tif", ".tiff", ".avif", *(HEIC_SUFFIXES if transform.HEIC else ()))
# Why a file of another suffix is left out.
OTHER_FILES = {
    **dict.fromkeys(HEIC_SUFFIXES, transform.NEEDS_HEIC),
    **dict.fromkeys(
        (
            *(".3fr", ".arw", ".cr2", ".cr3", ".dng", ".erf", ".iiq", ".kdc", ".mrw", ".nef", ".nrw", ".orf"),
            *(".pef", ".raf", ".raw", ".rw2", ".rwl", ".sr2", ".srf", ".srw", ".x3f"),
        ),
        "RAW file of a camera: export it as JPEG or TIFF",
    ),
    **dict.fromkeys((".bmp", ".gif", ".jp2", ".jxl", ".psd", ".svg"), "image of a format that is not read: convert it"),
    ".jfif": "JPEG of another suffix: name it .jpg",
    **dict.fromkeys((".txt", ".caption"), "text of no image: a caption of NAME.jpg is NAME.txt or NAME.caption"),
    **dict.fromkeys((".aae", ".json", ".pp3", ".thm", ".xmp"), "sidecar file of an image"),
    **dict.fromkeys((".avi", ".insv", ".m4v", ".mkv", ".mov", ".mp4"), "video"),
}
SHOWN = 20  # files that are left out, in the log; all are in the inventory
CAPTIONS = (".txt", ".caption")  # suffixes of a text beside an image
TABLES = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet", ".xls", ".xlsx", ".ods")
TABLE_REASON = f"perhaps the metadata file, which must be {' or '.join(geotags.METADATA_NAMES)} in the folder itself"
NO_ROW = "no row in the metadata file"
NO_PROFILE = "a colour profile that cannot be used, so that its colours count as sRGB"
MAX_CAPTION_BYTES = 2**16
MAX_FILE_BYTES = 2**30  # read at once, by every thread
THREADS = 8  # Pillow decodes outside the interpreter lock
CHUNK = 256
LOG_INTERVAL_S = 5.0

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Photo:
    """An image of the folder that can be decoded, with what its row of the metadata file and its caption say."""

    size: tuple[int, int]  # width and height, upright
    name: str  # relative to the folder
    position: tuple[float, float] | None
    position_from: str  # metadata, EXIF, or why it is unknown
    text: str
    mask: str | None  # relative to the folder
    sha256: str  # hash of the files: image, then mask
    profile_used: bool  # False: the colour profile cannot be used
    version: int  # version of `transform` that made its pixels: those of earlier versions are the same

    @property
    def identity(self) -> str:
        """Return what the data's identity has of it; photographs of version 1 keep theirs, and so their checkpoints."""
        latitude, longitude = self.position or (None, None)
        known = {"name": self.name, "latitude": latitude, "longitude": longitude, "text": self.text, "mask": self.mask}
        known |= {"sha256": self.sha256} | ({"version": self.version} if self.version > 1 else {})
        return f"Photo({', '.join(f'{name}={value!r}' for name, value in known.items())})"


Task = Callable[[], Photo | SkippedImage]


class FolderSource(Source):
    """Images below a folder, each with a position."""

    def __init__(self, config: DataConfig) -> None:
        """Check every image under `config.root`, except hidden files, and keep the usable ones.

        Raises UserError if the folder is missing or holds no usable image.
        """
        root = check_folder(config.root)
        rows = geotags.read_metadata(root)
        files, skipped = list_files(root)
        rows = rows and named_as_files(rows, files)
        # Masks may lie beside the photographs; they are not images of their own.
        masks = {row.mask for row in (rows or {}).values()}
        names = [name for name in files if name not in masks]
        skipped += rows_without_image(root, rows or {}, {*names, *(image.file for image in skipped)})
        examine = partial(_examine, root, rows=rows, side=config.resolution_px)
        tasks: Iterator[list[Task]] = (
            [partial(examine, name) for name in names[at : at + CHUNK]] for at in range(0, len(names), CHUNK)
        )
        self._keep(config, root, examine_all(tasks, len(names)), skipped, len(names), rows)

    def _keep(
        self,
        config: DataConfig,
        root: Path,
        results: Iterable[Photo | SkippedImage],
        skipped: list[SkippedImage],
        count: int,
        rows: dict[str, MetadataRow] | None = None,
    ) -> None:
        """Keep the usable images of `count`. Raises UserError if there is none."""
        found = count + len(skipped)
        by_content: dict[tuple[str, tuple[float, float] | None, str], Photo] = {}
        examined = 0
        # Results come in the order of the names, so data.num_images selects the same images on every machine.
        for result in results:
            examined += 1
            if isinstance(result, SkippedImage):
                skipped.append(result)
            elif (key := (result.sha256, result.position, result.text)) in by_content:
                skipped.append(SkippedImage(file=result.name, reason="duplicate: an image before it is the same"))
            else:
                by_content[key] = result
                if len(by_content) == config.num_images:
                    break
        photos = list(by_content.values())
        if not photos:
            reasons = _common_reasons(skipped)
            raise UserError(f"data.root={root}: no usable image, {found} found, {len(skipped)} left out: {reasons}")
        for image in skipped[:SHOWN]:
            log.warning("left out %s", sanitize(f"{image.file}: {image.reason}"))
        if len(skipped) > SHOWN:
            log.warning("left out %d more", len(skipped) - SHOWN)
        no_row = [p.name for p in photos if rows is not None and p.name not in rows]
        for problem, images in ((NO_PROFILE, [p.name for p in photos if not p.profile_used]), (NO_ROW, no_row)):
            if images:
                shown = sanitize(", ".join(images[:3]))
                log.warning("%d of %d images have %s: %s", len(images), len(photos), problem, shown)
        beyond = count - examined
        assert found == len(photos) + len(skipped) + beyond, "every file is counted once"
        self.inventory = Inventory(
            kind=config.kind, found=found, used=len(photos), beyond_limit=beyond, skipped=skipped
        )
        self.resolution_px = config.resolution_px
        self.positions = np.array([p.position for p in photos], np.float64)
        self.texts = [p.text for p in photos]
        self.names = [p.name for p in photos]
        self.identity = hashlib.sha256("\n".join(p.identity for p in photos).encode()).hexdigest()
        self._root = root
        self._masks = [(p.mask, p.size) for p in photos]

    def pixels(self, index: int) -> Pixels:
        """Return the image upright, cropped to the centre square and resized."""
        path = self._root / self.names[index]
        with transform.naming(path), transform.open_image(path) as image:
            return transform.center_square(transform.upright(image), self.resolution_px)

    def own_mask(self, index: int) -> Mask | None:
        """Return the mask that the metadata file names, cropped like the image, or None."""
        name, image_size = self._masks[index]
        if name is None:
            return None
        path = self._root / name
        with transform.naming(path), transform.open_image(path) as mask:
            return transform.center_square_mask(mask, image_size, self.resolution_px)


def check_folder(root: str | None) -> Path:
    """Return `data.root`. Raises UserError if it is no folder, cannot be read, or holds no file of an image."""
    path = expand_path(root or "")
    if not path.is_dir():
        what = "is a file, not a folder" if path.exists() else "no such folder"
        raise UserError(f"data.root={path}: {what}")
    if not os.access(path, os.R_OK | os.X_OK):
        raise UserError(f"data.root={path}: you may not read this folder")
    if not any(_why_no_image(path, name) is None for name in walk(path)):
        reasons = _common_reasons(list_files(path)[1])
        raise UserError(f"data.root={path}: no image in this folder ({', '.join(SUFFIXES)}): {reasons}")
    return path


def _common_reasons(left_out: list[SkippedImage]) -> str:
    counts = Counter(image.reason for image in left_out).most_common()
    shown = [f"{count} {reason}" for reason, count in counts[:3]]
    if others := sum(count for _, count in counts[3:]):
        shown.append(f"{others} for other reasons")
    return "; ".join(shown) or "it is empty"


def list_files(root: Path) -> tuple[list[str], list[SkippedImage]]:
    """Return the images below `root`, and every other file with the reason why it is none.

    Both are relative and sorted: an index means the same image on every machine. The metadata file and captions are
    in neither.
    """
    images, left_out = [], []
    reasons = {name: _why_no_image(root, name) for name in sorted(walk(root), key=lambda name: Path(name).parts)}
    others = {str(Path(name).with_suffix(end)) for name in reasons if reasons[name] is None for end in CAPTIONS}
    others.update(geotags.METADATA_NAMES)
    for name, reason in reasons.items():
        if reason is None:
            images.append(name)
        elif name not in others:
            left_out.append(SkippedImage(file=escape_invalid(name), reason=reason))
    return images, left_out


def walk(root: Path) -> Iterator[str]:
    """Yield everything below `root` but folders that were walked: files, links, and folders that cannot be read."""

    def relative(path: str) -> str:
        return Path(path).relative_to(root).as_posix()

    unreadable: list[str] = []
    for folder, folders, files in os.walk(root, onerror=lambda error: unreadable.append(str(error.filename))):
        yield from (relative(f"{folder}/{name}") for name in files)
        # A link to a folder is not followed: it may lead out of this one, or back into it.
        yield from (relative(f"{folder}/{name}") for name in folders if Path(folder, name).is_symlink())
    yield from map(relative, unreadable)


def _why_no_image(root: Path, name: str) -> str | None:
    """Return why a name below `root` is left out unopened, or None. A broken link of an image's name is not."""
    path = root / name
    if reason := why_left_out(root, name):
        return reason
    if path.suffix.lower() in SUFFIXES:
        return None
    if "metadata" in path.name.lower() or path.suffix.lower() in TABLES:
        return TABLE_REASON
    return OTHER_FILES.get(path.suffix.lower(), "not an image")


def why_left_out(root: Path, name: str) -> str | None:
    """Return why a name below `root` is left out, whatever its suffix, or None."""
    if any(part.startswith(".") for part in Path(name).parts):
        return "hidden file"
    if (path := root / name).is_dir():
        return "link to a folder, which is not followed" if path.is_symlink() else "folder that cannot be read"
    return None


def named_as_files(rows: dict[str, MetadataRow], files: Sequence[str]) -> dict[str, MetadataRow]:
    """Return the rows under the names of the files: macOS stores letters with accents in two parts, tables do not."""
    known = set(files)
    by_form = {unicodedata.normalize("NFC", name): name for name in files if not name.isascii()}

    def on_disk(name: str) -> str:
        return name if name in known else by_form.get(unicodedata.normalize("NFC", name), name)

    named: dict[str, MetadataRow] = {}
    for name, row in rows.items():
        file = on_disk(name)
        is_taken = file in rows or file in named
        named[name if is_taken else file] = replace(row, mask=on_disk(row.mask)) if row.mask else row
    return named


def _may_be_meant(lost: Iterable[str], images: Iterable[str]) -> tuple[str, str] | None:
    """Return a name without image and the image that it may mean: in other case, below another folder, or a suffix."""
    forms = {form: image for image in images for form in (image.lower(), image.lower().rpartition(".")[0])}
    for name in lost:
        parts = name.replace("\\", "/").lower().split("/")
        tails = ("/".join(parts[at:]) for at in range(len(parts)))
        if image := next((forms[tail] for tail in tails if tail in forms), None):
            return name, image
    return None


def rows_without_image(root: Path, rows: dict[str, MetadataRow], images: set[str]) -> list[SkippedImage]:
    """Return the rows of the metadata file whose image is not among `images`."""
    masks = {row.mask for row in rows.values()}
    absent_reason = f"named in the metadata file, but no image of that name in the folder ({', '.join(SUFFIXES)})"
    mask_reason = "also named as a mask in the metadata file, so it is not used as an image"
    skipped = []
    lost = sorted(rows.keys() - images)
    if pair := _may_be_meant(lost, images):
        absent_reason += f"; {pair[0]!r} may be {pair[1]!r}, as the folder has it"
    for name in lost:
        is_mask = name in masks and (root / name).is_file()
        skipped.append(SkippedImage(file=escape_invalid(name), reason=mask_reason if is_mask else absent_reason))
    return skipped


def examine_all(chunks: Iterable[list[Task]], count: int) -> Iterator[Photo | SkippedImage]:
    """Yield what the tasks return, in order and a chunk at a time: a limit reached early leaves the rest unread."""
    last_log, done = time.monotonic(), 0
    with ThreadPoolExecutor(min(THREADS, len(os.sched_getaffinity(0))), thread_name_prefix="images") as pool:
        for tasks in chunks:
            yield from pool.map(lambda task: task(), tasks)
            done += len(tasks)
            if time.monotonic() - last_log > LOG_INTERVAL_S:
                last_log = time.monotonic()
                log.info("checked %d of %d images", done, count)


def _examine(root: Path, name: str, *, rows: dict[str, MetadataRow] | None, side: int) -> Photo | SkippedImage:
    return examine(root, name, (rows or {}).get(name, MetadataRow()), side, has_row=rows is None or name in rows)


def examine(
    root: Path, name: str, row: MetadataRow, side: int, *, content: bytes | None = None, has_row: bool = True
) -> Photo | SkippedImage:
    """Return an image's description, or why it is left out; `content` is that of its file, else it is read."""
    try:
        _, _, photo = read_photo(root, name, row, side, content)
    except transform.DECODE_ERRORS as error:
        return skipped_image(name, error)
    if photo.position is None:
        no_row = "" if has_row else f"{NO_ROW}; "
        return SkippedImage(file=name, reason=f"{no_row}{photo.position_from}")
    return photo


def read_photo(
    root: Path, name: str, row: MetadataRow, side: int, given: bytes | None = None
) -> tuple[Image.Image, Mask | None, Photo]:
    """Return the upright image, its own mask as a square, and the description of both. Raises DECODE_ERRORS.

    `given` is the content of an image that is no file, and has no caption beside it.
    """
    check_row(name, row)
    content = read_plain(root / name, follow_links=True, max_bytes=MAX_FILE_BYTES) if given is None else given
    if not content:
        raise UnusableImageError("empty file")
    # Phones send such files with the name of a JPEG.
    if not transform.HEIC and content[4:12] in (b"ftypheic", b"ftypheix", b"ftyphevc"):
        raise UnusableImageError(transform.NEEDS_HEIC)
    position, mask = None, None
    with transform.open_image(io.BytesIO(content)) as image:
        upright = transform.upright(image)  # as `pixels` will: damaged EXIF must show now
        transform.check_complete(image, content)
        profile_used, version = transform.colours_count(image, upright), transform.version_of(image, upright)
        try:
            position, position_from = geotags.find_position(row, image)
        except PositionError as error:
            position_from = str(error)
    text = row.text or (_read_caption(root / name) if given is None else "")
    if row.mask is not None:
        mask_content, mask = read_mask(root, row.mask, upright.size, side)
        content += mask_content
    sha256 = hashlib.sha256(content).hexdigest()  # hash of both: another mask gives the data another identity
    photo = Photo(upright.size, name, position, position_from, text, row.mask, sha256, profile_used, version)
    return upright, mask, photo


def _read_caption(image: Path) -> str:
    """Return the first line of NAME.txt or .caption beside NAME.jpg, for kohya's scripts. Raises UnusableImageError."""
    present = [path for path in map(image.with_suffix, CAPTIONS) if os.path.lexists(path)]
    if len(present) > 1:
        raise UnusableImageError(f"it has the captions {' and '.join(path.name for path in present)}; keep one of them")
    try:
        files = (read_plain(path, follow_links=True, max_bytes=MAX_CAPTION_BYTES) for path in present)
        lines = (line.strip() for file in files for line in geotags.decode_text(file).splitlines())
        return next(filter(None, lines), "")
    except (OSError, ValueError) as error:
        raise UnusableImageError(f"its caption {present[0].name} cannot be read: {error.args[-1]}") from None


def read_mask(root: Path, name: str, size: tuple[int, int], side: int) -> tuple[bytes, Mask]:
    """Return the file's content and the mask of an image of `size` that its row names. Raises UnusableImageError."""
    path = root / name
    # A metadata file from elsewhere must not reach files outside its folder.
    if ".." in Path(name).parts or Path(name).is_absolute():
        raise UnusableImageError(f"its mask {name} lies outside the folder")
    if not path.is_file():
        raise UnusableImageError(f"its mask {name} is missing")
    try:
        content = read_plain(path, follow_links=True, max_bytes=MAX_FILE_BYTES)
        if not content:
            raise UnusableImageError(f"its mask {name} is an empty file")
        with transform.open_image(io.BytesIO(content)) as image:
            mask = transform.center_square_mask(image, size, side)
            transform.check_complete(image, content)
    except UnusableImageError:
        raise
    except transform.DECODE_ERRORS as error:
        raise UnusableImageError(f"its mask {name} cannot be read: {error}") from error
    return content, mask


def check_row(name: str, row: MetadataRow) -> None:
    """Raise UnusableImageError if an image's name or its row of the metadata file cannot be used."""
    if any(escape_invalid(text) != text for text in (name, row.text, row.mask or "")):
        raise UnusableImageError("its name, its text or its mask's name is not valid Unicode")
    if len(row.entries) > 1:
        entries = ", ".join(map(str, row.entries))
        raise UnusableImageError(f"named more than once in the metadata file (entries {entries})")


def skipped_image(name: str, error: Exception) -> SkippedImage:
    """Return why an image cannot be used, from one of DECODE_ERRORS."""
    if isinstance(error, UnusableImageError):
        reason = str(error)
    elif isinstance(error, UnidentifiedImageError):
        reason = "not an image that can be read"
    elif isinstance(error, OSError) and error.errno is not None:  # Pillow's own, such as "truncated", have no number
        reason = f"cannot be read: {error.strerror}"
    elif isinstance(error, Image.DecompressionBombError):
        reason = f"more pixels than Pillow decodes, scale it down: {error}"
    else:
        reason = f"damaged image: {error}"
    return SkippedImage(file=escape_invalid(name), reason=reason)


def escape_invalid(text: str) -> str:
    """Return the text with everything that is not valid Unicode escaped."""
    # File names that are not UTF-8 reach Python with lone surrogates, which neither JSON nor Parquet can hold.
    return text.encode("utf-8", "backslashreplace").decode()
