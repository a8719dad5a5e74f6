"""A user's mistake: one or two sentences, exit code 2, no traceback."""

from __future__ import annotations


class UserError(Exception):
    """What was wrong, where, and what would be right."""

    exit_code = 2


class PointsFailedError(Exception):
    """Points that were waited for did not complete, were not sent or fetched, or are unknown: which was said."""


class UnavailableError(UserError):
    """What was asked for cannot run on this machine, and why: a result, not a failure of the benchmark."""
