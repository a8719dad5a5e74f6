#!/usr/bin/env bash
# Run points one after another on the cards that CUDA_VISIBLE_DEVICES names: one such queue for each card of a machine.
# usage: CUDA_VISIBLE_DEVICES=0 benchmarks/queue.sh QUEUE OUT SECONDS GPU
#   QUEUE    file with a line for each point: its name, and arguments of `launch -m`
#   OUT      gets a sweep directory and a log for each point; `inpaint-bench merge OUT` merges them
#   SECONDS  after which no further point begins
#   GPU      h100 or h200
# The next point loads its packages while one closes. It must not reach the GPU before the other has left it.
set -euo pipefail
if (($# != 4)); then
    sed -n 's/^# usage: /usage: /p' "$0" >&2
    exit 2
fi
queue=$(realpath "$1") out=$(realpath -m "$2") deadline=$3 gpu=$4
unset PYTHONDONTWRITEBYTECODE # every run would compile again what it imports: seconds each
mkdir -p "$out"
cd "$(dirname "$0")/.."
closes_slowly='network=brats|profile=|save_weights=true|sample_images=' # more than the 10 s that packages take

run() {
    local name=$1 began=$SECONDS status=0
    shift
    python3 -m inpaint_bench.launch -m site=local "gpu=$gpu" telemetry.energy_hz=10 "hydra.sweep.dir=$out/$name" \
        wait=true "$@" >"$out/$name.log" 2>&1 </dev/null || status=$?
    echo "$name: exit code $status after $((SECONDS - began)) s"
}

# After the window levers are read back, which took up to 30 s.
closing() {
    local attempt=$out/$1/0/attempt-1
    grep -sA1 '"kind": "measure"' "$attempt/windows.json" | grep -q '"status": "completed"' &&
        ! grep -q '"not read back"' "$attempt/manifest.json"
}

while read -r name arguments; do
    [[ -z $name || $name == \#* ]] && continue
    if ((SECONDS > deadline)); then
        echo "not begun: $name"
        continue
    fi
    # Quotes in a line mean what they do in a shell.
    eval "points=($arguments)"
    run "$name" "${points[@]}" &
    running=$!
    while kill -0 $running 2>/dev/null && { [[ $arguments =~ $closes_slowly ]] || ! closing "$name"; }; do sleep 0.5; done
done <"$queue"
wait
