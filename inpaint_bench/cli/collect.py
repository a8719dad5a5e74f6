"""`collect`: bring here what another site measured, over ssh, or in a file that someone carries."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from inpaint_bench.core.console import pluralize
from inpaint_bench.core.errors import PointsFailedError, UserError
from inpaint_bench.core.files import read_json, replacing
from inpaint_bench.core.schema import SWEEP
from launchers.remote import bundle, client, plan_file
from launchers.remote import export as exporting
from launchers.remote.digests import Digests
from launchers.remote.import_results import Arrivals
from launchers.remote.ssh import UnreachableError
from launchers.status.survey import poll_sweep, sites_of
from launchers.sweep.ledger import Ledger

RUN_INDEX_BYTES = 16 << 20  # the list of one run's files, at most
NEWS_S = 30.0  # between two lines of how far it has come


def run_collect(source: Path, *, export: Path | None, into: Path | None) -> None:
    """Collect results of other sites into a sweep, export them, or unpack an exported file.

    Raises UserError where a site fails, PointsFailedError where something was left out.
    """
    if export:
        _export(Ledger.open(source), export)
    elif source.is_file():
        _from_file(source, into)
    elif into:
        raise UserError(f"--into {into}: needs a file that --export wrote, and {source} is not a file")
    else:
        _from_sites(Ledger.open(source))


def _from_sites(ledger: Ledger) -> None:
    complaints, asked, left_out = [], 0, 0
    for name, site in sorted(sites_of(ledger).items()):
        at = client.place(site, ledger) if site.connect.method == "ssh" else None
        if at is None:
            continue
        asked += 1
        try:
            left_out += _from_site(ledger, at)
        except (UnreachableError, client.RemoteError) as error:
            complaints.append(f"{error}; what arrived is kept, `collect` goes on from there")
        except UserError as error:
            complaints.append(f"{name}: {error}")
    waiting = sorted({str(record.plan) for record in ledger.points().values() if record.plan})
    if waiting:
        print(f"{', '.join(waiting)}: where it was run, `collect --export FILE`; here then, `collect FILE`.")
    elif not asked:
        print("Nothing to bring: no point of this sweep was sent over ssh, and none waits in a plan.")
    if complaints:
        raise UserError("; ".join(complaints))
    _all_came(left_out)


def _from_site(ledger: Ledger, at: client.Place) -> int:
    """How much was left out."""
    name, spoken = at.site.name, time.monotonic()
    stays: list[str] = []
    with Arrivals(ledger, site=name) as arrivals, client.results(at, arrivals.have()) as stream:
        try:
            while client.another(stream, at, stays):
                arrivals.take(stream, bundle.read_index(stream, max_bytes=RUN_INDEX_BYTES))
                if time.monotonic() - spoken > NEWS_S:
                    spoken = time.monotonic()
                    print(f"{name}: {arrivals.received}, so far", flush=True)
        except bundle.CutError:
            words = stream.last_words() or "the connection ended"
            raise UnreachableError(f"{name}: what it was sending broke off ({words})") from None
    print(f"{name}: {arrivals.received}")
    return _tell(arrivals.received.left_out, stays)


def _from_file(path: Path, into: Path | None) -> None:
    index = bundle.verify(path)
    if index.head.get("kind") == plan_file.KIND:
        raise UserError(f"{path}: is a plan; where it is to run: {plan_file.command(path.name)}")
    ledger = Ledger.open(into) if into else _owner(path, index)
    with Arrivals(ledger) as arrivals, path.open("rb") as stream:
        arrivals.take(stream, bundle.read_index(stream))
    print(f"{path}: {arrivals.received}, into {ledger.folder}")
    _all_came(_tell(arrivals.received.left_out, []))


def _tell(left_out: Mapping[tuple[int, int], str], stays: Sequence[str]) -> int:
    """A line for each; how many there are."""
    for (point, attempt), why in sorted(left_out.items()):
        print(f"  left out: point {point}, attempt {attempt}: {why}")
    for why in stays:
        print(f"  left there: {why}")
    return len(left_out) + len(stays)


def _all_came(left_out: int) -> None:
    if left_out:
        raise PointsFailedError("not everything was brought; what was left out, and why, is said above")


def _owner(path: Path, index: bundle.Index) -> Ledger:
    """The one sweep directory below ./runs that the results belong to."""
    found = []
    for pattern in (f"*/{SWEEP}", f"*/*/{SWEEP}"):
        for file in sorted(Path("runs").glob(pattern)):
            try:
                sweep = read_json(file)
            except ValueError:
                continue
            if isinstance(sweep, dict) and sweep.get("sweep_id") == index.head.get("sweep_id"):
                found.append(file.parent)
    if len(found) != 1:
        why = f"several sweeps below ./runs are it ({', '.join(map(str, found))})" if found else "not below ./runs"
        raise UserError(f"{path}: which sweep directory it belongs to is not clear, {why}; say --into SWEEP")
    return Ledger.open(found[0])


def _export(ledger: Ledger, out: Path) -> None:
    made_unix = time.time()
    standings = poll_sweep(ledger).points
    unfinished = {standing.record.num for standing in standings if standing.is_open}
    runs = list(exporting.outgoing(ledger.folder, [standing.record for standing in standings], unfinished))
    if not runs:
        raise UserError(f"{ledger.folder}: nothing was sent from here, so there are no results")
    digests = Digests(ledger.folder)
    contents = exporting.contents((source for run in runs for source in run.sources), digests)
    try:
        with replacing(out) as handle:
            index = bundle.write(handle, exporting.head(ledger.sweep["sweep_id"], runs, made_unix), contents)
    except bundle.ChangedError:
        digests.forget(member.path for _, member in contents)
        raise
    except OSError as error:
        raise UserError(f"{error.filename or out}: {error.strerror}") from None
    finally:
        digests.save()
    print(f"{out}: {pluralize(len(index.members), 'file')} of {pluralize(len(runs), 'attempt')}")
    if unfinished:
        print(f"{pluralize(len(unfinished), 'point')} had not ended: export again when it has.")
    _all_came(_tell({}, [why for run in runs for why in run.unfit]))
