#!/usr/bin/env bash
# Whether the figures of a recipe are those of a real training: its losses beside those of fp32 masters, its speed with
# other weights, its resumption. DATA is prepared, with caches. PARTS is one or more of "losses weights resume".
# usage: [RECIPE=tuned] [GPU=h200] [MODEL=sd15_inpaint] [REPEATS=3] benchmarks/h200_validity.sh DATA OUT PARTS [KEY=VALUE...]
set -euo pipefail
data=$1 out=$2 parts=$3 recipe=${RECIPE:-tuned} gpu=${GPU:-h200} model=${MODEL:-sd15_inpaint}
shift 3
common=(site=local "gpu=$gpu" data=prepared "data.root=$data" "$@")

run() { # name, overrides: one run here
    python -m inpaint_bench.launch "${common[@]}" "${@:2}" "hydra.run.dir=$out/$1" 2>&1 | tail -n 1
}

if [[ $parts == *losses* ]]; then # the seeds at once: company changes rates, not losses
    steps=(workload.warmup_steps=10 workload.measure_steps=490 workload.min_measure_s=0)
    for seed in 0 1 2; do
        for weights in bf16_split bf16_master; do
            run "losses/$weights-$seed" "model=$model" "recipe=[$recipe,$weights]" "seed=$seed" "${steps[@]}"
        done &
    done
    wait
    inpaint-bench merge "$out/losses" -o "$out/losses-dataset"
    python -m benchmarks.loss_curves "$out/losses-dataset" -o "$out/losses-figure" || echo "losses: exit code $?"
fi

if [[ $parts == *weights* ]]; then
    run training "model=$model" "recipe=[$recipe]" workload.train_steps=500 workload.save_weights=true
    rm -rf "$out/training/checkpoints"
    python -m benchmarks.weight_values write "$out/training/weights" "$out/weights" --model "$model"
    python -m inpaint_bench.launch -m --config-dir "$out/weights/conf" "${common[@]}" "recipe=[$recipe]" \
        "model=$model,${model}_trained,${model}_fan_in" workload.learning_rate=1e-9 workload.min_warmup_s=10 \
        "repeats=${REPEATS:-3}" wait=true "hydra.sweep.dir=$out/weights-sweep" 2>&1 | tail -n 14
    inpaint-bench merge "$out/weights-sweep" -o "$out/weights-dataset"
    python -m benchmarks.weight_values show "$out/weights-dataset"
fi

if [[ $parts == *resume* ]]; then
    python benchmarks/resume_on_gpu.py "$data" "$out/resume" "$recipe" "gpu=$gpu" "model=$model" "$@" ||
        echo "resume: exit code $?"
fi
