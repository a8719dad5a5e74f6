"""What a run says where Nsight Compute gives no counters. The messages are those that it really prints."""

from pathlib import Path

import pytest

from inpaint_bench.core.config.site import ConnectConfig, SiteConfig
from inpaint_bench.core.errors import UnavailableError, UserError
from inpaint_bench.profiling import ncu

FORBIDDEN = """==PROF== Connected to process 87374 (/usr/bin/python3.12)
==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters on the target \
device 0. For instructions on enabling permissions see https://developer.nvidia.com/ERR_NVGPUCTRPERM
==PROF== Disconnected from process 87374
"""
IN_USE = """==ERROR== Profiling failed because a driver resource was unavailable. Ensure that no other tool \
(like DCGM) is concurrently collecting profiling data. See https://docs.nvidia.com/nsight-compute for details.
==ERROR== Failed to profile "kernel" in process 7508
==PROF== Trying to shutdown target application
==ERROR== An error occurred while trying to profile.
==WARNING== No kernels were profiled.
"""
NO_DRIVER = """==PROF== Connected to process 12
==ERROR== An error was reported by the counter measurement library:
==ERROR== Failed to initialize the profiler: LibraryNotLoaded. Check that a compatible driver library is loaded.
==ERROR== The application returned an error code (9).
"""
CRASHED = """==PROF== Connected to process 5
Traceback (most recent call last):
torch.OutOfMemoryError: CUDA out of memory.
==PROF== Disconnected from process 5
==ERROR== The application returned an error code (1).
==WARNING== No kernels were profiled.
"""


@pytest.mark.parametrize(
    ("text", "site", "says"),
    [
        (FORBIDDEN, SiteConfig(name="delta", counter_features=["perf", "nvperf"]), "--constraint=perf&nvperf"),
        (FORBIDDEN, SiteConfig(name="grace"), "sites.grace.counter_features"),
        (FORBIDDEN, SiteConfig(name="local", connect=ConnectConfig(method="local")), "NVreg_RestrictProfilingToAdmin"),
        (IN_USE, SiteConfig(), "DCGM"),
        (NO_DRIVER, SiteConfig(), "LibraryNotLoaded"),
    ],
)
def test_a_machine_that_gives_no_counters_makes_a_run_unavailable(text, site, says):
    with pytest.raises(UnavailableError, match=says):
        ncu.check(text, 1, site)


def test_a_crash_is_told_by_the_last_line_of_the_application():
    with pytest.raises(UserError, match=r"ncu ended with 1: torch\.OutOfMemoryError: CUDA out of memory") as caught:
        ncu.check(CRASHED, 1, SiteConfig())
    assert not isinstance(caught.value, UnavailableError)


def test_no_kernel_is_an_error_and_counters_are_none():
    with pytest.raises(UserError, match="saw none of the kernels"):
        ncu.check("==WARNING== No kernels were profiled.", 0, SiteConfig())
    ncu.check((Path(__file__).parent / "ncu_column_per_metric.csv").read_text(), 0, SiteConfig())


def test_the_command_leaves_the_clocks_alone_and_counts_only_what_was_asked_for(tmp_path):
    arguments = ncu.command("/usr/bin/ncu", ["nvjet_a", "Kernel2"], 40, tmp_path / "ncu.csv", ["python", "task"])
    text = " ".join(arguments)
    assert "--clock-control none" in text
    assert "--profile-from-start off --graph-profiling node" in text
    assert "--kernel-name regex:^(nvjet_a|Kernel2)$ --launch-count 40" in text
    assert "--csv --page raw --print-units base" in text
    assert arguments[-2:] == ["python", "task"]
