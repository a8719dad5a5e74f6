"""A report refuses a dataset that was changed after its merge, and says what older code defined differently."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import polars as pl
import pytest

from analysis import merge
from analysis.dataset import open_dataset
from analysis.report.report import write_report
from inpaint_bench.cli import app
from inpaint_bench.core import files, seal
from inpaint_bench.core.errors import UserError
from tests.run.small_disk import permissions_count, small_disk_on

from .build import write_run

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    for name in ("r-01", "r-02"):
        folder = write_run(tmp_path / "runs", name)
    (folder / "steps" / "notes.txt").touch()  # so that a file is skipped
    merge.merge([tmp_path / "runs"], tmp_path / "ds")
    return tmp_path / "ds"


def report(dataset: Path) -> str:
    return write_report(dataset, dataset.parent / "report", formats=()).read_text()


def part_of(dataset: Path, run_id: str = "r-01", table: str = "samples_fast") -> Path:
    (path,) = dataset.glob(f"{table}/*/*/run={run_id}/*.parquet")
    return path


def speed_up(dataset: Path) -> None:
    path = dataset / "runs.parquet"
    pl.read_parquet(path).with_columns(pl.col("images_per_s") * 1.1).write_parquet(path)


def empty_skipped(dataset: Path) -> None:
    path = dataset / "skipped_files.parquet"
    pl.read_parquet(path).with_columns(reason=pl.lit("x")).write_parquet(path)


def edit_metadata(dataset: Path) -> None:
    path = dataset / "dataset.json"
    path.write_text(path.read_text().replace('"skipped": 1', '"skipped": 0'))


def edit_directories(dataset: Path) -> None:
    path = dataset / "directories.json"
    path.write_text(path.read_text().replace("r-01", "r-03"))


def swap(dataset: Path) -> None:
    shutil.copy(part_of(dataset, "r-02"), part_of(dataset))


def flip(dataset: Path) -> None:
    path = part_of(dataset, table="steps")
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (speed_up, "runs.parquet was edited"),
        (empty_skipped, "skipped_files.parquet was edited"),
        (edit_metadata, "dataset.json was edited"),
        (edit_directories, "directories.json was edited"),
        (lambda dataset: (dataset / "directories.json").unlink(), "directories.json cannot be read"),
        (lambda dataset: part_of(dataset).unlink(), "samples_fast/site=grace/gpu=a40/run=r-01/part-000000.parquet is"),
        (lambda dataset: shutil.copy(part_of(dataset), part_of(dataset).with_name("part-000001.parquet")), "was added"),
        (swap, "run=r-01/part-000000.parquet was edited"),
        (flip, "run=r-01/part-000000.parquet was edited"),
    ],
)
def test_a_changed_dataset_is_refused(dataset: Path, change: Callable[[Path], object], words: str) -> None:
    change(dataset)
    with pytest.raises(UserError, match="was changed after its merge") as caught:
        report(dataset)
    assert words in str(caught.value)


def test_a_refused_dataset_is_one_sentence_with_exit_code_2(dataset: Path, capsys: pytest.CaptureFixture[str]) -> None:
    speed_up(dataset)
    assert app.main(["report", str(dataset), "-o", str(dataset.parent / "out")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not (dataset.parent / "out").exists()


def test_a_pipe_in_place_of_a_file_is_refused_at_once(dataset: Path) -> None:
    for path in (part_of(dataset), dataset / "runs.parquet"):
        path.unlink()
        os.mkfifo(path)
        with pytest.raises(UserError, match="was changed after its merge"):
            report(dataset)


def test_a_dataset_of_which_every_run_was_left_out_is_reported(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "runs")
    (folder / "manifest.json").write_text("{")
    merge.merge([tmp_path / "runs"], tmp_path / "ds")
    assert "0 of 0 runs are valid" in report(tmp_path / "ds")


def test_a_copied_dataset_is_not_changed(dataset: Path) -> None:
    shutil.copytree(dataset, dataset.parent / "copy", copy_function=shutil.copyfile)
    os.utime(part_of(dataset))
    for folder in (dataset, dataset.parent / "copy"):
        assert "Merged by" not in report(folder)


def test_merging_again_accepts_a_changed_dataset(dataset: Path) -> None:
    speed_up(dataset)
    merge.merge([dataset.parent / "runs"], dataset)
    assert "Merged by" not in report(dataset)


def test_a_dataset_of_older_code_says_so(dataset: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, words = dataset / "dataset.json", "flags, throttle_power_pct, throttle_thermal_pct were defined differently"
    metadata = json.loads(path.read_text())
    del metadata["definitions"]
    path.write_text(json.dumps(seal.seal(metadata, dataset)))
    page = report(dataset)
    markdown = (dataset.parent / "report" / "report.md").read_text()
    assert app.main(["report", str(dataset), "-o", str(dataset.parent / "report"), "--export", "none"]) == 0
    terminal = capsys.readouterr().out
    assert all(words in " ".join(output.replace("\\_", "_").split()) for output in (page, markdown, terminal))


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*/dataset.json")), ids=lambda path: path.parent.name)
def test_committed_datasets_are_unchanged_and_of_the_present_definitions(path: Path) -> None:
    """After a change of `columns.DEFINITIONS` their reports say that a column was defined differently."""
    assert open_dataset(path.parent).notes == []


COMMANDS = [
    ["report", "{}", "-o", "out", "--export", "none"],
    ["compare", "{}", "{}"],
    ["levers", "{}"],
    ["advise", "model=sd15_inpaint", "images=6500", "epochs=16", "--datasets", "{}"],
    [
        *("launch", "-m", "gpu=a40", "site=grace", "batch=16", "dry_run=true", "datasets=[{}]"),
        *("sites.grace.account.value=123456789012", "hydra.sweep.dir=sweep"),
    ],
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_every_command_refuses_a_dataset_that_was_edited(
    dataset: Path, command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(dataset.parent)
    arguments = [word.replace("{}", str(dataset)) for word in command]
    assert app.main(arguments) == 0
    speed_up(dataset)
    capsys.readouterr()
    assert app.main(arguments) == 2
    sentence = f"error: {dataset} was changed after its merge: {{}}. Merge the run directories again.\n"
    assert capsys.readouterr().err.endswith(sentence.format("runs.parquet was edited"))


@pytest.mark.parametrize(
    "arguments",
    [
        ["report", "ds", "-o", "/proc/x"],
        ["report", "ds", "-o", "out", "--figures", "/proc/x"],
        ["report", ".", "-o", "/proc/x"],
        ["merge", "runs", "-o", "/proc/x"],
        ["compare", "ds", "ds", "--fail-on", "3%", "--junit", "/proc/x"],
        ["prepare", "data=synthetic", "data.num_images=4", "data.resolution_px=64", "prepare.out=/proc/x"],
        ["watch", "--telemetry", "none", "-o", "/proc/x", "--", "true"],
        ["launch", "gpu=cpu", "recipe=cpu", "telemetry=none", "hydra.run.dir=/proc/x"],
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)
def test_output_where_nothing_can_be_made_is_refused_in_a_sentence(
    dataset: Path, arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(dataset.parent)
    assert app.main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: /proc")
    assert "cannot be" in line or "takes no files" in line
    assert not (dataset.parent / "out").exists()


@pytest.mark.subprocess
@pytest.mark.parametrize("place", ["disk/x", "disk/x/y", "file/x", "locked/x", "locked"])
@pytest.mark.parametrize(
    "command",
    [
        ["merge", "runs", "-o"],
        ["report", "ds", "-o"],
        ["report", "ds", "-o", "out", "--figures"],
        ["prepare", "data=synthetic", "data.num_images=4", "data.resolution_px=64", "prepare.out="],
        ["prepare", "workload=volume3d_train", "workload.network=tiny", "workload.volumes=1", "prepare.out="],
    ],
    ids=lambda words: f"{words[0]} {words[1].partition('=')[0]} {words[-1].rstrip('=')}",
)
def test_output_where_nothing_may_be_written_is_refused_in_a_sentence_and_nothing_is_left(
    dataset: Path, command: list[str], place: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: an empty folder without write permission was replaced."""
    monkeypatch.chdir(dataset.parent)
    Path("file").touch()
    Path("locked").mkdir(mode=0o555)
    before = sorted(dataset.parent.rglob("*"))
    *options, last = command
    arguments = [*options, last + place] if last.endswith("=") else [*command, place]
    with (
        small_disk_on(dataset.parent / "disk", access="ro") if "disk" in place else nullcontext(),
        permissions_count(),
    ):
        assert app.main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "cannot be made in" in line or "takes no files" in line
    Path("disk").rmdir() if "disk" in place else None
    assert sorted(dataset.parent.rglob("*")) == before


