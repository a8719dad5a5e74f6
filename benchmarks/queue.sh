#!/usr/bin/env bash
# Run points one after another on the cards that CUDA_VISIBLE_DEVICES names: one such queue for each card of a machine.
# usage: CUDA_VISIBLE_DEVICES=0 benchmarks/queue.sh QUEUE OUT SECONDS GPU
#   QUEUE    file with a line for each point: its name, and arguments of `launch -m`
#   OUT      gets a sweep directory and a log for each point; `inpaint-bench merge OUT` merges them
#   SECONDS  after which no further point begins
#   GPU      h100 or h200
set -euo pipefail
if (($# != 4)); then
    sed -n 's/^# usage: /usage: /p' "$0" >&2
    exit 2
fi
queue=$(realpath "$1") out=$(realpath -m "$2") deadline=$3 gpu=$4
unset PYTHONDONTWRITEBYTECODE # every run would compile again what it imports: seconds each
mkdir -p "$out"
cd "$(dirname "$0")/.."
while read -r name arguments; do
    [[ -z $name || $name == \#* ]] && continue
    if ((SECONDS > deadline)); then
        echo "not begun: $name"
        continue
    fi
    began=$SECONDS
    # Quotes in a line mean what they do in a shell.
    eval "points=($arguments)"
    status=0
    python3 -m inpaint_bench.launch -m site=local "gpu=$gpu" telemetry.energy_hz=10 "hydra.sweep.dir=$out/$name" \
        wait=true "${points[@]}" >"$out/$name.log" 2>&1 </dev/null || status=$?
    echo "$name: exit code $status after $((SECONDS - began)) s"
done <"$queue"
