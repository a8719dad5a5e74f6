"""profile=nsys on a machine without a GPU, from launch to report. Nsight Systems is a script that stands in for it.

The script runs the application, so that the steps are real ones, and exports a timeline with the tables of nsys: two
steps of 10 ms, each a wait, a copy to the device, and two kernels that overlap.
"""

from __future__ import annotations

import json
import sqlite3
import sys
from pathlib import Path

import pytest

from analysis.dataset import open_dataset
from analysis.report import report
from inpaint_bench import launch
from inpaint_bench.cli import app
from inpaint_bench.core.errors import UserError
from inpaint_bench.profiling import nsys

from .test_counters import put_on_path

pytestmark = pytest.mark.subprocess  # a run asks git for the commit

SCHEMA = """
CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
    streamId INTEGER NOT NULL, correlationId INTEGER, demangledName INTEGER NOT NULL, shortName INTEGER NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
    streamId INTEGER NOT NULL, correlationId INTEGER, bytes INTEGER NOT NULL, copyKind INTEGER NOT NULL);
CREATE TABLE NVTX_EVENTS (start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, rangeId INTEGER,
    category INTEGER, color INTEGER, text TEXT, globalTid INTEGER, endGlobalTid INTEGER, textId INTEGER);
INSERT INTO StringIds VALUES (1, 'wait for data'), (2, 'kernel');
"""
STEP = """
INSERT INTO NVTX_EVENTS VALUES ({0}, {0} + 9000000, 59, NULL, NULL, NULL, 'step', 7, NULL, NULL);
INSERT INTO NVTX_EVENTS VALUES ({0}, {0} + 3000000, 59, NULL, NULL, NULL, NULL, 7, NULL, 1);
INSERT INTO NVTX_EVENTS VALUES ({0}, NULL, 34, NULL, NULL, NULL, 'a mark', 7, NULL, NULL);
INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES ({0} + 3000000, {0} + 4000000, 0, 7, 1, 1048576, 1);
INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES ({0} + 4500000, {0} + 7000000, 0, 7, 2, 2, 2);
INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES ({0} + 6000000, {0} + 10000000, 0, 14, 3, 2, 2);
"""
EXPORT = SCHEMA + STEP.format(0) + STEP.format(10_000_000)
NSYS = """#!{python} -P
import pathlib, sqlite3, subprocess, sys
output = next(word.partition("=")[2] for word in sys.argv if word.startswith("--output="))
if sys.argv[1] == "export":
    assert pathlib.Path(sys.argv[-1]).read_text() == "timeline"
    sqlite3.connect(output).executescript({export!r})
else:
    assert {{"--capture-range=cudaProfilerApi", "--capture-range-end=stop"}} <= set(sys.argv)
    calls = pathlib.Path(__file__).with_name("calls")
    calls.write_text(calls.read_text() + "x" if calls.exists() else "x")
    if calls.read_text() == "xx":
        sys.exit("Importer error status: An unknown error occurred.")
    first = next(at for at, word in enumerate(sys.argv) if at > 1 and not word.startswith("-"))
    subprocess.run(sys.argv[first:], check=True)
    pathlib.Path(output + ".nsys-rep").write_text("timeline")
"""
OPTIONS = ["gpu=h200", "profile=demo", "profiler=nsys", "workload.min_measure_s=1"]


def test_a_run_has_its_measurement_and_a_timeline_or_a_sentence_why_it_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_on_path("nsys", NSYS.format(python=sys.executable, export=EXPORT), tmp_path, monkeypatch)
    sweep = tmp_path / "sweep"
    assert launch.main(["-m", *OPTIONS, "batch=2,3", f"hydra.sweep.dir={sweep}"]) == 0
    dirs = [sweep / point / "attempt-1" for point in ("0", "1")]
    profiles = [json.loads((folder / "manifest.json").read_text())["profile"] for folder in dirs]
    assert (profiles[0]["problems"], profiles[0]["traces"]) == ([], ["traces/timeline.nsys-rep"])
    assert (dirs[0] / nsys.FILE).exists()
    assert profiles[0]["timeline"] == {
        "steps": 2,
        "length_ms": 17.0,
        "kernels": 4,
        "gaps": 3,
        "idle_ms": 4.0,
        "longest_gap_ms": 3.0,
        "wait_ms": 6.0,
        "idle_in_waits_ms": 3.0,
        "copied_ms": {"host to device": 2.0},
        "copied_mib": {"host to device": 2.0},
    }
    assert profiles[1]["timeline"] is None
    assert profiles[1]["problems"] == [
        "no timeline: nsys profile ended with 1: Importer error status: An unknown error occurred."
    ]
    assert app.main(["merge", str(sweep), "-o", str(tmp_path / "dataset")]) == 0
    runs = open_dataset(tmp_path / "dataset").runs
    assert runs["valid"].to_list() == [True, True], runs["invalid_reason"].to_list()
    page = report.write_report(tmp_path / "dataset", tmp_path / "report").read_text()
    assert "a stall of the loader" in page
    assert "An unknown error occurred." in page
    (row,) = [line for line in (tmp_path / "report" / "report.md").read_text().splitlines() if "cpu, H200" in line]
    assert [cell.strip() for cell in row.split("|")][3:11] == [
        "2",
        "23.5",
        "3.00",
        "8.50",
        "2.00",
        "1.50",
        "2.00",
        "3.00",
    ]


@pytest.mark.parametrize("program", ["nsys", "ncu"])
def test_without_its_program_a_run_ends_before_anything_is_built(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    options = [*OPTIONS[:2], f"profiler={program}", "batch=2"]
    assert launch.main(["-m", *options, f"hydra.sweep.dir={tmp_path / 'sweep'}"]) == 0
    manifest = json.loads((tmp_path / "sweep" / "0" / "attempt-1" / "manifest.json").read_text())
    assert (manifest["status"], manifest["reason"], manifest["workload_facts"]) == ("failed", "unavailable", None)
    assert f"no `{program}` is on PATH" in manifest["message"]


def test_an_export_without_kernels_or_that_is_none_gets_a_sentence(tmp_path: Path) -> None:
    database = tmp_path / "timeline.sqlite"
    sqlite3.connect(database).executescript("CREATE TABLE StringIds (id INTEGER, value TEXT)")
    with pytest.raises(UserError, match="recorded no kernel"):
        nsys.summarise(database)
    database.write_text("not a database" * 100)
    with pytest.raises(UserError, match="cannot be read: file is not a database"):
        nsys.summarise(database)
