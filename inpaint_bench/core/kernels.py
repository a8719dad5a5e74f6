"""What a CUDA kernel does, by its name: convolution forward, GEMM, norm, attention ...

The names are those of cuDNN, cuBLAS, CUTLASS, FlashAttention, PyTorch's own kernels, Triton (those of inductor and of
inpaint_bench.kernels) and NCCL; on a CPU the names of operators, as the profiler gives both. A name may say too
little: two operators in one fused kernel, a copy that may be a cast. What is assumed then is said beside the rule.
"""

import re
from enum import StrEnum
from functools import lru_cache
from typing import Final, NamedTuple


class KernelClass(StrEnum):
    """What a kernel does. A tie in its name is decided by the order of `RULES`."""

    CONV_FORWARD = "convolution forward"
    CONV_DGRAD = "convolution dgrad"  # gradient of the input
    CONV_WGRAD = "convolution wgrad"  # gradient of the weights
    CONVOLUTION = "convolution, pass not named"
    GEMM = "GEMM"
    ATTENTION = "attention"  # self-attention, and cross-attention if the name does not tell
    CROSS_ATTENTION = "cross-attention"
    NORM = "norm"
    POINTWISE = "pointwise"  # and reductions, random numbers, upsampling, pooling, padding
    LAYOUT = "layout conversion"
    OPTIMIZER = "optimizer"  # and what else runs over lists of parameters: EMA, clipping
    COPY = "copy"  # memcpy, memset, casts, concatenation, gathering
    COMMUNICATION = "communication"
    OTHER = "other"


class Kernel(NamedTuple):
    """The class of a kernel, and a second word: the algorithm of a convolution, a library, the kind of copy."""

    kind: KernelClass
    detail: str = ""


# What `classify` says of the kernels of each value of recipe.attention.
ATTENTION_LIBRARIES = {"flash4": "FlashAttention-4", "flash": "flash", "cudnn": "cuDNN"}
ATTENTION_LIBRARIES |= {"efficient": "efficient", "math": "math"}
IDLE = "idle"  # in a table of kernels by class: time in which none ran
CONVOLUTIONS = (KernelClass.CONV_FORWARD, KernelClass.CONV_DGRAD, KernelClass.CONV_WGRAD, KernelClass.CONVOLUTION)

