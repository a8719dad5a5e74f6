"""`python -m inpaint_bench VERB ...`, the same as `inpaint-bench VERB ...`."""

import sys


def main() -> int:
    """Run one verb and return the exit code of the process."""
    try:
        from inpaint_bench.cli.app import main as run  # takes seconds on a cold network disk
    except KeyboardInterrupt:
        return 130
    return run()


if __name__ == "__main__":
    sys.exit(main())
