#!/usr/bin/env bash
# Run the bare loop, the plain one, earlier_baseline and the tuned recipes in turn on one GPU: the same photographs,
# batch 16, 512 px, no location tokens.
# usage: benchmarks/yardstick.sh PHOTOGRAPHS PREPARED GPU OUT SEED
#   PHOTOGRAPHS  a folder of JPEG files
#   PREPARED     the same, prepared with prepare.caches=true prepare.formats=[memmap]
#   GPU          h100 or h200
#   OUT          gets bare.jsonl, and two sweeps for each seed
#   SEED         of this turn: 0, 1 and 2 make three turns, each odd one in the reverse order
set -euo pipefail
if (($# != 5)); then
    sed -n 's/^# usage: /usage: /p' "$0" >&2
    exit 2
fi
photographs=$(realpath "$1") prepared=$(realpath "$2") gpu=$3 out=$(realpath -m "$4") seed=$5
cd "$(dirname "$0")/.."
mkdir -p "$out"
bare() { python3 -m benchmarks.bare_loop "$photographs" "$@" | tee -a "$out/bare.jsonl"; }
launch() { # name, kind and folder of the data, recipes
    python3 -m inpaint_bench.launch -m site=local "gpu=$gpu" batch=16 "data=$2" "data.root=$3" "recipe=$4" "seed=$seed" \
        model.location_tokens=0 workload.warmup_steps=10 workload.measure_steps=40 workload.min_measure_s=12 \
        telemetry.energy_hz=10 "hydra.sweep.dir=$out/$1-$seed"
}
plain() { launch plain folder "$photographs" baseline,earlier_baseline; }
tuned() { launch tuned prepared "$prepared" tuned_online,tuned_hopper; }
if ((seed % 2)); then
    tuned && plain && bare --constant && bare
else
    bare && bare --constant && plain && tuned
fi
