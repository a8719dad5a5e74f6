"""What a run says where Nsight Compute gives no counters, and what its rules say.

The messages are those that it really prints. The rows of rules have the form of 2022 and of 2025, with other kernels.
"""

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
  File "count.py", line 1, in main
    call.work()
torch.OutOfMemoryError: CUDA out of memory.

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "signal_handling.py", line 73, in handler
RuntimeError: DataLoader worker (pid 6) exited unexpectedly with exit code 143.
==PROF== Disconnected from process 5
==ERROR== The application returned an error code (1).
==WARNING== No kernels were profiled.
"""

OF_2022 = """==PROF== Connected to process 12 (/usr/bin/python3.10)
"ID","Process ID","Process Name","Host Name","Kernel Name","Kernel Time","Context","Stream","Section Name",\
"Metric Name","Metric Unit","Metric Value","Rule Name","Rule Type","Rule Description"
"0","12","python3","127.0.0.1","_norm","2022-Nov-02 10:11:12","1","7","Occupancy","Achieved Occupancy","%","74.48"
"0","12","python3","127.0.0.1","_norm","2022-Nov-02 10:11:12","1","7","SpeedOfLight","","","","SOLBottleneck","WRN",\
"This kernel exhibits low compute throughput and memory bandwidth utilization."
"""
_OF_2025 = '"0","12","python3","127.0.0.1","_norm","1","7","(256, 1, 1)","(132, 1, 1)","0","9.0"'
OF_2025 = f"""\
"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device","CC",\
"Section Name","Metric Name","Metric Unit","Metric Value","Rule Name","Rule Type","Rule Description",\
"Estimated Speedup Type","Estimated Speedup"
{_OF_2025},"GPU Speed Of Light Throughput","Elapsed Cycles","cycle","508,757",
{_OF_2025},"Occupancy","Achieved Occupancy","%","74.48","","","","",""
{_OF_2025},"SpeedOfLight","","","","SOLBottleneck","INF","Compute and Memory are ""well-balanced"": to go on,
look at both.","",""
{_OF_2025},"MemoryWorkloadAnalysis_Tables","","","","SharedMemoryConflicts","OPT","1.5 - way conflict","global","20.33"
{_OF_2025},"ComputeWorkloadAnalysis","","","","HighPipeUtilization","OPT","under-utilized","local","85.2"
{_OF_2025},"Occupancy","","","","TheoreticalOccupancy","OPT","of later versions","whole","3.1"
{_OF_2025},"LaunchStats","","","","LaunchConfiguration","OPT","more than there is","global","120"
{_OF_2025},"LaunchStats","","","","LaunchConfiguration","OPT","longer","global","1","another","column"
{_OF_2025.replace('"0"', '"7"', 1)},"SpeedOfLight","","","","SOLBottleneck","OPT","of no launch","global","1"
==PROF== Disconnected from process 12
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


def test_a_crash_is_not_said_by_the_exceptions_of_its_handling():
    with pytest.raises(UserError, match=r"ncu ended with 1: torch\.OutOfMemoryError: CUDA out of memory") as caught:
        ncu.check(CRASHED, 1, SiteConfig())
    assert not isinstance(caught.value, UnavailableError)


LOADER = """Traceback (most recent call last):
  File "count.py", line 1, in main
    raise exception
FileNotFoundError: Caught FileNotFoundError in DataLoader worker process 0.
Original Traceback (most recent call last):
  File "fetch.py", line 3, in fetch
FileNotFoundError: [Errno 2] No such file or directory: 'a.jpg'
"""
CAUSED = """Traceback (most recent call last):
  File "a.py", line 1, in read
ValueError: invalid literal for int()

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "a.py", line 2, in main
UserError: a.yaml: batch: not a number
Exception ignored in atexit callback: <function end>
Traceback (most recent call last):
RuntimeError: DataLoader worker (pid 6) exited unexpectedly with exit code 143.
"""


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (LOADER, "FileNotFoundError: [Errno 2] No such file or directory: 'a.jpg'"),
        (CAUSED, "UserError: a.yaml: batch: not a number"),
        ("Exception ignored in: <f>\n" + LOADER, "FileNotFoundError: [Errno 2] No such file or directory: 'a.jpg'"),
        ("no GPU\n==ERROR== The application returned an error code (1).\n", "no GPU"),
    ],
)
def test_a_failure_is_said_by_the_exception_that_caused_it(text, line):
    assert ncu.main_error(text) == line


def test_no_kernel_is_an_error_and_counters_are_none():
    with pytest.raises(UserError, match="saw none of the kernels"):
        ncu.check("==WARNING== No kernels were profiled.", 0, SiteConfig())
    ncu.check((Path(__file__).parent / "ncu_column_per_metric.csv").read_text(), 0, SiteConfig())


def test_the_command_leaves_the_clocks_alone_and_counts_only_what_was_asked_for(tmp_path):
    report, output = tmp_path / "report.ncu-rep", tmp_path / "ncu.csv"
    arguments = ncu.command("/usr/bin/ncu", ["nvjet_a", "Kernel2"], 40, report, output, ["python", "task"])
    text = " ".join(arguments)
    assert "--clock-control none" in text
    assert "--profile-from-start off --graph-profiling node" in text
    assert "--kernel-name regex:^(nvjet_a|Kernel2)$ --launch-count 40" in text
    assert f"--section Occupancy --export {report} --page raw --csv --print-units base" in text
    assert "SourceCounters" not in text
    assert arguments[-4:-2] == ["--log-file", str(output)]
    assert arguments[-2:] == ["python", "task"]


def test_rules_of_a_version_without_estimates():
    (rule,), unread = ncu.parse_rules(OF_2022, [0])
    assert (rule.launch, rule.section, rule.rule, rule.type) == (0, "SpeedOfLight", "SOLBottleneck", "WRN")
    assert rule.text.startswith("This kernel exhibits low")
    assert (rule.scope, rule.speedup_pct, unread) == (None, None, [])


def test_rules_with_estimates_and_what_cannot_be_read():
    rules, unread = ncu.parse_rules(OF_2025, [0])
    assert [(rule.rule, rule.scope, rule.speedup_pct) for rule in rules] == [
        ("SOLBottleneck", None, None),
        ("SharedMemoryConflicts", "global", 20.33),
        ("HighPipeUtilization", "local", 85.2),
        ("TheoreticalOccupancy", None, None),
        ("LaunchConfiguration", None, None),
    ]
    assert rules[0].text == 'Compute and Memory are "well-balanced": to go on,\nlook at both.'
    assert unread == [
        "rules of Nsight Compute: an estimate that is not known, 'whole' '3.1', 1 time",
        "rules of Nsight Compute: an estimate that is not known, 'global' '120', 1 time",
        "rules of Nsight Compute: a row of another form or launch, 2 times",
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no rules: Nsight Compute printed no page of details"),
        ('"ID","Metric Name"\n"0","x"\n', "no column Rule Description, Rule Name, Rule Type, Section Name"),
    ],
)
def test_no_rules_are_said_to_be_none(text, says):
    rules, (problem,) = ncu.parse_rules(text, [0])
    assert rules == []
    assert says in problem
