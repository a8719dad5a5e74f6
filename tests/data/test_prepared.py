"""A prepared dataset as a run reads it: damaged, of other settings, staged."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from inpaint_bench.cli import app
from inpaint_bench.core.errors import UserError

from .support import FORMATS, opened, prepared

FACADES = ("data=synthetic", "data.num_images=40")


class TestADamagedDataset:
    @pytest.fixture
    def dataset(self, tmp_path: Path) -> Path:
        return prepared(tmp_path / "set", *FACADES)

    @pytest.mark.parametrize("name", ["images/000003.jpg", "pixels.npy", "pixels.h5", "shards/000001.tar"])
    def test_a_file_of_another_size_or_none_is_an_error_where_it_is_needed(self, dataset: Path, name: str) -> None:
        format = {"i": "files", "n": "memmap", "h": "hdf5", "s": "webdataset"}[name[0] if "/" in name else name[7]]
        (dataset / name).write_bytes((dataset / name).read_bytes()[:-7])
        with pytest.raises(UserError, match=rf"{name} has [\d,]+ bytes"):
            opened(dataset, format)
        (dataset / name).unlink()
        with pytest.raises(UserError, match=f"{name} is missing"):
            opened(dataset, format)

    def test_a_changed_index_is_an_error(self, dataset: Path) -> None:
        content = bytearray((dataset / "index.parquet").read_bytes())
        content[100] ^= 1
        (dataset / "index.parquet").write_bytes(content)
        with pytest.raises(UserError, match=r"index\.parquet: not as it was written"):
            opened(dataset)

    def test_a_damaged_manifest_is_an_error(self, dataset: Path) -> None:
        (dataset / "prepared.json").write_text('{"schema_version": 1, ')
        with pytest.raises(UserError, match="not valid JSON"):
            opened(dataset)

    def test_a_changed_bit_is_found_by_verify(self, dataset: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert app.main(["prepare", "--verify", str(dataset)]) == 0
        with (dataset / "pixels.npy").open("r+b") as out:
            out.seek(5000)
            out.write(bytes([255 - (dataset / "pixels.npy").read_bytes()[5000]]))
        assert app.main(["prepare", "--verify", str(dataset)]) == 2
        assert "1 files hold other content than was written: pixels.npy" in capsys.readouterr().err

    def test_a_missing_format_is_named_with_the_command_that_adds_it(self, tmp_path: Path) -> None:
        out = prepared(tmp_path / "plain", *FACADES, "prepare.formats=[files]")
        with pytest.raises(UserError, match="prepared as files; this adds it") as caught:
            opened(out, "memmap")
        command = str(caught.value).split("inpaint-bench prepare ")[1]
        assert app.main(["prepare", *command.split()]) == 0
        assert len(opened(out, "memmap")) == 40

    @pytest.mark.parametrize(
        "setting", [{"resolution_px": 64}, {"seed": 3}, {"validation_share": 0.3}, {"num_images": 9}]
    )
    def test_settings_that_are_not_its_own_are_refused(self, facades: Path, setting: dict[str, float]) -> None:
        with pytest.raises(UserError, match=f"data.{next(iter(setting))}=.* \\(prepared: "):
            opened(facades, **setting)


class TestStaging:
    @pytest.fixture(autouse=True)
    def _node(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "node").mkdir()
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "node"))

    def test_a_second_user_copies_nothing_and_the_last_one_removes_the_copy(
        self, facades: Path, tmp_path: Path
    ) -> None:
        first, second = opened(facades, "memmap", "tmp"), opened(facades, "memmap", "tmp")
        assert (first.staging["copied"], second.staging["copied"]) == (True, False)
        assert first.staging["path"] == second.staging["path"]
        assert first.staging["bytes"] == (facades / "pixels.npy").stat().st_size
        assert first.staging["path"].startswith(str(tmp_path / "node"))
        first.close()
        assert np.array_equal(second.pixels(5), opened(facades).pixels(5))
        second.close()
        second.close()
        assert not list((tmp_path / "node").glob("*/*"))

    @pytest.mark.parametrize("format", FORMATS)
    def test_the_copy_is_what_is_read(self, facades: Path, format: str) -> None:
        staged = opened(facades, format, "tmp")
        assert staged.stage_in_effect == "tmp"
        assert np.array_equal(staged.pixels(9), opened(facades).pixels(9))
        if format == "webdataset":
            assert all(str(one.path).startswith(staged.staging["path"]) for one in staged.shards())
        staged.close()

    def test_two_processes_at_once_copy_once(self, facades: Path, tmp_path: Path) -> None:
        code = (
            "import sys; from tests.data.support import opened; from pathlib import Path;"
            "s = opened(Path(sys.argv[1]), 'files', 'tmp'); print(s.staging['copied'], flush=True); sys.stdin.read()"
        )
        command = [sys.executable, "-c", code, str(facades)]
        environment = {**os.environ, "TMPDIR": str(tmp_path / "node")}
        both = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
            for _ in range(2)
        ]
        said = [one.stdout.readline().strip() for one in both if one.stdout]
        assert sorted(said) == ["False", "True"]
        both[0].kill()  # it cannot clean up; the other one does
        for one in both:
            one.communicate(timeout=60)
        assert not list((tmp_path / "node").glob("*/*"))

    def test_data_that_does_not_fit_is_refused_with_need_and_free_space(
        self, facades: Path, small_disk: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        disk = small_disk(100)
        monkeypatch.setattr("tempfile.tempdir", str(disk))
        with pytest.raises(UserError, match=r"recipe\.stage_to=tmp: the data needs 0\.2 MB on .*, 0\.1 MB are free"):
            opened(facades, "memmap", "tmp")
        assert not list(disk.glob("*/*"))

    def test_a_damaged_copy_that_a_killed_process_left_is_made_again(self, facades: Path) -> None:
        first = opened(facades, "memmap", "tmp")
        root = Path(first.staging["path"])
        first.close()
        root.mkdir()
        (root / "pixels.npy").write_bytes(b"half")
        again = opened(facades, "memmap", "tmp")
        assert (again.staging["copied"], Path(again.staging["path"])) == (True, root)
        assert np.array_equal(again.pixels(5), opened(facades).pixels(5))
        again.close()
