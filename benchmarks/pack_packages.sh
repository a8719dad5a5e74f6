#!/usr/bin/env bash
# Pack what `gpu_sweep.sh` needs on a machine without a package source that has Python 3.12 and PyTorch: the Python
# packages which that machine lacks (without polars, Altair and vl-convert: merge and report run elsewhere), in the
# versions of constraints.txt, and Slurm's .deb files.
# usage: benchmarks/pack_packages.sh HAVE OUT [MIB]
#   HAVE  what the machine has: the output there of `python3 -m pip list --format=freeze`. Its versions are not checked.
#         Take a line out to pack that package in our version.
#   OUT   new folder; gets packages.tar.xz.00, .01 and so on, of at most MIB each (40), and debs/
# On that machine:
#   cat OUT/packages.tar.xz.* | tar -xJ -C FOLDER; export PYTHONPATH=FOLDER:FOLDER/nvidia_cutlass_dsl/dsl_packages
#   python3 -m pip check      # says which versions of its own are too old
# Needs uv, strip (binutils), and as root on Debian 12 apt-get.
set -euo pipefail
if (($# < 2)) || [[ ! -f $1 || -e $2 ]]; then
    sed -n 's/^# usage: /usage: /p' "$0" >&2
    exit 2
fi
mkdir -p "$2/debs"
have=$(realpath "$1") out=$(realpath "$2") mib=${3:-40}
cd "$(dirname "$0")/.."
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# An excluded package leaves the resolution together with what only that package requires.
{
    sed -E 's/[=@ ].*//' "$have"
    printf '%s\n' polars altair vl-convert-python nvidia-cutlass-dsl-libs-cu12
} >"$scratch/excluded.txt"
target=(--python-version 3.12 --python-platform x86_64-manylinux_2_28)
uv pip compile --quiet pyproject.toml -c constraints.txt --extra train --extra flash4 --extra lora "${target[@]}" \
    --excludes "$scratch/excluded.txt" --no-annotate --no-header --output-file "$scratch/missing.txt" >/dev/null
uv pip install --quiet --no-deps "${target[@]}" --target "$scratch/site" --requirement "$scratch/missing.txt"
# What no run imports: 33 of 60 MB of pyarrow, packed. Stripping and the x86 filter save a sixth; xz takes five minutes.
rm -rf "$scratch"/site/pyarrow/{include,tests,libarrow_flight*,_flight*,libarrow_s3*,_s3fs*}
find "$scratch/site" -name '*.so' -not -path '*/aarch64-*' -exec strip --strip-unneeded {} +
tar -C "$scratch/site" --sort=name -cf - . | xz --x86 --lzma2=preset=9e,dict=192MiB | split -d -b "${mib}M" - "$out/packages.tar.xz."

(cd "$out/debs" && apt-get download -qq slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge libmunge2 libhwloc15 \
    libjson-c5 liblz4-1 libnuma1)
du -sh "$out"/*
