"""What the argparse commands share: --help with an example, and the one way out."""

from __future__ import annotations

import argparse
import logging
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from .exit_codes import guarded


def parser(verb: str, does: str, example: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=f"inpaint-bench {verb}",
        description=does,
        epilog=f"example:\n  inpaint-bench {verb} {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def run(
    parser: argparse.ArgumentParser,
    body: Callable[[argparse.Namespace], None],
    argv: Sequence[str] | None,
) -> int:
    options = parser.parse_intermixed_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    return guarded(lambda: body(options))


def run_whole(
    parser: argparse.ArgumentParser,
    body: Callable[[argparse.Namespace], None],
    argv: Sequence[str] | None,
) -> int:
    """`run` for a command whose result is whole or not there, also where SIGTERM or Ctrl-C ends it."""
    try:
        with _terminated():
            return run(parser, body, argv)
    except _Stopped as stopped:
        print(f"Stopped by {stopped}. Nothing half-written was left.", file=sys.stderr)
        return 128 + stopped.signal


class _Stopped(BaseException):
    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.signal = number


@contextmanager
def _terminated() -> Iterator[None]:
    """SIGTERM and Ctrl-C unwind, so that what is half-written is removed; a second one does not disturb that."""

    def stop(number: int, frame: FrameType | None) -> None:
        for ignored in (signal.SIGINT, signal.SIGTERM):
            signal.signal(ignored, signal.SIG_IGN)
        raise _Stopped(number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
