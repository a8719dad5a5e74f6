"""The lever `dali`: what it refuses everywhere, and what it hands out where DALI is installed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from inpaint_bench import levers
from inpaint_bench.core.errors import UnavailableError, UserError
from inpaint_bench.data.prepared import dali
from inpaint_bench.workloads import finetune_inpaint
from tests.run.support import bench

from .support import batches, opened, prepared, same, samples, take

CPU = torch.device("cpu")
LEFT = ("data=prepared", "data.root=/nowhere")
PIXELS = {"image", "mask", "masked_image"}


class TestALeverThatCannotRun:
    @pytest.mark.parametrize(
        ("overrides", "why"),
        [
            ((), "needs data=prepared and recipe.format=files, this is data=synthetic"),
            (("data=folder", "data.root=/nowhere"), "this is data=folder"),
            ((*LEFT, "recipe.format=memmap"), "this is data=prepared with format memmap"),
            ((*LEFT, "recipe.cache_image=true", "recipe.cache_masked=true"), "no image is read"),
        ],
    )
    def test_says_what_it_needs(self, overrides: tuple[str, ...], why: str) -> None:
        with pytest.raises(UnavailableError, match=f"lever dali: .*{why}"):
            levers.require(bench("recipe=[cpu,dali]", *overrides), CPU)

    def test_names_the_extra_and_the_build_for_an_older_cuda(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("nvidia", "nvidia.dali", "nvidia.dali.plugin", "nvidia.dali.plugin.pytorch"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.setattr(sys, "path", [one for one in sys.path if not (Path(one) / "nvidia/dali").exists()])
        with pytest.raises(UnavailableError, match=r"inpaint-bench\[dali\].*nvidia-dali-cuda120"):
            levers.require(bench("recipe=[cpu,dali]", *LEFT), CPU)

    def test_a_broken_installation_says_what_is_broken(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(name: str) -> None:
            raise ImportError("libnvjpeg.so.13: cannot open shared object file")

        monkeypatch.setattr(dali, "import_module", broken)
        with pytest.raises(UnavailableError, match=r"DALI cannot be imported: libnvjpeg\.so\.13"):
            levers.require(bench("recipe=[cpu,dali]", *LEFT), CPU)

    def test_the_loader_itself_takes_no_other_format(self, facades: Path) -> None:
        with pytest.raises(UserError, match=r"recipe\.format=files"):
            batches(opened(facades, "memmap"), 4, "recipe.decode=dali")


class TestBytesInsteadOfPixels:
    """The half that is ours; needs no DALI."""

    def test_are_those_of_the_files_under_the_same_masks(self, facades: Path) -> None:
        source = opened(facades)
        plain = samples(source)
        encoded = dali.collate([dali.Encoded(plain, source)[one] for one in ((7, 0), (3, 1))])
        assert bytes(encoded["jpeg"].numpy()) == source.jpeg(7) + source.jpeg(3)
        assert encoded["jpeg_bytes"].tolist() == [len(source.jpeg(7)), len(source.jpeg(3))]
        for place, key in enumerate(((7, 0), (3, 1))):
            whole = plain[key]
            assert all(torch.equal(encoded[name][place], whole[name]) for name in whole.keys() - PIXELS | {"mask"})


@pytest.mark.skipif(dali.missing() is not None, reason=f"decodes with DALI: {dali.missing()}")
class TestDecodedByDali:
    @pytest.mark.parametrize("workers", [0, 2])
    def test_batches_are_those_of_pillow_to_the_bit(self, facades: Path, workers: int) -> None:
        source, number = opened(facades), f"recipe.num_workers={workers}"
        theirs = batches(source, 8, number, "recipe.decode=dali")
        assert theirs.settings["decode"] == {"requested": "dali", "effective": "dali"}
        assert same(take(theirs, 20), take(batches(source, 8, number), 20))

    def test_from_any_draw_on_they_are_the_rest_of_the_stream(self, facades: Path) -> None:
        source = opened(facades)
        whole = take(batches(source, 8, "recipe.decode=dali"), 6)
        assert same(take(batches(source, 8, "recipe.decode=dali", start=32), 2), whole[4:])

    def test_staged_files_are_what_is_read(
        self, facades: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        staged = opened(facades, "files", "tmp")
        ours = take(batches(staged, 4, "recipe.decode=dali"), 2)
        staged.close()
        assert same(ours, take(batches(opened(facades), 4), 2))

    @pytest.mark.parametrize("damage", ["no image at all", "another size"])
    def test_a_file_that_changed_under_the_run_is_named(self, tmp_path: Path, damage: str) -> None:
        root = prepared(tmp_path / "set", "data=synthetic", "data.num_images=8")
        source = opened(root)
        if damage == "another size":
            Image.new("RGB", (40, 32)).save(root / "images/000005.jpg")
        else:
            (root / "images/000005.jpg").write_bytes(b"no picture")
        stream = batches(source, 8, "recipe.decode=dali")
        with pytest.raises(RuntimeError, match=r"images/000005\.jpg: "):
            next(stream)
        stream.close()

    def test_a_run_reads_back_who_decoded_where_and_how_far_from_pillow(self, facades: Path) -> None:
        workload = built(facades)
        workload.step(workload.next_batch())
        (row,) = workload.verify_levers()
        workload.close()
        assert (row.name, row.requested, row.effective, row.active) == ("dali", "dali", "dali cpu", True)
        assert "handed out 3 batches" in row.evidence
        assert "by 0.000 of 255 levels in the mean, 0 at most" in row.evidence

    def test_a_decoder_that_gives_other_pixels_is_told(self, facades: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        plain = dali.DaliBatches._pixels
        monkeypatch.setattr(dali.DaliBatches, "_pixels", lambda self, indices: plain(self, indices).flip(3))
        workload = built(facades)
        (row,) = workload.verify_levers()
        workload.close()
        assert row.active is False

    def test_a_run_has_the_losses_of_one_that_decodes_with_pillow(self, facades: Path) -> None:
        ours, theirs = built(facades), built(facades, "recipe=cpu")
        for _ in range(3):
            assert ours.step(ours.next_batch()).item() == theirs.step(theirs.next_batch()).item()
        ours.close()
        theirs.close()


def built(root: Path, recipe: str = "recipe=[cpu,dali]") -> Any:
    data = ("data=prepared", f"data.root={root}", "data.num_images=null")
    return finetune_inpaint.build(bench(*data, recipe), CPU)
