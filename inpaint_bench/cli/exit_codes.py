"""One way out of every command: what the user did wrong in a sentence, and the exit code."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from inpaint_bench.core.errors import PointsFailedError, UserError

# What a disk or its owner refuses: nobody's bug
_REFUSALS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EISDIR, errno.ENOTDIR)


def guarded(call: Callable[[], Any]) -> int:
    """0, or 2 for a user's mistake, 1 for points that failed, 130 for Ctrl-C, 141 for a reader that left.

    Real bugs keep their traceback.
    """
    before = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises instead of printing and exiting with 1
    try:
        call()
        if sys.stdout is not None:
            sys.stdout.flush()  # so that a reader who left is noticed here and not at exit
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except PointsFailedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(
            "Interrupted. What Slurm holds goes on; `status` and `cancel` take the sweep directory.",
            file=sys.stderr,
        )
        return 130
    except BrokenPipeError:  # `status SWEEP | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left to flush at exit goes nowhere
        return 128 + signal.SIGPIPE
    except Exception as error:
        if type(error).__module__.split(".")[0] in ("hydra", "omegaconf"):  # some of Hydra's are OSErrors
            from inpaint_bench.core.hydra_errors import explain  # Hydra is not loaded for commands that do without it

            said = explain(error)
        elif isinstance(error, OSError) and error.errno in _REFUSALS:
            said = f"{error.filename or 'a file'}: {error.strerror}"
        else:
            raise
        print(f"error: {said}", file=sys.stderr)
        return UserError.exit_code
    finally:
        if before is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = before
    return 0
