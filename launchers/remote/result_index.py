"""What a bundle of results says of itself, believed only where it is well-formed: numbers, words, paths, times.

Whether it fits what a sweep knows is for `arrivals`. Here a single thing that no writer of ours would say refuses all.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from inpaint_bench.core.errors import UserError

from . import validate_reply
from .bundle import BundleError, Index
from .export import JOB, LEFT_THERE, LOG, RESULTS, travels

CLOCKS_APART_S = 86_400.0  # what was made later than this from now would pass for the newest until then

_RUN_FILE = re.compile(r"(0|[1-9]\d{0,6})/attempt-([1-9]\d{0,6})/(.+)", re.ASCII)
_PROCESS = re.compile(r"pid:\d{1,10}@[\w.-]{1,200}", re.ASCII)

Key = tuple[int, int]  # point and attempt


@dataclass(frozen=True, kw_only=True)
class Claims:
    made_unix: float
    attempts: dict[Key, dict[str, Any]]
    journals: frozenset[str]  # paths of all that were still there

    @property
    def origin(self) -> str:
        """The sites whose results they are."""
        return ",".join(sorted({facts["site"] for facts in self.attempts.values()})) or "nowhere"

    def owners(self, path: str) -> set[Key]:
        """The attempts that a file is of. A log is its job's, or else of all of its group; none: it does not belong."""
        if run := _RUN_FILE.fullmatch(path):
            key = (int(run[1]), int(run[2]))
            ours = travels(run[3]) and run[3].split("/")[0] not in LEFT_THERE
            return {key} & self.attempts.keys() if ours else set()
        if not (log := LOG.fullmatch(path)):
            return set()
        named = JOB.match(path.rpartition("/")[2])
        return self._by_array.get((log[1], named[1] if named else None)) or self._by_array.get((log[1], None), set())

    @cached_property
    def _by_array(self) -> dict[tuple[str, str | None], set[Key]]:
        """By group and job; with no job, all of a group."""
        found: dict[tuple[str, str | None], set[Key]] = {}
        for key, facts in self.attempts.items():
            for job in {facts["job_id"], None}:
                found.setdefault((facts["group"], job), set()).add(key)
        return found


def read(index: Index, sweep_id: str, *, site: str | None = None) -> Claims:
    """`site`: the only one whose attempts may be among them. Raises UserError."""
    head = index.head
    if head.get("kind") != RESULTS:
        raise BundleError("it holds no results (a plan goes to `launch --plan`)")
    if head.get("sweep_id") != sweep_id:
        raise UserError(f"this is sweep {sweep_id}, and these are results of {_said(head.get('sweep_id'))}")
    made_unix = head.get("made_unix")
    if (
        not isinstance(made_unix, int | float)
        or isinstance(made_unix, bool)
        or not 0 <= made_unix < validate_reply.LATEST
    ):
        raise BundleError("its list lacks the time at which it was made")
    if made_unix > time.time() + CLOCKS_APART_S:
        when = time.strftime("%Y-%m-%d %H:%M", time.gmtime(made_unix))
        raise BundleError(f"by its own word it was made at {when} UTC, which is yet to come: look at the clocks")
    journals = head.get("journals")
    if not isinstance(journals, list) or not all(isinstance(path, str) for path in journals):
        raise BundleError("its list lacks the journals")
    if not isinstance(head.get("attempts"), list):
        raise BundleError("its list lacks the attempts")
    for facts in head["attempts"]:
        try:
            _check(facts, of_ssh=site is not None)
        except (KeyError, TypeError, ValueError):
            raise BundleError("its list describes an attempt in a way that cannot be") from None
        if facts["site"] != (site or facts["site"]):
            raise BundleError(f"{site} was asked, and these results are of {facts['site']}")
    attempts = {(facts["point"], facts["attempt"]): facts for facts in head["attempts"]}
    if len(attempts) != len(head["attempts"]):
        raise BundleError("its list describes an attempt twice")
    claims = Claims(made_unix=made_unix, attempts=attempts, journals=frozenset(journals))
    for member in index.members:
        if not claims.owners(member.path):
            raise BundleError(f"{member.path}: not a file of the runs that it brings")
    return claims


def _check(facts: Any, *, of_ssh: bool) -> None:
    """Raises KeyError, TypeError, ValueError. A job is a task of Slurm's; in a file also a process of that machine."""
    for key in ("point", "attempt"):
        validate_reply.number(facts[key])
    for key in ("run_id", "site", "job_name"):
        if key != "job_name" or facts[key] is not None:
            validate_reply.word(facts[key])
    validate_reply.group(facts["group"])
    if of_ssh or not _PROCESS.fullmatch(str(facts["job_id"])):
        validate_reply.task(facts["job_id"])
    if validate_reply.line(facts["refused"]) and not facts["refused"].isprintable():
        raise ValueError("not a line")
    if not isinstance(facts["cancelled"], bool):
        raise ValueError("neither yes nor no")


def _said(value: Any) -> str:
    try:
        return validate_reply.word(value)
    except ValueError:
        return "something else"
