"""What is asked of a site over ssh, where our own command (`there`) does it: submitting, looking, cancelling.

The sweep's folder there is a sweep directory in its own right, with a ledger that knows what was submitted; so a
connection that breaks loses nothing, and asking twice submits nothing twice. A site that does not answer is a missing
witness: what it holds is then unknown, never lost.
"""

from __future__ import annotations

import io
import json
import logging
import shlex
import shutil
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inpaint_bench.core.attempt_state import RunArtifacts, SchedulerState
from inpaint_bench.core.console import pluralize
from inpaint_bench.core.schema import CODE, SNAPSHOT, Status
from inpaint_bench.core.site import SiteConfig
from launchers.points.group import Group
from launchers.points.point import Point
from launchers.slurm.query import Answer
from launchers.sweep.launch_context import Surroundings
from launchers.sweep.ledger import Attempt, Ledger, PointRecord

from . import validate_reply
from .ssh import Connection, Stream, UnreachableError, login, printable, shell

log = logging.getLogger(__name__)

MARK = b"inpaint-bench: "  # begins our lines: a login shell may print others
MODULE = "launchers.remote_agent"
BUNDLE = b"bundle\n"  # after it, nothing but one, and then marked lines again
ALIVE, LEFT, END = "alive", "left", "end"  # kinds of those: nothing new, what stays there, nothing follows
GREETING_LINES = 1000  # of a login shell, at most
SUBMIT, LOOK, CANCEL, EXPORT = "submit", "look", "cancel", "export"
SUBMIT_PATIENCE = 30  # times the site's time-out; a thousand points are composed there
MAX_LEFT = 1000  # files of which it says why they stay there
LOOK_PATIENCE = 3  # squeue and sacct have a minute each


class RemoteError(Exception):
    """The site was reached, and what was asked was not done; the text says why."""


@dataclass(frozen=True)
class Unreached(Answer):
    """Of a site that could not be asked."""

    why: str = ""

    @property
    def silence(self) -> str:
        return self.why


@dataclass(frozen=True, kw_only=True)
class Place:
    """A sweep's folder at a site, and the snapshot there that our command runs from."""

    site: SiteConfig
    root: str
    code: str

    def command(self, verb: str) -> str:
        assert self.site.python is not None
        path = f"{self.root}/{CODE}/{self.code}"
        return shell([self.site.python, "-m", MODULE, verb], PYTHONPATH=path, PYTHONSAFEPATH="1")

    def ask(self, verb: str, request: Mapping[str, Any], *, patience: float = LOOK_PATIENCE) -> list[dict[str, Any]]:
        """The lines of the answer. Raises UnreachableError, RemoteError."""
        stdin = json.dumps({"root": self.root, **request}).encode()
        answer = Connection(self.site.connect).run(self.command(verb), stdin=stdin, patience=patience)
        try:
            lines = [json.loads(line[len(MARK) :]) for line in answer.out.splitlines() if line.startswith(MARK)]
            kinds = [line["kind"] for line in lines]
        except (ValueError, TypeError, KeyError, RecursionError):
            raise RemoteError(f"{self.site.name}: its answer cannot be read") from None
        for line in lines:
            if line["kind"] == "error":
                raise RemoteError(f"{self.site.name}: {printable(str(line.get('message')))}")
        if kinds[-1:] != ["end"]:
            said = answer.err or f"exit code {answer.code}"
            raise RemoteError(f"{self.site.name}: our command there did not come to its end ({said})")
        return lines[:-1]


@dataclass(frozen=True, kw_only=True)
class Told:
    """What the sites said that are asked over ssh."""

    answers: dict[str, Answer] = field(default_factory=dict)
    artifacts: dict[tuple[int, int], RunArtifacts] = field(default_factory=dict)  # by point and attempt
    silent: dict[str, str] = field(default_factory=dict)  # why a site did not say what was submitted


def place(site: SiteConfig, ledger: Ledger) -> Place | None:
    """Where the sweep lies there; None before anything was staged."""
    for record in reversed(ledger.notes("staged")):
        if record["site"] == site.name:
            return Place(site=site, root=record["root"], code=record["code"])
    return None


