#!/usr/bin/env bash
# Run the bare loop and the plain recipes in turn on one GPU, all on the same photographs, without location tokens.
# usage: benchmarks/yardstick.sh PHOTOGRAPHS GPU OUT SEED [RECIPE ...]
#   PHOTOGRAPHS  a folder of JPEG files
#   GPU          h100 or h200
#   OUT          gets bare.jsonl and a folder of runs for each seed
#   SEED         of this turn; call it with 0, 1 and 2 for three turns
set -euo pipefail
if (($# < 4)); then
    sed -n 's/^# usage: /usage: /p' "$0" >&2
    exit 2
fi
photographs=$(realpath "$1") gpu=$2 out=$(realpath -m "$3") seed=$4
shift 4
cd "$(dirname "$0")/.."
mkdir -p "$out"
bare() { python3 -m benchmarks.bare_loop "$photographs" "$@" | tee -a "$out/bare.jsonl"; }
launch() {
    python3 -m inpaint_bench.launch -m site=local "gpu=$gpu" batch=16 data=folder "data.root=$photographs" seed="$seed" \
        model.location_tokens=0 workload.warmup_steps=10 workload.measure_steps=40 workload.min_measure_s=12 \
        telemetry.energy_hz=10 "hydra.sweep.dir=$out/$1-$seed" "${@:2}"
}
plain=(recipe='[encoders_half,pin_memory,non_blocking],baseline')
# Another order in each turn.
if ((seed % 2)); then
    launch plain "${plain[@]}"
    bare --constant
    bare
else
    bare
    bare --constant
    launch plain "${plain[@]}"
fi
for recipe in "$@"; do
    launch "${recipe%%=*}" "${recipe#*=}"
done
