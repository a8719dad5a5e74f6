"""Exit codes of every command, and the one place where errors become sentences."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from inpaint_bench.core.errors import PointsFailedError, UserError

# Errors of the disk or its permissions, which are not bugs of ours.
_REFUSALS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EISDIR, errno.ENOTDIR)


class Terminated(BaseException):
    """SIGINT or SIGTERM inside `unwind_on_signals`."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@contextmanager
def unwind_on_signals() -> Iterator[None]:
    """Raise Terminated on SIGINT and SIGTERM, so that a command removes its partial output before it ends."""

    def stop(number: int, frame: FrameType | None) -> None:
        for ignored in (signal.SIGINT, signal.SIGTERM):  # a second signal must not interrupt the cleanup
            signal.signal(ignored, signal.SIG_IGN)
        raise Terminated(number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def guarded(call: Callable[[], int | None]) -> int:
    """Run `call` and return the exit code of the process; bugs keep their traceback.

    0 or what `call` returns; 1 for points that failed, 2 for a user's mistake, 130 for Ctrl-C, 141 for a closed pipe,
    128 + the signal where `unwind_on_signals` was active.
    """
    before = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises instead of printing and exiting with 1
    try:
        code = call()
        if sys.stdout is not None:
            sys.stdout.flush()  # a closed pipe raises here and not at interpreter exit
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except PointsFailedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except Terminated as signalled:
        print(f"Stopped by {signalled}. No partial output is left.", file=sys.stderr)
        return 128 + signalled.number
    except KeyboardInterrupt:
        print(
            "Interrupted. Submitted jobs are not affected; use `status` and `cancel` with the sweep directory.",
            file=sys.stderr,
        )
        return 130
    except BrokenPipeError:  # `status SWEEP | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the flush at exit goes nowhere
        return 128 + signal.SIGPIPE
    except Exception as error:
        if type(error).__module__.split(".")[0] in ("hydra", "omegaconf"):  # before OSError: some of Hydra's are
            from inpaint_bench.core.hydra_support import explain  # imports Hydra, which most commands do without

            message = explain(error)
        elif isinstance(error, OSError) and error.errno in _REFUSALS:
            message = f"{error.filename or 'a file'}: {error.strerror}"
        else:
            raise
        print(f"error: {message}", file=sys.stderr)
        return UserError.exit_code
    finally:
        if before is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = before
    return code or 0
