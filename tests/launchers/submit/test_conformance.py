"""Hydra's own conformance tests for launchers, run against ours."""

import pytest
from hydra import version
from hydra.test_utils.launcher_common_tests import IntegrationTestSuite, LauncherTestSuite

pytestmark = pytest.mark.subprocess


@pytest.mark.parametrize(("launcher_name", "overrides"), [("inpaint_bench", [])])
class TestLauncher(LauncherTestSuite):
    pass


@pytest.mark.parametrize(("task_launcher_cfg", "extra_flags"), [({}, ["-m", "hydra/launcher=inpaint_bench"])])
class TestIntegration(IntegrationTestSuite):
    pass


@pytest.fixture(scope="module")
def _module_wide_version_base():
    version.setbase("1.3")


@pytest.mark.usefixtures("_module_wide_version_base")
def test_version_base_of_a_module_fixture_does_not_reach_a_test():
    """Regression: a module-wide fixture set it, and jobs of the conformance suite did not change directory."""
    assert version.getbase() != version.Version("1.3")
