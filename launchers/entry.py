"""What a job starts with: `python -m launchers.entry FOLDER` looks whose folder it is, then submitit loads the point."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

from inpaint_bench.errors import UserError

from . import private


def command(python: str, folder: Path) -> str:
    """The shell command of a job whose pickle lies in `folder`."""
    return f"{shlex.quote(python)} -u -m {__name__} {shlex.quote(str(folder))}"


def main(argv: list[str]) -> int:
    folder = Path(argv[0])
    try:
        private.check(folder)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    from submitit.core.job_environment import JobEnvironment
    from submitit.core.submission import process_job

    os.environ["SUBMITIT_FOLDER"] = str(folder)
    result = JobEnvironment().paths.result_pickle
    # submitit refuses to write beside what an earlier start of a requeued job left half-written
    result.with_suffix(f"{result.suffix}.save_tmp").unlink(missing_ok=True)
    process_job(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
