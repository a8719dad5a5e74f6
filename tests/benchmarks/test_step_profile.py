"""One training step by classes of kernels."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from benchmarks import step_profile, step_record, step_work
from inpaint_bench.core.config.bench import BenchConfig
from inpaint_bench.core.config.parse import parse_config
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.hydra_support import register
from inpaint_bench.core.kernels import KernelClass, classify
from inpaint_bench.core.paths import conf_dir
from inpaint_bench.core.records import Communication, write_record
from inpaint_bench.profiling.profile import KernelEvent, KernelTotal, communication, idle_gaps, kernel_totals

TINY = shlex.split("gpu=cpu model=tiny_inpaint telemetry=none data.resolution_px=64 batch=2 data.num_images=4")


def config(*overrides: str) -> BenchConfig:
    register()
    with initialize_config_dir(version_base="1.3", config_dir=str(conf_dir())):
        return parse_config(compose("config", overrides=list(overrides)))


def made_up(**changes: object) -> step_record.StepProfile:
    """Return a profile of 100 ms: half convolutions, a third norms, the rest attention, and 10 ms idle."""
    times = {"sm90_xmma_fprop_implicit_gemm": 45.0, "_group_norm_forward": 30.0, "flash_fwd_kernel": 15.0}
    kernels = [
        KernelTotal(name=name, kind=classify(name).kind, detail=classify(name).detail, ms=ms, launches=1)
        for name, ms in times.items()
    ]
    fields = {
        "recipe": "tuned",
        "overrides": [],
        "phase": "replay",
        "gpu": "h200",
        "device": "NVIDIA H200",
        "torch": "2.11.0",
        "model": "sd15_inpaint",
        "batch": 16,
        "resolution_px": 512,
        "images": 16,
        "step_ms": 100.0,
        "span_ms": 100.0,
        "kernel_ms": 90.0,
        "idle_ms": 10.0,
        "idle_gaps": 5,
        "norm_pointwise_floor_ms": 8.0,
        "classes": step_record.class_totals(kernels, {}, {}),
        "kernels": kernels,
        "gaps": [],
    }
    return step_record.StepProfile(**{**fields, **changes})


class TestProfileOnACpu:
    def test_the_operators_of_a_step_are_written_by_class_and_one_point_failing_stops_no_other(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        code = step_profile.main(["--out", str(tmp_path), "--load-s", "0", *TINY, "recipe=[cpu,cudnn_benchmark],cpu"])
        assert code == 2
        text = capsys.readouterr()
        assert "needs a GPU, and this recipe runs on the CPU" in text.err
        (file,) = tmp_path.glob("*.json")
        profile = step_record.read_profile(file)
        assert (profile.recipe, profile.phase, profile.batch) == ("cpu", "operators", 2)
        kinds = {row.kind for row in profile.classes}
        assert {KernelClass.CONV_FORWARD, KernelClass.GEMM, KernelClass.NORM, KernelClass.OPTIMIZER} <= kinds
        assert sum(row.share for row in profile.classes) == pytest.approx(1)
        (forward,) = (row for row in profile.classes if row.kind == KernelClass.CONV_FORWARD)
        assert forward.flop is not None
        assert forward.tflops is not None
        assert forward.floor_ms is None
        assert "aten::mkldnn_convolution" in text.out


def test_a_sweep_is_all_combinations() -> None:
    overrides = list(step_profile.points(["recipe=baseline,[tuned,tf32]", "batch=4,8", "seed=1"]))
    assert len(overrides) == 4
    assert ["recipe=[tuned,tf32]", "batch=8", "seed=1"] in overrides


class TestTotals:
    def test_rates_are_operations_over_the_time_of_the_class(self) -> None:
        events = [
            KernelEvent(name="sm90_xmma_fprop_implicit_gemm", start_us=0, end_us=2000),
            KernelEvent(name="sm90_xmma_fprop_implicit_gemm", start_us=2000, end_us=4000),
            KernelEvent(name="_add_bias", start_us=4000, end_us=5000),
        ]
        kernels = kernel_totals(events)
        first, second = step_record.class_totals(kernels, {KernelClass.CONV_FORWARD: 2e12}, {})
        assert (first.kind, first.ms, first.launches, first.tflops) == (KernelClass.CONV_FORWARD, 4.0, 2, 500.0)
        assert (second.kind, second.share, second.tflops) == (KernelClass.POINTWISE, 0.2, None)

    def test_time_is_idle_only_where_no_kernel_of_any_stream_runs(self) -> None:
        times = [(0, 10), (5, 30), (8, 12), (34, 40), (36, 38), (41, 50)]
        events = [KernelEvent(name=f"k{i}", start_us=a, end_us=b) for i, (a, b) in enumerate(times)]
        gaps = idle_gaps(events)
        assert [(gap.us, gap.after, gap.before) for gap in gaps] == [(4, "k1", "k3"), (1, "k3", "k5")]

    def test_communication_is_exposed_only_where_no_other_kernel_runs(self) -> None:
        nccl = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
        times = [("gemm", 0, 10), (nccl, 5, 20), (nccl, 18, 22), ("add", 12, 14), ("adam", 24, 30)]
        events = [KernelEvent(name=name, start_us=1e3 * a, end_us=1e3 * b) for name, a, b in times]
        assert communication(events) == Communication(ms=17, exposed_ms=10, call_ms=30)
        assert communication([event for event in events if event.name != nccl]) is None

    def test_a_file_that_is_no_profile_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "x.json").write_text("{}")
        with pytest.raises(UserError, match=r"x\.json.*step_profile"):
            step_record.read_profile(tmp_path / "x.json")


class TestSideBySide:
    def test_a_class_that_a_profile_lacks_takes_no_time_and_the_change_is_from_the_first(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for file, times in (("a", {"nvjet_sm90": 20.0, "nchwToNhwcKernel": 6.5}), ("b", {"nvjet_sm90": 20.0})):
            events = [KernelEvent(name=name, start_us=0, end_us=1e3 * ms) for name, ms in times.items()]
            kernels = kernel_totals(events)
            profile = made_up(kernels=kernels, classes=step_record.class_totals(kernels, {}, {}), step_ms=30.0)
            write_record(tmp_path / f"{file}.json", profile)
        assert step_record.main([str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 0
        lines = [line.split() for line in capsys.readouterr().out.splitlines()]
        assert ["layout", "conversion", "6.50", "0.00", "(-6.50)"] in lines
        assert ["GEMM", "20.00", "20.00", "(+0.00)"] in lines
        assert ["step,", "not", "profiled", "30.00", "30.00"] in lines


class TestWork:
    """Of the SD 1.5 inpainting UNet at 512 px and batch 16."""

    SD15 = ("gpu=h200", "batch=16", "data=prepared", "data.root=/photos")
    FACTS = {"encodes_online": 0, "parameters_trained": 859_535_364}

    def test_operations_of_the_channels_last_unet(self) -> None:
        work = step_work.count(config(*self.SD15, "recipe=tuned"), self.FACTS)
        flop = {kind: value / 1e12 for kind, value in work.flop.items()}
        assert flop[KernelClass.CONV_FORWARD] == flop[KernelClass.CONV_WGRAD] == pytest.approx(6.41, abs=0.01)
        assert flop[KernelClass.GEMM] == pytest.approx(13.30, abs=0.01)
        # Queries times keys of all levels, 3.5 forward passes.
        assert flop[KernelClass.ATTENTION] == pytest.approx(6.86, abs=0.01)
        assert work.floors_ms[KernelClass.OPTIMIZER] == pytest.approx(3.64, abs=0.01)
        assert work.norm_pointwise_floor_ms == pytest.approx(8.1, abs=0.1)

    def test_images_that_are_encoded_in_the_step_count_as_forward_convolutions(self) -> None:
        cached = step_work.count(config(*self.SD15, "recipe=baseline"), self.FACTS)
        online = step_work.count(config(*self.SD15, "recipe=baseline"), {**self.FACTS, "encodes_online": 2})
        more = {kind: online.flop[kind] - cached.flop[kind] for kind in cached.flop}
        assert more[KernelClass.CONV_FORWARD] == pytest.approx(34.1e12, rel=0.01)
        assert more[KernelClass.CONV_DGRAD] == 0