_C = KernelClass
_FUSED = "^triton_(poi|red|per|for|mix|spl)_fused"  # inductor: pointwise, reduction, persistent reduction, foreach ...
# Operators that compute nothing. Before an attention kernel they lay out its inputs.
_COPIES = "_to_copy|_unsafe_view|clone|copy|expand|permute|t|transpose|view|convolution|convolution_backward"
_COPIES = f"({_COPIES}|_scaled_dot_product_([a-z]+_)*attention(_backward)?)"
# The first pattern found in the name decides; the case of letters does not matter.
RULES: tuple[tuple[str, KernelClass, str], ...] = (
    ("^autograd::|Backward[0-9]+$", _C.OTHER, "autograd"),  # on a CPU: they contain the operators that count
    ("nccl", _C.COMMUNICATION, "NCCL"),
    ("^Memcpy PtoP|_mean_over_ranks|symmetric_memory", _C.COMMUNICATION, "peer copies"),
    ("^(gloo:|c10d::)", _C.COMMUNICATION, "gloo"),
    ("^Memcpy", _C.COPY, "memcpy"),
    ("^Memset", _C.COPY, "memset"),
    ("multi_tensor_apply|adam|^Optimizer[.]|kOptimizer|kPreconditionOptimizer|_foreach_", _C.OPTIMIZER, ""),
    # Templates of inductor are named after the product, and after what was fused behind it.
    ("^triton_tem_fused.*attention", _C.ATTENTION, "Triton"),
    ("^triton_tem_fused.*(convolution|conv2d)", _C.CONV_FORWARD, "Triton"),
    ("^triton_tem_fused", _C.GEMM, "Triton"),
    # A fused kernel with a norm reads what the norm reads, so it counts as one.
    (f"{_FUSED}.*(norm_|var_mean)", _C.NORM, "Triton"),
    (f"{_FUSED}.*softmax", _C.ATTENTION, "math"),
    # Copies change the layout, the type or both. A bias alone is called "convolution" too: counted here all the same,
    # so that no conversion is missed.
    (f"{_FUSED}(_{_COPIES})+_[0-9]+$", _C.LAYOUT, "copy or cast"),
    (_FUSED, _C.POINTWISE, "Triton"),
    # Before GEMM and convolution, whose words are in the names of attention kernels ("cutlass", "fprop").
    ("cross_attention", _C.CROSS_ATTENTION, "Triton"),
    ("sdpa|cudnn::fusion::", _C.ATTENTION, "cuDNN"),
    ("FlashAttention|flash_attncute", _C.ATTENTION, "FlashAttention-4"),
    ("flash_(fwd|bwd)|flash::|flash_attention", _C.ATTENTION, "flash"),
    ("fmha|efficient_attention|AttentionKernel", _C.ATTENTION, "efficient"),
    ("flex_attention|scaled_dot_product", _C.ATTENTION, ""),
    ("softmax", _C.ATTENTION, "math"),  # no other softmax is in these models
    ("nchwToNhwc|nhwcToNchw|tensorTransform|AddPadding|convertTensor", _C.LAYOUT, "cuDNN"),
    ("cublasTranspose", _C.LAYOUT, "cuBLAS"),
    ("vol2col|col2vol|im2col|col2im", _C.LAYOUT, "columns"),
    ("(group|layer|batch|rms|instance)_?norm|bn_fw|bn_bw|Welford", _C.NORM, ""),
    ("RowwiseMoments|ComputeFusedParams|ComputeInternalGradients|ComputeBackwardFusedParams|GammaBeta", _C.NORM, ""),
    ("wgrad|grad_weight|scudnn.*stridedB_splitK", _C.CONV_WGRAD, "algorithm"),
    # cuDNN adds up the parts of a sum over pixels, which gradients of weights are.
    ("cutlass_*[a-z0-9]*_cudnn::reduction", _C.CONV_WGRAD, "algorithm"),
    ("dgrad|conv_depthwise[23]d_backward", _C.CONV_DGRAD, "algorithm"),
    ("fft[12]d|scudnn.*stridedB|convolution_backward|cudnn.*computeOffsets", _C.CONVOLUTION, "algorithm"),
    ("winograd|fprop|scudnn|convolve|conv_depthwise|direct_kernel|implicit_gemm", _C.CONV_FORWARD, "algorithm"),
    ("convolution|conv(_transpose)?[123]d", _C.CONV_FORWARD, "algorithm"),
    ("nvjet|cublas|gemv|gemmk1|reduce_1Block|splitKreduce|[a-z0-9]+_gemm_", _C.GEMM, "cuBLAS"),
    ("cutlass.*gemm|GemmUniversal|Gemm[A-Za-z]*Sm[0-9]+", _C.GEMM, "CUTLASS"),
    ("gemm|triton_mm", _C.GEMM, ""),
    ("^aten::(mm|bmm|addmm|baddbmm|linear|matmul|mkldnn_linear|dot)$", _C.GEMM, ""),
    # PyTorch's copies: with strides, for another layout; over contiguous memory, for another type.
    ("(?<![a-z_])elementwise_kernel<.*direct_copy_kernel", _C.LAYOUT, "strided copy"),
    ("_copy_kernel|^aten::(copy_|_to_copy|clone)$", _C.COPY, "cast"),
    ("CatArray|^aten::cat$", _C.COPY, "concatenation"),
    ("FillFunctor|^aten::(fill_|zero_)$", _C.COPY, "fill"),
    ("gather|index_elementwise|index_?select|scatter|^aten::(index|embedding)", _C.COPY, "gather"),
    ("distribution_|^aten::(normal_|random_|uniform_|randn|randint)", _C.POINTWISE, "random numbers"),
    ("upsample|sum_taps", _C.POINTWISE, "upsampling"),
    ("(max|avg)_pool|(replication|reflection|constant)_pad", _C.POINTWISE, "pooling, padding"),
    ("reduce_kernel|_column_sums|_sum_partials|^aten::(sum|mean)$", _C.POINTWISE, "reduction"),
    ("elementwise_kernel|_geglu_|_add_bias|^_rotate|mse_|silu|gelu", _C.POINTWISE, ""),
    (
        "^aten::(add|sub|mul|div|neg|exp|sqrt|rsqrt|pow|sin|cos|clamp(_min)?|relu|where|lerp|lt)(cmul|cdiv)?_?$",
        _C.POINTWISE,
        "",
    ),
)
# Second words of convolutions, likewise.
ALGORITHMS: tuple[tuple[str, str], ...] = (
    ("winograd", "Winograd"),
    ("fft", "FFT"),
    ("depthwise|grouped_direct|direct_kernel|alg0|alg1", "direct"),
    ("implicit|xmma|tensorop|s16816|s1688|scudnn|convolve|reduction", "implicit GEMM"),
)
_COMPILED = [(re.compile(pattern, re.IGNORECASE), kind, detail) for pattern, kind, detail in RULES]


