"""Results of another site, put into place in the sweep directory that sent for them.

A bundle reaches the run directories of its attempts and nothing else, and a file has its name only when it is whole and
verified. An attempt that contradicts what this sweep knows is left out, with all its files, and the reason is kept for
whoever asked. Doing it again changes nothing, and brings what was left out once it fits.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from inpaint_bench.core.console import pluralize
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.files import replacing
from inpaint_bench.telemetry.storage.journal import is_journal
from launchers.sweep.ledger import Attempt, Ledger

from . import result_index
from .bundle import Index, Member, Readable, Source, read_files, skip_over
from .digests import PART, Digests
from .export import LOGS
from .result_index import Claims, Key

FORGOTTEN_S = 3600  # a half-written file to which nothing was added for so long: its writer was killed
PATIENCE_S = 60.0  # for a command that is submitting
ROOM = 0.95  # of a disk that may be filled

KEPT = "what arrived is kept, `collect` goes on from there"

_HALF_WRITTEN = re.compile(r"\..+\.\d+\.tmp", re.ASCII)


@dataclass(kw_only=True)
class Received:
    """What a collect did."""

    runs: set[Key] = field(default_factory=set)  # with new files
    new: int = 0  # files
    kept: int = 0  # files that were here already, as they are
    older: int = 0  # files that are newer here
    bytes_new: int = 0
    left_out: dict[Key, str] = field(default_factory=dict)  # why

    def __str__(self) -> str:
        said = (
            "nothing new"
            if not self.new
            else f"{pluralize(self.new, 'new file')} of {pluralize(len(self.runs), 'run')}, {self.bytes_new:,} bytes"
        )
        said += f"; {self.kept} were here" if self.kept else ""
        return said + (f"; {self.older} are newer here" if self.older else "")


class Arrivals:
    """Takes bundles into a sweep, one after another; another `collect` into it is refused meanwhile.

    `site`: the one that is asked over ssh, whose attempts alone may come. None: a person brings a file.
    """

    def __init__(self, ledger: Ledger, *, site: str | None = None) -> None:
        self.received = Received()
        self._ledger, self._site = ledger, site
        self._root = ledger.folder.resolve()
        self._sweep, self._records = ledger.sweep, ledger.points()
        self._digests = Digests(ledger.folder)
        self._taken: Claims | None = None  # the last that brought something
        self._held = ExitStack()

    def __enter__(self) -> Arrivals:
        self._held.enter_context(_alone(self._ledger.folder))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        with self._held:
            self._digests.save()
            if self._taken is None:
                return
            with suppress(OSError) if error else nullcontext():  # what went wrong first is what is told
                self._ledger.append(
                    "collected",
                    origin=self._origin(self._taken),
                    made_unix=self._taken.made_unix,
                    files=self.received.new,
                )

    def have(self) -> dict[str, list[Any]]:
        """Size and SHA-256 by path of what is here of the site's attempts. What a killed collect left goes away."""
        attempts = [a for record in self._records.values() for a in record.attempts if a.site == self._site]
        found: dict[str, list[Any]] = {}
        for folder in (*(a.subdir for a in attempts), LOGS):  # arrays have other names there
            for file in _files(self._root / folder):
                path = file.relative_to(self._root).as_posix()
                with suppress(FileNotFoundError):
                    member = self._digests.of(Source(path=path, file=file))
                    found[path] = [member.size, member.sha256]
        return found

    def take(self, stream: Readable, index: Index) -> None:
        """Put the files of a bundle into place, one by one, each verified first.

        What is here already, byte for byte, is left; of what grows, the newer wins; a closed part that differs is never
        replaced, and its attempt left out from there on. Raises BundleError, UserError.
        """
        claimed = result_index.read(index, self._sweep["sweep_id"], site=self._site)
        try:
            self._know(claimed)
            self._check_room(index)
            # over ssh what comes is as of now; a file may have lain somewhere
            outdated = self._site is None and claimed.made_unix < self._newest(claimed)
            read_files(stream, index, partial(self._put, claimed, outdated))
            for key in claimed.attempts.keys() - self.received.left_out.keys() if not outdated else ():
                self._drop_journals(key, claimed)
        except OSError as error:
            raise UserError(f"{error.filename or self._ledger.folder}: {error.strerror}; {KEPT}") from None

    def _know(self, claimed: Claims) -> None:
        """Have every attempt in the ledger, or left out, before a file of it is here.

        A run directory of which the ledger does not tell is asked what it was: what another site wrote into it must
        never answer.
        """
        with ExitStack() as held:
            if claimed.attempts.keys() - self._known():
                # a `rerun` must not choose their numbers meanwhile
                held.enter_context(self._ledger.locked(patience_s=PATIENCE_S))
                self._records = self._ledger.points()
            for key, facts in claimed.attempts.items():
                if why := self._conflict(facts):
                    self.received.left_out[key] = why
            brought = sorted(claimed.attempts.keys() - self.received.left_out.keys())
            if brought:
                self._taken = claimed
            self._adopt({key: claimed.attempts[key] for key in brought if key not in self._known()})

    def _known(self) -> set[Key]:
        return {(a.point, a.attempt) for record in self._records.values() for a in record.attempts}

    def _conflict(self, facts: dict[str, Any]) -> str | None:
        """Why an attempt cannot be one of this sweep, as far as it is known here."""
        record = self._records.get(facts["point"])
        if record is None:
            return "this sweep has no such point"
        known = next((a for a in record.attempts if a.attempt == facts["attempt"]), None)
        at = known.site if known else record.site
        if facts["site"] != at:
            return f"it was sent to {at}, and these results are of {facts['site']}"
        if known and not known.carried and self._sweep["sites"][at]["connect"]["method"] != "ssh":
            return "it was sent from here; there is nothing to bring"
        if known and known.run_id != facts["run_id"]:
            return f"it is another run here ({known.run_id})"
        return None

    def _check_room(self, index: Index) -> None:
        to_come = sum(member.size for member in index.members if not self._is_of_size(member))
        free = shutil.disk_usage(self._root).free
        if to_come > ROOM * free:
            raise UserError(f"{self._ledger.folder}: {to_come:,} bytes are to come and {free:,} are free; {KEPT}")

    def _put(self, claimed: Claims, outdated: bool, member: Member, chunks: Iterator[bytes]) -> None:
        owners, target = claimed.owners(member.path), self._root / member.path
        if owners <= self.received.left_out.keys():
            skip_over(chunks)
            return
        if target.parent.resolve() != target.parent:
            raise UserError(f"{target.parent}: leads elsewhere by a link; nothing is put there")
        if target.is_symlink() or target.exists():
            same = self._is_of_size(member) and _sha256(target) == member.sha256
            if not same and member.path.endswith(PART):
                why = f"{target}: a closed part differs from the one that was to come; nothing replaces it"
                self.received.left_out.update(dict.fromkeys(owners, why))
            if same or outdated or member.path.endswith(PART):
                skip_over(chunks)
                self.received.kept += same
                self.received.older += not same and outdated
                return
        elif outdated and is_journal(target.name):  # it is a part by now
            skip_over(chunks)
            self.received.older += 1
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as out:
            for chunk in chunks:
                out.write(chunk)
        self._digests.arrived(member.path, member.sha256)
        self.received.new += 1
        self.received.bytes_new += member.size
        if not member.path.startswith(f"{LOGS}/"):
            self.received.runs |= owners

    def _is_of_size(self, member: Member) -> bool:
        try:
            seen = (self._root / member.path).lstat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        return stat.S_ISREG(seen.st_mode) and seen.st_size == member.size

    def _drop_journals(self, key: Key, claimed: Claims) -> None:
        """A journal that is no more became a part, which is here by now: its rows would count twice."""
        run_dir = self._root / f"{key[0]}" / f"attempt-{key[1]}"
        if run_dir.resolve() != run_dir:
            return
        for file in run_dir.rglob("*"):
            if is_journal(file.name) and file.relative_to(self._root).as_posix() not in claimed.journals:
                file.unlink()

    def _adopt(self, new: dict[Key, dict[str, Any]]) -> None:
        """Write attempts into the ledger that were made elsewhere: from a plan, or by a `rerun` there.

        What a point asks for stays as it was asked here: `rerun` composes it, which could run anything.
        """
        for key, facts in new.items():
            record, pair = self._records[key[0]], list(key)
            self._ledger.append(
                "planned",
                group=facts["group"],
                job_name=facts["job_name"],
                site=facts["site"],
                carried=self._site is None,
                points=[[*pair, facts["run_id"]]],
                asked=[{"overrides": record.overrides, "gpu": record.gpu, "batch": record.batch}],
            )
            if facts["job_id"]:
                self._ledger.append("submitted", group=facts["group"], job_id=facts["job_id"], points=[pair])
            if facts["refused"]:
                self._ledger.append("refused", group=facts["group"], points=[pair], message=facts["refused"])
            if facts["cancelled"]:
                self._ledger.append("cancelled", points=[pair])
            words = {
                name: facts[name] for name in ("run_id", "site", "group", "job_name", "job_id", "refused", "cancelled")
            }
            record.attempts.append(
                Attempt(point=key[0], attempt=key[1], planned_unix=time.time(), carried=self._site is None, **words)
            )

    def _newest(self, claimed: Claims) -> float:
        """When the newest results that came from there were taken there."""
        notes = (note for note in self._ledger.notes("collected") if note["origin"] == self._origin(claimed))
        return max((note["made_unix"] for note in notes), default=0.0)

    def _origin(self, claimed: Claims) -> str:
        return self._site or claimed.origin


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    with (folder / ".collect.lock").open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{folder}: another `collect` is bringing results into it; wait for it") from None
        except OSError:
            pass  # a file system without locks
        yield


def _files(folder: Path) -> Iterator[Path]:
    """Plain files below a folder that is no link. What a killed collect left half-written goes away."""
    if folder.resolve() != folder:
        return
    for here, _, names in os.walk(folder):
        for file in (Path(here, name) for name in names):
            try:
                seen = file.lstat()
            except FileNotFoundError:  # `status` has just renamed it
                continue
            if _HALF_WRITTEN.fullmatch(file.name) and time.time() - seen.st_mtime > FORGOTTEN_S:
                file.unlink(missing_ok=True)
            elif stat.S_ISREG(seen.st_mode):
                yield file


def _sha256(target: Path) -> str:
    with target.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
