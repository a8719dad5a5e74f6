#!/usr/bin/env bash
# The whole chain on one machine with a real GPU: Slurm from carried packages, sbatch, NVML, status.
# usage: benchmarks/h200_slurm.sh FOLDER_OF_DEBS SWEEP_DIR     (root; about 3 minutes)
set -euo pipefail
python3 tests/testbed/unpack.py "$1"
python3 -m tests.testbed up --one-gpu --sites delta
trap 'python3 -m tests.testbed down' EXIT
source "${INPAINT_BENCH_TESTBED:-.testbed}/delta/env.sh"
python3 -m inpaint_bench.launch -m gpu=h200 batch=8,16,32 profile=testbed_gpu wait=true \
    workload.min_measure_s=20 hydra.sweep.dir="$2"
sinfo -o '%P %G %l %T'
squeue -t all -o '%i %P %T %b %N %M'
