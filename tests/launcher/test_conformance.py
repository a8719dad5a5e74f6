"""Hydra's own conformance tests for launchers, run against ours."""

import pytest
from hydra.test_utils.launcher_common_tests import IntegrationTestSuite, LauncherTestSuite


@pytest.mark.parametrize(("launcher_name", "overrides"), [("inpaint_bench", [])])
class TestLauncher(LauncherTestSuite):
    pass


@pytest.mark.parametrize(("task_launcher_cfg", "extra_flags"), [({}, ["-m", "hydra/launcher=inpaint_bench"])])
class TestIntegration(IntegrationTestSuite):
    pass
