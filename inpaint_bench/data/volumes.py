"""Labelled volumes, from NIfTI files or from a seed.

The segmentation of `images/NAME.nii.gz` is `labels/NAME.nii.gz`; both are fitted to a network. As in Med-DDPM, whole
heads are resampled to the network's sides, those of BraTS cropped or padded around their centre. The lowest value of
each channel becomes -1, its highest 1 (Med-DDPM scales each slice of a whole head for itself), and labels are resampled
to the nearest one. Everything that a run uses is read and checked before its first step.
"""

import gzip
import hashlib
import importlib.util
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from inpaint_bench.core.config.bench import DataConfig
from inpaint_bench.core.console import pluralize
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.files import expand_path, read_plain, replacing_folder
from inpaint_bench.core.records import DataFacts, SkippedImage
from inpaint_bench.core.workloads._volumes import VolumeShape

Volume = npt.NDArray[np.float32]
Sides = tuple[int, int, int]

IMAGES, LABELS = "images", "labels"
SUFFIXES = (".nii.gz", ".nii")
MAX_FILE_BYTES = 2**31
MAX_VOXELS = 2**28  # voxels of a file with all its channels: 1 GiB as float32
LABEL_TOLERANCE = 1e-3
AFFINE_TOLERANCE = 0.01  # mm; files of one scanner differ by their rounding
LEVELS = 1000  # synthetic images are written as integers, as scanners do
NIFTI_2 = (b"\x1c\x02\x00\x00", b"\x00\x00\x02\x1c")  # sizes of its header, 540, in both byte orders
VERSION = 1  # part of the identity of synthetic volumes: increase it when others come out
NOISE = 0.05  # noise of synthetic volumes
HELD_OUT = 1_000_000  # number of the first synthetic volume that is never trained on


class NiftiFolder:
    """The volumes of a run: those to train on, and others that are held out, by the hash of their names."""

    def __init__(self, config: DataConfig, train: int, held_out: int) -> None:
        """Choose the files without opening them. Raises UserError if one has no partner, or they are too few."""
        self._root = expand_path(config.root or "")
        images, skipped = _list(self._root, IMAGES)
        labels, others = _list(self._root, LABELS)
        for folder, partner, lone in (
            (IMAGES, LABELS, images.keys() - labels),
            (LABELS, IMAGES, labels.keys() - images),
        ):
            if lone:
                name = min(lone)
                more = f" (and {len(lone) - 1} more like it)" if len(lone) > 1 else ""
                raise UserError(f"data.root={self._root}: {folder}/{name} has no {partner}/{name}.nii.gz{more}")
        names = sorted(images)[: config.num_images]
        # By hash and not by a shuffle: new files leave the order of the others as it was.
        order = sorted(names, key=lambda name: hashlib.sha256(f"{config.seed}/{name}".encode()).digest())
        share = config.validation_share
        apart = min(max(1, round(share * len(names))), len(names)) if share else 0
        if apart < held_out or len(names) - apart < train:
            raise UserError(
                f"data.root={self._root}: {pluralize(len(names), 'labelled volume')}, {apart} of them held out "
                f"(data.validation_share={share:g}); this run needs {train} to train on and {held_out} held out"
            )
        self._files = {name: (images[name], labels[name]) for name in names}
        self._names = {True: order[:held_out], False: sorted(order[apart:])[:train]}
        self._facts = DataFacts(
            kind="nifti",
            root=str(self._root),
            found=len(images) + len(skipped) + len(others),
            used=train + held_out,
            beyond_limit=len(images) - train - held_out,
            skipped=[*skipped, *others],
            train=train,
            validation=held_out,
        )
        self._digest = hashlib.sha256()

    @property
    def facts(self) -> DataFacts:
        """Return which volumes were read; the identity covers the names and contents of their files."""
        return msgspec.structs.replace(self._facts, identity=self._digest.hexdigest())

    def read(self, shape: VolumeShape, sides: Sides, *, held_out: bool) -> Iterator[tuple[Volume, Volume]]:
        """Yield images [C, *sides] in -1..1 and one-hot labels [L, *sides], axial slices first. Raises UserError."""
        return (self._read(name, shape, sides) for name in self._names[held_out])

    def _read(self, name: str, shape: VolumeShape, sides: Sides) -> tuple[Volume, Volume]:
        image_path, label_path = self._files[name]
        values, affine = self._load(image_path)
        numbers, label_affine = self._load(label_path)
        channels = shape.image_channels
        if channels == 1 and values.ndim == 3:
            values = values[..., None]
        if values.ndim != 4 or values.shape[3] != channels:
            needed = "three axes" if channels == 1 else f"a fourth axis of {channels}, one per kind of image"
            raise UserError(f"{image_path}: has {_times(values.shape)} voxels; this network takes {needed}")
        if numbers.ndim == 4 and numbers.shape[3] == 1:
            numbers = numbers[..., 0]
        if numbers.shape != values.shape[:3]:
            shapes = f"{_times(numbers.shape)} voxels, its image {_times(values.shape[:3])}"
            raise UserError(f"{label_path}: has {shapes}; both must agree")
        if not np.allclose(affine, label_affine, atol=AFFINE_TOLERANCE):
            raise UserError(
                f"{label_path}: lies elsewhere than its image (their affines differ); resample one to the other"
            )
        # Resampling and a scale factor leave numbers that are whole but for their rounding.
        whole = np.rint(numbers)
        numbers = np.where(np.abs(numbers - whole) <= LABEL_TOLERANCE, whole, numbers)
        known = np.arange(shape.label_channels + 1)
        if other := sorted({*np.unique(numbers).tolist()} - {*known.tolist()}):
            shown = ", ".join(f"{value:.9g}" for value in other[:5])
            raise UserError(
                f"{label_path}: has the labels {shown}; this network takes 1 to {shape.label_channels}, and 0 for none"
            )
        # Depth first, as Med-DDPM transposes its volumes: [C, bottom to top, back to front, left to right].
        images = np.ascontiguousarray(values.T, dtype=np.float32)
        one_hot = (known[1:, None, None, None] == numbers.T).astype(np.float32)
        if shape.crop:
            images, one_hot = _crop(images, sides), _crop(one_hot, sides)
        images = _scale(images, image_path)
        if shape.crop:
            return _pad(images, sides, -1), _pad(one_hot, sides, 0)
        return _resample(images, sides, "trilinear"), _resample(one_hot, sides, "nearest-exact")

    def _load(self, path: Path) -> tuple[npt.NDArray[Any], npt.NDArray[np.float64]]:
        """Return values and affine of a file, its axes from left to right, back to front, bottom to top."""
        nibabel = _nibabel()
        try:
            content = read_plain(path, follow_links=True, max_bytes=MAX_FILE_BYTES)
            self._digest.update(f"{path.name}\0{hashlib.sha256(content).hexdigest()}\n".encode())
            # As a whole: only at the end gzip compares the checksum.
            raw = gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
            volume = (nibabel.Nifti2Image if raw[:4] in NIFTI_2 else nibabel.Nifti1Image).from_bytes(raw)
            if volume.get_data_dtype().kind not in "iuf" or np.prod(volume.shape, dtype=float) > MAX_VOXELS:
                have = f"{_times(volume.shape)} voxels of type {volume.get_data_dtype()}"
                raise UserError(f"{path}: has {have}; must be at most {MAX_VOXELS:,}, integers or floats")
            volume = nibabel.as_closest_canonical(volume)
            return np.asarray(volume.dataobj), volume.affine
        except UserError:
            raise
        except Exception as error:  # several classes, depending on what is wrong with the file
            raise UserError(f"{path}: cannot be read as NIfTI: {' '.join(str(error).split())[:200]}") from None


