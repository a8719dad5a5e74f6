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
]
SUBJECTS = [["doctor", "machine"], ["doctor", "site"], ["doctor", "gpu"]]
HEAVY = {"torch", "hydra", "diffusers", "polars", "pyarrow", "altair", "rich", "numpy"}
NUMERICAL = {"torch", "numpy", "pyarrow", "polars"}


@pytest.mark.parametrize("arguments", [[], *([verb] for verb in VERBS), *SUBJECTS])
def test_help_imports_no_heavy_library(arguments: list[str]) -> None:
    code = (
        "import sys; from inpaint_bench.cli import app\n"
        f"assert app.main([*{arguments}, '--help']) == 0\n"
        f"heavy = {HEAVY} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"Usage: inpaint-bench {' '.join(arguments)}".rstrip())


@pytest.mark.parametrize(
    "words",
    [
        "--version",
        "status nowhere",
        "rerun nowhere",
        "cancel nowhere",
        "collect nowhere",
        "merge nowhere -o dataset",
        "report nowhere -o page",
        "restore nowhere nowhere -o out",
        "doctor site nowhere",
        "watch --telemetry replay --capture nowhere -- true",
        "launch gpu=nowhere",
        "launch -m gpu=h200 batch=8,16 dry_run=true",
        "launch --help data",
    ],
)
def test_a_mistake_is_answered_and_a_sweep_planned_without_numerical_libraries(words: str, tmp_path: Path) -> None:
    code = (
        "import sys; from inpaint_bench.cli import app\n"
        f"code = app.main({words.split()})\n"
        "assert code == (2 if 'nowhere' in sys.argv[1] else 0), code\n"
        f"heavy = {NUMERICAL} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code, words], cwd=tmp_path, capture_output=True, text=True)
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
    ("arguments", "message"),
    [
        (["stats"], "No such command 'stats'. Did you mean 'status'?"),
        (["--verbose"], "No such option: --verbose"),
        (["status", "runs", "--wach"], "No such option: --wach (Possible options: --watch)"),
        (["rerun"], "Missing argument 'SWEEP'."),
        (["status", "runs", "--point", "first"], "--point first: must be a whole number"),
        (["status", "runs", "--json", "--watch"], "--watch and --json cannot be combined"),
        (["status", "runs", "--cost"], "--cost: was removed; the table of `status` has a column `cost`"),
        (["merge", "."], "Missing option '-o' / '--output'."),
        (["restore", "a", "b", "-o", "c", "--mask-kind", "fog"], "--mask-kind: 'fog' is not one of 'sd', 'disaster'"),
        (["restore", "a", "b", "-o", "c", "--seed", "-1"], "--seed -1: must be at least 0"),
        (["status", "runs", "--every", "soon"], "--every soon: must be a number"),
        (["prepare", "--verify", "dataset", "data=synthetic"], "--verify dataset: takes no configuration"),
        (["doctor", "profile=testbed"], "No such command 'profile=testbed'"),
        (["doctor", "sight"], "No such command 'sight'. Did you mean 'site'?"),
        (["launch", "gpuu=h200"], "gpuu"),
        (["launch", "--bogus"], "--bogus: no such option"),
        (["launch", "--config-dir"], "argument --config-dir/-cd: expected one argument"),
        (["launch", "--plan", "/nowhere.yaml"], "/nowhere.yaml"),
        (["launch", "--plan"], "argument --plan: expected one argument"),
    ],
)
def test_a_usage_error_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert "Value error" not in error
    assert "Input should" not in error
    assert len(error.splitlines()) == 1


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
        "inpaint_bench.cli.rerun.run_rerun", lambda sweep, changes, **_: calls.append((str(sweep), changes))
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


def test_a_closed_pipe_ends_a_command_quietly() -> None:
    command = [sys.executable, "-m", "inpaint_bench", "doctor"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        running.stdout.close()
        error = running.stderr.read()
    assert running.returncode == 141
    assert error == ""


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_can_complete_verbs(shell: str) -> None:
    environment = {**os.environ, "_INPAINT_BENCH_COMPLETE": f"complete_{shell}"}
    environment |= {"COMP_WORDS": "inpaint-bench st", "COMP_CWORD": "1"}
    environment |= {"_TYPER_COMPLETE_ARGS": "inpaint-bench st", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    done = subprocess.run([sys.executable, "-m", "inpaint_bench"], env=environment, capture_output=True, text=True)
    assert "status" in done.stdout
    assert "merge" not in done.stdout


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
def test_zsh_and_fish_complete_choices_of_launch(shell: str) -> None:
    environment = {**os.environ, "_INPAINT_BENCH_COMPLETE": f"complete_{shell}"}
    environment |= {"_TYPER_COMPLETE_ARGS": "inpaint-bench launch gpu=a40,h", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    done = subprocess.run([sys.executable, "-m", "inpaint_bench"], env=environment, capture_output=True, text=True)
    assert "gpu=a40,h200" in done.stdout
