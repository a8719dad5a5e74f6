"""Folders of labelled volumes in NIfTI: what is read of them, what is held out, and what is refused, in which words."""

from __future__ import annotations

import gzip
from pathlib import Path

import nibabel
import numpy as np
import numpy.typing as npt
import pytest

from inpaint_bench.cli import app
from inpaint_bench.core.config.bench import DataConfig
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.workloads._volumes import SHAPES
from inpaint_bench.data.volumes import NiftiFolder, synthetic

pytestmark = pytest.mark.torch  # which resampling loads

SIDES = (16, 16, 16)
ARRAY = npt.NDArray[np.float64]


def save(path: Path, values: npt.ArrayLike, affine: npt.ArrayLike | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    array = np.asarray(values)
    nibabel.save(nibabel.Nifti1Image(array, np.eye(4) if affine is None else affine), path)
    return path


def pair(root: Path, name: str = "a", sides: tuple[int, ...] = SIDES) -> None:
    ramp = np.arange(np.prod(sides), dtype=np.float32).reshape(sides)
    save(root / "images" / f"{name}.nii.gz", ramp)
    labels = np.zeros(sides[:3], np.uint8)
    labels[4:, :, :], labels[8:, :, :] = 1, 2
    save(root / "labels" / f"{name}.nii.gz", labels)


def read(root: Path, network: str = "tiny", sides: tuple[int, int, int] = SIDES) -> tuple[ARRAY, ARRAY]:
    folder = NiftiFolder(DataConfig(kind="nifti", root=str(root)), train=0, held_out=1)
    ((images, labels),) = folder.read(SHAPES[network], sides, held_out=True)
    return images, labels


def test_synthetic_volumes_come_back_from_their_files(tmp_path, caplog):
    caplog.set_level("INFO")
    out = tmp_path / "volumes"
    command = ["prepare", "workload=volume3d_train", "workload.network=tiny", "workload.volumes=3"]
    assert app.main([*command, "workload.validation_volumes=2", f"prepare.out={out}"]) == 0
    assert "data.validation_share=0.4" in caplog.text
    folder = NiftiFolder(DataConfig(kind="nifti", root=str(out), validation_share=0.4), train=3, held_out=2)
    parts = {held_out: list(folder.read(SHAPES["tiny"], SIDES, held_out=held_out)) for held_out in (False, True)}
    read_back = [*parts[False], *parts[True]]
    written = [synthetic(0, number, SIDES, 1, 2) for number in range(5)]
    # Which volume is held out depends on the hash of its name; each comes back once.
    order = [next(n for n, (_, labels) in enumerate(written) if np.array_equal(labels, mine)) for _, mine in read_back]
    assert sorted(order) == list(range(5))
    for number, (images, _) in zip(order, read_back, strict=True):
        expected = written[number][0]
        low, high = expected.min(), expected.max()
        assert np.allclose(images, (expected - low) / (high - low) * 2 - 1, atol=2e-3)
    assert app.main([*command, f"prepare.out={out}"]) == 2  # never into a folder that holds something


def test_labels_that_are_whole_but_for_their_rounding_are_read(tmp_path):
    pair(tmp_path)
    _, expected = read(tmp_path)
    path = tmp_path / "labels" / "a.nii.gz"
    exact = np.asarray(nibabel.load(path).dataobj)
    for error in (0.00002, -0.0009):
        save(path, exact.astype(np.float32) + np.float32(error))
        assert np.array_equal(read(tmp_path)[1], expected)


def test_whole_heads_are_resampled_and_the_others_cropped_or_padded(tmp_path):
    pair(tmp_path, sides=(32, 24, 16))
    images, labels = read(tmp_path)
    assert (images.shape, labels.shape) == ((1, *SIDES), (2, *SIDES))
    assert labels.sum((1, 2, 3)).tolist() == [2 * 256, 12 * 256]  # 4 and 24 of 32 slices
    assert np.all(np.diff(images[0].mean((1, 2))) > 0)
    root = tmp_path / "brats"
    ramp = np.stack([np.arange(40.0)[:, None, None] * np.ones((40, 16, 16)) + n for n in range(4)], axis=-1)
    save(root / "images" / "a.nii", ramp)
    save(root / "labels" / "a.nii", np.full((40, 16, 16), 4, np.int16))
    images, labels = read(root, "brats", (32, 16, 32))
    assert (images.shape, labels.shape) == ((4, 32, 16, 32), (4, 32, 16, 32))
    # From left to right in the last axis, from bottom to top in the first.
    assert images[0, 16, 0].tolist() == pytest.approx(np.linspace(-1, 1, 32).tolist(), abs=1e-6)
    assert (images[:, :8] == -1).all()
    assert (labels[3, 8:24] == 1).all()
    assert labels.sum() == 32 * 16 * 16


def test_axes_point_the_same_way_whatever_the_scanner_wrote(tmp_path):
    pair(tmp_path / "plain")
    plain = read(tmp_path / "plain")
    flipped = np.diag([-1.0, 1, 1, 1])
    flipped[0, 3] = 15
    for kind in ("images", "labels"):
        values = np.asarray(nibabel.load(tmp_path / "plain" / kind / "a.nii.gz").dataobj)
        save(tmp_path / "flipped" / kind / "a.nii.gz", values[::-1], flipped)
    for mine, other in zip(plain, read(tmp_path / "flipped"), strict=True):
        assert np.array_equal(mine, other)


def test_the_identity_follows_the_files_and_the_held_out_ones_their_names(tmp_path):
    for number in range(5):
        pair(tmp_path, f"v{number}")
    (tmp_path / "images" / ".hidden").touch()
    (tmp_path / "images" / "notes.txt").touch()
    config = DataConfig(kind="nifti", root=str(tmp_path), validation_share=0.4)

    def facts():
        folder = NiftiFolder(config, train=2, held_out=1)
        for held_out in (False, True):
            list(folder.read(SHAPES["tiny"], SIDES, held_out=held_out))
        return folder.facts

    first = facts()
    assert (first.found, first.used, first.beyond_limit, first.train, first.validation) == (7, 3, 2, 2, 1)
    assert {image.file: image.reason for image in first.skipped} == {
        "images/.hidden": "hidden file",
        "images/notes.txt": "not a NIfTI file (.nii.gz, .nii)",
    }
    assert facts().identity == first.identity
    for number in range(5):
        path = tmp_path / "labels" / f"v{number}.nii.gz"
        save(path, np.ones(SIDES, np.uint8))
    assert facts().identity != first.identity
    everything = NiftiFolder(config, train=3, held_out=2)
    assert len(list(everything.read(SHAPES["tiny"], SIDES, held_out=True))) == 2


def damage(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-6] ^= 1  # of the checksum
    damage(path, bytes(content))


def shorten(path: Path) -> None:
    damage(path, path.read_bytes()[:-100])


def shorten_inside(path: Path) -> None:
    damage(path, gzip.compress(gzip.decompress(path.read_bytes())[:-100]))


def without_values(path: Path) -> None:
    save(path, np.full(SIDES, np.nan, np.float32))


SHIFTED = np.eye(4)
SHIFTED[0, 3] = 5
REFUSED = {
    "no mask": (lambda image, label: label.rename(label.with_name("b.nii.gz")), "images/a has no labels/a"),
    "no folder": (lambda image, label: (label.unlink(), label.parent.rmdir()), "folder labels cannot be read"),
    "no file": (lambda image, label: label.unlink(), "no NIfTI file in folder labels"),
    "two of a name": (lambda image, label: save(image.with_name("a.nii"), np.ones(SIDES)), "has the same name"),
    "other shape": (
        lambda image, label: save(label, np.zeros((16, 16, 8), np.uint8)),
        "16x16x8 voxels, its image 16x16x16",
    ),
    "other place": (
        lambda image, label: save(label, np.zeros(SIDES, np.uint8), SHIFTED),
        "lies elsewhere than its image",
    ),
    "other labels": (
        lambda image, label: save(label, np.full(SIDES, 4, np.uint8)),
        "has the labels 4; .* takes 1 to 2",
    ),
    "labels between": (lambda image, label: save(label, np.full(SIDES, 0.5)), "has the labels 0.5; .* takes 1 to 2"),
    "labels nearly whole": (
        lambda image, label: save(label, np.full(SIDES, 1.0015)),
        r"has the labels 1\.0015; .* takes 1 to 2",
    ),
    "channels": (
        lambda image, label: save(image, np.ones((*SIDES, 4))),
        "16x16x16x4 voxels; this network takes three axes",
    ),
    "not a number": (lambda image, label: without_values(image), "NaN or infinite"),
    "empty image": (lambda image, label: save(image, np.ones(SIDES)), "the same value in all voxels"),
    "complex": (
        lambda image, label: save(image, np.ones(SIDES, np.complex64)),
        "complex64; must be .* integers or floats",
    ),
    "not NIfTI": (lambda image, label: damage(image, b"GIF89a" * 100), "images/a.nii.gz: cannot be read as NIfTI"),
    "empty file": (lambda image, label: damage(image, b""), "images/a.nii.gz: cannot be read as NIfTI"),
    "truncated gzip": (
        lambda image, label: shorten(image),
        "images/a.nii.gz: cannot be read as NIfTI: Compressed file ended",
    ),
    "wrong checksum": (
        lambda image, label: flip_a_byte(label),
        "labels/a.nii.gz: cannot be read as NIfTI: CRC check failed",
    ),
    "fewer voxels": (lambda image, label: shorten_inside(image), "images/a.nii.gz: cannot be read as NIfTI"),
}


@pytest.mark.parametrize(("change", "sentence"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_used_is_refused_with_its_file(tmp_path, change, sentence):
    pair(tmp_path)
    change(tmp_path / "images" / "a.nii.gz", tmp_path / "labels" / "a.nii.gz")
    with pytest.raises(UserError, match=sentence):
        read(tmp_path)
