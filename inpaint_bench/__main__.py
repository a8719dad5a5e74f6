"""`inpaint-bench VERB ...`, or `python -m inpaint_bench VERB ...`."""

from __future__ import annotations

import sys
from importlib import import_module

VERBS = {
    "prepare": "a folder of images or the generator -> a dataset with a manifest and a split",
    "launch": "send a sweep to every site (-m), or run one point here",
    "status": "how every point of a sweep stands, and why",
    "rerun": "send again what failed or never started",
    "cancel": "stop what is queued or running",
    "collect": "bring here what another site measured, over ssh or in a carried file",
    "merge": "shards of any number of sites -> one dataset",
    "report": "dataset -> tables, figures, one HTML page",
    "doctor": "what this machine can do; --site holds site files against Slurm, --gpu probes a GPU",
    "restore": "repaint the masked parts of a folder of images with saved weights",
}
EXAMPLE = "inpaint-bench launch -m gpu=a40,a100,h200 batch=8,16,32"


def main() -> int:
    verb = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if verb in ("-h", "--help"):
        lines = [f"  {name:8} {does}" for name, does in VERBS.items()]
        print("usage: inpaint-bench VERB ...\n", *lines, f"\nexample:\n  {EXAMPLE}", sep="\n")
        return 0
    if verb not in VERBS:
        print(f"{verb}: no such verb; have: {', '.join(VERBS)}", file=sys.stderr)
        return 2
    package = "inpaint_bench" if verb == "launch" else "inpaint_bench.cli"
    code: int = import_module(f"{package}.{verb}").main(sys.argv[2:])
    return code


if __name__ == "__main__":
    sys.exit(main())
