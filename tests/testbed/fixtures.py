"""Provide test beds to tests: `testbed` (with accounting) and `testbed_light`, one each per session.

Each has its own folder and ports, beside any bed that a user has started. Where no bed can be started, tests are
skipped and the end of the run says so; with INPAINT_BENCH_REQUIRE_TESTBED=1 they fail instead.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from . import packages, ssh
from .bed import Bed
from .errors import PackagesError, PortsTakenError
from .plan import SITES, Plan, free_port
from .ssh import LoginNodes

REQUIRE = "INPAINT_BENCH_REQUIRE_TESTBED"

_refusals: list[str] = []


@contextmanager
def temporary_bed(*, light: bool = False, sites: tuple[str, ...] = SITES, gpus: int = 0) -> Iterator[Bed]:
    """Run a test bed within the block and remove it afterwards. Installs packages if possible."""
    packages.install(light=light)
    # Not pytest's tmp_path: sockets need a short path.
    folder = Path(tempfile.mkdtemp(prefix="testbed-"))
    try:
        bed = _up_on_free_ports(folder / "bed", light=light, sites=sites, gpus=gpus)
        try:
            yield bed
        finally:
            bed.down()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _up_on_free_ports(state: Path, *, light: bool, sites: tuple[str, ...], gpus: int, tries: int = 5) -> Bed:
    for left in reversed(range(tries)):
        bed = Bed(Plan(state=state, sites=sites, light=light, gpus=gpus, port=free_port()))
        try:
            bed.up()
        except PortsTakenError:  # another process took a port meanwhile
            if not left:
                raise
        else:
            return bed
    raise AssertionError("unreachable")


def _bed_or_skip(*, light: bool) -> Iterator[Bed]:
    try:
        packages.install(light=light)
    except PackagesError as error:
        if os.environ.get(REQUIRE) == "1":
            pytest.fail(f"{REQUIRE}=1, yet: {error}", pytrace=False)
        if str(error) not in _refusals:
            _refusals.append(str(error))
        pytest.skip(str(error))
    with temporary_bed(light=light) as bed:
        yield bed


@pytest.fixture(scope="session")
def testbed() -> Iterator[Bed]:
    """Return a test bed with both sites, MariaDB and slurmdbd, shared by the session."""
    yield from _bed_or_skip(light=False)


@pytest.fixture(scope="session")
def testbed_light() -> Iterator[Bed]:
    """Return a test bed with both sites and no database; sacct is a stand-in."""
    yield from _bed_or_skip(light=True)


@pytest.fixture(scope="module")
def login_nodes(testbed: Bed) -> Iterator[LoginNodes]:
    """Run an sshd for delta, with the environment that makes commands use the bed."""
    try:
        ssh.install()
    except PackagesError as error:
        if os.environ.get(REQUIRE) == "1":
            pytest.fail(f"{REQUIRE}=1, yet: {error}", pytrace=False)
        pytest.skip(str(error))
    nodes = LoginNodes(testbed)
    nodes.up("delta")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("INPAINT_BENCH_TESTBED", str(testbed.state))
        yield nodes
    nodes.down()


@pytest.fixture(scope="module")
def delta_waits(testbed: Bed) -> Iterator[None]:
    """Keep jobs of delta's H200 partition pending, and cancel them afterwards."""
    partition = ("scontrol", "update", "partitionname=gpuH200x8")
    testbed.run("delta", *partition, "state=down")
    yield
    testbed.run("delta", "scancel", "--partition", "gpuH200x8")
    testbed.run("delta", *partition, "state=up")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for refusal in _refusals:
        terminalreporter.write_sep("!", "tests on real Slurm did NOT run", red=True, bold=True)
        terminalreporter.write_line(f"{refusal}. Set {REQUIRE}=1 to make this a failure.")
