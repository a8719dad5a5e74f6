"""Our side of an ssh connection: `python -m launchers.remote_agent VERB`, run at the site from the code sent there.

The question is JSON on standard input. The answer is marked lines of JSON on standard output, `end` the last of them;
whatever else is printed goes to standard error. Only the sweep's own directory there is read or written.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from inpaint_bench.core.errors import PointsFailedError, UserError
from inpaint_bench.core.paths import ROOT
from inpaint_bench.core.schema import CODE, SWEEP, PointState
from launchers.remote.client import ALIVE, BUNDLE, CANCEL, END, EXPORT, LEFT, LOOK, MARK, SUBMIT
from launchers.remote.digests import Digests
from launchers.status.survey import cancellable, poll_sweep, sites_of
from launchers.sweep.ledger import Ledger
from launchers.sweep.lock import BUSY, BusyError

from .remote import bundle
from .remote import export as carry
from .slurm import query
from .sweep import snapshot

if TYPE_CHECKING:
    from launchers.points.point import Point

Lines = Iterator[dict[str, Any]]

BEAT_S = 1.0  # between two signs of life


def submit(request: dict[str, Any]) -> Lines:
    """Send those of the points that are not here yet, and say of each what became of it.

    A request may come late, or twice: no point is sent again whose attempt is known, is open or has completed. What is
    wrong with it is said of every point, for then none was sent. Raises BusyError where another command may be sending
    these very points.
    """
    folder = Path(request["root"])
    instead: dict[int, str] = {}
    why = "it was not sent"
    try:
        _send(request, instead)
    except BusyError:
        raise
    except Exception as error:
        why = _sentence(error)
    records = Ledger(folder).points() if (folder / SWEEP).is_file() else {}
    for asked in request["points"]:
        record = records.get(asked["num"])
        found = next((a for a in (record.attempts if record else []) if a.run_id == asked["run_id"]), None)
        refused = found.refused if found else instead.get(asked["num"], why)
        yield {
            "kind": "attempt",
            "point": asked["num"],
            "attempt": asked["attempt"],
            "job_id": found.job_id if found else None,
            "refused": refused,
        }


def _send(request: dict[str, Any], instead: dict[int, str]) -> None:
    """`instead` gets, by point, why it was left out. Raises what `send` raises, but for points that were refused."""
    from inpaint_bench.run.task import task  # Hydra only where points are composed
    from launchers.points.compose import composer
    from launchers.points.repetitions import Order
    from launchers.submit.submit import Sending, new_sweep, send
    from launchers.sweep.launch_context import Surroundings

    folder, site = Path(request["root"]), request["site"]
    _check_code(folder)
    ledger = Ledger(folder)
    around = replace(Surroundings.recorded(request["surroundings"]), working_dir=str(Path.cwd()))
    with composer(around) as compose:

        def choose() -> list[Point]:
            standings = poll_sweep(ledger, holding_lock=True).points if (folder / SWEEP).is_file() else []
            known = {s.record.num: s for s in standings}
            points = []
            for asked in request["points"]:
                standing = known.get(asked["num"])
                last = standing.record.last if standing else None
                if standing and last and last.attempt >= asked["attempt"]:
                    instead[asked["num"]] = f"attempt {last.attempt} was sent before"
                    continue
                if standing and (standing.is_open or standing.state is PointState.COMPLETED):
                    instead[asked["num"]] = f"attempt {last.attempt if last else 0} is {standing.state} there"
                    continue
                overrides = [one for one in asked["overrides"] if not one.startswith("site=")]
                # whoever sent us here knows that this is the site, whatever the machine is called
                point = compose(asked["num"], [*overrides, f"site={site}", f"sites.{site}.connect.hostnames=['.*']"])
                if not point.reachable:
                    raise UserError(f"{site} cannot be reached from its own machine ({point.why})")
                point.attempt, point.run_id = asked["attempt"], asked["run_id"]
                points.append(point)
            return points

        order = Order.recorded(request["order"])
        sweep = None if (folder / SWEEP).is_file() else new_sweep(request["sweep_id"], order=order, around=around)
        sending = Sending(folder=folder, hydra_context=compose.context, task_function=task, sweep=sweep, capped=True)
        with suppress(PointsFailedError):  # the ledger has it of each
            send(choose, sending)


def answer(request: dict[str, Any]) -> Lines:
    """What the witnesses here say of every attempt; whoever asked weighs them."""
    ledger = Ledger(Path(request["root"]))
    busy = ledger.busy()  # before the look: what was submitted meanwhile is then seen
    if not (ledger.folder / SWEEP).is_file():
        yield {"kind": "answer", "squeue": "", "sacct": "", "busy": busy, "sweep": False}
        return
    sweep = poll_sweep(ledger)
    site = next(iter(sweep.answers.values()), query.Answer())
    yield {"kind": "answer", "squeue": site.squeue, "sacct": site.sacct, "busy": busy, "sweep": True}
    for tried in (tried for standing in sweep.points for tried in standing.attempts):
        attempt = tried.attempt
        yield {
            "kind": "attempt",
            "point": attempt.point,
            "attempt": attempt.attempt,
            "run_id": attempt.run_id,
            "group": attempt.group,
            "job_id": attempt.job_id,
            "refused": attempt.refused,
            "cancelled": attempt.cancelled,
            "word": None if tried.scheduler is None else asdict(tried.scheduler),
            "left": asdict(tried.artifacts),
        }


def cancel(request: dict[str, Any]) -> Lines:
    """Also what a command that is still submitting here sends, as far as that ends within `patience_s`."""
    ledger = Ledger.open(Path(request["root"]))
    asked = {(point, attempt) for point, attempt in request["points"]}
    busy = ledger.busy()  # before the look: what was submitted meanwhile is then seen
    complaints = _stop(ledger, asked)
    if busy:
        try:
            with ledger.locked(patience_s=request["patience_s"]):
                complaints = _stop(ledger, asked, holding_lock=True)
        except BusyError:
            complaints.append(f"a command there {BUSY}, and has not ended: cancel again when it has")
    yield from ({"kind": "complaint", "message": message} for message in complaints)


def _stop(ledger: Ledger, asked: set[tuple[int, int]], *, holding_lock: bool = False) -> list[str]:
    """What went wrong."""
    standings = [s for s in poll_sweep(ledger, holding_lock=holding_lock).points if s.is_open]
    tries = [t.attempt for s in standings for t in s.attempts if (t.attempt.point, t.attempt.attempt) in asked]
    sites, complaints = sites_of(ledger), []
    for site in sorted({attempt.site for attempt in tries}):
        mine, others = cancellable(sites[site], [attempt for attempt in tries if attempt.site == site])
        complaints += others
        ledger.append("cancelled", points=[[a.point, a.attempt] for a in mine])
        jobs = [attempt.job_id for attempt in mine if attempt.job_id]
        if jobs and (complaint := query.cancel(sites[site], jobs)):
            complaints.append(complaint)
    return complaints


def export(request: dict[str, Any], out: BinaryIO) -> None:
    """A bundle for every attempt, each after its marked line: what arrived is in place there, however this ends.

    Attempts without anything new have one too, with what became of them and of their journals. While files are read,
    and nothing can be sent yet, a line now and then says that we live, and ends us where nobody is left to read it.
    """
    spoken = time.monotonic()

    def beat() -> None:
        nonlocal spoken
        if time.monotonic() - spoken > BEAT_S:
            spoken = time.monotonic()
            _put(out, {"kind": ALIVE})

    ledger, made_unix = Ledger.open(Path(request["root"])), time.time()
    _put(out, {"kind": ALIVE})
    standings, sweep_id = poll_sweep(ledger).points, ledger.sweep["sweep_id"]
    unfinished = {standing.record.num for standing in standings if standing.is_open}
    digests = Digests(ledger.folder, beat)
    try:
        for run in carry.outgoing(ledger.folder, [standing.record for standing in standings], unfinished):
            if run.facts["site"] != request["site"]:
                which = "point {point}, attempt {attempt}: was run at {site}".format_map(run.facts)
                _put(out, {"kind": LEFT, "message": f"{which}, and {request['site']} was asked"})
                continue
            for message in run.unfit:
                _put(out, {"kind": LEFT, "message": message})
            contents = carry.contents(run.sources, digests, have=request["have"])
            out.write(MARK + BUNDLE)
            try:
                bundle.write(out, carry.head(sweep_id, [run], made_unix), contents)
            except bundle.ChangedError:
                digests.forget(member.path for _, member in contents)
                raise
            out.flush()
            spoken = time.monotonic()
    finally:
        digests.save()
    _put(out, {"kind": END})


def _sentence(error: Exception) -> str:
    """Raises what is a bug of ours."""
    if isinstance(error, UserError):
        return str(error)
    if type(error).__module__.split(".")[0] not in ("hydra", "omegaconf"):
        raise error
    from inpaint_bench.core.hydra_support import explain

    return explain(error)


def _check_code(folder: Path) -> None:
    """What runs here is, to the last byte, what it is named after."""
    wanted = snapshot.would_be(folder / CODE)
    if wanted.resolve() != ROOT:
        raise UserError(f"{ROOT}: the code there is not what was sent; remove that folder and send again")


def _put(out: BinaryIO, line: dict[str, Any]) -> None:
    out.write(MARK + json.dumps(line).encode() + b"\n")
    out.flush()


def main(argv: list[str]) -> int:
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # tables and log lines are not part of the answer
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    request = json.load(sys.stdin)
    try:
        out.write(b"\n")  # a login shell may have left a line open
        if argv == [EXPORT]:
            export(request, out)
        else:
            for line in {SUBMIT: submit, LOOK: answer, CANCEL: cancel}[argv[0]](request):
                _put(out, line)
            _put(out, {"kind": END})
    except Exception as error:
        said = _sentence(error)
        print(said, file=sys.stderr)  # in the middle of a bundle nobody reads lines
        _put(out, {"kind": "error", "message": said})
        return 2
    finally:
        out.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
