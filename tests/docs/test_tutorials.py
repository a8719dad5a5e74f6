"""What the documentation shows below a command, or below Python, is what they print; `...` stands for the rest."""

from __future__ import annotations

import contextlib
import io
import shlex
import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from inpaint_bench.cli import app
from inpaint_bench.core.paths import ROOT
from tests.launchers.sweeps import a_point, a_sweep

from .pages import PAGES, blocks

pytestmark = [pytest.mark.slow, pytest.mark.subprocess]

COMMITTED = "2026-11-23-h200-finetune"
# Commands whose output is shown and not compared, by their first words.
NOT_COMPARED = {
    "inpaint-bench launch -m gpu=a40,a100,h200 batch=8,16,32 sites.delta": "submits to real Slurm",
    "inpaint-bench status SWEEP": "of jobs on the test bed",
    "inpaint-bench rerun SWEEP --dry-run": "of jobs on the test bed",
    "python -m benchmarks.results_page": "writes into the checkout; tests/benchmarks/test_results_page.py compares it",
}
NEEDED = ("cp", "sed")  # run although they show nothing
_printed: dict[str, str] = {}  # by reports of committed datasets, which several pages show
# Python that another test runs.
PYTHON_ELSEWHERE = {
    "own_training.md": "tests/test_wheel.py, from an installed wheel",
    "training.md": "tests/levers/test_lora.py and tests/models/test_pipeline_folder.py, with tiny networks",
}


PYTHON = [
    page
    for page in PAGES
    if page.name not in PYTHON_ELSEWHERE
    and any(block.language == "python" for block in blocks(page.read_text(encoding="utf-8")))
]


def shown(page: Path) -> list[tuple[str, str]]:
    """Return the commands of a page that show output, with it, and those that they need."""
    found = [pair for block in blocks(page.read_text(encoding="utf-8")) for pair in block.commands()]
    kept = [(command, output) for command, output in found if output or command.startswith(NEEDED)]
    return [(command, output) for command, output in kept if not command.startswith(tuple(NOT_COMPARED))]


def flat(text: str) -> str:
    """Return a text without its line ends and the rules of its tables."""
    return " ".join(text.replace("\u2500", " ").split())


def differs(expected: str, actual: str) -> str | None:
    """Return the first part of the expected text that the actual one lacks, None where it has all in this order."""
    parts = [part.strip() for part in flat(expected).split("...")]
    text, position = flat(actual), 0
    for part in parts:
        found = text.find(part, position)
        if found < 0 or (part is parts[0] and part and found):
            return f"{part!r} is not in {text!r}"
        position = found + len(part)
    return f"{text[position:]!r} is left out" if parts[-1] and position < len(text) else None


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory from which the datasets of this checkout are seen."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    return tmp_path


def photographs(folder: Path) -> None:
    """Write forty photographs with positions."""
    folder.mkdir()
    rows = ["file_name,latitude,longitude,text"]
    for number in range(40):
        noise = np.random.default_rng(number).integers(0, 255, (96, 128, 3), dtype=np.uint8)
        Image.fromarray(noise).save(folder / f"{number}.jpg")
        rows.append(f"{number}.jpg,{55.69 + 0.004 * (number // 4)},{13.19 + 0.0005 * (number % 4)},a brick house")
    (folder / "metadata.csv").write_text("\n".join(rows) + "\n")


def compare(page: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Run the commands of a page in order, and compare what they print."""
    commands = shown(page)
    assert commands
    for command, expected in commands:
        words = shlex.split(command)
        if words[0] != "inpaint-bench":
            subprocess.run(words, check=True)
        elif command not in _printed:
            app.main(words[1:])
        printed = "".join(capfd.readouterr())
        if command.startswith("inpaint-bench report benchmarks/"):
            printed = _printed.setdefault(command, printed)
        problem = differs(expected, printed) if expected else None
        assert problem is None, f"{page.name}: {command}\n{problem}"


@pytest.mark.parametrize("name", ["tutorial_cluster.md", "tutorial_reviewer.md"])
def test_commands_print_what_a_tutorial_shows(name: str, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    compare(ROOT / "docs" / name, capfd)


@pytest.mark.faults
def test_commands_print_what_the_tutorial_of_one_gpu_shows(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    photographs(folder / "photos")
    compare(ROOT / "docs" / "tutorial_gpu.md", capfd)


def test_output_is_shown_in_tutorials_alone() -> None:
    pages = {page.name for page in PAGES if any(output for _, output in shown(page))}
    assert pages == {"tutorial_cluster.md", "tutorial_gpu.md", "tutorial_reviewer.md"}


@pytest.mark.parametrize("page", PYTHON, ids=lambda page: page.name)
def test_python_runs_and_prints_what_is_shown(page: Path, folder: Path) -> None:
    (folder / "dataset").symlink_to(ROOT / "benchmarks" / "results" / COMMITTED)
    a_sweep(folder / "sweep", [a_point(0)], {"delta": {"name": "delta"}})
    found = blocks(page.read_text(encoding="utf-8"))
    names: dict[str, object] = {}
    for block, after in zip(found, [*found[1:], None], strict=False):
        if block.language != "python":
            continue
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(block.text, f"{page.name}:{block.line}", "exec"), names)
        expected = after.text if after and "print(" in block.text else ""
        assert differs(expected, printed.getvalue()) is None


def test_a_difference_is_found() -> None:
    assert differs("a ... c", "a b\nc") is None
    assert differs("... c", "a b c") is None
    assert differs("a ...", "a b c") is None
    for expected in ("a c", "a ... d", "b ...", "a b", "c ... a ..."):
        assert differs(expected, "a b c"), expected
