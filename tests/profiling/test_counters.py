"""What Nsight Compute prints, and which kernels it is to count.

`ncu_row_per_metric.csv` is an excerpt of what it printed on a card of compute capability 7.5. In
`ncu_column_per_metric.csv` the layout is that of the raw page, and the first launch has values that were published for
an attention kernel on an H100, its cycles apart; the second launch is made up.
"""

from pathlib import Path

import pytest

from inpaint_bench.core.kernels import METRICS
from inpaint_bench.profiling.ncu import function_name, parse, select

HERE = Path(__file__).parent
NAMES = HERE.parent / "core" / "kernel_names.tsv"
FILL = "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, std::array<char*, 1ul> >"
FILL += "(int, at::native::FillFunctor<float>, std::array<char*, 1ul>)"


def test_a_page_with_a_column_per_metric_becomes_a_row_per_launch():
    attention, fill = parse((HERE / "ncu_column_per_metric.csv").read_text())
    assert (attention.number, attention.kernel) == (0, "_attention_fwd_kernel")
    assert (attention.grid, attention.block) == ("(32, 128, 1)", "(256, 1, 1)")
    known = {name: value for name, value in attention.counters.items() if value is not None}
    assert known == {
        "sm_cycles": 2_294_511,
        "dram_read_bytes": 402_748_928,
        "dram_write_bytes": 130_558_720,
        "tensor_pct": 45.828613,
        "sm_pct": 43.878221,
        "memory_pct": 38.464337,
        "l2_hit_pct": 85.505901,
        "occupancy_pct": 12.492134,
        "stall_gmma": 0.05,
        "stall_wait": 1.35,
    }
    assert fill.kernel == FILL
    assert fill.counters["dram_read_bytes"] == 0
    # n/a and nan: the chip does not have it, or nothing was accessed.
    assert fill.counters["dram_write_bytes"] is None
    assert fill.counters["l2_hit_pct"] is None
    assert set(attention.counters) == set(METRICS)


def test_a_page_with_a_row_per_metric_becomes_a_row_per_launch():
    convolution, product = parse((HERE / "ncu_row_per_metric.csv").read_text())
    assert convolution.kernel == "_5x_cudnn_volta_scudnn_128x64_relu_xregs_large_nn_v1"
    assert (convolution.counters["sm_pct"], convolution.counters["occupancy_pct"]) == (80.66, 34.40)
    assert (product.counters["sm_pct"], product.grid) == (27.10, "(25, 2, 1)")


def test_an_output_without_counters_has_no_launches():
    assert parse("") == []
    assert parse("==PROF== Disconnected from process 1\n==WARNING== No kernels were profiled.\n") == []


def test_no_metric_is_a_time():
    assert not [metric for metric in METRICS.values() if "time" in metric or "per_second" in metric]


@pytest.mark.parametrize(
    ("kernel", "function"),
    [
        (FILL, "vectorized_elementwise_kernel"),
        ("void cutlass::Kernel2<cutlass_80_simt_sgemm_64x64_8x5_nn_align1>(T1::Params)", "Kernel2"),
        ("void (anonymous namespace)::softmax_warp_forward<float, 2, false>(float*, int)", "softmax_warp_forward"),
        ("std::enable_if<!(false), void>::type internal::gemvx::kernel<int, float>(float)", "kernel"),
        (
            "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(Attention<cutlass::bfloat16_t>::Params)",
            "fmha_cutlassF_bf16_aligned_64x64_rf_sm80",
        ),
        ("nvjet_sm90_tst_64x8_64x16_4x2_h_bz_NNT", "nvjet_sm90_tst_64x8_64x16_4x2_h_bz_NNT"),
    ],
)
def test_a_kernel_is_selected_by_the_name_of_its_function(kernel, function):
    assert function_name(kernel) == function


def test_the_function_of_every_known_kernel_can_stand_in_an_expression():
    names = [line.split("\t")[3] for line in NAMES.read_text().splitlines() if line.startswith("H200")]
    functions = {function_name(name) for name in names if not name.startswith("Mem")}
    assert len(functions) > 50
    assert not [function for function in functions if not function.isidentifier()]


def test_the_heaviest_kernels_are_chosen_that_have_few_enough_launches():
    add = "void at::native::elementwise_kernel<128, 4, add>(int, add)"
    copy = "void at::native::elementwise_kernel<128, 4, copy>(int, copy)"
    kernels = [("conv", 50.0, 20), (add, 20.0, 150), (copy, 20.0, 150), ("gemm", 30.0, 70), ("norm", 5.0, 20)]
    chosen = select([*kernels, ("Memcpy DtoD (Device -> Device)", 99.0, 1), ("small", 1.0, 1)], 3, 100)
    assert chosen.functions == ["conv", "gemm", "small"]
    assert chosen.launches == 91
    assert [text.split(" was")[0] for text in chosen.left_out] == ["elementwise_kernel", "norm"]
    assert "300 launches" in chosen.left_out[0]