def connect(points: Iterable[Point]) -> None:
    """Open the connections that these points need; those of a site that does not answer are marked out of reach."""
    tried: dict[str, str | None] = {}
    for point in points:
        if not point.reachable or point.site.connect.method != "ssh":
            continue
        if point.site.name not in tried:
            try:
                Connection(point.site.connect).open()
                tried[point.site.name] = None
            except UnreachableError as error:
                tried[point.site.name] = str(error)
        if why := tried[point.site.name]:
            point.reachable, point.why = False, why


def submit(groups: Sequence[Group], ledger: Ledger, code: Path) -> tuple[int, bool]:
    """Have the groups of one site submitted there, and write down what became of them.

    Returns how many points were not taken as far as is known, and whether that is because no word of them came back:
    of those `status` knows once the site answers.
    """
    site = groups[0].first.site
    points = [point for group in groups for point in group.points]
    sweep = ledger.sweep
    at = Place(site=site, root=root_of(site, sweep["sweep_id"]), code=code.name)
    request = {
        "sweep_id": sweep["sweep_id"],
        "order": sweep.get("order"),
        "site": site.name,
        "surroundings": Surroundings.recorded(sweep.get("surroundings")).elsewhere().record(),
        "points": [
            {"num": p.num, "attempt": p.attempt, "run_id": p.run_id, "overrides": _as_planned(p)} for p in points
        ],
    }
    try:
        _stage(at, code)
    except (UnreachableError, RemoteError) as error:
        log.error(f"{error}. Nothing of its {pluralize(len(points), 'point')} was sent; `rerun` does that.")
        return len(points), False
    ledger.append("staged", site=site.name, root=at.root, code=at.code)
    try:
        became = _became(at.ask(SUBMIT, request, patience=SUBMIT_PATIENCE), site.name)
    except (UnreachableError, RemoteError) as error:
        its = pluralize(len(points), "point")
        log.error(f"{error}. What became of its {its} is not known; `status` tells once it answers.")
        return len(points), True
    return _write_down(became, points, groups[0].name, ledger, site.name), False


def _as_planned(point: Point) -> list[str]:
    """Its overrides, but that what was worked out here, from the runs that lie here, is not worked out again there."""
    return [*point.overrides, *([f"time_min={point.request.time_min}"] if point.limit_basis else [])]


def root_of(site: SiteConfig, sweep_id: str) -> str:
    assert site.connect.folder is not None
    return f"{site.connect.folder.rstrip('/')}/{sweep_id}"


def _became(lines: list[dict[str, Any]], site: str) -> dict[tuple[int, int], tuple[str | None, str | None]]:
    """By point and attempt: the job that it is, and why it is none. Raises RemoteError."""
    try:
        return {
            (validate_reply.number(line["point"]), validate_reply.number(line["attempt"])): (
                validate_reply.task(line["job_id"]),
                validate_reply.line(line["refused"]),
            )
            for line in lines
            if line["kind"] == "attempt"
        }
    except (KeyError, ValueError):
        raise RemoteError(f"{site}: its answer cannot be read") from None


def _write_down(
    became: Mapping[tuple[int, int], tuple[str | None, str | None]],
    points: list[Point],
    group: str,
    ledger: Ledger,
    site: str,
) -> int:
    arrays: dict[str, dict[int, list[int]]] = {}
    refused: dict[str, list[list[int]]] = {}
    for point in points:
        pair, (job_id, why) = [point.num, point.attempt], became.get((point.num, point.attempt), (None, None))
        if job_id:
            array, _, task = job_id.partition("_")
            arrays.setdefault(array, {})[int(task)] = pair
        else:
            refused.setdefault(why or "it did not say why", []).append(pair)
    for array, tasks in arrays.items():
        whole = sorted(tasks) == list(range(len(tasks)))
        runs = [([tasks[t] for t in sorted(tasks)], "%a")] if whole else [([p], str(t)) for t, p in tasks.items()]
        for pairs, task in runs:
            ledger.append("submitted", group=group, job_id=f"{array}_{task}", points=pairs)
        log.info(f"{site}: array {array} with {pluralize(len(tasks), 'point')}, over ssh")
    for message, pairs in refused.items():
        ledger.append("refused", group=group, points=pairs, message=f"{site}: {message}")
        log.error(f"{site}: {message}. `rerun`, with what is to change, sends its {pluralize(len(pairs), 'point')}.")
    return sum(map(len, refused.values()))


