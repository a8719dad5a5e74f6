"""profile=ncu on a machine without counters, from launch to report. Nsight Compute is a script that stands in for it.

The script runs the application, so that the process that would be counted is the real one, and then prints what Nsight
Compute prints where the counters are forbidden. Counters themselves need a GPU.
"""

import json
import os
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from analysis.dataset import open_dataset
from analysis.report import report, workloads
from analysis.report.tables import TableBuilder
from inpaint_bench import launch
from inpaint_bench.cli import app
from inpaint_bench.core.schema import KERNEL_COUNTERS, KERNEL_RULES
from inpaint_bench.profiling.ncu import parse

from .test_profile import DENOISERS

pytestmark = pytest.mark.subprocess  # a run asks git for the commit

FORBIDDEN = """#!/bin/sh
while [ "$1" != --log-file ]; do shift; done
log=$2; shift 2
"$@" || exit 7
cat > "$log" <<END
==PROF== Connected to process 87374 (/usr/bin/python3.12)
==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters on the target \
device 0. For instructions on enabling permissions see https://developer.nvidia.com/ERR_NVGPUCTRPERM
==PROF== Disconnected from process 87374
END
exit 1
"""
CUT = """#!{python} -P
import pathlib, sys
pathlib.Path(sys.argv[-1]).with_name("cut").touch()
log = pathlib.Path(sys.argv[sys.argv.index("--log-file") + 1])
log.write_bytes(pathlib.Path("{printed}").read_bytes() + b"==ERROR== Failed to profile \\"kernel\\" in process 7034")
sys.exit(1)
"""
# Prints for every function that is to be counted the same counters, under the names that the profile gave, and one rule
# of each launch from the report that it wrote.
COUNTED = """#!{python} -P
import pathlib, re, sys, yaml
import pyarrow.parquet as pq
from inpaint_bench.core.kernels import METRICS
from inpaint_bench.profiling.ncu import function_name
if "--import" in sys.argv:
    assert sys.argv[sys.argv.index("--page") + 1] == "details"
    print('"ID","Section Name","Rule Name","Rule Type","Rule Description","Estimated Speedup Type","Estimated Speedup"')
    for number in range(1, int(pathlib.Path(sys.argv[sys.argv.index("--import") + 1]).read_text())):
        print(f'"{{number}}","LaunchStats","LaunchConfiguration","OPT","Few blocks.","global","12.5"')
    sys.exit()
file = pathlib.Path(sys.argv[-1])
task = yaml.safe_load(file.read_text())
log = pathlib.Path(sys.argv[sys.argv.index("--log-file") + 1])
wanted = re.compile(sys.argv[sys.argv.index("--kernel-name") + 1].removeprefix("regex:"))
values = dict.fromkeys(METRICS, "1") | dict(dram_read_bytes="1048576", l2_hit_pct="50", ipc="2", warps_issued="0.5")
lines = [["ID", "Kernel Name", "Grid Size", "Block Size", *METRICS.values()]]
for row in pq.read_table(log.parent / "kernel_times").to_pylist():
    if row["call"] == task["call"] and wanted.match(function_name(row["kernel"])):
        lines.append([str(len(lines)), row["kernel"], "(1, 1, 1)", "(1, 1, 1)", *values.values()])
log.write_text("".join(",".join(f'"{{cell}}"' for cell in line) + chr(10) for line in lines))
pathlib.Path(sys.argv[sys.argv.index("--export") + 1]).write_text(str(len(lines)))
file.with_name("done").touch()
"""
OPTIONS = ["gpu=h200", "profile=demo", "profiler=ncu"]


