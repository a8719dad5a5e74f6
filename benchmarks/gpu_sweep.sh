#!/usr/bin/env bash
# A sweep on this machine's own GPUs through real Slurm, one job per GPU at a time. It ends by itself after LIMIT_S
# seconds (540); the same command again, on the same machine, goes on. Root, without a package source or a network.
# usage: benchmarks/gpu_sweep.sh DEBS OUT SWEEP [KEY=VALUE ...]
#   DEBS    folder of Slurm's .deb files, as pack_packages.sh makes it
#   OUT     folder that gets SWEEP as a .tgz without its copy of the code, however the script ends
#   SWEEP   sweep directory: launched with the overrides if it does not exist yet, else only waited for
# gpu=... and the name of the site are those of the machine: h200-testbed, h100-testbed. PREPARED (/tmp/prepared) is the
# dataset, made once. CANCEL=1, for the last call: after LIMIT_S no further job starts, and those that run get 45 s.
# Without a GPU, or with GPUS=0: a tiny model and simulated GPUs. PORT is the first of Slurm's.
# Exit code: 0 all points completed; 3 some are left; 1 some failed; 2 wrong command.
set -euo pipefail
if (($# < 3)); then
    sed -n 's/^# usage: /usage: /p' "$0" >&2
    exit 2
fi
debs=$(realpath -m "$1") out=$(realpath "$2") sweep=$(realpath -m "$3")
shift 3
cd "$(dirname "$0")/.."
limit_s=${LIMIT_S:-540}
prepared=${PREPARED:-/tmp/prepared}
unset PYTHONDONTWRITEBYTECODE # every job would compile again what it imports: seconds each
export INPAINT_BENCH_TESTBED=${INPAINT_BENCH_TESTBED:-/tmp/testbed}

say() { printf '%4d s  %s\n' "$SECONDS" "$*"; }

pack() {
    [[ -d $sweep ]] || return 0
    # Jobs may still be writing, which tar reports with 1.
    tar -C "$(dirname "$sweep")" --exclude="$(basename "$sweep")/code" -czf "$out/$(basename "$sweep").tgz" \
        --warning=no-file-changed "$(basename "$sweep")" || (($? == 1))
    say "packed $out/$(basename "$sweep").tgz, $(du -h "$out/$(basename "$sweep").tgz" | cut -f1)"
}
trap pack EXIT

num_gpus=${GPUS:-$({ nvidia-smi -L 2>/dev/null || true; } | wc -l)}
if ((num_gpus)); then
    model=$(nvidia-smi --query-gpu=name --format=csv,noheader | awk 'NR == 1 {print tolower($2)}')
    bed=(--gpus "$num_gpus")
    options=(profile=testbed_gpu "gpu=$model" "sites.delta.name=$model-testbed")
    data=()
else
    bed=(--light)
    options=(profile=testbed gpu=h200)
    data=(model=tiny_inpaint recipe=cpu data.resolution_px=64)
fi

command -v sbatch >/dev/null || python3 tests/testbed/unpack.py "$debs"
# Slurm resolves no name on a machine that has no address but 127.0.0.1.
[[ $(hostname -I) ]] || ip address replace 127.0.0.2/8 dev lo
python3 -m tests.testbed up "${bed[@]}" --sites delta --port "${PORT:-17000}"
source "$INPAINT_BENCH_TESTBED/delta/env.sh"

if [[ ! -e $prepared.complete ]]; then
    rm -rf "$prepared"
    python3 -m inpaint_bench prepare data=synthetic data.num_images=256 prepare.out="$prepared" prepare.caches=true \
        "${data[@]}"
    touch "$prepared.complete"
    say "prepared $prepared"
fi

if [[ ! -e $sweep ]]; then
    python3 -m inpaint_bench.launch -m "${options[@]}" data=prepared data.root="$prepared" hydra.sweep.dir="$sweep" "$@"
    say "launched $sweep"
fi

wait_until() { # SECOND [STATES]; prints and sets how many jobs are left
    local shown=
    while left=$(squeue -h -r -o %i -t "${2:-PENDING,RUNNING,COMPLETING}" | wc -l) && ((left && SECONDS < $1)); do
        [[ $left == "$shown" ]] || say "$left jobs left"
        shown=$left
        sleep 1
    done
}
wait_until "$limit_s"
if ((left)) && [[ ${CANCEL:-} ]]; then
    scontrol update nodename=gpuh001 state=drain reason="the time is over"
    wait_until $((limit_s + 45)) RUNNING,COMPLETING
    python3 -m inpaint_bench cancel "$sweep"
    wait_until $((SECONDS + 10))
fi
code=0
python3 -m inpaint_bench status "$sweep" --all || code=$?
((left)) || python3 -m tests.testbed down
exit "$code"
