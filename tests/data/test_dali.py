"""The lever `dali`: its refusals, and its batches where DALI is installed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from inpaint_bench import levers
from inpaint_bench.core.errors import UnavailableError
from inpaint_bench.data.prepared import dali
from inpaint_bench.workloads import finetune_inpaint
from tests.run.support import bench

from .support import batches, open_prepared, prepared, same, samples, take

CPU = torch.device("cpu")
LEFT = ("data=prepared", "data.root=/nowhere")
PIXELS = {"image", "mask", "masked_image"}


class TestUnavailable:
    @pytest.mark.parametrize(
        ("overrides", "reason"),
        [
            ((), "needs data=prepared and recipe.format=files, this is data=synthetic"),
            (("data=folder", "data.root=/nowhere"), "this is data=folder"),
            ((*LEFT, "recipe.format=memmap"), "this is data=prepared with format memmap"),
            ((*LEFT, "recipe.cache_image=true", "recipe.cache_masked=true"), "no image is read"),
        ],
    )
    def test_reason_names_the_requirement(self, overrides: tuple[str, ...], reason: str) -> None:
        with pytest.raises(UnavailableError, match=f"lever dali: .*{reason}"):
            levers.require(bench("recipe=[cpu,dali]", *overrides), CPU)

    def test_missing_package_names_the_extra_and_the_build_for_cuda_12(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("nvidia", "nvidia.dali", "nvidia.dali.plugin", "nvidia.dali.plugin.pytorch"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.setattr(sys, "path", [path for path in sys.path if not (Path(path) / "nvidia/dali").exists()])
        with pytest.raises(UnavailableError, match=r"inpaint-bench\[dali\].*nvidia-dali-cuda120"):
            levers.require(bench("recipe=[cpu,dali]", *LEFT), CPU)

    def test_import_error_of_a_broken_installation_is_reported(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(name: str) -> None:
            raise ImportError("libnvjpeg.so.13: cannot open shared object file")

        monkeypatch.setattr(dali, "import_module", broken)
        with pytest.raises(UnavailableError, match=r"DALI cannot be imported: libnvjpeg\.so\.13"):
            levers.require(bench("recipe=[cpu,dali]", *LEFT), CPU)


class TestEncodedSamples:
    """The part before the decoder, which needs no DALI."""

    def test_bytes_are_the_files_and_masks_are_unchanged(self, facades: Path) -> None:
        source = open_prepared(facades)
        plain = samples(source)
        encoded = dali.collate([dali.EncodedSamples(plain, source)[key] for key in ((7, 0), (3, 1))])
        assert bytes(encoded["jpeg"].numpy()) == source.jpeg(7) + source.jpeg(3)
        assert encoded["jpeg_bytes"].tolist() == [len(source.jpeg(7)), len(source.jpeg(3))]
        for place, key in enumerate(((7, 0), (3, 1))):
            full = plain[key]
            assert all(torch.equal(encoded[name][place], full[name]) for name in full.keys() - PIXELS | {"mask"})


@pytest.mark.skipif(dali.unavailable_reason() is not None, reason=f"decodes with DALI: {dali.unavailable_reason()}")
class TestDaliBatches:
    @pytest.mark.parametrize("workers", [0, 2])
    def test_batches_equal_pillows_to_the_bit(self, facades: Path, workers: int) -> None:
        source, number = open_prepared(facades), f"recipe.num_workers={workers}"
        dali_batches = batches(source, 8, number, "recipe.decode=dali")
        assert dali_batches.settings["decode"] == {"requested": "dali", "effective": "dali"}
        assert same(take(dali_batches, 20), take(batches(source, 8, number), 20))

    def test_stream_started_late_equals_the_rest_of_the_stream(self, facades: Path) -> None:
        source = open_prepared(facades)
        full = take(batches(source, 8, "recipe.decode=dali"), 6)
        assert same(take(batches(source, 8, "recipe.decode=dali", start=32), 2), full[4:])

    def test_staged_files_are_read(self, facades: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        staged = open_prepared(facades, "files", "tmp")
        batches_read = take(batches(staged, 4, "recipe.decode=dali"), 2)
        staged.close()
        assert same(batches_read, take(batches(open_prepared(facades), 4), 2))

    @pytest.mark.parametrize("damage", ["no image at all", "another size"])
    def test_error_names_a_file_that_changed_during_the_run(self, tmp_path: Path, damage: str) -> None:
        root = prepared(tmp_path / "set", "data=synthetic", "data.num_images=8")
        source = open_prepared(root)
        if damage == "another size":
            Image.new("RGB", (40, 32)).save(root / "images/000005.jpg")
        else:
            (root / "images/000005.jpg").write_bytes(b"no picture")
        stream = batches(source, 8, "recipe.decode=dali")
        with pytest.raises(RuntimeError, match=r"images/000005\.jpg: "):
            next(stream)
        stream.close()

    def test_lever_report_has_decoder_device_and_difference_to_pillow(self, facades: Path) -> None:
        workload = built(facades)
        workload.step(workload.next_batch())
        (row,) = levers.verify(workload.execution, workload.probe)
        workload.close()
        assert (row.name, row.requested, row.effective, row.active) == ("dali", "dali", "dali cpu", True)
        assert "handed out 3 batches" in row.evidence
        assert "by 0.000 of 255 levels in the mean, 0 at most" in row.evidence

    def test_lever_is_reported_inactive_if_pixels_differ(self, facades: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        plain = dali.DaliBatches._wait_for_pixels
        monkeypatch.setattr(dali.DaliBatches, "_wait_for_pixels", lambda self, indices: plain(self, indices).flip(3))
        workload = built(facades)
        (row,) = levers.verify(workload.execution, workload.probe)
        workload.close()
        assert row.active is False

    def test_losses_equal_those_with_pillow(self, facades: Path) -> None:
        dali_run, pillow_run = built(facades), built(facades, "recipe=cpu")
        for _ in range(3):
            losses = [run.step(run.next_batch()).item() for run in (dali_run, pillow_run)]
            assert losses[0] == losses[1]
        dali_run.close()
        pillow_run.close()


def built(root: Path, recipe: str = "recipe=[cpu,dali]") -> Any:
    """Build the training workload on a prepared dataset."""
    data = ("data=prepared", f"data.root={root}", "data.num_images=null")
    return finetune_inpaint.build(bench(*data, recipe), CPU)
