"""Exit codes of every command, and the one place where errors become sentences."""

import errno
import logging
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from inpaint_bench.core.errors import UNREACHABLE, PointsFailedError, UserError
from inpaint_bench.core.signals import Terminated, terminable

# Errors of the disk, of its permissions and of what lies there, which are not bugs of ours. The last three of the
# second line are also those of core/files.py for a link, for what is not a plain file and for an endless one.
_REFUSALS = (
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EISDIR, errno.ENOTDIR, errno.EEXIST),
    *(errno.ENAMETOOLONG, errno.ELOOP, errno.ENXIO, errno.EFBIG),
)
_NOT_UTF8 = "{}: is not UTF-8, as every path and argument has to be"
_SYNONYMS = {"run": "launch", "submit": "launch", "train": "launch", "sweep": "launch", "help": "--help"}
_MORE = {"report": "A folder of several datasets has one report, and `compare A B` compares two."}
_REMOVED = {  # commands and options
    **dict.fromkeys(
        ("probe-result", "--probe"), "was removed; `srun --gpus=1 inpaint-bench doctor` checks a compute node"
    ),
    **dict.fromkeys(
        ("--export", "--into"), "results are no longer packed; rsync the sweep directory here and merge both"
    ),
    "--cost": "was removed; the table of `status` has a column `cost`, and so has --json",
}


class _Record(logging.LogRecord):  # with names that break no line; other libraries may print several lines
    def getMessage(self) -> str:  # noqa: N802 - a method of logging
        from inpaint_bench.core.console import sanitize

        text, package = super().getMessage(), self.name.partition(".")[0]
        return sanitize(text) if package in ("inpaint_bench", "launchers", "analysis") else text


def print_error(message: str) -> None:
    """Print the sentence that a command ends with, without control characters."""
    from inpaint_bench.core.console import echo  # rich, which `--help` does without

    echo(f"error: {message}", error=True)


@contextmanager
def unwind_on_signals() -> Iterator[None]:
    """Raise Terminated on SIGINT and SIGTERM, so that a command removes its partial output before it ends."""
    try:
        with terminable((signal.SIGINT, signal.SIGTERM)):
            yield
    except Terminated as error:
        print(f"Stopped by {error.name}. No partial output is left.", file=sys.stderr)
        raise


def refuse_paths(arguments: Iterable[str]) -> None:
    """Raise UserError for a working directory that is gone, and for names that no record can hold: not UTF-8."""
    try:
        folder = str(Path.cwd())
    except FileNotFoundError:
        raise UserError("the working directory does not exist any more; change to another one") from None
    for text in (*arguments, folder):
        if any("\ud800" <= char <= "\udfff" for char in text):  # how Python holds such bytes
            raise UserError(_NOT_UTF8.format(text))


def guarded(call: Callable[[], int | None]) -> int:
    """Run `call` and return the exit code of the process; bugs keep their traceback.

    0 or what `call` returns; 1 for points that failed, 2 for a user's mistake, 130 for Ctrl-C, 141 for a closed pipe,
    128 + the signal that a command or a run was ended with.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # see inpaint_bench/__init__.py
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises instead of printing and exiting with 1
    logging.setLogRecordFactory(_Record)
    if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors == "strict":  # a terminal that is not of UTF-8
        sys.stdout.reconfigure(errors="replace")
    logging.raiseExceptions = False  # no traceback from a logger whose reader is gone, as with `| head`
    try:
        code = call()
        if sys.stdout is not None:
            sys.stdout.flush()  # a closed pipe raises here and not at interpreter exit
    except (UserError, PointsFailedError) as error:
        print_error(str(error))
        return error.exit_code
    except Terminated as error:
        return 128 + error.signum
    except KeyboardInterrupt:
        of_sweep = "launchers.sweep.ledger" in sys.modules
        jobs = " Submitted jobs are not affected; use `status` and `cancel` with the sweep directory."
        print(f"Interrupted.{jobs if of_sweep else ''}", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `status SWEEP | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the flush at exit goes nowhere
        return 128 + signal.SIGPIPE
    except Exception as error:
        if _is_of_hydra(error):  # before OSError: some of Hydra's are
            from inpaint_bench.core.hydra_support import explain  # Hydra, which most commands do without

            message = explain(error)
        elif isinstance(error, ModuleNotFoundError):
            from inpaint_bench.core.config.parse import TRAIN, needs_train

            if (module := (error.name or "").partition(".")[0]) not in TRAIN:
                raise
            message = needs_train(module)
        elif isinstance(error, UnicodeEncodeError) and error.reason == "surrogates not allowed":
            # Quote only the part of a long text around the error: it contains the name.
            named = error.object[max(0, error.start - 100) : error.end + 50]
            message = _NOT_UTF8.format(named)
        elif isinstance(error, OSError) and (error.errno in _REFUSALS or error.errno in UNREACHABLE):
            # The second of two names is the target of a copy.
            message = f"{error.filename2 or error.filename or 'a file'}: {error.strerror}"
            if error.errno in UNREACHABLE:
                message += "; its file system does not answer, try again"
        else:
            raise
        print_error(message)
        return UserError.exit_code
    return code or 0


def _is_of_hydra(error: Exception) -> bool:
    """Return whether it is an error of Hydra or OmegaConf, or the ValueError that Hydra raises, say for `gpu=null`."""
    modules = [type(error).__module__]
    if isinstance(error, ValueError):
        modules += [
            frame.f_globals.get("__name__", "") for frame, _ in list(traceback.walk_tb(error.__traceback__))[-1:]
        ]
    return any(module.split(".")[0] in ("hydra", "omegaconf") for module in modules)


def usage_error(error: Any, program: str) -> str:
    """Return the parser's sentence, and what it leaves out: what an argument is, and a verb of another name."""
    message: str = error.format_message()
    option, problems = getattr(error, "param", None), getattr(error.__cause__, "errors", None)
    if option and problems:  # from pydantic, with which typer checks values
        return _wrong_value(max(option.opts, key=len), problems()[0])
    if ("Missing" in message or "does not exist" in message) and error.param:
        return f"{message.partition(' Choose from')[0]} {error.param.help}"
    if "unexpected extra argument" in message:
        verb = error.ctx.command_path.rpartition(" ")[2] if error.ctx else ""
        return f"{message.removesuffix('.')}. {_MORE.get(verb, 'Names with spaces need quotes.')}"
    word = next(iter(re.findall(r"No such (?:command '|option: )([\w-]+)", message)), "")
    if word in _REMOVED:
        return f"{word}: {_REMOVED[word]}"
    if word in _SYNONYMS:
        return f"No such command '{word}'. Did you mean '{_SYNONYMS[word]}'?"
    if "Did you" in message or "Possible" in message or not message.startswith("No such"):
        return message
    verb = error.ctx.command_path if error.ctx else program
    return f"{message.removesuffix('.')}. `{verb} --help` lists all."


def _wrong_value(option: str, problem: dict[str, Any]) -> str:
    """Return the value of an option with what it must be, by the first problem that pydantic lists."""
    limits = problem.get("ctx", {})
    required = {
        "int_parsing": "a whole number",
        "float_parsing": "a number",
        "greater_than_equal": f"at least {limits.get('ge')}",
    }.get(problem["type"])
    if required:
        return f"{option} {problem['input']}: must be {required}"
    return f"{option}: {problem['msg'].removeprefix('Value error, ').removesuffix('.')}"
