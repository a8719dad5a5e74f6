"""The sidecar process: `python -m inpaint_bench.telemetry '<SidecarSpec as JSON>'`, or the JSON on stdin.

It samples at once, then prints lines of JSON (`report.Message`): first Ready or NotReady, last FinalReport.
SIGTERM, SIGINT or the parent's death end it with a last sample, closed parts and telemetry.json.
Exit code 0; 1: rows could not be saved, or sampling had to end; 2: never ready.
"""

import sys

from . import runtime


def main() -> int:
    runtime.block_signals()
    from .process import run_sidecar  # imports pyarrow, whose threads must inherit the signal mask

    return run_sidecar(sys.argv[1] if len(sys.argv) > 1 else sys.stdin.read())


if __name__ == "__main__":
    sys.exit(main())