@lru_cache(maxsize=10_000)
def classify(name: str) -> Kernel:
    """Return the class of a kernel, of an operator on a CPU; `other` if no rule knows the name."""
    for pattern, kind, detail in _COMPILED:
        if pattern.search(name):
            if detail == "algorithm":
                named = (text for words, text in ALGORITHMS if re.search(words, name, re.IGNORECASE))
                detail = next(named, "")
            return Kernel(kind, detail)
    return Kernel(KernelClass.OTHER)


# --- hardware counters ---------------------------------------------------------------------------

# Columns of the table `kernel_counters`, and their names in Nsight Compute: those of compute capability 9.0. One that a
# chip does not have is printed as n/a, and is null. No metric is a time: a kernel that is counted is run several times,
# each time with empty caches and at whatever clocks there are.

# Sums over the whole chip. On Hopper a WGMMA counts in both columns of the tensor cores.
TOTALS: Final[dict[str, str]] = {
    "sm_cycles": "sm__cycles_elapsed.max",
    "instructions": "smsp__inst_executed.sum",  # counted per warp, as all others
    "inst_fma": "sm__inst_executed_pipe_fma.sum",  # FP32, packed FP16, and integer multiplication
    "inst_alu": "sm__inst_executed_pipe_alu.sum",  # integers, logic, comparison
    "inst_tensor": "sm__inst_executed_pipe_tensor_op_hmma.sum",
    "inst_wgmma": "sm__inst_executed_pipe_tensor_op_gmma.sum",
    "inst_fp64": "sm__inst_executed_pipe_fp64.sum",
    "inst_xu": "sm__inst_executed_pipe_xu.sum",  # exp, sin, reciprocals, conversions
    "inst_lsu": "sm__inst_executed_pipe_lsu.sum",  # loads and stores
    "inst_tex": "sm__inst_executed_pipe_tex.sum",
    "inst_uniform": "sm__inst_executed_pipe_uniform.sum",
    "inst_adu": "sm__inst_executed_pipe_adu.sum",  # addresses, barriers
    "inst_cbu": "sm__inst_executed_pipe_cbu.sum",  # branches, convergence
    "dram_read_bytes": "dram__bytes_read.sum",
    "dram_write_bytes": "dram__bytes_write.sum",
    "load_conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum",  # banks of shared memory
    "store_conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum",
}
# Shares of a peak, hit rates, occupancy: per launch. Over several launches, means weighted by cycles.
RATES: Final[dict[str, str]] = {
    "ipc": "sm__inst_executed.avg.per_cycle_active",  # per SM
    "tensor_pct": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "sm_pct": "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "memory_pct": "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed",
    "dram_pct": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "l2_pct": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "l1_pct": "l1tex__throughput.avg.pct_of_peak_sustained_active",
    "l2_hit_pct": "lts__t_sector_hit_rate.pct",
    "l1_hit_pct": "l1tex__t_sector_hit_rate.pct",
    # 32 bytes each, of a warp's instruction: 4 if its threads read 4 bytes each, side by side
    "sectors_per_load": "l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_ld.ratio",
    "sectors_per_store": "l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_st.ratio",
    "occupancy_pct": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "warps_eligible": "smsp__warps_eligible.avg.per_cycle_active",  # per scheduler
    "warps_issued": "smsp__issue_active.avg.per_cycle_active",  # per scheduler, at most 1
}
_STATES = (
    *("barrier", "branch_resolving", "dispatch_stall", "drain", "gmma", "imc_miss", "lg_throttle", "long_scoreboard"),
    *("math_pipe_throttle", "membar", "mio_throttle", "misc", "no_instruction", "not_selected", "selected"),
    *("short_scoreboard", "sleeping", "tex_throttle", "wait"),
)
# Warps in each state per instruction issued. Over several launches, means weighted by instructions.
STALLS: Final[dict[str, str]] = {
    f"stall_{state}": f"smsp__average_warps_issue_stalled_{state}_per_issue_active.ratio" for state in _STATES
}
METRICS: Final[dict[str, str]] = TOTALS | RATES | STALLS
