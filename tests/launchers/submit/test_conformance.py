"""Hydra's own conformance tests for launchers, run against ours."""

import pytest
from hydra import version
from hydra.test_utils.launcher_common_tests import IntegrationTestSuite, LauncherTestSuite


@pytest.mark.parametrize(("launcher_name", "overrides"), [("inpaint_bench", [])])
class TestLauncher(LauncherTestSuite):
    pass


@pytest.mark.parametrize(("task_launcher_cfg", "extra_flags"), [({}, ["-m", "hydra/launcher=inpaint_bench"])])
class TestIntegration(IntegrationTestSuite):
    pass


@pytest.fixture(scope="module")
def _composed_for_a_whole_module():
    version.setbase("1.3")


@pytest.mark.usefixtures("_composed_for_a_whole_module")
def test_what_a_wide_fixture_told_hydra_does_not_reach_a_test():
    """Regression: such a fixture set the version base, and jobs of the conformance suite did not change folder."""
    assert version.getbase() != version.Version("1.3")