def look(ledger: Ledger, sites: Mapping[str, SiteConfig], records: Mapping[int, PointRecord]) -> Told:
    """One question to each site that is reached over ssh and has something open. Attempts get the job ids, and points
    the attempts, that only the site knows of."""
    told = Told()
    for name, site in sites.items():
        attempts = [a for r in records.values() for a in r.attempts if a.site == name and not a.carried]
        at = place(site, ledger) if site.connect.method == "ssh" else None
        if at is None or all(_settled(ledger.folder / a.subdir) for a in attempts):
            continue
        try:
            _hear(at.ask(LOOK, {}), at, attempts, records, told)
        except (UnreachableError, RemoteError) as error:
            told.answers[name] = Unreached(why=str(error))
            told.silent[name] = str(error)
            unseen = [a for a in attempts if not (ledger.folder / a.subdir).is_dir()]
            # the run directory may exist there
            told.artifacts.update({(a.point, a.attempt): RunArtifacts() for a in unseen})
    return told


def _settled(run_dir: Path) -> bool:
    """What was brought here tells how it ended."""
    word = SchedulerState.load(run_dir)
    return word is not None and word.final and RunArtifacts.read(run_dir).manifest is not None


def _hear(
    lines: list[dict[str, Any]],
    at: Place,
    attempts: list[Attempt],
    records: Mapping[int, PointRecord],
    told: Told,
) -> None:
    site, mine = at.site.name, {(a.point, a.attempt): a for a in attempts}
    said: dict[str, SchedulerState] = {}
    try:
        (answer,) = (line for line in lines if line["kind"] == "answer")
        for line in (line for line in lines if line["kind"] == "attempt"):
            key = (validate_reply.number(line["point"]), validate_reply.number(line["attempt"]))
            run_id, group = validate_reply.word(line["run_id"]), validate_reply.group(line["group"])
            attempt = mine.get(key) or _made_there(key, run_id, group, site, records)
            if attempt is None or attempt.run_id != run_id:
                continue
            attempt.job_id = validate_reply.task(line["job_id"]) or attempt.job_id
            attempt.refused = attempt.refused or validate_reply.line(line["refused"])
            attempt.cancelled = attempt.cancelled or line["cancelled"] is True
            if attempt.job_id and line["word"] is not None:
                said[attempt.job_id] = validate_reply.scheduler_word(line["word"])
            left = validate_reply.leavings(line["left"])
            if left.manifest is not None and left.manifest["status"] in list(Status):
                told.artifacts[key] = left
        squeue, sacct = (printable(str(answer[name])) for name in ("squeue", "sacct"))
        told.answers[site] = Answer(words=said, squeue=squeue, sacct=sacct)
        if answer["sweep"] is not True:
            told.answers[site] = Unreached(why=f"{at.root} at {site} holds no sweep (any more)")
        busy = answer["busy"] is True
    except (KeyError, TypeError, ValueError, AttributeError):
        raise RemoteError(f"{site}: its answer cannot be read") from None
    if busy and any(attempt.job_id is None and not attempt.refused for attempt in attempts):
        told.silent[site] = f"{site} is still submitting"


def _made_there(
    key: tuple[int, int], run_id: str, group: str, site: str, records: Mapping[int, PointRecord]
) -> Attempt | None:
    """An attempt that somebody sent from the sweep's folder there, later than those that we know of."""
    record = records.get(key[0])
    if record is None or (record.last and record.last.attempt >= key[1]):
        return None
    attempt = Attempt(point=key[0], attempt=key[1], run_id=run_id, site=site, group=group, planned_unix=0.0)
    record.attempts.append(attempt)
    return attempt