def write_synthetic(out: Path, pairs: Iterable[tuple[Volume, Volume]]) -> None:
    """Write volumes with one-hot labels as a folder of NIfTI files; `out` must not exist or be empty."""
    nibabel = _nibabel()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"prepare.out={out}: exists already; nothing was written")
    with replacing_folder(out, IMAGES) as folder:
        for number, (images, one_hot) in enumerate(pairs):
            values = np.rint(images * LEVELS).astype(np.int16).T
            labels = (one_hot * np.arange(1, len(one_hot) + 1)[:, None, None, None]).sum(0).astype(np.uint8).T
            for kind, array in ((IMAGES, values[..., 0] if len(images) == 1 else values), (LABELS, labels)):
                (folder / kind).mkdir(exist_ok=True)
                nibabel.save(nibabel.Nifti1Image(array, np.eye(4)), folder / kind / f"volume-{number:04d}.nii.gz")


def _nibabel() -> Any:
    if importlib.util.find_spec("nibabel") is None:
        raise UserError("NIfTI files need nibabel, which is not installed: pip install 'inpaint-bench[nifti]'")
    import nibabel

    return nibabel


def _list(root: Path, folder: str) -> tuple[dict[str, Path], list[SkippedImage]]:
    """Return the NIfTI files of a folder by their names without suffix, and every other file with the reason."""
    try:
        paths = sorted((root / folder).iterdir())
    except OSError as error:
        layout = f"a volume is {IMAGES}/NAME.nii.gz and {LABELS}/NAME.nii.gz"
        raise UserError(f"data.root={root}: folder {folder} cannot be read ({error.strerror}); {layout}") from None
    files: dict[str, Path] = {}
    skipped = []
    for path in paths:
        suffix = next((suffix for suffix in SUFFIXES if path.name.endswith(suffix)), None)
        if path.name.startswith(".") or suffix is None or path.is_dir():
            reason = "hidden file" if path.name.startswith(".") else f"not a NIfTI file ({', '.join(SUFFIXES)})"
            skipped.append(SkippedImage(file=f"{folder}/{path.name}", reason=reason))
            continue
        name = path.name.removesuffix(suffix)
        if name in files:
            raise UserError(f"{path}: {files[name].name} beside it has the same name; remove one of them")
        files[name] = path
    if not files:
        raise UserError(f"data.root={root}: no NIfTI file in folder {folder} ({', '.join(SUFFIXES)})")
    return files, skipped


