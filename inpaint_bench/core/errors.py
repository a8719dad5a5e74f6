"""Errors that end a command with one or two sentences instead of a traceback."""

import errno

# A network file system does not answer, or its ticket has expired: such an error does not say what lies there.
_NAMES = "EIO ESTALE ETIMEDOUT ENOTCONN ESHUTDOWN EHOSTDOWN EREMOTEIO ENOLINK ECOMM EKEYEXPIRED EKEYREVOKED ENOKEY"
UNREACHABLE = frozenset(number for number, name in errno.errorcode.items() if name in _NAMES.split())


class UserError(Exception):
    """A user's mistake: what was wrong, where, and what would be right."""

    exit_code = 2


class PointsFailedError(Exception):
    """Points failed, or were not submitted or collected, or their state is unknown."""

    exit_code = 1


class UnavailableError(UserError):
    """A request that this machine cannot fulfil, with the reason: a result, not a failure of the benchmark."""


def undecodable_byte(error: UnicodeDecodeError) -> tuple[int, str]:
    """Return the line of the byte that cannot be decoded, and which it is: `byte 0xe4 is not UTF-8`."""
    content = error.object  # without a byte order mark, from whose end `error.start` counts
    line, encoding = content.count(b"\n", 0, error.start) + 1, error.encoding.upper()
    return line, f"byte {content[error.start]:#04x} is not {encoding}"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, with the next if it only announces that, or its type."""
    lines = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1])