def cancel(site: SiteConfig, ledger: Ledger, attempts: Iterable[Attempt], *, patience_s: float) -> str | None:
    """None, or what went wrong. `patience_s`: for a command there that is still submitting."""
    at = place(site, ledger)
    if at is None:
        return None  # nothing of it ever left this machine
    request = {"points": [[a.point, a.attempt] for a in attempts], "patience_s": patience_s}
    try:
        lines = at.ask(CANCEL, request, patience=LOOK_PATIENCE + patience_s / site.connect.timeout_s)
    except (UnreachableError, RemoteError) as error:
        return str(error)
    said = [printable(str(line.get("message"))) for line in lines if line["kind"] == "complaint"]
    return f"{site.name}: {'; '.join(said)}" if said else None


def results(at: Place, have: Mapping[str, Any]) -> Stream:
    """The sweep's results there, less what we have: bundles, each after `another`. Raises UnreachableError."""
    stdin = json.dumps({"root": at.root, "site": at.site.name, "have": have}).encode()
    return Connection(at.site.connect).stream(at.command(EXPORT), stdin=stdin)


def another(stream: Stream, at: Place, left: list[str]) -> bool:
    """Read on to the next bundle; False after the last. `left` gets what the site says of files that stay there.

    Raises RemoteError, and UnreachableError where the connection ended in between.
    """
    name, strange = at.site.name, 0
    while line := stream.read_line():
        if line == MARK + BUNDLE:
            return True
        if not line.startswith(MARK):  # of a login shell
            strange += 1
            if strange > GREETING_LINES:
                break
            continue
        try:
            said = json.loads(line[len(MARK) :])
            kind, message = said["kind"], printable(str(said.get("message")))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise RemoteError(f"{name}: its answer cannot be read") from None
        if kind == END:
            return False
        if kind == "error":
            raise RemoteError(f"{name}: {message}")
        if kind == LEFT and len(left) < MAX_LEFT:
            left.append(message)
    raise UnreachableError(f"{name}: sent no more results ({stream.last_words() or 'it did not say why'})")


def _stage(at: Place, code: Path) -> None:
    """The snapshot, once: named after its content, and under that name only when it is whole."""
    connection, folder = Connection(at.site.connect), shlex.quote(f"{at.root}/{CODE}")
    partial, python = f".{at.code}.partial", shlex.quote(str(at.site.python))
    make = f"mkdir -p {shlex.quote(at.root)} && umask 077 && mkdir -p {folder} && cd {folder} && echo lies here"
    see = f"test -e {at.code}/{SNAPSHOT} && echo has it; command -v rsync; test -x {python} || echo lacks python"
    seen = connection.run(login(f"{make} && {{ {see}; }}"))
    said = seen.out.decode(errors="replace").splitlines()
    if "lies here" not in said:
        raise RemoteError(f"{at.site.name}: {at.root} cannot be made there ({seen.err or 'it did not say why'})")
    if "lacks python" in said:
        raise RemoteError(f"{at.site.name}: {at.site.python} is no program there (python in the site's file)")
    if "has it" in said:
        return
    publish = f"cd {folder} && mv -T {partial} {at.code}"
    if any(line.endswith("/rsync") for line in said) and shutil.which("rsync"):
        connection.push(code, f"{at.root}/{CODE}/{partial}")
        done = connection.run(login(publish))
    else:
        fresh = f"cd {folder} && rm -rf {partial} && mkdir {partial} && tar -x -f - -C {partial}"
        done = connection.run(login(f"{fresh} && {publish}"), stdin=_tar(code), patience=SUBMIT_PATIENCE)
    if done.code:
        raise RemoteError(f"{at.site.name}: the code could not be put into {at.root} ({done.err})")


def _tar(folder: Path) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        archive.add(folder, arcname=".")
    return out.getvalue()
