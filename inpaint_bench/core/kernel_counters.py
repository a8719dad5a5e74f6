"""Hardware counters of a kernel launch: columns of the table `kernel_counters`, and their names in Nsight Compute.

Names are those of compute capability 9.0; one that a chip does not have is printed as n/a, and is null. No metric is a
time: a kernel that is counted is run several times, each time with empty caches and at whatever clocks there are.
"""

from __future__ import annotations

from typing import Final

# Sums over the whole chip. On Hopper a WGMMA counts in both columns of the tensor cores.
TOTALS: Final[dict[str, str]] = {
    "sm_cycles": "sm__cycles_elapsed.max",
    "instructions": "smsp__inst_executed.sum",  # of warps, as all others
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
