"""Contradictions planted in a run that a real H200 gave: each makes it invalid, with a sentence that says which."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import polars as pl
import pytest

from analysis.ingest.parts import TableFiles
from analysis.ingest.run_dir import Run
from analysis.metrics import audit, flags, run_row
from analysis.metrics.facts import Facts
from inpaint_bench.core.records import Manifest, Window, to_record
from inpaint_bench.telemetry.report import TelemetryReport
from tests.analysis import real_run
from tests.analysis.build import load_run

S = 10**9
RUN_ID = "r-20261121T092412-audited"
RANK = {"rank": 0, "local_rank": 0, "node": "node-1", "pid": 1, "device": "cuda"}
LORA = {"name": "lora_16", "field": "lora_rank", "requested": 16, "active": True}


@dataclass
class Planted:
    """A run directory as it was read: its records as dictionaries and lists, to plant contradictions in."""

    manifest: Any
    windows: Any
    report: Any  # telemetry.json
    tables: dict[str, pl.DataFrame]
    run: Run


Change = Callable[[Planted], None]


def load(folder: Path) -> Planted:
    run, tables = load_run(folder)
    records = (msgspec.to_builtins(record) for record in (run.manifest, run.windows, run.sidecar))
    return Planted(*records, tables, run)


def judged(sound: Planted, *changes: Change) -> dict[str, Any]:
    """Return the row of a changed copy of the run."""
    planted = replace(copy.deepcopy(replace(sound, tables={}, run=None)), tables=dict(sound.tables), run=sound.run)
    for change in changes:
        change(planted)
    files = replace(planted.run, sidecar=to_record(planted.report, TelemetryReport | None))
    manifest, windows = to_record(planted.manifest, Manifest), to_record(planted.windows, list[Window])
    facts = Facts(manifest=manifest, windows=windows, tables=planted.tables, files=files)
    row = run_row.summarise(facts)
    return row | {"flags": flags.join(flags.run_flags(facts, flags.window_flags(facts), row["steady"]))}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Planted:
    return load(real_run.write_run(tmp_path_factory.mktemp("audit") / "0" / "attempt-1", RUN_ID))


def record(name: str, **values: Any) -> Change:
    """Return a change of a record: keys are paths with `__` between their names."""

    def change(planted: Planted) -> None:
        for path, value in values.items():
            *parents, last = [int(key) if key.isdecimal() else key for key in path.split("__")]
            place = getattr(planted, name)
            for key in parents:
                place = place[key]
            place[last] = value(place[last]) if callable(value) else value

    return change


def rows(table: str, change: Callable[[pl.DataFrame], pl.DataFrame]) -> Change:
    return lambda planted: planted.tables.update({table: change(planted.tables[table])})


def column(table: str, name: str, value: pl.Expr) -> Change:
    return rows(table, lambda frame: frame.with_columns(value.cast(frame.schema[name]).alias(name)))


def later(table: str, *clocks: str, by_s: float) -> Change:
    return rows(table, lambda frame: frame.with_columns(pl.col(f"t_{clock}_ns") + round(by_s * S) for clock in clocks))


def manifest(**values: Any) -> Change:
    return record("manifest", **values)


def lose_counters(planted: Planted) -> None:
    table = "samples_gpm"
    planted.run = replace(planted.run, tables=planted.run.tables | {table: TableFiles(table=table)})
    planted.tables[table] = planted.tables[table].clear()


def windows_later(*clocks: str, by_s: float) -> Change:
    places = [(index, edge, clock) for index in (0, 1) for edge in ("start", "end") for clock in clocks]
    return record("windows", **{f"{i}__t_{e}_{c}_ns": lambda t: t + round(by_s * S) for i, e, c in places})


def test_sound_run_is_valid_without_a_stall(sound: Planted) -> None:
    row = judged(sound)
    assert row["valid"], row["invalid_reason"]
    assert (row["stalls"], row["stall_s"]) == (0, 0)
    assert row["images_per_s_steady"] == pytest.approx(row["images_per_s"])


CONTRADICTIONS: dict[str, tuple[list[Change], str]] = {
    "rows of the step table were dropped": (
        [rows("steps", lambda frame: frame.filter(pl.col("step") != 30))],
        "the step table has 49 steps of measure-1, which counts 50",
    ),
    "rows of the step table were doubled": (
        [rows("steps", lambda frame: pl.concat([frame, frame.tail(1)]))],
        "the step table repeats 1 step of measure-1",
    ),
    "steps are numbered with a gap": (
        [column("steps", "step", pl.when(pl.col("step") > 30).then(pl.col("step") + 5).otherwise("step"))],
        "the 50 steps of measure-1 are numbered 10 to 64",
    ),
    "images per step are another batch's": (
        [column("steps", "images", pl.lit(16))],
        "the step table counts 800 images in measure-1, which counts 1600",
    ),
    "the GPU worked longer than the window": (
        [column("steps", "device_ms", pl.col("device_ms") * 1.2)],
        "s on the GPU, in a window of 39.",
    ),
    "the GPU worked half as long as the window": (
        [column("steps", "device_ms", pl.col("device_ms") / 2)],
        "that does not explain a window of 39.",
    ),
    "losses are not finite": (
        [column("steps", "loss", pl.lit(1e38) * 1e3)],
        "measure-1: 50 of 50 losses are not finite",
    ),
    "the batch is another": ([manifest(batch=16)], "batch=32 was requested, and the manifest says 16"),
    "the seed is missing": ([manifest(seed=None)], "was requested, and the manifest has none"),
    "two GPUs and one device": ([manifest(gpus=2)], "the manifest lists 1 GPU in a run on 2"),
    "two nodes and one process": ([manifest(nodes=2)], "the manifest says 2 nodes, and its ranks ran on 1"),
    "three GPUs and two processes": (
        [manifest(gpus=3, ranks=[RANK, {**RANK, "rank": 1}])],
        "the manifest names 2 ranks in a run on 3 GPUs",
    ),
    "a measure window is called a warm-up": (
        [record("windows", **{"0__kind": "measure"})],
        "windows.json calls warmup-0 a measure window",
    ),
    "windows shifted by 2 s on one clock": ([windows_later("unix", by_s=2)], "clocks disagree"),
    "samples shifted by 2 s on one clock": ([later("samples_fast", "mono", by_s=2)], "clocks disagree"),
    "samples shifted by an hour": (
        [later("samples_fast", "mono", "unix", by_s=3600)],
        "no telemetry samples in the measure window",
    ),
    "samples shifted by 2 s on both clocks": (
        [later("samples_fast", "mono", "unix", by_s=2)],
        "samples_fast ends 1.90 s after the sidecar ended, by telemetry.json",
    ),
    "windows shifted by 2 s on both clocks": (
        [windows_later("mono", "unix", by_s=2)],
        "measure-1 closed 2.00 s after the manifest recorded its end",
    ),
    "a window stretched on both clocks": (
        [record("windows", **{f"1__t_end_{clock}_ns": lambda t: t - 4 * S for clock in ("mono", "unix")})],
        "the manifest recorded 40.3",
    ),
    "the counter is a tenth off": (
        [column("samples_fast", "energy_mj", pl.col("energy_mj") // 10 * 9)],
        "energy counter deviates -10.",
    ),
    "power in milliwatts": (
        [column("samples_fast", "power_instant_w", pl.col("power_instant_w") * 1000)],
        "values of power_instant_w, e.g.",
    ),
    "an H200 called an A100": (
        [manifest(gpu="a100", overrides=[])],
        "is named 'NVIDIA H200', not 'NVIDIA A100-(PCIE|PCIe|SXM4)-40GB'",
    ),
    "another size of memory": ([manifest(devices__0__memory_mib=81559.0)], "has 79.6 GiB, not about 141"),
    "another clock limit": ([manifest(devices__0__max_sm_clock_mhz=1410)], "has a clock limit of 1410 MHz, not 1980"),
    "MIG": ([manifest(devices__0__mig_mode=1)], "is in MIG mode"),
    "a sample is missing": (
        [rows("samples_fast", lambda frame: frame.filter(pl.col("tick_seq") != 200))],
        "rows, and the sidecar wrote",
    ),
    "a part is missing": (
        [lose_counters],
        "samples_gpm has 0 parts, and the sidecar closed 1",
    ),
    "late ticks that no row lacks": (
        [record("report", streams__fast__ticks_skipped=40)],
        "which are not",
    ),
    "late ticks of which all rows are there": (
        [
            record(
                "report",
                streams__fast__ticks_skipped=40,
                streams__fast__ticks_due=lambda count: count + 40,
            )
        ],
        "samples_fast ends with tick 577 and lacks 0; the sidecar counts 618 due and 40 skipped",
    ),
    "less memory in use than PyTorch reserved": (
        [
            column("samples_slow", "vram_free_mib", pl.col("vram_free_mib") + pl.col("vram_used_mib") / 2),
            column("samples_slow", "vram_used_mib", pl.col("vram_used_mib") / 2),
        ],
        "were in use by NVML, and PyTorch had reserved 62,070 MiB",
    ),
    "utilisation as a fraction": (
        [column("samples_fast", "gpu_util_pct", pl.col("gpu_util_pct") / 100)],
        "a utilisation of 1 % by NVML, and the steps took 100 % of the window on the GPU",
    ),
    "no temperature": ([column("samples_slow", "temp_gpu_c", pl.lit(0.0))], "values of temp_gpu_c, e.g. 0"),
    "a driver that the sidecar did not find": (
        [manifest(environment__driver="570.1")],
        "telemetry.json has driver 580.159.04, the manifest 570.1",
    ),
    "a batch that was not requested": (
        [manifest(workload_facts__batch_requested=64)],
        "the manifest has batch 32, and its workload facts say that 64 was requested",
    ),
    "epochs that were not requested": (
        [manifest(overrides=["workload.epochs=16"], workload_facts__epochs=1)],
        "workload.epochs=16 was requested, and the manifest says 1",
    ),
    "a precision that no lever gives": (
        [manifest(workload_facts__precision="fp32")],
        "the workload ran with precision fp32, which is not among the levers of recipe baseline",
    ),
    "a cache that the workload did not use": (
        [manifest(levers=[{"name": "cache_image", "field": "cache_image", "requested": True}])],
        "of the caches the levers name cache_image, and the workload encoded 2 images per sample",
    ),
    "no counter, and instant power that its average contradicts": (
        [
            column("samples_fast", "energy_mj", pl.lit(None)),
            column("samples_fast", "power_instant_w", pl.col("power_instant_w") * 0.8),
        ],
        "instant power deviates -20.0 % from the integral of its one-second average",
    ),
    "a co-tenant that no event shows": (
        [record("report", devices__0__processes__verdict="co_tenant")],
        "another process was on GPU",
    ),
    "a power limit that changed without an event": (
        [record("report", devices__0__power_limit_last_w=500.0)],
        "700 W to 500 W, by telemetry.json",
    ),
    "telemetry.json of another run": ([record("report", run_id="r-other")], "telemetry.json has run r-other"),
    "telemetry of another boot": ([record("report", boot_id="b")], "telemetry.json has boot b"),
    "rows of another run": ([column("steps", "run_id", pl.lit("r-other"))], "steps has rows of run r-other"),
    "the manifest of another point": ([manifest(point=7)], "the directory of point 0 holds the manifest of point 7"),
    "the manifest of another attempt": ([manifest(attempt=2)], "attempt-1 holds the manifest of attempt 2"),
    "another resolution": (
        [manifest(overrides=["data.resolution_px=256"])],
        "data.resolution_px=256 was requested, and the manifest says 512",
    ),
    "a lever that the workload did not have": (
        [manifest(levers=[{"name": "tf32", "field": "tf32", "requested": True}], workload_facts__tf32=False)],
        "lever tf32 was requested, and the workload ran with tf32 False",
    ),
    "a power limit that was requested and is not set": (
        [manifest(overrides=["telemetry.power_limit_w=500"])],
        "telemetry.power_limit_w=500 was requested, and the manifest says 700",
    ),
    "adapters that need as many operations as all weights": (
        [
            manifest(workload_facts__parameters_trained=999_937),
            manifest(workload_facts__parameters_by_network__lora=999_937),
        ],
        "a step with adapters has 2.411e+12 operations, and a forward pass 8.037e+11: more than one of them are",
    ),
    "ten times the operations": (
        [manifest(workload_facts__flop_per_image=4.66e13)],
        "flop_per_image is 4.66e+13, and by flop_parts and encodes_online and text_online 4657804152832",
    ),
    "the operations of all weights beside those of adapters": (
        [manifest(workload_facts__flop_parts__unet_step=1_715_243_344_896)],
        "flop_per_image is 4657804152832, and by flop_parts and encodes_online and text_online 3961858782208",
    ),
    "utilisation over 100 %": (
        [column("samples_fast", "gpu_util_pct", pl.lit(150.0))],
        "values of gpu_util_pct, e.g. 150, outside 0 to 100",
    ),
    "a GPU that is idle while its SMs are active": (
        [column("samples_fast", "gpu_util_pct", pl.lit(0.0))],
        "and cannot exceed gpu_util_pct, which is 0",
    ),
    "a temperature of 540": ([column("samples_slow", "temp_gpu_c", pl.lit(540.0))], "e.g. 540, outside 1.00 to 130"),
    "no memory": ([column("samples_slow", "vram_total_mib", pl.lit(0.0))], "values of vram_total_mib, e.g. 0"),
    "clocks beyond the limit": ([column("samples_slow", "sm_clock_mhz", pl.lit(2500))], "values of sm_clock_mhz, e.g."),
    "more allocated than reserved": ([manifest(memory__allocated_peak_mib=70000.0)], "do not ascend"),
    "weights that need more memory than was allocated": (
        [manifest(memory={"allocated_peak_mib": 9_000.0, "reserved_peak_mib": 62_070.0})],
        "memory of the weights, allocated, reserved and of the GPU do not ascend: 9,837 MiB, 9,000 MiB",
    ),
    "memory of PyTorch in GiB": (
        [
            manifest(memory={"allocated_peak_mib": 51.5, "reserved_peak_mib": 60.6}),
            manifest(workload_facts__parameters=None, workload_facts__parameters_trained=None),
        ],
        "62,847 MiB of memory were in use by NVML, and PyTorch had reserved 60.6 MiB alone",
    ),
    "PCIe in KiB": (
        [column("samples_gpm", "pcie_tx_mib_s", pl.col("pcie_tx_mib_s") * 1024)],
        "pcie_tx_mib_s is 25,503 on average, and one GPU in use has at most 2,500",
    ),
    "read times in ns": (
        [column("samples_fast", "read_us", pl.col("read_us") * 1000)],
        "a row of samples_fast took 4.4 s to read, which is more than 10 Hz allow",
    ),
    "a UUID without one of its digits": (
        [manifest(devices__0__uuid="GPU-e120538b-27a3-f35a-fb2f-b7cd070c745")],
        "GPU-e120538b-27a3-f35a-fb2f-b7cd070c745 is not the UUID of a GPU: GPU- or MIG-, then 32 hexadecimal digits",
    ),
    "images that the user did not state": (
        [manifest(workload="command", workload_facts={"uniform_steps": False, "images_stated": 1500})],
        "--images 1500 was stated, and the measure window counts 1600 images",
    ),
    "a loss that no network has": (
        [column("steps", "loss", pl.lit(50.0))],
        "measure-1: loss is 50, outside 0 to 10.0",
    ),
    "a validation that diverged": (
        [manifest(quality={"validation": [{"step": 60, "loss": 7e9}]})],
        "validation 60: loss is 7e+09, outside 0 to 10.0",
    ),
    "a metric beyond its range": (
        [manifest(quality={"metrics": {"psnr_hole_db": {"value": 700.0, "n": 4}}})],
        "quality: psnr_hole_db is 700, outside -10.0 to 100",
    ),
    "errors within the tolerance that are called too large": (
        [manifest(parity__far=True)],
        "the manifest says that an error is too large, and it is not",
    ),
    "errors beyond the tolerance that are called small": (
        [manifest(parity__gradient_rel=0.9)],
        "the manifest says that an error is small enough, and it is not",
    ),
    "a compilation that took longer than all before the window": (
        [manifest(workload_facts__compile_s=600.0)],
        "compile_s is 600.0, and the measure window opened 20.0 s after the start",
    ),
    "images that are neither used nor skipped": (
        [manifest(data__found=6501)],
        "6501 images were found, and 6500 used, 0 skipped and 0 beyond the limit",
    ),
    "more images to train on than are used": (
        [manifest(data__validation=261)],
        "6500 images are used, and 6501 are to train on or held out",
    ),
    "images of another data set": (
        [manifest(workload_facts__num_images=6400)],
        "6500 images are used, and the workload had 6400",
    ),
    "adapters of another rank": (
        [manifest(levers=[LORA | {"effective": {"rank": 8, "parameters": 859_535_364}}], recipe="lora_16")],
        "lever lora_16 is called active, and 8 was read back",
    ),
    "fewer parameters than the networks have": (
        [manifest(workload_facts__parameters_trained=100)],
        "parameters_trained is 100, and by parameters_by_network and levers 859535364",
    ),
    "the parameters of another model": (
        [manifest(workload_facts__parameters=2_567_478_084, workload_facts__parameters_by_network={})],
        "sd15_inpaint has 859,535,364 parameters, and the workload 2,567,478,084",
    ),
    "steps that overlap": (
        [column("steps", "t_end_mono_ns", pl.col("t_end_mono_ns") + (pl.col("step") == 30) * S)],
        "clock jump: the times of steps go back at 1 step",
    ),
    "a run that ended before it started": ([manifest(ended_unix_ns=lambda t: t - 3600 * S)], "before it started"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_contradiction_makes_the_run_invalid(sound: Planted, name: str) -> None:
    changes, sentence = CONTRADICTIONS[name]
    row = judged(sound, *changes)
    assert not row["valid"]
    assert sentence in row["invalid_reason"]


def test_lever_that_was_not_active_is_a_flag_and_a_warning(sound: Planted) -> None:
    lever = {"name": "attn_flash", "field": "attention", "requested": "flash", "active": False, "evidence": "cutlass"}
    row = judged(sound, manifest(levers=[lever], recipe="attn_flash", overrides=[]))
    assert row["valid"], row["invalid_reason"]
    assert "lever_inactive" in row["flags"].split(",")
    assert "lever attn_flash was requested and not found active: cutlass" in row["warnings"]


def test_peak_that_is_not_the_boards_gives_no_mfu(sound: Planted) -> None:
    row = judged(sound, manifest(gpu_facts__bf16_dense_tflops=1979.0))
    assert (row["valid"], row["mfu_pct"]) == (True, None)
    assert "mfu_pct=the manifest has a peak of 1979 TFLOP/s, conf/gpu 989.5" in row["null_reasons"]


def test_steps_of_different_work_give_no_rates_and_may_peak_between_two_samples(sound: Planted) -> None:
    less_memory, _ = CONTRADICTIONS["less memory in use than PyTorch reserved"]
    row = judged(sound, *less_memory, manifest(workload_facts__uniform_steps=False))
    assert row["valid"], row["invalid_reason"]
    assert row["power_w"] == pytest.approx(row["energy_j"] / row["window_s"])
    assert {row[name] for name in ("images_per_s", "joules_per_image", "step_ms_p50", "mfu_pct", "runtime_h")} == {None}
    assert "images_per_s=the steps of this workload differ in their work: see its results" in row["null_reasons"]


def worker_later(by_s: float) -> Change:
    """Return a change of all times of the worker but that of its last record of progress."""

    def change(planted: Planted) -> None:
        windows_later("mono", "unix", by_s=by_s)(planted)
        later("steps", "start_mono", "end_mono", by_s=by_s)(planted)

    return change


OFFERED = pl.col("vram_total_mib") - pl.col("vram_reserved_mib")
# The figures may be right all the same.
WARNINGS: dict[str, tuple[list[Change], str]] = {
    "the times of the worker shifted back": (
        [worker_later(-2)],
        "the manifest recorded the end of measure-1 2.00 s after it",
    ),
    "a counter that nothing confirms": (
        [column("samples_fast", name, pl.lit(None)) for name in ("power_instant_w", "power_avg1s_w")],
        "no sampled power to check the energy counter against",
    ),
    "a counter that stands still longer than it should": (
        [column("samples_fast", "energy_mj", pl.col("energy_mj") // 600_000 * 600_000)],
        "the energy may be wrong by up to",
    ),
    "throttling that no counter counts": (
        [
            column("samples_slow", "throttle_reasons", pl.lit(0x20)),
            *(column("samples_slow", f"throttle_{name}_thermal_ns", pl.lit(None)) for name in ("sw", "hw")),
        ],
        "thermal throttling in 39 of 39 samples, by throttle_reasons; no counter says for how long",
    ),
    "memory that is given back and taken again near the card's limit": (
        [
            column(
                "samples_slow",
                "vram_used_mib",
                OFFERED * pl.when(pl.col("tick_seq") % 2 == 0).then(0.99).otherwise(0.5),
            ),
            column("samples_slow", "vram_free_mib", OFFERED - pl.col("vram_used_mib")),
            manifest(memory={"allocated_peak_mib": 130_000.0, "reserved_peak_mib": 140_000.0}),
        ],
        "at its peak, 99.0 % of the card: PyTorch frees and reserves again; try a smaller batch",
    ),
    "a lever that nothing found": (
        [manifest(recipe="tf32", overrides=["recipe=[baseline,tf32]"])],
        "lever tf32 was requested and not found active",
    ),
    "a peak of memory bandwidth that the board does not have": (
        [manifest(gpu_facts__bandwidth_gb_s=3350.0)],
        "the manifest has a GPU with bandwidth_gb_s 3350.0, conf/gpu 4800.0",
    ),
    "memory errors that no event shows": (
        [record("report", devices__0__health_end__ecc_uncorrected_volatile=5)],
        "5 new uncorrectable memory errors, by telemetry.json",
    ),
}


def test_memory_that_another_process_uses_says_nothing_of_the_allocator(sound: Planted) -> None:
    changes, _ = WARNINGS["memory that is given back and taken again near the card's limit"]
    memory = manifest(memory={"allocated_peak_mib": 60_000.0, "reserved_peak_mib": 70_000.0})
    assert "memory in use varies" not in (judged(sound, *changes[:2], memory)["warnings"] or "")


@pytest.mark.parametrize("name", WARNINGS)
def test_doubt_gives_a_warning(sound: Planted, name: str) -> None:
    changes, sentence = WARNINGS[name]
    row = judged(sound, *changes)
    assert row["valid"], row["invalid_reason"]
    assert sentence in (row["warnings"] or "")


def _drawing(facts: Facts) -> list[str]:
    return [f"{(facts.tables['samples_fast']['power_instant_w'] > 0).sum()} row(s) draw power"]


def test_a_check_is_one_entry_of_the_table(sound: Planted, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CHECKS", "WARNINGS"):
        monkeypatch.setattr(audit, name, (*getattr(audit, name), ("run", (_drawing,))))
    row = judged(sound)
    assert re.fullmatch(r"\d+ row\(s\) draw power", row["invalid_reason"])
    assert re.search(r"\d+ row\(s\) draw power$", row["warnings"])