def test_what_could_not_be_written_leaves_no_folder_above_it(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    with pytest.raises(UserError, match="not this"), files.replacing_folder(tmp_path / "kept/a/b/c", "marker"):
        raise UserError("not this")
    assert [path.name for path in tmp_path.rglob("*")] == ["kept"]


@pytest.mark.subprocess
@pytest.mark.parametrize("kib", [8, 24, 60])
@pytest.mark.parametrize("command", [["merge", "runs", "-o"], ["report", "ds", "-o"]], ids=lambda words: words[0])
def test_disk_that_fills_is_a_sentence(
    dataset: Path, command: list[str], kib: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(dataset.parent)
    with small_disk_on(dataset.parent / "disk", kib):
        assert app.main([*command, "disk/x"]) == 2
    printed = capsys.readouterr().err
    assert "No space left on device" in printed
    assert printed.count("\n") == 1


@pytest.mark.subprocess
def test_full_disk_is_said_whatever_the_library_that_writes(tmp_path: Path) -> None:
    with (
        small_disk_on(tmp_path / "disk"),
        pytest.raises(UserError, match=r"x: cannot be written .*No space left"),
        files.replacing_folder(tmp_path / "disk/x", "marker") as folder,
    ):
        pl.DataFrame({"a": list(range(10**6))}).write_parquet(folder / "a.parquet")
