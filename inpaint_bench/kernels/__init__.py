"""Fused training kernels in Triton, each beside a plain PyTorch reference that runs anywhere, in any precision.

Every public function takes and returns ordinary tensors and is differentiable. On CUDA with Triton the kernel runs,
elsewhere the reference: parity tests compare the two, and on a processor in float64 the whole network with diffusers'.
"""
