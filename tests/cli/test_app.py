"""The command line itself: help, exit codes, and that no verb pays for the libraries of another."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from inpaint_bench.cli import app

VERBS = [
    "prepare",
    "status",
    "rerun",
    "cancel",
    "collect",
    "merge",
    "report",
    "compare",
    "levers",
    "restore",
    "watch",
    "doctor",
    "new",
]
SUBJECTS = ["doctor machine", "doctor site", "doctor gpu"]
HEAVY = {"torch", "hydra", "diffusers", "polars", "pyarrow", "altair", "rich", "numpy"}
NUMERICAL = {"torch", "numpy", "pyarrow", "polars"}


def without(libraries: set[str], lines: dict[str, int], folder: Path) -> str:
    """Run command lines in turn in one new process, none of which may load these libraries; return what is printed."""
    code = (
        "import sys; from inpaint_bench.cli import app\n"
        f"for line, expected in {lines}.items():\n"
        "    code = app.main(line.split())\n"
        f"    loaded = {libraries} & set(sys.modules)\n"
        "    assert (code, loaded) == (expected, set()), (line, code, loaded)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_help_imports_no_heavy_library(tmp_path: Path) -> None:
    subjects = ["", *VERBS, *SUBJECTS]
    printed = without(HEAVY, {f"{subject} --help": 0 for subject in subjects}, tmp_path)
    for subject in subjects:
        assert f"Usage: inpaint-bench {subject}".rstrip() in printed


def test_a_mistake_is_answered_and_a_sweep_planned_without_numerical_libraries(tmp_path: Path) -> None:
    mistakes = [
        *("status nowhere", "rerun nowhere", "cancel nowhere", "collect nowhere", "merge nowhere -o dataset"),
        *("report nowhere -o page", "restore nowhere nowhere -o out", "doctor site nowhere"),
        *("watch --telemetry replay --capture nowhere -- true", "launch gpu=nowhere"),
    ]
    good = ["--version", "launch -m gpu=h200 batch=8,16 dry_run=true", "launch --help data"]
    without(NUMERICAL, {**dict.fromkeys(mistakes, 2), **dict.fromkeys(good, 0)}, tmp_path)


def test_files_of_the_working_directory_are_not_imported_in_place_of_modules(tmp_path: Path) -> None:
    (tmp_path / "launchers").mkdir()
    for name in ("launchers/__init__", "yaml", "typing", "json"):
        (tmp_path / f"{name}.py").write_text("x = 1\n")
    for command in (["inpaint_bench.launch", "-m", "gpu=h200", "dry_run=true"], ["inpaint_bench", "levers"]):
        command = [sys.executable, "-m", *command]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def test_help_lists_every_verb_and_is_what_no_arguments_print(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main([]) == 0
    text = capsys.readouterr().out
    for verb in (*VERBS, "launch"):
        assert f"\n  {verb} " in text
    assert "..." not in text.split("Commands:")[1]  # every summary fits its line
    assert app.main(["--help"]) == 0
    assert capsys.readouterr().out == text


def test_version_is_printed_with_the_commit(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["--version"]) == 0
    out = capsys.readouterr().out
    version = re.escape(metadata.version("inpaint-bench"))
    assert re.fullmatch(rf"inpaint-bench {version} \(commit ([0-9a-f]{{12}}(, changed)?|not known)\)\n", out)


@pytest.mark.parametrize(
    ("arguments", "sweep", "changes"),
    [
        (["SWEEP", "time_min=120", "seed=-1"], "SWEEP", ["time_min=120", "seed=-1"]),
        (["time_min=120", "--dry-run", "SWEEP"], "time_min=120", ["SWEEP"]),
        (
            ["SWEEP", "--dry-run", "~study", "+new.key=1", "levers=[a,b]"],
            "SWEEP",
            ["~study", "+new.key=1", "levers=[a,b]"],
        ),
        (["SWEEP", "--", "-x=1"], "SWEEP", ["-x=1"]),
    ],
)
def test_options_and_overrides_may_be_mixed(
    arguments: list[str], sweep: str, changes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    monkeypatch.setattr(
        "inpaint_bench.cli.sweeps.run_rerun", lambda sweep, changes, **_: calls.append((str(sweep), changes))
    )
    assert app.main(["rerun", *arguments]) == 0
    assert calls == [(sweep, changes)]


@pytest.mark.parametrize("verb", app.app.registered_commands + app.app.registered_groups)
def test_launch_names_the_command_of_a_verb_that_is_typed_after_it(
    verb: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    name = verb.name or verb.callback.__name__
    assert app.main(["launch", "-m", name]) == 2
    assert f"{name}: is not KEY=VALUE; the command is `inpaint-bench {name}`" in capsys.readouterr().err


def test_hydra_reads_the_arguments_of_launch_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []
    monkeypatch.setattr("inpaint_bench.launch.main", lambda arguments: calls.append(list(arguments)) or 3)
    arguments = ["-m", "gpu=a40,a100", "--config-dir", "here", "+x=-1", "--help", "-cd", "there", "batch=8"]
    assert app.main(["launch", *arguments]) == 3
    assert calls == [arguments]


@pytest.mark.parametrize(
    ("words", "expected", "left_out"),
    [
        ("launch gp", "gpu=", "batch="),
        ("launch gpu = a", "a100", "h200"),  # as bash splits gpu=a
        ("launch recipe =", "tuned", "a100"),
        ("launch recipe = tuned+[tf32,attn_f", "tuned+[tf32,attn_flash", "tuned"),
        ("levers channels", "channels_last", "tuned"),
        ("launch -m recipe.precision = f", "fp32", "bf16"),
    ],
)
def test_bash_completes_keys_and_choices_of_launch(words: str, expected: str, left_out: str) -> None:
    line = f"inpaint-bench {words}"
    environment = {**os.environ, "_INPAINT_BENCH_COMPLETE": "complete_bash"}
    environment |= {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1)}
    done = subprocess.run([sys.executable, "-m", "inpaint_bench"], env=environment, capture_output=True, text=True)
    assert expected in done.stdout
    assert left_out not in done.stdout.split()


@pytest.mark.parametrize("shell", ["zsh", "fish"])
@pytest.mark.parametrize(
    ("line", "expected", "left_out"), [("st", "status", "merge"), ("launch gpu=a40,h", "gpu=a40,h200", "gpu=a100")]
)
def test_zsh_and_fish_complete_verbs_and_choices(shell: str, line: str, expected: str, left_out: str) -> None:
    environment = {**os.environ, "_INPAINT_BENCH_COMPLETE": f"complete_{shell}"}
    environment |= {"_TYPER_COMPLETE_ARGS": f"inpaint-bench {line}", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    done = subprocess.run([sys.executable, "-m", "inpaint_bench"], env=environment, capture_output=True, text=True)
    assert expected in done.stdout
    assert left_out not in done.stdout
