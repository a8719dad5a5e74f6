#!/usr/bin/env bash
# What a run does beside its window, by stage: with empty caches of kernels, with warm ones, and with copied ones.
# usage: benchmarks/start.sh GPU OUT [N [RECIPE [EMPTY]]]
#   GPU     h100 or h200
#   OUT     gets the data, the caches and a sweep for each run
#   N       runs with warm and with copied caches, in turn (3)
#   RECIPE  that needs prepared data with caches (tuned_hopper)
#   EMPTY   runs with empty caches, of 2 minutes each (1)
# Synthetic images, random weights, batch 16, 512 px, a window of 3 s.
set -euo pipefail
if (($# < 2)); then
    sed -n 's/^# usage: /usage: /p' "$0" >&2
    exit 2
fi
gpu=$1 out=$(realpath -m "$2") count=${3:-3} recipe=${4:-tuned_hopper} empty=${5:-1}
batch=${BATCH:-16} side=${SIDE:-512} model=${MODEL:-sd15_inpaint} # smaller ones try the script on a small machine
cd "$(dirname "$0")/.."
mkdir -p "$out"
if [ ! -e "$out/data" ]; then
    python3 -m inpaint_bench prepare data=synthetic data.num_images=256 "model=$model" "data.resolution_px=$side" \
        model.location_tokens=0 prepare.caches=true 'prepare.formats=[memmap]' "prepare.out=$out/data" ${PREPARE:-}
fi
launch() { # name of the sweep, folder of kernels
    local began=$SECONDS
    python3 -m inpaint_bench.launch -m site=local "gpu=$gpu" "recipe=$recipe" "batch=$batch" data=prepared "data.root=$out/data" \
        "model=$model" model.location_tokens=0 workload.warmup_steps=10 workload.measure_steps=20 workload.min_measure_s=3 \
        telemetry.energy_hz=10 "sites.local.storage.kernels=$2" "hydra.sweep.dir=$out/$1" wait=true ${LAUNCH:-} \
        > "$out/$1.log" 2>&1 || { tail -n 20 "$out/$1.log"; return 1; }
    echo "$1: the launch took $((SECONDS - began)) s in all; kernels: $(du -sh "$2" 2> /dev/null | cut -f1)"
}
for ((i = 1; i <= empty; i++)); do
    rm -rf "$out/kernels"
    launch "empty-$i" "$out/kernels"
done
for ((i = 1; i <= count; i++)); do
    launch "warm-$i" "$out/kernels"
    mkdir -p "$out/kernels" # there are none on a CPU
    rm -rf "$out/copied"
    cp -r "$out/kernels" "$out/copied"
    launch "copied-$i" "$out/copied"
done
for kind in empty warm copied; do
    python3 - "$out" "$kind" << 'EOF'
import json, statistics, sys
from pathlib import Path
runs = [json.loads(path.read_bytes())["stages"] for path in sorted(Path(sys.argv[1]).glob(f"{sys.argv[2]}-*/0/attempt-1/manifest.json"))]
if runs:
    print(f"\n{sys.argv[2]}, n = {len(runs)}: median (all) in s")
    rows = {name: [run.get(name, 0.0) for run in runs] for name in max(runs, key=len)}
    rows["total"] = [sum(run.values()) for run in runs]
    rows["beside the window"] = [sum(run.values()) - run["window"] for run in runs]
    for name, values in rows.items():
        print(f"  {name:18} {statistics.median(values):7.2f}  ({', '.join(f'{value:.2f}' for value in values)})")
EOF
done
