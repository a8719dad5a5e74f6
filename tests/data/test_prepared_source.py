"""A prepared dataset as a run reads it: damaged, or with other settings."""

from __future__ import annotations

from pathlib import Path

import hydra
import pytest

from inpaint_bench.cli import app
from inpaint_bench.core.config.bench import DataConfig
from inpaint_bench.core.config.parse import parse_config
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.hydra_support import register
from inpaint_bench.core.paths import conf_dir
from inpaint_bench.data.prepared_source import PreparedSource
from tests.run.support import TINY

from .support import open_prepared, prepared

FACADES = ("data=synthetic", "data.num_images=40")


class TestOpen:
    @pytest.fixture
    def dataset(self, tmp_path: Path) -> Path:
        return prepared(tmp_path / "set", *FACADES)

    @pytest.mark.parametrize("name", ["images/000003.jpg", "pixels.npy", "pixels.h5", "shards/000001.tar"])
    def test_missing_or_truncated_file_is_refused_where_it_is_needed(self, dataset: Path, name: str) -> None:
        format = {"i": "files", "n": "memmap", "h": "hdf5", "s": "webdataset"}[name[0] if "/" in name else name[7]]
        (dataset / name).write_bytes((dataset / name).read_bytes()[:-7])
        with pytest.raises(UserError, match=rf"{name} has [\d,]+ bytes"):
            open_prepared(dataset, format)
        (dataset / name).unlink()
        with pytest.raises(UserError, match=f"{name} is missing"):
            open_prepared(dataset, format)

    def test_changed_index_is_refused(self, dataset: Path) -> None:
        content = bytearray((dataset / "index.parquet").read_bytes())
        content[100] ^= 1
        (dataset / "index.parquet").write_bytes(content)
        with pytest.raises(UserError, match=r"index\.parquet: not as it was written"):
            open_prepared(dataset)

    def test_manifest_of_another_number_of_images_is_refused(self, dataset: Path) -> None:
        text = (dataset / "prepared.json").read_text()
        (dataset / "prepared.json").write_text(text.replace('"num_images": 40', '"num_images": 39'))
        with pytest.raises(UserError, match=r"prepared\.json: says 39 images, index\.parquet has 40; prepare the"):
            open_prepared(dataset)

    def test_damaged_manifest_is_refused(self, dataset: Path) -> None:
        (dataset / "prepared.json").write_text('{"schema_version": 1, ')
        with pytest.raises(UserError, match=r"prepared\.json: .*; prepare the dataset again"):
            open_prepared(dataset)

    def test_verify_finds_a_changed_byte(self, dataset: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert app.main(["prepare", "--verify", str(dataset)]) == 0
        with (dataset / "pixels.npy").open("r+b") as out:
            out.seek(5000)
            out.write(bytes([255 - (dataset / "pixels.npy").read_bytes()[5000]]))
        assert app.main(["prepare", "--verify", str(dataset)]) == 2
        assert "1 files hold other content than was written: pixels.npy" in capsys.readouterr().err

    @pytest.mark.parametrize(
        "setting", [{"resolution_px": 64}, {"seed": 3}, {"validation_share": 0.3}, {"num_images": 9}]
    )
    def test_settings_that_differ_from_the_dataset_are_refused(self, facades: Path, setting: dict[str, float]) -> None:
        with pytest.raises(UserError, match=f"data.{next(iter(setting))}=.* \\(prepared: "):
            open_prepared(facades, **setting)


def composed(*overrides: str) -> DataConfig:
    """Return `data` as the command line gives it."""
    register()
    tiny = [override for override in TINY if not override.startswith("data.")]
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return parse_config(hydra.compose("config", overrides=[*tiny, "data=prepared", *overrides])).data


class TestFactsOfTheDataset:
    """data=prepared takes them from prepared.json; before, they had to be typed."""

    def test_need_not_be_given(self, tmp_path: Path) -> None:
        root = prepared(tmp_path / "a set", *FACADES, "data.block_m=50", "data.seed=3", "data.validation_share=0.2")
        data = composed(f"data.root='{root}'")
        assert (data.resolution_px, data.block_m, data.seed, data.validation_share) == (32, 50, 3, 0.2)
        assert len(PreparedSource(data)) == 40

    def test_other_values_are_refused(self, facades: Path) -> None:
        with pytest.raises(UserError, match=r"data\.block_m=70 \(prepared: 200\); leave out data\.block_m, which"):
            PreparedSource(composed(f"data.root={facades}", "data.block_m=70"))

    def test_that_this_machine_cannot_see_has_the_defaults(self) -> None:
        data = composed("data.root=/nowhere", "data.resolution_px=64")
        assert (data.resolution_px, data.block_m) == (64, 200)
