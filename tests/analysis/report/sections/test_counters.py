"""The report's section of counters, of made-up values."""

import json
from pathlib import Path
from typing import Any

from analysis.dataset import Dataset, open_dataset
from analysis.merge import merge
from analysis.report.sections import counters
from analysis.report.tables import Section, TableBuilder
from tests.analysis.build import write_part, write_run

PROFILE = {"profiler": "ncu", "calls": ["step"], "traces": [], "problems": []}
CONV = {"sm_cycles": 4e6, "instructions": 8e6, "ipc": 2.0, "tensor_pct": 0.0, "inst_fma": 6e6, "inst_tensor": 0.0}
CONV |= {"inst_wgmma": 0.0, "sm_pct": 80.0, "memory_pct": 20.0, "stall_wait": 3.0, "stall_selected": 1.0}
TENSOR = {"sm_cycles": 4e5, "instructions": 8e5, "ipc": 1.0, "tensor_pct": 60.0, "inst_fma": 1e5, "inst_tensor": 2e5}
TENSOR |= {"inst_wgmma": 2e5, "sm_pct": 60.0, "memory_pct": 30.0, "dram_read_bytes": 2.0**20, "l2_hit_pct": 50.0}
DGRAD = {"sm_cycles": 1e6, "instructions": 1e6, "ipc": 3.0}


def write(
    root: Path,
    run_id: str,
    recipe: str,
    launches: list[tuple[str, str, dict[str, float]]],
    missing: int = 0,
    **changes: Any,
) -> Path:
    """Write a run: of every launch the kernel, its class and its counters. In its profile all take one millisecond.

    Of every kernel so many launches are missing.
    """
    changes = {"power_w": 200.0 + int(run_id[2:]), "profile": PROFILE, **changes}
    folder = write_run(root, run_id, recipe=recipe, gpu="h200", **changes)
    common = {"run_id": run_id, "call": "step", "detail": ""}
    names = {name for _, _, values in launches for name in values}
    columns = {name: [values.get(name) for _, _, values in launches] for name in names}
    kernels, kinds = ([launch[index] for launch in launches] for index in (0, 1))
    numbers = {"launch": list(range(len(launches))), "grid": "(132, 1, 1)", "block": "(384, 1, 1)"}
    table = {**common, **columns, **numbers, "kernel": kernels, "kind": kinds}
    write_part(folder / "kernel_counters", "kernel_counters", table)
    unique = list(dict.fromkeys(zip(kernels, kinds, strict=True)))
    times = {"kernel": [kernel for kernel, _ in unique], "kind": [kind for _, kind in unique]}
    counts = {"ms": [1.0] * len(unique), "launches": [kernels.count(kernel) + missing for kernel, _ in unique]}
    write_part(folder / "kernel_times", "kernel_times", {**common, **times, **counts, "measured": True})
    return folder


def merged(tmp_path: Path) -> tuple[Dataset, list[Section]]:
    merge([tmp_path / "runs"], tmp_path / "dataset")
    dataset = open_dataset(tmp_path / "dataset")
    return dataset, counters.sections(dataset, TableBuilder(runs=dataset.runs))


def test_launches_of_a_kernel_add_up_and_rates_are_weighted_by_cycles(tmp_path):
    slow = {**CONV, "sm_cycles": 12e6, "ipc": 1.0, "sm_pct": 40.0}
    write(tmp_path / "runs", "r-1", "fp32", [("conv", "convolution forward", each) for each in (CONV, slow)])
    _, (section,) = merged(tmp_path)
    overview, mix, memory, warps = section.tables
    assert overview.title == "Counters: earlier_baseline+fp32, H200, sd15_inpaint, batch 8, step"
    # 16 million cycles, IPC (4 x 2 + 12 x 1) / 16, and the SMs busy for (4 x 80 + 12 x 40) / 16 per cent.
    assert overview.rows == [
        ["conv", "convolution forward", "2", "100", "16.0", "16.0", "1.25", "0", "50.0", "20.0", "50.0"]
    ]
    assert mix.rows[0][2:5] == ["75.0", "\u2013", "0"]
    assert memory.rows[0][2:] == ["\u2013"] * 11
    assert warps.rows[0][-2:] == ["4.00", "wait 75 %"]


def test_rules_are_ranked_by_the_kernel_time_that_they_would_save(tmp_path):
    small = {**CONV, "sm_cycles": 12e6}
    launches = [("conv", "convolution forward", CONV), ("conv", "convolution forward", small), ("norm", "norm", DGRAD)]
    folder = write(tmp_path / "runs", "r-1", "fp32", launches)
    said = [  # launch, rule, scope, speed-up
        (0, "SharedMemoryConflicts", "global", 40.0),
        (0, "SharedMemoryConflicts", "global", 8.0),  # loads and stores
        (1, "SharedMemoryConflicts", "global", 20.0),
        (0, "CPIStall", "global", 80.0),  # and nothing of the other launch, which is three times as long
        (2, "HighPipeUtilization", "local", 95.0),
        (2, "AchievedOccupancy", "global", 30.0),
        (2, "SOLBottleneck", None, None),
    ]
    names = ("launch", "rule", "scope", "speedup_pct")
    table = {name: [row[index] for row in said] for index, name in enumerate(names)}
    table |= {"run_id": "r-1", "call": "step", "section": "A", "type": "OPT", "text": "Why."}
    write_part(folder / "kernel_rules", "kernel_rules", table)
    _, (section,) = merged(tmp_path)
    ranked = section.tables[-1]
    assert ranked.title.startswith("Rules by priority: ")
    # Both kernels take half of the time: (4 x 40 + 12 x 20) / 16 = 25 %.
    assert [[row[0], *row[2:8]] for row in ranked.rows] == [
        ["norm", "AchievedOccupancy", "1 of 1", "50.0", "30.0", "global", "15.0"],
        ["conv", "SharedMemoryConflicts", "2 of 2", "50.0", "25.0", "global", "12.5"],
        ["conv", "CPIStall", "1 of 2", "50.0", "20.0", "global", "10.0"],
        ["norm", "HighPipeUtilization", "1 of 1", "50.0", "95.0", "local", "\u2013"],
    ]