def put_on_path(program: str, text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a script of this text that stands in for a program."""
    script = folder / "bin" / program
    script.parent.mkdir()
    script.write_text(text)
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(script.parent), prepend=os.pathsep)


@pytest.mark.faults
@pytest.mark.parametrize("overrides", [["batch=2"], DENOISERS], ids=["training", "denoisers"])
def test_where_counters_are_forbidden_a_run_is_unavailable_and_enters_no_figure(tmp_path, monkeypatch, overrides):
    put_on_path("ncu", FORBIDDEN, tmp_path, monkeypatch)
    sweep = tmp_path / "sweep"
    assert launch.main(["-m", *OPTIONS, *overrides, f"hydra.sweep.dir={sweep}"]) == 0  # a result, no failure
    run_dir = sweep / "0" / "attempt-1"
    manifest = json.loads((run_dir / "manifest.json").read_text())
    assert (manifest["status"], manifest["reason"]) == ("failed", "unavailable")
    assert "may not read the GPU's performance counters (ERR_NVGPUCTRPERM)" in manifest["message"]
    assert manifest["profile"]["profiler"] == "ncu"
    assert manifest["profile"]["calls"]
    assert not (run_dir / "windows.json").exists()
    # The process under it did its work: it would have ended with another code.
    assert "ERR_NVGPUCTRPERM" in (run_dir / "ncu.csv").read_text()
    assert app.main(["merge", str(sweep), "-o", str(tmp_path / "dataset")]) == 0
    dataset = open_dataset(tmp_path / "dataset")
    assert dataset.runs["valid"].to_list() == [False]
    assert dataset.runs["images_per_s"].to_list() == [None]
    page = report.write_report(tmp_path / "dataset", tmp_path / "report").read_text()
    assert "no time of such a run is shown" in page
    assert f"Run {manifest['run_id']} has no counters: this job may not read" in page


def test_counters_are_kept_where_the_limit_ends_the_process_within_a_kernel(tmp_path, monkeypatch):
    printed = Path(__file__).parents[1] / "profiling" / "ncu_column_per_metric.csv"
    put_on_path("ncu", CUT.format(python=sys.executable, printed=printed), tmp_path, monkeypatch)
    assert launch.main([*OPTIONS, "batch=2", f"hydra.run.dir={tmp_path / 'run'}"]) == 0
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["status"] == "completed"
    assert any("launches were counted within 300 s (profiler_limit_s)" in s for s in manifest["profile"]["problems"])
    assert pq.read_table(tmp_path / "run" / KERNEL_COUNTERS).num_rows == len(parse(printed.read_text()))


def test_each_case_of_the_denoisers_is_counted_apart(tmp_path, monkeypatch):
    put_on_path("ncu", COUNTED.format(python=sys.executable), tmp_path, monkeypatch)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    options = [*OPTIONS[:2], *DENOISERS[:-1], "workload.patch_batches=[1,9]", "workload.min_measure_s=0.5"]
    options[options.index("workload.models=[unet,dncnn]")] = "workload.models=[dncnn]"
    for profiler in ("none", "ncu"):
        run_dir = tmp_path / "runs" / profiler
        assert launch.main([*options, f"profiler={profiler}", f"hydra.run.dir={run_dir}"]) == 0
    calls = pq.read_table(run_dir / KERNEL_COUNTERS)["call"].to_pylist()
    # Of nine patches at once the image has four.
    expected = ["dncnn patches of 32 px by 1", "dncnn patches of 32 px by 4"]
    assert list(dict.fromkeys(calls)) == expected
    assert len(list(run_dir.glob("ncu*.csv"))) == len(list(run_dir.glob("rules*.csv"))) == len(expected)
    rules = pq.read_table(run_dir / KERNEL_RULES)
    assert rules["call"].to_pylist() == calls
    assert set(rules["speedup_pct"].to_pylist()) == {12.5}
    assert app.main(["merge", str(tmp_path / "runs"), "-o", str(tmp_path / "dataset")]) == 0
    dataset = open_dataset(tmp_path / "dataset")
    assert sorted(dataset.runs["valid"]) == [False, True], dataset.runs["invalid_reason"].to_list()
    (section,) = workloads.sections(dataset, TableBuilder(runs=dataset.runs))
    traffic = section.tables[-1]
    rows = [dict(zip(traffic.columns, row, strict=True)) for row in traffic.rows]
    assert {row["L2 hits [%]"] for row in rows} == {"50.0"}
    # Each counted kernel reads one MiB, once for a batch.
    read = {row["Batch"]: float(row["DRAM read [MiB per patch]"]) for row in rows}
    assert read == pytest.approx({"1": calls.count(expected[0]), "4": calls.count(expected[1]) / 4}, rel=0.01)
    assert all((row["Patches/s"] == "\u2013") == (row["Batch"] == "4") for row in rows)  # timed as batches of nine
