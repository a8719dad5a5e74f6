"""Errors that end a command with one or two sentences instead of a traceback."""

from __future__ import annotations

import errno

# Of a network file system that does not answer, or whose ticket has expired: they say nothing of what lies there.
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
