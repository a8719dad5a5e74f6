"""Code in the documentation: commands exist, launches compose, Python runs, output is what the commands print.

Every launch line is composed by tests/launchers/points/test_configs.py.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import pytest
import typer.main
import yaml
from typer.core import TyperGroup

from inpaint_bench.cli import app
from inpaint_bench.core.config.user_file import read_user_file
from inpaint_bench.core.config.yaml_file import read_config_file
from inpaint_bench.core.paths import ROOT, templates_dir

from .pages import PAGES, blocks, simple_commands

pytestmark = pytest.mark.slow

ALL = [(page, block) for page in PAGES for block in blocks(page.read_text(encoding="utf-8"))]
# What no test runs, by the first words of a command, and why.
NOT_RUN = {
    **dict.fromkeys(("git clone", "pip", "uv", "hf", "wandb"), "needs a network"),
    **dict.fromkeys(("make install", "module", "source", "python3.12"), "installs; CI does so on a bare machine"),
    **dict.fromkeys(("make testbed-up", "make testbed-down", "make test", "make quick"), "of this checkout"),
    **dict.fromkeys(("make docs", "make demo"), "minutes; CI runs them"),
    **dict.fromkeys(("cd", "export", "cp", "mkdir", "sed", "while", "do", "sleep", "done", "["), "the shell's own"),
    **dict.fromkeys(("rsync", "srun", "apptainer"), "needs a cluster"),
    "tensorboard": "a server that does not end",
    "benchmarks/yardstick.sh": "needs a GPU",
    "git diff": "of the checkout of the reader",
}
LANGUAGES = {"console", "bash", "python", "yaml", "csv", "jinja", "text", ""}


def unknown(words: list[str]) -> str | None:
    """Return what is wrong with a command, None if it exists."""
    if words[:2] in (["inpaint-bench", "launch"], ["python", "-m"]) and words[2:3] != ["inpaint_bench"]:
        module = words[2] if words[0] == "python" else "inpaint_bench.launch"
        return None if importlib.util.find_spec(module) else f"no module {module}"
    if words[0] == "inpaint-bench":
        return _parse(words[1:])
    if words[0] == "make" and not re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE):
        return "no such target"
    known = words[0] in NOT_RUN or " ".join(words[:2]) in NOT_RUN
    return None if known else "neither run by a test nor listed in NOT_RUN"


@cache
def _command() -> Any:
    return typer.main.get_command(app.app)


def _parse(words: list[str]) -> str | None:
    """Return what is wrong with the arguments of a verb; a file that does not exist is not."""
    command = _command()
    while words and isinstance(command, TyperGroup) and words[0] in command.commands:
        command, words = command.commands[words[0]], words[1:]
    if words and isinstance(command, TyperGroup) and not words[0].startswith("-"):
        return f"no verb {words[0]}"
    try:
        command.make_context("inpaint-bench", words)
    except typer.Exit:
        return None
    except typer.TyperException as error:
        return None if "does not exist" in str(error) else str(error)
    return None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_exists(page: Path) -> None:
    lines = [command for block in blocks(page.read_text(encoding="utf-8")) for command, _ in block.commands()]
    problems = {shlex.join(words): unknown(words) for line in lines for words in simple_commands(line)}
    assert {line: problem for line, problem in problems.items() if problem} == {}


def test_a_command_that_does_not_exist_is_found() -> None:
    for line in ("inpaint-bench stauts SWEEP", "inpaint-bench status SWEEP --wacth", "make demoo", "curl x"):
        (words,) = simple_commands(line)
        assert unknown(words), line


def test_every_block_is_of_a_language_that_a_test_reads() -> None:
    assert {block.language for _, block in ALL} <= LANGUAGES


def of_language(language: str) -> list[tuple[Path, str]]:
    """Return page and text of the blocks in a language."""
    return [(page, block.text) for page, block in ALL if block.language == language]


def test_every_python_block_is_python() -> None:
    for page, text in of_language("python"):
        compile(text, page.name, "exec")


def test_every_yaml_block_is_a_configuration_file_or_a_part_of_one(tmp_path: Path) -> None:
    found = [(page.name, yaml.safe_load(text)) for page, text in of_language("yaml")]
    (site,) = (content for _, content in found if "gpus" in content)
    for name, content in found:
        if "notify.mail" in content:
            path = tmp_path / "config.yaml"
            path.write_text(yaml.safe_dump(content))
            assert read_user_file(path) == content
            continue
        group = "workload" if "module" in content else "site"
        if group == "site":
            content = {**site, **content, "connect": {**site["connect"], **content.get("connect", {})}}
        path = tmp_path / f"{content['name']}.yaml"
        path.write_text(yaml.safe_dump(content))
        assert read_config_file(path, group), name


def test_every_template_fills_blocks_that_the_base_has(tmp_path: Path) -> None:
    for _, text in of_language("jinja"):
        (tmp_path / "mine.sh.j2").write_text(text)
        loader = jinja2.FileSystemLoader([tmp_path, templates_dir()])
        templates = jinja2.Environment(loader=loader)
        assert set(templates.get_template("mine.sh.j2").blocks) <= set(templates.get_template("base.sh.j2").blocks)
