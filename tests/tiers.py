"""Sort the tests into three tiers, which tests/README.md describes: `quick`, `test` and `faults`.

A test is marked by what it needs: `slurm` and `browser` by its fixtures, `torch` by what its file imports (directly or
through this project), `subprocess` where the file imports it. By hand: `faults`, `slow`, and `torch` and `subprocess`
where the code under test loads the one or starts the other. `quick` are all that need nothing, and an audit hook fails
a quick test that loads torch or starts a process; `test` are all others but `faults`.
"""

from __future__ import annotations

import ast
import gc
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROJECT = ("inpaint_bench", "launchers", "analysis", "benchmarks", "tests")
FIXTURES = {"testbed": "slurm", "testbed_light": "slurm", "browser": "browser"}
LIBRARIES = {"torch": "torch", "diffusers": "torch", "subprocess": "subprocess", "multiprocessing": "subprocess"}
PROCESS_EVENTS = frozenset(("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.system"))

TIERS = ("quick", "test", "faults")
COLLECTED = pytest.StashKey[list[pytest.Item]]()  # before any were deselected

_running_quick = False


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --quick: collect only files whose import loads neither torch nor subprocess."""
    parser.addoption("--quick", action="store_true", help="run the tests marked `quick`, without importing the others")


def pytest_configure(config: pytest.Config) -> None:
    """Select the tests marked `quick` and watch the process if --quick is given."""
    if config.getoption("--quick"):
        config.option.markexpr = "quick"
        sys.addaudithook(_refuse_in_quick_tests)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignore, with --quick, files of other tiers: importing torch alone takes seconds."""
    is_test = collection_path.suffix == ".py" and collection_path.name.startswith("test_")
    return True if config.getoption("--quick") and is_test and _markers_of_file(collection_path) else None


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marker
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark every test with its needs and tier, and order them: what mostly waits first, quick tests last."""
    for item in items:
        names = _markers_of_file(item.path)
        fixtures = {*getattr(item, "fixturenames", ()), *_parameters(item)}
        names |= {FIXTURES[fixture] for fixture in fixtures if fixture in FIXTURES}
        names |= {mark.name for mark in item.iter_markers()} & {"faults", "slow", "subprocess", "torch"}
        for name in (names | {_tier(names)}) - {mark.name for mark in item.iter_markers()}:
            item.add_marker(name)
        if not any(item.iter_markers("xdist_group")):
            item.add_marker(pytest.mark.xdist_group(_group(item)))
    config.stash[COLLECTED] = list(items)
    heavy = {item.path for item in items if item.get_closest_marker("torch")}
    items.sort(key=lambda item: (item.get_closest_marker("slurm") is None, item.path not in heavy))


def _tier(names: set[str]) -> str:
    return "faults" if "faults" in names else "test" if names else "quick"


def _group(item: pytest.Item) -> str:
    """Return what runs on one worker: tests on a Slurm test bed share the bed, those of a file their fixtures."""
    return "slurm" if item.get_closest_marker("slurm") else item.nodeid.partition("::")[0]


def pytest_collection_finish() -> None:
    """Leave what is loaded by now out of later collections of garbage: they would look through all of it each time."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Tell the audit hook which test runs."""
    global _running_quick
    _running_quick = item.get_closest_marker("quick") is not None
    try:
        return (yield)
    finally:
        _running_quick = False


def _refuse_in_quick_tests(event: str, arguments: tuple[Any, ...]) -> None:
    if _running_quick and (event in PROCESS_EVENTS or (event == "import" and arguments[0] == "torch")):
        raise AssertionError(f"a quick test caused {event} {arguments[0]}: mark it torch or subprocess")


def _parameters(item: pytest.Item) -> list[str]:
    """Return the parameters of a test that are strings: a fixture may name another in its own."""
    callspec = getattr(item, "callspec", None)
    return [value for value in callspec.params.values() if isinstance(value, str)] if callspec else []


def _markers_of_file(path: Path) -> set[str]:
    """Return the markers that the imports of a test file call for."""
    modules = _loaded_modules(path)
    torch = {LIBRARIES[name] for name in modules if LIBRARIES.get(name) == "torch"}
    return torch | {LIBRARIES[name] for name in _imports(path) if name in LIBRARIES}


@cache
def _loaded_modules(path: Path) -> frozenset[str]:
    """Return all modules that are loaded when a file of the project is imported."""
    loaded: set[str] = set()
    files, visited = [path], {path}
    while files:
        for name in _imports(files.pop()):
            loaded.add(name)
            if name.partition(".")[0] in PROJECT and (file := _file_of_module(name)) and file not in visited:
                visited.add(file)
                files.append(file)
    return frozenset(loaded)


@cache
def _imports(path: Path) -> frozenset[str]:
    """Return the modules that the top level of a file imports, each with its packages; not those for type checkers."""
    names: set[str] = set()
    statements = list(ast.parse(path.read_text(encoding="utf-8")).body)
    while statements:
        statement = statements.pop()
        if isinstance(statement, ast.Import):
            names.update(alias.name for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom):
            package = (
                path.relative_to(ROOT).with_suffix("").parts[: -statement.level or None] if statement.level else ()
            )
            module = ".".join((*package, *filter(None, [statement.module])))
            names.update((module, *(f"{module}.{alias.name}" for alias in statement.names)))
        elif isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test):
            continue
        elif isinstance(statement, ast.If | ast.Try | ast.With | ast.ClassDef):
            statements += statement.body
    return frozenset(parent for name in names for parent in _with_packages(name))


def _with_packages(name: str) -> Iterator[str]:
    parts = name.split(".")
    return (".".join(parts[: end + 1]) for end in range(len(parts)))


@cache
def _file_of_module(name: str) -> Path | None:
    path = ROOT.joinpath(*name.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)
