"""Two real Slurm clusters on loopback, `grace` and `delta`, with GPUs that are links to /dev/null.

Everything lies under one state folder and on ports of its own; a Slurm already on the machine is neither
read nor touched. What is real: submission rules, scheduling, arrays, requeue, preemption, node failure,
accounting. What is not: GPUs (except with --gpus), memory limits, CPU confinement.
"""

from .bed import Bed
from .errors import BedError
from .plan import SITES, Plan

__all__ = ["SITES", "Bed", "BedError", "Plan"]
