"""What a CUDA kernel does, by its name: convolution forward, GEMM, norm, attention ...

The names are those of cuDNN, cuBLAS, CUTLASS, FlashAttention, PyTorch's own kernels, Triton (those of inductor and of
inpaint_bench.kernels) and NCCL; on a CPU the names of operators, as the profiler gives both. A name may say too
little: two operators in one fused kernel, a copy that may be a cast. What is assumed then is said beside the rule.
"""

from __future__ import annotations

import re
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple


class KernelClass(StrEnum):
    """What a kernel does. A tie in its name is decided by the order of `RULES`."""

    CONV_FORWARD = "convolution forward"
    CONV_DGRAD = "convolution dgrad"  # gradient of the input
    CONV_WGRAD = "convolution wgrad"  # gradient of the weights
    CONVOLUTION = "convolution, pass not named"
    GEMM = "GEMM"
    ATTENTION = "attention"  # self-attention, and cross-attention where the name does not tell
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
    ("upsample", _C.POINTWISE, "upsampling"),
    ("(max|avg)_pool|(replication|reflection|constant)_pad", _C.POINTWISE, "pooling, padding"),
    ("reduce_kernel|_column_sums|_sum_partials|^aten::(sum|mean)$", _C.POINTWISE, "reduction"),
    ("elementwise_kernel|_geglu_|_add_bias|mse_|silu|gelu", _C.POINTWISE, ""),
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
    """Return the class of a kernel, of an operator on a CPU; `other` where no rule knows the name."""
    for pattern, kind, detail in _COMPILED:
        if pattern.search(name):
            return Kernel(kind, _algorithm(name) if detail == "algorithm" else detail)
    return Kernel(KernelClass.OTHER)


def _algorithm(name: str) -> str:
    return next((algorithm for pattern, algorithm in ALGORITHMS if re.search(pattern, name, re.IGNORECASE)), "")