def test_the_report_says_where_launches_of_a_kernel_are_missing(tmp_path):
    write(tmp_path / "runs", "r-1", "fp32", [("conv", "convolution forward", CONV)] * 2, missing=1)
    write(tmp_path / "runs", "r-2", "tf32", [("sm90_xmma", "convolution forward", TENSOR)])
    _, (section,) = merged(tmp_path)
    change, overview, *_ = section.tables
    assert change.rows[0][1:3] == ["at most 100 %", "100 %"]
    assert (overview.rows[0][2], overview.rows[0][-1]) == ("2 of 3", "\u2013")
    assert "Run r-1: at most 100 % of the kernel time" in overview.note


def test_two_recipes_are_compared_by_class(tmp_path):
    before = [("sgemm", "convolution forward", CONV), ("dgrad", "convolution dgrad", DGRAD)]
    write(tmp_path / "runs", "r-1", "fp32", before)
    write(tmp_path / "runs", "r-2", "tf32", [("sm90_xmma", "convolution forward", TENSOR)])
    write(tmp_path / "runs", "r-3", "tf32", [("sm90_xmma", "convolution forward", TENSOR)], batch=4)
    _, (section,) = merged(tmp_path)
    changes = [table for table in section.tables if table.id.startswith("counter-changes")]
    (change,) = changes  # the other batch is other work
    recipes = "From earlier_baseline+fp32 to earlier_baseline+tf32"
    assert change.title == f"{recipes}, H200, sd15_inpaint, batch 8: counters by class of kernels"
    assert change.rows[0] == [
        *("convolution forward", "100 %", "100 %", "4.00", "0.400", "0.100", "8.00", "0.800", "0.100"),
        *("2.00", "1.00", "0.500", "0", "60.0", "\u2013"),
    ]
    assert change.rows[1][:6] == ["convolution dgrad", "100 %", "0 %", "1.00", "\u2013", "\u2013"]


def test_there_is_no_ratio_to_tensor_cores_that_are_not_used(tmp_path):
    """Regression: 105,000 times, over the stray instructions of IEEE fp32."""
    stray = CONV | {"tensor_pct": 0.0005}
    write(tmp_path / "runs", "r-1", "fp32", [("sgemm", "convolution forward", stray)])
    write(tmp_path / "runs", "r-2", "tf32", [("sm90_xmma", "convolution forward", TENSOR)])
    _, (section,) = merged(tmp_path)
    assert section.tables[0].rows[0][-2:] == ["60.0", "\u2013"]


def test_a_run_with_counters_is_in_no_cell_whatever_windows_it_has(tmp_path):
    # `write_run` writes windows, steps and samples, as a run that was timed has them.
    write(tmp_path / "runs", "r-1", "fp32", [("conv", "convolution forward", CONV)])
    dataset, _ = merged(tmp_path)
    assert dataset.runs["valid"].to_list() == [False]
    assert dataset.runs["invalid_reason"].to_list() == ["kernels were counted, nothing was timed (profile=ncu)"]
    assert dataset.runs["images_per_s"].to_list() == dataset.runs["step_ms_p50"].to_list() == [None]
    assert TableBuilder(runs=dataset.runs).cells.is_empty()


def test_what_is_missing_is_said_and_a_damaged_table_costs_only_itself(tmp_path):
    problems = {**PROFILE, "problems": ["elementwise_kernel was not counted: 900 launches in a call"]}
    write(tmp_path / "runs", "r-1", "fp32", [("conv", "convolution forward", CONV)], profile=problems)
    folder = write(tmp_path / "runs", "r-2", "tf32", [("conv", "convolution forward", CONV)])
    (folder / "kernel_counters" / "part-000000.parquet").write_bytes(b"PAR1 and nothing more")
    dataset, (section,) = merged(tmp_path)
    assert "Run r-1: elementwise_kernel was not counted: 900 launches in a call." in section.paragraphs
    assert any(text.startswith("Run r-2 has no counters: its table") for text in section.paragraphs)
    assert [Path(path).parent.name for path in dataset.skipped["path"]] == ["kernel_counters"]


def test_a_run_without_windows_is_complete_where_kernels_were_counted(tmp_path):
    folder = write(tmp_path / "runs", "r-1", "fp32", [("conv", "convolution forward", CONV)])
    (folder / "windows.json").unlink()
    dataset, (section,) = merged(tmp_path)
    assert dataset.skipped.is_empty()
    assert len(section.tables) == 4


def test_without_counters_there_is_no_section(tmp_path):
    write_run(tmp_path / "runs", "r-1", profile=json.loads(json.dumps({**PROFILE, "profiler": "torch"})))
    assert merged(tmp_path)[1] == []
