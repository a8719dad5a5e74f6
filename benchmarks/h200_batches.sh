#!/usr/bin/env bash
# The baseline recipe over the poster's batches on one H200, without Slurm: two runs per batch, interleaved.
# usage: benchmarks/h200_batches.sh SWEEP_DIR     (about 6 minutes)
set -euo pipefail
python3 -m inpaint_bench.launch -m site=local gpu=h200 seed=0,1 batch=4,8,16,32 \
    workload.min_measure_s=20 hydra.sweep.dir="$1"
