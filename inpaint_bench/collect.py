"""`collect`: bring here what another site measured, over ssh, or in a file that someone carries."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from launchers.away import bundle, carry, remote
from launchers.away.plans import KIND as PLAN
from launchers.away.ssh import UnreachableError
from launchers.record.ledger import Ledger
from launchers.standing.watch import look, sites_of

from .command import parser, run
from .contract import SWEEP
from .errors import UserError
from .files import read_json, replacing
from .terminal import count


def main(argv: Sequence[str] | None = None) -> int:
    does = (
        "Bring manifests, closed parts and logs of another site's runs into the sweep directory here: over ssh, from "
        "every site of the sweep that is reached so, or out of a file that --export wrote there. Every file is "
        "verified before it is put into place. Doing it again brings only what is new; a transfer that broke is "
        "taken up where it was."
    )
    options = parser("collect", does, "runs/2026-11-21/08-30-00-inpaint")
    what = "the folder that `launch -m` printed, or a file that --export wrote"
    options.add_argument("source", type=Path, metavar="SWEEP|FILE", help=what)
    how = options.add_mutually_exclusive_group()
    how.add_argument("--export", type=Path, metavar="FILE", help="write the results of SWEEP into a file to carry")
    into = "the sweep directory that FILE belongs to (default: the one below ./runs that it names)"
    how.add_argument("--into", type=Path, metavar="SWEEP", help=into)
    return run(options, _collect, argv)


def _collect(options: argparse.Namespace) -> None:
    if options.export:
        _export(Ledger.open(options.source), options.export)
    elif options.source.is_file():
        _from_file(options.source, options.into)
    elif options.into:
        raise UserError(f"--into {options.into}: is for a file, and {options.source} is none")
    else:
        _from_sites(Ledger.open(options.source))


def _from_sites(ledger: Ledger) -> None:
    complaints, asked = [], 0
    for name, site in sorted(sites_of(ledger).items()):
        at = remote.place(site, ledger) if site.reach.method == "ssh" else None
        if at is None:
            continue
        asked += 1
        try:
            _from_site(ledger, at)
        except (UnreachableError, remote.RemoteError) as error:
            complaints.append(f"{error}; what arrived is kept, `collect` goes on from there")
        except UserError as error:
            complaints.append(f"{name}: {error}")
    plans = sorted({str(record.plan) for record in ledger.points().values() if record.plan})
    if plans:
        print(f"{', '.join(plans)}: where it was run, `collect --export FILE`; here then, `collect FILE`.")
    elif not asked:
        print("Nothing to bring: no point of this sweep was sent over ssh, and none waits in a plan.")
    if complaints:
        raise UserError("; ".join(complaints))


def _from_site(ledger: Ledger, at: remote.Place) -> None:
    name = at.site.name
    attempts = [a for record in ledger.points().values() for a in record.attempts if a.site == name]
    have = carry.present(ledger.folder, [*(a.subdir for a in attempts), carry.LOGS])
    with remote.results(at, have) as stream:
        try:
            index = bundle.read_index(stream)
            brought = carry.check(index, ledger, site=name)
            received = carry.receive(stream, index, ledger, newest_unix=carry.newest(ledger, name))
        except bundle.CutError:
            words = stream.last_words() or "the connection ended"
            raise UnreachableError(f"{name}: what it was sending broke off ({words})") from None
    with ledger.locked():
        carry.adopt(brought, ledger, carried=False)
    ledger.append("collected", origin=name, made_unix=index.head["made_unix"], files=received.new)
    print(f"{name}: {received}")


def _from_file(path: Path, into: Path | None) -> None:
    index = bundle.verify(path)
    if index.head.get("kind") == PLAN:
        raise UserError(f"{path}: is a plan; where it is to run: python -m inpaint_bench.launch --plan {path.name}")
    ledger = Ledger.open(into) if into else _owner(path, index)
    brought = carry.check(index, ledger)
    origin = ",".join(sorted({facts["site"] for facts in brought})) or "nowhere"
    with ledger.locked(), path.open("rb") as stream:
        received = carry.receive(stream, bundle.read_index(stream), ledger, newest_unix=carry.newest(ledger, origin))
        carry.adopt(brought, ledger, carried=True)
    ledger.append("collected", origin=origin, made_unix=index.head["made_unix"], files=received.new)
    print(f"{origin}: {received}, into {ledger.folder}")


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
    standings = look(ledger)
    unfinished = {standing.record.num for standing in standings if standing.open}
    attempts, sources = carry.outgoing(ledger.folder, [standing.record for standing in standings], unfinished)
    if not attempts:
        raise UserError(f"{ledger.folder}: nothing was sent from here, so there are no results")
    try:
        with replacing(out) as handle:
            index = bundle.write(handle, carry.head(ledger, attempts, sources), sources)
    except OSError as error:
        raise UserError(f"{out}: {error.strerror}") from None
    print(f"{out}: {count(len(index.members), 'file')} of {count(len(attempts), 'attempt')}")
    if unfinished:
        print(f"{count(len(unfinished), 'point')} had not ended: export again when it has.")


if __name__ == "__main__":
    sys.exit(main())
