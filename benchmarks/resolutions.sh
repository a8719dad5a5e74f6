#!/usr/bin/env bash
# Say for which Python and machine the package's dependencies can be installed: the versions of constraints.txt, wheels only.
# Linux x86_64 and aarch64 (GH200) with glibc 2.28, as all and as the plain package; macOS on arm64 as the plain package.
# usage: benchmarks/resolutions.sh
# Needs uv and a package index. antlr4-python3-runtime, which Hydra needs, has no wheel and is built from its source.
# Exit code: 0 all resolve, 1 some do not, 2 there is no uv.
set -euo pipefail
cd "$(dirname "$0")/.."
command -v uv >/dev/null || { echo 'uv is not installed: pip install uv' >&2; exit 2; }
failed=0
try() { # name, platform, options
    local name=$1 platform=$2 python
    shift 2
    printf '%-28s' "$name"
    for python in 3.11 3.12 3.13 3.14; do
        if uv pip compile --quiet pyproject.toml --constraint constraints.txt --python-version "$python" \
            --python-platform "$platform" --only-binary :all: --no-binary antlr4-python3-runtime "$@" \
            >/dev/null 2>"${TMPDIR:-/tmp}/resolution.txt"; then
            printf '  %s yes' "$python"
        else
            printf '  %s NO ' "$python"
            failed=1
        fi
    done
    echo
    ((failed == 0)) || sed 's/^/    /' "${TMPDIR:-/tmp}/resolution.txt"
}
for machine in x86_64 aarch64; do
    try "Linux $machine" "$machine-manylinux_2_28" --extra train
    try "Linux $machine, plain" "$machine-manylinux_2_28"
done
try 'macOS arm64, plain' aarch64-apple-darwin
exit "$failed"
