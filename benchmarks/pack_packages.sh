#!/usr/bin/env bash
# Pack what `gpu_sweep.sh` needs on a machine without a package source that has Python 3.12, PyTorch, transformers and SciPy:
# the Python packages of uv.lock without theirs (polars and Altair too: merge and report run elsewhere), and Slurm's .deb files.
# usage: benchmarks/pack_packages.sh OUT [MIB]
#   OUT   new folder; gets packages.tar.xz.00, .01 and so on, of at most MIB each (40), and debs/
# On that machine:
#   cat OUT/packages.tar.xz.* | tar -xJ -C FOLDER; export PYTHONPATH=FOLDER:FOLDER/nvidia_cutlass_dsl/dsl_packages
# Needs uv and pip, and as root on Debian 12 apt-get.
set -euo pipefail
if (($# < 1)) || [[ -e $1 ]]; then
    sed -n 's/^# usage: /usage: /p' "$0" >&2
    exit 2
fi
mkdir -p "$1/debs"
out=$(realpath "$1") mib=${2:-40}
cd "$(dirname "$0")/.."
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

present=(torch torchmetrics transformers huggingface-hub accelerate numpy scipy pillow safetensors regex requests)
present+=(polars altair vl-convert-python nvidia-cutlass-dsl-libs-cu12)
uv export --quiet --frozen --no-emit-project --no-hashes --no-annotate --no-header --no-dev --extra flash4 --extra lora \
    --python 3.12 "${present[@]/#/--prune=}" >"$scratch/all.txt"
# antlr4 is published as source alone: its wheel is built here.
grep -v '^antlr4' "$scratch/all.txt" >"$scratch/wheels.txt"
python3 -m pip wheel --quiet --no-deps --wheel-dir "$scratch/wheels" "$(grep '^antlr4' "$scratch/all.txt")"
python3 -m pip install --quiet --no-deps --no-compile --only-binary=:all: --python-version 3.12 --implementation cp \
    --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
    --target "$scratch/site" --requirement "$scratch/wheels.txt"
python3 -m pip install --quiet --no-deps --no-compile --no-index --target "$scratch/site" "$scratch"/wheels/*.whl
# What no run imports: 33 of 60 MB of pyarrow, packed.
rm -rf "$scratch"/site/pyarrow/{include,tests,libarrow_flight*,_flight*,libarrow_s3*,_s3fs*}
tar -C "$scratch/site" -cf - . | xz -T0 | split -d -b "${mib}M" - "$out/packages.tar.xz."

(cd "$out/debs" && apt-get download -qq slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge libmunge2 libhwloc15 \
    libjson-c5 liblz4-1 libnuma1)
du -sh "$out"/*
