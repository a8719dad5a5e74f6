"""The sidecar process: `python -m inpaint_bench.telemetry.process '<json>'`, or the JSON on stdin.

Samples at once, then says so in one line of JSON on stdout ({"ready": true, ...} or {"ready": false,
"error": ...}); later lines carry problems and, last, telemetry.json once more, for the case that the disk is
full. SIGTERM, SIGINT or its parent's death: one last sample, parts closed, telemetry.json, exit 0.
Exit 1: rows could not be saved, or sampling had to end. Exit 2: never ready.
"""

from __future__ import annotations

import sys

from . import signals


def main() -> int:
    signals.block()
    from . import session  # imports pyarrow: not before the signals are blocked

    return session.main(sys.argv[1] if len(sys.argv) > 1 else sys.stdin.read())


if __name__ == "__main__":
    sys.exit(main())
