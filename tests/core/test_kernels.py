"""Kernels are classified by their names."""

from __future__ import annotations

import re
from pathlib import Path

import inpaint_bench.kernels
from inpaint_bench.core.kernels import KernelClass, classify

_GOLDEN = (Path(__file__).parent / "kernel_names.tsv").read_text().splitlines()[1:]
NAMES = [tuple(line.split("\t")) for line in _GOLDEN]


def test_a_known_kernel_has_its_class() -> None:
    wrong = [(name, classify(name)) for _, kind, detail, name in NAMES if classify(name) != (kind, detail)]
    assert wrong == []


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
