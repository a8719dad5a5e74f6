"""Mistakes that people make on the command line: each is answered by a sentence that says what would be right."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from functools import partial
from pathlib import Path

import pytest

from inpaint_bench import launch
from inpaint_bench.cli import app
from inpaint_bench.commands import exit_codes
from inpaint_bench.core.config.parse import TRAIN
from inpaint_bench.core.hydra_support import refuse_wrong_overrides
from inpaint_bench.core.paths import ROOT, conf_dir
from launchers.points.compose import composer

from .mistakes import COMMANDS, LOCAL, OVERRIDES

pytestmark = pytest.mark.slow
NOT_UTF8 = "is not UTF-8, as every path and argument has to be"


def problem(code: int, out: str, error: str, message: str) -> str | None:
    """Return an answer that is not one sentence with this message, None for one that is."""
    expected = ".*".join(map(re.escape, message.split(" ... ")))
    wrong = r"Traceback|Error executing job|Config search path|mismatched input|LexerNo|hydra\.cc"
    right = code == 2 and re.fullmatch(f"error: .*{expected}.*\n", error) and not re.search(wrong, out + error)
    return None if right and len(re.findall(r"[.?!] [A-Z`]", error)) <= 2 else f"{code}: {out}{error}"


def test_an_override_that_does_not_fit_is_answered_by_what_would_be_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """One composition for all; a launch does the same to its overrides, as the command lines below show."""
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    problems = {}
    with composer() as compose:

        def refused(overrides: list[str]) -> None:
            refuse_wrong_overrides(overrides, [conf_dir()], multirun=True)
            compose(0, overrides)

        for line, message in OVERRIDES:
            code = exit_codes.guarded(partial(refused, shlex.split(line)))
            if wrong := problem(code, *capfd.readouterr(), message):
                problems[line] = wrong
    assert problems == {}


def test_new_is_not_proposed_for_a_name_that_it_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    for line in ("doctor site auto", "doctor site my.site", "launch -m site=my.site"):
        assert app.main(line.split()) == 2
        assert "inpaint-bench new" not in capsys.readouterr().err


@pytest.mark.parametrize(("line", "message"), COMMANDS, ids=[line for line, _ in COMMANDS])
def test_a_mistake_is_answered_by_what_would_be_right(
    line: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SLURM_CONF", raising=False)
    code = app.main(shlex.split(line))
    assert problem(code, *capfd.readouterr(), message) is None
    assert [path.name for path in tmp_path.iterdir() if path.name != "runs"] == ["empty"]


@pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_here_is_missed_before_torch_is_loaded(tmp_path: Path) -> None:
    code = "import sys; from inpaint_bench.launch import main; sys.exit(main() + 4 * ('torch' in sys.modules))"
    arguments = ["gpu=h200", "site=local", f"out={tmp_path}/runs"]
    run = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert run.stderr.startswith("error: gpu=h200: this machine has no NVIDIA GPU (")
    assert run.stderr.endswith("with -m the run is submitted to a site, and gpu=cpu recipe=cpu runs here\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("launch gpu=a40 profile=demo", "site=local runs points on this machine, and torch"),
        ("launch gpu=cpu recipe=cpu telemetry=none", "site=local runs points on this machine, and torch"),
        ("launch -m gpu=a40,h200 profile=demo hydra.sweep.dir=s", "site=grace runs points on this machine, and torch"),
        (
            "launch -m gpu=cpu recipe=cpu telemetry=none hydra.sweep.dir=s",
            "site=local runs points on this machine, and",
        ),
        ("launch -m gpu=h200 site=local hydra.sweep.dir=s", "site=local runs points on this machine, and torch is not"),
        ("launch -m gpu=a40 profile=demo dry_run=true hydra.sweep.dir=s", None),
        ("launch -m gpu=a40 hydra.sweep.dir=s", None),  # a plan file for a site that has Slurm
    ],
)
def test_without_the_extra_train_nothing_starts_on_this_machine(
    line: str,
    answer: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "torch", None)  # as if it were not installed
    code = app.main(shlex.split(line))
    error = capfd.readouterr().err
    if answer is None:
        assert (code, error) == (0, "")
    else:
        assert code == 2
        assert error.startswith(f"error: {answer}")
        assert error.endswith("pip install 'inpaint-bench[train]'\n")
        assert {path.name for path in tmp_path.rglob("*") if path.is_file()} <= {".lock"}


@pytest.mark.parametrize("folder", ["", "/etc/passwd", "/proc/x"])
def test_a_folder_of_kernels_that_cannot_be_written_is_named(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", folder)
    code = app.main(["launch", *LOCAL.split()])
    answer = f"TORCHINDUCTOR_CACHE_DIR={folder}: kernels cannot be kept there"
    assert problem(code, *capfd.readouterr(), answer) is None


def test_the_modules_of_the_extra_train_are_those_of_the_project_file() -> None:
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["train"]
    names = (re.match(r"[\w-]+", package)[0] for package in packages)
    assert sorted(TRAIN) == sorted({"pillow": "PIL"}.get(name, name) for name in names)


def test_launch_without_arguments_prints_the_help(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert app.main(["launch"]) == launch.main([]) == 0
    assert capsys.readouterr().out.startswith("Usage: inpaint-bench launch [OPTIONS] KEY=VALUE ...")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("override", "remark"),
    [
        ("notify.mail=me", "notify.mail=me: is no address; the site's mail system must have a user me"),
        ("track=wandb", "track=wandb: was not checked whether grace has the package wandb"),
        ("out=/proc/x", "/proc/x: No such file or directory, so the scripts were not written"),
    ],
)
def test_a_dry_run_says_what_it_cannot_know(
    override: str, remark: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert app.main(["launch", "-m", "gpu=a40", override, "--dry-run"]) == 0
    assert remark in capsys.readouterr().out.splitlines()


def test_what_the_shell_sets_for_sbatch_is_named_also_far_from_the_site(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SBATCH_ACCOUNT", "mine")
    monkeypatch.delenv("SLURM_CONF", raising=False)
    assert app.main(["launch", "-m", "gpu=h200", "--dry-run"]) == 0
    assert "SBATCH_ACCOUNT=mine: a launch does not read this from the shell; use" in capsys.readouterr().out


def test_several_partitions_make_several_points(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert app.main(["launch", "-m", "gpu=h200", "sites.delta.gpus.h200.partition=gpu,gpu-debug", "--dry-run"]) == 0
    assert "makes points for each partition; none waits for either of them" in capsys.readouterr().err


DOUBTFUL = {  # overrides, and the warnings with the points that they concern
    "gpu=h200 recipe.num_workers=200,4 mem_gb=1 workload.learning_rate=10,1,1e-5": [
        "workload.learning_rate=10: trainings with AdamW diverge above 0.01, and 1 more like it (points 0, 1, 3, 4)",
        "mem_gb=1: torch and a small model take about 4 G of a node's memory (points 0, 1, 2, 3, 4, 5)",
        "recipe.num_workers=200: more than the 12 CPU cores that a job at delta has for each GPU (points 0, 1, 2)",
    ],
    "gpu=h200 data.num_images=4 batch=8,4 workload.train_steps=1000 workload.validate_every=5000": [
        "batch=8: the data has 4 images (point 0)",
        "workload.validate_every=5000: the training ends before, after workload.train_steps=1000",
    ],
    "gpu=h200 workload.train_steps=9": ["workload.warmup_steps=10: the training ends before, after"],
    "gpu=h200 workload.train_steps=99 workload.checkpoint_every_s=3600": ["checkpoint_every_s=3600: a job ends before"],
    "gpu=h200 time_min=1 workload.min_measure_s=60": ["time_min=1: a run takes more than 60 s (point 0)"],
    "gpu=h200 telemetry.fast_hz=0.1 workload.min_measure_s=15": ["telemetry.fast_hz=0.1: takes no two samples in"],
    "gpu=h200 repeats=auto repeats_target=1": ["repeats_target=1: is 100 % of the mean"],
    "gpu=cpu recipe=cpu telemetry=none": ["gpu=cpu: a CPU takes very long for a step of sd15_inpaint at 512 px"],
    "gpu=cpu recipe=cpu telemetry=none workload=volume3d_train": [
        "gpu=cpu: a CPU takes very long for a step of whole_head 128x128x128"
    ],
    "gpu=cpu recipe=cpu telemetry=none workload=denoise_patch": [],
    "gpu=a40,a100,h200 recipe.num_workers=12": [],
}


@pytest.mark.parametrize("line", DOUBTFUL)
def test_what_is_surely_not_meant_is_told_before_it_is_submitted_unless_it_is_silenced(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert app.main(["launch", "-m", *line.split(), "--dry-run"]) == 0
    warnings = [text for text in capsys.readouterr().out.splitlines() if text.startswith("WARNING: ")]
    assert len(warnings) == len(DOUBTFUL[line])
    assert all(warning in text for text, warning in zip(warnings, DOUBTFUL[line], strict=True))
    if warnings:
        names = [text.rpartition("silence=[")[2].rstrip("]") for text in warnings]
        assert app.main(["launch", "-m", *line.split(), f"silence=[{','.join(names)}]", "--dry-run"]) == 0
        assert "WARNING" not in capsys.readouterr().out


def test_images_that_no_step_trains_on_are_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: texts beside images counted as images, and held-out images as those to train on."""
    monkeypatch.chdir(tmp_path)
    folder, prepared = tmp_path / "folder", tmp_path / "prepared"
    folder.mkdir()
    for name in ("a.jpg", "b.jpg", "a.txt", "b.txt", "metadata.csv", "._a.jpg"):
        (folder / name).touch()
    prepared.mkdir()
    (prepared / "prepared.json").write_text('{"num_images": 4, "split": {"train": 2, "validation": 2}}')
    for kind, root, images in (("folder", folder, "2 images"), ("prepared", prepared, "2 images for training")):
        line = ["launch", "-m", "gpu=h200", "batch=3", f"data={kind}", f"data.root={root}", "--dry-run"]
        assert app.main(line) == 0
        assert f"WARNING: batch=3: the data has {images}" in capsys.readouterr().out


@pytest.mark.parametrize("main", [app.main, launch.main])
@pytest.mark.parametrize(
    "arguments", [["-m", "gpu=a40", "hydra.sweep.dir=/tmp/\udcff"], ["--plan", "/tmp/\udcff/plan.delta.yaml"]]
)
def test_a_path_that_is_not_utf_8_is_refused(main, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", *arguments] if main is app.main else arguments) == 2
    assert capsys.readouterr().err == f"error: {arguments[-1].replace(chr(0xDCFF), '?')}: {NOT_UTF8}\n"


@pytest.mark.parametrize("name", ["gone", "\udcff"])
def test_a_working_directory_that_cannot_be_named_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / name)
    if name == "gone":
        (tmp_path / name).rmdir()
    assert app.main(["watch", "--telemetry", "none", "--", "true"]) == 2
    assert re.fullmatch(f"error: (.*/\\?: {NOT_UTF8}|the working directory does not .*)\n", capsys.readouterr().err)


def test_a_file_whose_name_is_not_utf_8_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_codes.guarded(lambda: len("a\udcff".encode())) == 2
    assert capsys.readouterr().err == f"error: a?: {NOT_UTF8}\n"
