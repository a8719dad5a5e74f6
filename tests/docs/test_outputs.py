"""What a documented command writes into the checkout is ignored by git, so that it is no change of the code."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from inpaint_bench.core.paths import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "inpaint_bench/cli/app.py"]
OPTIONS = r"(?:-o |--out |--local-dir |(?:hydra\.sweep\.dir|prepare\.out|data\.root)=)"
PATH = re.compile(OPTIONS + r"([a-z][\w-]*(?:[./][\w-]+)*)")  # names in capitals stand for others


def documented() -> list[str]:
    """Return the relative paths that the commands in README, docs and help write, and the data that they read."""
    return sorted({path for page in PAGES for path in PATH.findall(page.read_text(encoding="utf-8"))})


def test_the_commands_of_the_readme_are_read() -> None:
    assert {"sweep", "dataset", "report", "prepared", "restored", "photos", "sd15-inpainting"} <= set(documented())


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no checkout")
@pytest.mark.parametrize("path", documented())
def test_git_ignores_it_at_the_top_of_the_checkout_only(path: str) -> None:
    def is_ignored(name: str) -> bool:
        name += "" if Path(path).suffix else "/"  # a folder, which need not exist
        done = subprocess.run(["git", "check-ignore", "--quiet", "--no-index", name], cwd=ROOT, check=False)
        assert done.returncode in (0, 1)
        return done.returncode == 0

    assert is_ignored(path)
    assert not is_ignored(f"inpaint_bench/{path}")
