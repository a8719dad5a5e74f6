import copy
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hydra.core.singleton import Singleton
from omegaconf.basecontainer import BaseContainer

from launchers.points.compose import Composer, composer
from launchers.points.point import Point

ACCOUNT = "sites.delta.account.value=bbxx-delta-gpu"


class KeptComposer:
    """A composer with the state of Hydra and OmegaConf that it needs, which is put in place while it is used."""

    def __init__(self, compose: Composer) -> None:
        self._compose = compose
        self._state = Singleton._instances, BaseContainer._resolvers

    @contextmanager
    def used(self) -> Iterator[Composer]:
        """Compose as other tests did before, from what they composed: only for tests that patch nothing."""
        before = Singleton._instances, BaseContainer._resolvers
        try:
            Singleton._instances, BaseContainer._resolvers = self._state
            yield self._compose
        finally:
            Singleton._instances, BaseContainer._resolvers = before


@pytest.fixture(scope="session")
def kept_composer() -> Iterator[KeptComposer]:
    """Keep one composer for the tests of this process."""
    outside = Singleton._instances, BaseContainer._resolvers
    Singleton._instances, BaseContainer._resolvers = copy.deepcopy(outside[0]), dict(outside[1])
    with composer() as compose:
        kept = KeptComposer(compose)
        # A fixture of a module that runs next must not find Hydra initialized.
        Singleton._instances, BaseContainer._resolvers = outside
        yield kept
        Singleton._instances, BaseContainer._resolvers = kept._state  # which leaving the composer changes


@pytest.fixture
def points(request: pytest.FixtureRequest) -> Callable[..., list[Point]]:
    """Placed points, one per argument; an argument is a line of overrides."""
    kept = None if "monkeypatch" in request.fixturenames else request.getfixturevalue("kept_composer")

    def make(*lines: str) -> list[Point]:
        with kept.used() if kept else composer() as compose:
            made = [compose(num, line.split()) for num, line in enumerate(lines)]
        for point in made:
            point.bench, point.site = copy.deepcopy((point.bench, point.site))  # a test may change them
        return made

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