def _times(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def _crop(volume: Volume, sides: Sides) -> Volume:
    """Return the middle of [C, ...], no side longer than `sides`."""
    starts = [max(0, (have - side) // 2) for have, side in zip(volume.shape[1:], sides, strict=True)]
    return volume[:, *(slice(start, start + side) for start, side in zip(starts, sides, strict=True))]


def _pad(volume: Volume, sides: Sides, value: float) -> Volume:
    """Return [C, *sides] with `volume` in the middle."""
    missing = [side - have for have, side in zip(volume.shape[1:], sides, strict=True)]
    return np.pad(volume, [(0, 0), *((m // 2, m - m // 2) for m in missing)], constant_values=value)


def _scale(images: Volume, path: Path) -> Volume:
    """Return each channel with its lowest value at -1 and its highest at 1."""
    low, high = (limit(images, axis=(1, 2, 3), keepdims=True) for limit in (np.min, np.max))
    if not np.isfinite(high - low).all():
        raise UserError(f"{path}: has voxels that are NaN or infinite")
    if (low == high).any():
        raise UserError(f"{path}: has the same value in all voxels that the network would see")
    return (images - low) * (2 / (high - low)) - 1


def _resample(volume: Volume, sides: Sides, mode: str) -> Volume:
    import torch  # not if only the names are looked at

    tensor = torch.from_numpy(np.ascontiguousarray(volume))[None]
    return torch.nn.functional.interpolate(tensor, size=sides, mode=mode)[0].numpy()


# --- volumes from a seed -------------------------------------------------------------------------


class SyntheticVolumes:
    """As many volumes as a run needs, each a function of seed and number."""

    def __init__(self, config: DataConfig, train: int, held_out: int) -> None:
        self._seed, self._counts = config.seed, {False: train, True: held_out}
        identity = hashlib.sha256(f"volumes/{VERSION}/{config.seed}/{train}/{held_out}".encode()).hexdigest()
        count = train + held_out
        self.facts = DataFacts(
            kind="synthetic", found=count, used=count, identity=identity, train=train, validation=held_out
        )

    def read(self, shape: VolumeShape, sides: Sides, *, held_out: bool) -> Iterator[tuple[Volume, Volume]]:
        """Yield images [C, *sides] in -1..1 and one-hot labels [L, *sides] of each volume."""
        first, channels = HELD_OUT if held_out else 0, (shape.image_channels, shape.label_channels)
        numbers = range(first, first + self._counts[held_out])
        return (synthetic(self._seed, number, sides, *channels) for number in numbers)


def synthetic(seed: int, index: int, sides: Sides, images: int, labels: int) -> tuple[Volume, Volume]:
    """Draw volume `index`: images [images, D, H, W] in -1..1 and one-hot labels [labels, D, H, W].

    The first label is the largest ellipsoid, each further one lies inside the one before; outside there is none.
    """
    random = np.random.Generator(np.random.PCG64(np.random.SeedSequence((seed, index))))
    axes = [np.linspace(-1, 1, side, dtype=np.float32) for side in sides]
    grid = np.meshgrid(*axes, indexing="ij", sparse=True)
    label = np.zeros(sides, np.int64)
    centre, radii = random.uniform(-0.05, 0.05, 3), random.uniform(0.7, 0.9, 3)
    for number in range(1, labels + 1):
        distance = sum(((axis - c) / r) ** 2 for axis, c, r in zip(grid, centre, radii, strict=True))
        label[distance <= 1] = number
        # Inside the one before: the centre moves by less than the radius shrinks.
        shrink = random.uniform(0.45, 0.6)
        centre = centre + radii * (1 - shrink) * random.uniform(-0.4, 0.4, 3)
        radii = radii * shrink
    one_hot = np.stack([label == number for number in range(1, labels + 1)]).astype(np.float32)
    volumes = np.full((images, *sides), -1, np.float32)
    inside = label > 0
    for image in volumes:
        brightness = np.concatenate([[-1.0], random.uniform(-0.6, 0.8, labels)]).astype(np.float32)
        frequencies, phases = random.uniform(2, 6, 3), random.uniform(0, 2 * np.pi, 3)
        waves = [np.cos(f * axis + p) for axis, f, p in zip(grid, frequencies, phases, strict=True)]
        texture = 0.15 * waves[0] * waves[1] * waves[2]
        noise = NOISE * random.standard_normal(sides, dtype=np.float32)
        image[inside] = (brightness[label] + texture + noise)[inside]
    return volumes.clip(-1, 1), one_hot
