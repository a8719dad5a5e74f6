"""`prepare` on the command line: complete datasets, or nothing."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from inpaint_bench.cli import app
from inpaint_bench.core.config.config_hash import config_hash
from inpaint_bench.data.prepared import INDEX_SCHEMA
from tests.run.support import compose, photo

from .support import FORMATS, SMALL, open_prepared, prepared

FACADES = ("data=synthetic", "data.num_images=40")
LARGE = ("data=synthetic", "data.num_images=5000", "data.resolution_px=64")
PREPARE = (sys.executable, "-m", "inpaint_bench", "prepare")


def contents(root: Path) -> dict[str, str]:
    """Return the hash of every file below a folder."""
    files = (path for path in root.rglob("*") if path.is_file())
    return {path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def add(root: Path, format: str) -> int:
    """Add a format to a prepared dataset."""
    data = ["data=prepared", f"data.root={root}", "data.resolution_px=32"]
    return app.main(["prepare", *data, f"prepare.formats=[{format}]"])


class TestDataset:
    def test_all_formats_hold_equal_pixels(self, facades: Path) -> None:
        plain = open_prepared(facades)
        index = pq.read_table(facades / "index.parquet").to_pylist()
        for format in FORMATS[1:]:
            other = open_prepared(facades, format)
            assert all(np.array_equal(plain.pixels(at), other.pixels(at)) for at in range(60)), format
        for row in index:
            assert hashlib.sha256(plain.pixels(row["id"]).tobytes()).hexdigest() == row["sha256"]
            assert plain.pixels(row["id"]).shape == (32, 32, 3)

    def test_index_has_positions_and_split_in_order(self, facades: Path) -> None:
        table = pq.read_table(facades / "index.parquet")
        assert table.schema.names == INDEX_SCHEMA.names
        assert table["id"].to_pylist() == list(range(60))
        assert str(table["latitude"].type) == str(table["longitude"].type) == "double"
        assert np.abs(table["latitude"].to_numpy() - 30.6).max() < 0.1
        sides = {(row["block"], row["split"]) for row in table.to_pylist()}
        assert len(sides) == len({block for block, _ in sides})
        assert {side for _, side in sides} == {"train", "validation"}

    def test_manifest_has_counts_and_times(self, facades: Path) -> None:
        manifest = json.loads((facades / "prepared.json").read_text())
        assert manifest["num_images"] == manifest["inventory"]["used"] == 60
        assert manifest["split"]["train"] + manifest["split"]["validation"] == 60
        assert set(manifest["formats"]) == set(FORMATS)
        assert all(entry["seconds"] > 0 for entry in manifest["formats"].values())
        assert len(manifest["formats"]["files"]["files"]) == 60

    def test_result_is_reproducible_to_the_byte(self, facades: Path, tmp_path: Path) -> None:
        second = contents(prepared(tmp_path / "second", "data.num_images=60"))
        before = contents(facades)
        assert {n: h for n, h in second.items() if n != "prepared.json"} == {
            n: h for n, h in before.items() if n != "prepared.json"
        }


class TestSecondRun:
    def test_complete_dataset_is_not_rewritten(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        out = prepared(tmp_path / "set", *FACADES)
        before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
        capsys.readouterr()
        prepared(out, *FACADES)
        assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before

    def test_missing_format_is_added(self, tmp_path: Path) -> None:
        out, complete = prepared(tmp_path / "set", *FACADES, "prepare.formats=[files]"), tmp_path / "complete"
        assert set(json.loads((out / "prepared.json").read_text())["formats"]) == {"files"}
        prepared(out, *FACADES)
        prepared(complete, *FACADES)
        assert contents(out).keys() == contents(complete).keys()
        assert np.array_equal(open_prepared(out, "hdf5").pixels(7), open_prepared(complete, "memmap").pixels(7))

    @pytest.mark.parametrize(
        "override", ["data.seed=1", "prepare.jpeg_quality=90", "data.block_m=50", "data.num_images=41"]
    )
    def test_folder_with_another_dataset_is_refused(
        self, tmp_path: Path, override: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        out = prepared(tmp_path / "set", *FACADES)
        before = contents(out)
        assert app.main(["prepare", *FACADES, f"prepare.out={out}", *SMALL, override]) == 2
        assert "holds another dataset" in capsys.readouterr().err
        assert contents(out) == before

    def test_folder_with_other_files_is_refused(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "thesis.tex").write_text("years of work")
        assert app.main(["prepare", *FACADES, f"prepare.out={tmp_path}"]) == 2
        assert "not a prepared dataset" in capsys.readouterr().err
        assert list(tmp_path.iterdir()) == [tmp_path / "thesis.tex"]

    def test_changed_photographs_make_another_dataset(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "photos").mkdir()
        for number, name in enumerate("abc"):
            photo(tmp_path / "photos" / f"{name}.jpg", position=(55.0 + number, 13.0))
        overrides = ["data=folder", f"data.root={tmp_path / 'photos'}", f"prepare.out={tmp_path / 'set'}", *SMALL]
        assert app.main(["prepare", *overrides]) == 0
        assert app.main(["prepare", *overrides]) == 0
        photo(tmp_path / "photos" / "b.jpg", position=(56.0, 13.0), colour=(1, 2, 3))
        assert app.main(["prepare", *overrides]) == 2


class TestInterruptions:
    @pytest.mark.parametrize(
        ("format", "kilobytes"), [("files", 150), ("memmap", 300), ("hdf5", 300), ("webdataset", 400)]
    )
    def test_full_disk_is_reported_and_nothing_is_left_on_it(
        self, small_disk: Callable[[int], Path], capsys: pytest.CaptureFixture[str], format: str, kilobytes: int
    ) -> None:
        disk = small_disk(kilobytes)
        overrides = [
            *FACADES,
            "data.num_images=80",
            f"prepare.out={disk / 'set'}",
            *SMALL,
            f"prepare.formats=[{format}]",
        ]
        assert app.main(["prepare", *overrides]) == 2
        message = capsys.readouterr().err
        assert f"the disk {disk} is full" in message
        assert "MB were free" in message
        assert not list(disk.iterdir())

    @pytest.mark.parametrize("writer", ["memmap", "hdf5", "webdataset"])
    def test_full_disk_while_a_format_is_added_keeps_the_dataset(
        self,
        small_disk: Callable[[int], Path],
        capsys: pytest.CaptureFixture[str],
        writer: str,
    ) -> None:
        disk = small_disk(400)
        out = prepared(disk / "set", *FACADES, "data.num_images=80", "prepare.formats=[files]")
        before = contents(disk)
        assert add(out, writer) == 2
        assert "is full" in capsys.readouterr().err
        assert contents(disk) == before
        assert sorted(path.name for path in disk.iterdir()) == ["set"]

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    def test_signal_leaves_nothing_behind_and_a_second_run_works(self, tmp_path: Path, number: signal.Signals) -> None:
        running = start(tmp_path)
        os.killpg(running.pid, number)  # all of them, as Slurm and a terminal do
        _, message = running.communicate(timeout=60)
        assert running.returncode == 128 + number
        assert f"Stopped by {number.name}" in message
        assert not list(tmp_path.iterdir())
        prepared(tmp_path / "set", *FACADES)

    @pytest.mark.parametrize("hook", ["before", "after_in_parent"])
    @pytest.mark.parametrize("number", ["SIGTERM", "SIGINT"])
    def test_signal_during_fork_is_not_lost(self, tmp_path: Path, hook: str, number: str) -> None:
        """Regression: an exception raised by the handler inside the hooks of a fork was dropped."""
        script = (
            "import os, signal, sys; from inpaint_bench.cli import app\n"
            f"os.register_at_fork({hook}=lambda: os.kill(os.getpid(), signal.{number}))\n"
            "sys.exit(app.main(['prepare', *sys.argv[1:]]))"
        )
        command = [sys.executable, "-c", script, *FACADES, f"prepare.out={tmp_path / 'set'}", *SMALL]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 128 + signal.Signals[number], done.stderr
        assert done.stderr == f"Stopped by {number}. No partial output is left.\n"
        assert not list(tmp_path.iterdir())

    def test_second_run_removes_what_a_killed_one_left_and_no_process_stays(self, tmp_path: Path) -> None:
        running = start(tmp_path)
        running.kill()
        running.communicate(timeout=60)  # its pipes close only when its children are gone
        prepared(tmp_path / "set", *FACADES)
        assert [path.name for path in tmp_path.iterdir()] == ["set"]

    def test_concurrent_prepare_of_the_same_folder_is_refused(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        running = start(tmp_path)
        assert app.main(["prepare", *LARGE, f"prepare.out={tmp_path / 'set'}"]) == 2
        assert "another prepare is writing it" in capsys.readouterr().err
        running.terminate()
        running.communicate(timeout=60)
        assert running.returncode == 128 + signal.SIGTERM


class TestLocation:
    def test_symlink_to_another_disk_is_followed_and_kept(
        self, small_disk: Callable[[int], Path], tmp_path: Path
    ) -> None:
        disk, link = small_disk(4000), tmp_path / "set"
        (disk / "there").mkdir()
        link.symlink_to(disk / "there")
        prepared(link, *FACADES, "prepare.formats=[files]")
        assert add(link, "memmap") == 0
        assert link.is_symlink()
        assert len(open_prepared(disk / "there", "memmap")) == 40
        assert [path.name for path in disk.iterdir()] == ["there"]

    def test_mount_point_is_refused_but_formats_can_be_added_to_a_dataset_there(
        self, small_disk: Callable[[int], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        disk = small_disk(4000)
        assert app.main(["prepare", *FACADES, f"prepare.out={disk}", *SMALL]) == 2
        assert "is a mount point, which cannot be replaced" in capsys.readouterr().err
        shutil.copytree(prepared(tmp_path / "set", *FACADES, "prepare.formats=[files]"), disk, dirs_exist_ok=True)
        assert add(disk, "webdataset") == 0
        assert app.main(["prepare", "--verify", str(disk)]) == 0
        assert not list(disk.glob(".*"))

    @pytest.mark.parametrize(
        ("out", "reason"), [("file/set", "Not a directory"), ("n" * 250, "too long"), ("n" * 300, "too")]
    )
    def test_impossible_name_is_reported(
        self, tmp_path: Path, out: str, reason: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "file").touch()
        assert app.main(["prepare", *FACADES, f"prepare.out={tmp_path / out}", *SMALL]) == 2
        message = capsys.readouterr().err
        assert str(tmp_path / out) in message
        assert reason in message


class TestDamageWithUnchangedSize:
    """Damage that only hashes show, when a format is added."""

    def refused(self, out: Path, format: str, capsys: pytest.CaptureFixture[str]) -> str:
        capsys.readouterr()
        assert app.main(["prepare", *FACADES, f"prepare.out={out}", *SMALL, f"prepare.formats=[{format}]"]) == 2
        assert set(json.loads((out / "prepared.json").read_text())["formats"]) == {"files"}
        return capsys.readouterr().err

    @pytest.mark.parametrize("format", ["memmap", "webdataset"])
    def test_damaged_image_is_reported_and_not_converted(
        self, tmp_path: Path, format: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        out = prepared(tmp_path / "set", *FACADES, "prepare.formats=[files]")
        complete = (out / "images/000003.jpg").read_bytes()
        (out / "images/000003.jpg").write_bytes(bytes(len(complete)))
        assert f"{out}/images/000003.jpg: cannot be decoded" in self.refused(out, format, capsys)
        changed = bytearray(complete)
        changed[-40:-20] = bytes(20)
        (out / "images/000003.jpg").write_bytes(changed)
        assert f"{out}/images/000003.jpg: other pixels than were prepared" in self.refused(out, format, capsys)


def start(folder: Path) -> subprocess.Popen[str]:
    """Start `prepare` as a process group of its own, and wait until it is writing images."""
    command = [*PREPARE, *LARGE, f"prepare.out={folder / 'set'}"]
    running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    until = time.monotonic() + 60
    while not list(folder.glob(".set.partial/images/*9.jpg")):
        assert time.monotonic() < until, "no image was written"
        time.sleep(0.02)
    return running


class TestCommand:
    def test_help_ends_with_an_example(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert app.main(["prepare", "--help"]) == 0
        assert "inpaint-bench prepare data=synthetic" in capsys.readouterr().out

    def test_summary_ends_with_the_overrides_to_use(self, tmp_path: Path) -> None:
        command = [*PREPARE, *FACADES, *SMALL, f"prepare.out={tmp_path / 'set'}"]
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        assert lines[0] == "40 found, 40 used, 0 left out"
        place = r"40 positions: latitude [\d.]+ to [\d.]+, longitude -[\d.]+ to -[\d.]+ degrees \(0\.\d+ km .*"
        assert re.fullmatch(place + r" centre [\d.]+, -[\d.]+, in 5 blocks of 200 m", lines[1])
        assert re.fullmatch(r"\d+ for training, \d+ for validation: 1 of 5 blocks of 200 m", lines[2])
        assert lines[-1] == f"use it: data=prepared data.root={tmp_path / 'set'}"

    def test_images_in_one_block_are_all_for_training_with_a_warning(self, tmp_path: Path) -> None:
        command = [*PREPARE, *FACADES, *SMALL, "data.num_images=3", f"prepare.out={tmp_path / 'set'}"]
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        assert any(line.startswith("no validation split: all 3 images lie in one geographic block") for line in lines)
        assert "3 for training, 0 for validation: 0 of 1 block of 200 m" in lines

    def test_terminal_gets_a_progress_bar(self, tmp_path: Path) -> None:
        leader, follower = pty.openpty()
        command = [*PREPARE, *FACADES, *SMALL, f"prepare.out={tmp_path / 'set'}"]
        environment = {**os.environ, "TERM": "xterm"}
        with subprocess.Popen(command, stdout=follower, stderr=follower, env=environment) as running:
            os.close(follower)
            output = b""
            with contextlib.suppress(OSError):  # EIO when the last process has closed the terminal
                while chunk := os.read(leader, 4096):
                    output += chunk
        os.close(leader)
        screen = output.decode()
        assert running.returncode == 0, screen
        assert re.search(r"images .*40/40", screen)
        assert re.search(r"hdf5 .*40/40", screen)

    def test_caches_of_the_frozen_networks_are_built_and_kernels_compiled(self, tmp_path: Path) -> None:
        networks = ["model=tiny_inpaint", "recipe=cpu", "gpu=cpu", "prepare.caches=true", "prepare.kernels=true"]
        out = prepared(tmp_path / "set", *FACADES, *networks, "batch=2", "workload.warmup_steps=1")
        (facts_file,) = out.glob("cache/*/cache.json")
        assert json.loads(facts_file.read_text())["images"] == 40

    def test_prepare_settings_do_not_change_the_config_hash(self) -> None:
        assert config_hash(compose("prepare.out=somewhere")) == config_hash(compose())
