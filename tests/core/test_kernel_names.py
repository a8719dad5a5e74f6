"""Kernels are classified by their names."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import inpaint_bench.kernels
from inpaint_bench.core.kernel_names import KernelClass, classify

_GOLDEN = (Path(__file__).parent / "kernel_names.tsv").read_text().splitlines()[1:]
NAMES = [tuple(line.split("\t")) for line in _GOLDEN]


@pytest.mark.parametrize(("source", "kind", "detail", "name"), NAMES, ids=[f"{n[0]}-{n[3][:60]}" for n in NAMES])
def test_a_known_kernel_has_its_class(source: str, kind: str, detail: str, name: str) -> None:
    assert classify(name) == (kind, detail)


def test_the_known_kernels_cover_every_class() -> None:
    assert {kind for _, kind, _, _ in NAMES} == set(KernelClass)
    assert sum(source == "H200" for source, *_ in NAMES) > 150


def test_a_name_that_no_rule_knows_is_other() -> None:
    assert classify("some_kernel_of_tomorrow") == (KernelClass.OTHER, "")


def test_every_kernel_that_this_project_launches_has_a_class() -> None:
    folder = Path(inpaint_bench.kernels.__file__).parent
    launched = {name for file in folder.glob("*.py") for name in re.findall(r"(_\w+)\[[^\]]*\]\(", file.read_text())}
    defined = {name for file in folder.glob("*.py") for name in re.findall(r"def (_\w+)\(", file.read_text())}
    assert "_geglu_forward" in launched & defined
    assert [name for name in launched & defined if classify(name).kind is KernelClass.OTHER] == []


def test_names_are_classified_without_loading_torch() -> None:
    code = "import sys, inpaint_bench.core.kernel_names; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"
