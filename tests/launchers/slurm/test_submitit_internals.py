"""submitit's private API is as it was in the versions that launchers/slurm/submitit_internals.py was tested with."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import pytest
from submitit.core.utils import DelayedSubmission
from submitit.local.local import LocalExecutor

TESTED_SERIES = (1, 5)
PARAMETERS: dict[Callable[..., Any], list[str]] = {
    DelayedSubmission.set_timeout: ["self", "timeout_min", "max_num_timeout"],
    DelayedSubmission.dump: ["self", "filepath"],
}


def test_installed_version_is_of_the_tested_series():
    """For another series, check every use in submitit_internals.py, run the tests on Slurm, then extend this."""
    assert tuple(map(int, version("submitit").split(".")[:2])) == TESTED_SERIES


@pytest.mark.parametrize("function", PARAMETERS, ids=lambda function: function.__qualname__)
def test_signature_is_the_tested_one(function):
    assert list(inspect.signature(function).parameters) == PARAMETERS[function]


def test_command_of_a_job_can_be_overridden():
    assert isinstance(LocalExecutor._submitit_command_str, property)
