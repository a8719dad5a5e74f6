import os
from collections.abc import Callable
from pathlib import Path

import pytest

from launchers.points.compose import composer
from launchers.points.point import Point

ACCOUNT = "sites.delta.account.value=bbxx-delta-gpu"


@pytest.fixture
def points() -> Callable[..., list[Point]]:
    """Placed points, one per argument; an argument is a line of overrides."""

    def make(*lines: str) -> list[Point]:
        with composer() as compose:
            return [compose(num, line.split()) for num, line in enumerate(lines)]

    return make


@pytest.fixture
def fake_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """Put a shell script before Slurm's command of that name; returns the file that logs its arguments."""

    def install(name: str, body: str) -> Path:
        calls = tmp_path / f"{name}.calls"
        script = tmp_path / "bin" / name
        script.parent.mkdir(exist_ok=True)
        script.write_text(f'#!/bin/sh\necho "$@" >> {calls}\n{body}\n')
        script.chmod(0o755)
        return calls

    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    return install
