#!/usr/bin/env bash
# The poster's second study at batch 16, then the ladder, on one H200, without Slurm: n = 1 per call, call it
# again with another SEED (about 8 minutes each, of which the first compilation takes two).
# usage: benchmarks/h200_levers.sh DATA_DIR SWEEPS_DIR [SEED]
set -euo pipefail
data=$1 sweeps=$2 seed=${3:-0}
python3 -m inpaint_bench.prepare data=synthetic data.num_images=512 data.out="$data" prepare.formats=[memmap] \
    prepare.caches=true recipe=[baseline,workers_8]
common=(site=local gpu=h200 data=prepared "data.root=$data" batch=16 "seed=$seed"
    workload.warmup_steps=6 workload.measure_steps=50 workload.min_measure_s=8)
python3 -m inpaint_bench.launch -m "${common[@]}" \
    recipe=poster_baseline,poster_optimized hydra.sweep.dir="$sweeps/poster-$seed"
python3 -m inpaint_bench.launch -m "${common[@]}" "hydra.sweep.dir=$sweeps/ladder-$seed" \
    'recipe=[baseline],[baseline,adamw_fused],[baseline,adamw_fused,cache_image,cache_masked,cache_text],[baseline,adamw_fused,cache_image,cache_masked,cache_text,on_gpu,compile],[baseline,adamw_fused,cache_image,cache_masked,cache_text,on_gpu,compile,cuda_graph]'
