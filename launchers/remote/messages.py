"""Requests to the agent at a site and its replies: JSON, with every field checked when it is decoded.

Names, job ids and paths end up in the ledger and in file names here, so they may only hold characters that
mean nothing to a path or a shell.
"""

from __future__ import annotations

from msgspec import Raw, Struct

from launchers.sweep.attempt import Attempt, Number

MARKER = b"inpaint-bench: "  # begins the line of a reply: a login shell may print lines of its own


class Reply(Struct, kw_only=True):
    """Envelope of every reply."""

    error: str | None = None
    result: Raw = Raw(b"null")


class CancelRequest(Struct, kw_only=True):
    """Attempts to be cancelled; the reply is a list of errors."""

    attempts: list[tuple[Number, Number]]
    timeout_s: float  # how long to wait for a command at the site that is still submitting


class SweepReply(Struct, kw_only=True):
    """A sweep directory at a site."""

    sweep_id: str | None  # None: there is no sweep (any more)
    submitting: bool = False  # a command there holds the sweep's lock
    squeue: str = ""  # "ok", or why it did not answer
    sacct: str = ""
    attempts: list[Attempt] = []  # without what they request
    skipped: list[str] = []  # what is not copied, a sentence each
