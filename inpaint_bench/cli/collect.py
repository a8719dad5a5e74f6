"""`collect`: copy results of other sites into a sweep, over ssh or in an archive that a person carries."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path

import msgspec

from inpaint_bench.core.console import echo, pluralize
from inpaint_bench.core.errors import PointsFailedError, UserError
from inpaint_bench.core.files import replacing
from inpaint_bench.core.records import decode_record
from launchers.remote.archive import ArchiveError, read_archive, write_archive
from launchers.remote.client import RemoteError, RemoteSweep
from launchers.remote.messages import SweepReply
from launchers.remote.ssh import UnreachableError
from launchers.remote.sync import copy_results, extract, fetch_over_ssh, is_summary, list_results, source_path
from launchers.status.survey import poll_sweep, sites_of
from launchers.sweep import private_dirs
from launchers.sweep.events import AttemptKey
from launchers.sweep.ledger import Ledger
from launchers.sweep.owner import check_own

HEADER = "results.json"  # first member of an archive of results


def run_collect(source: Path, *, export: Path | None, into: Path | None) -> None:
    """Collect results of other sites into a sweep, export them, or unpack an exported file.

    Raises UserError where a site fails, PointsFailedError where something was left out.
    """
    if export:
        left_out = _export(Ledger.open(source), export)
    elif source.is_file() and into:
        ledger = Ledger.open(into)
        check_own(into, "only that user can copy results into it")
        with private_dirs.restricted_umask(into):
            left_out = _from_archive(source, ledger)
    elif source.is_file() or into:
        raise UserError(f"{source}: `collect FILE --into SWEEP` takes an exported file and its sweep directory")
    else:
        ledger = Ledger.open(source)
        check_own(source, "only that user can collect its results; `merge` reads those that are there")
        with private_dirs.restricted_umask(source):
            left_out = _from_sites(ledger)
    if left_out:
        raise PointsFailedError("not everything was copied; the reasons are listed above")


def _from_sites(ledger: Ledger) -> bool:
    """Copy from every site that is reached over ssh; return whether something was left out."""
    sites = sorted(sites_of(ledger).items())
    remotes = [remote for _, site in sites if (remote := RemoteSweep.of(site, ledger))]
    plans = sorted({str(record.plan) for record in ledger.points().values() if record.plan})
    if plans:
        echo(f"{', '.join(plans)}: `collect --export FILE` where it was submitted, then `collect FILE --into` here.")
    elif not remotes:
        echo("Nothing to collect: no point of this sweep was submitted over ssh, and none waits in a plan.")
    errors, left_out = [], False
    for remote in remotes:
        name = remote.site.name
        try:
            # True: with the list of files of every attempt.
            reply = remote.call("query", True, SweepReply)
            echo(f"{name}: {pluralize(len(reply.attempts), 'run')} listed")
            fetch = partial(fetch_over_ssh, remote, folder=ledger.folder)
            report = copy_results(ledger, reply, fetch, site=name)
            echo(f"{name}: {report}")
            left_out |= _print_left_out(report.left_out, reply.skipped)
        # The other sites are still asked, and all errors are reported together.
        except (UnreachableError, RemoteError) as error:
            errors.append(f"{error}; what has arrived is kept, and `collect` continues from there")
        except UserError as error:
            errors.append(f"{name}: {error}")
    if errors:
        raise UserError("; ".join(errors))
    return left_out


def _from_archive(path: Path, ledger: Ledger) -> bool:
    """Copy out of an archive; return whether something was left out."""
    headers: list[bytes] = []
    try:
        # Reads all of it first: nothing of a damaged archive is used.
        with path.open("rb") as archive:
            read_archive(archive, lambda name, content, _: headers.append(content) if name == HEADER else None)
        if not headers:
            raise ArchiveError(f"holds no results; a plan is submitted by `launch --plan {path}`")
        reply = decode_record(headers[0], SweepReply)
        with path.open("rb") as archive:
            report = copy_results(ledger, reply, partial(extract, archive, folder=ledger.folder), site=None)
    except (ArchiveError, msgspec.DecodeError) as error:
        raise UserError(f"{path}: {error}") from None
    except OSError as error:
        message = f"{error.filename or path}: {error.strerror}"
        raise UserError(f"{message}; `collect` continues with what is missing") from None
    echo(f"{path}: {report}")
    return _print_left_out(report.left_out, [])


def _export(ledger: Ledger, out: Path) -> bool:
    """Write the results of a sweep directory into an archive; return whether something was left out."""
    if not out.parent.is_dir():
        raise UserError(f"{out}: No such file or directory")
    points = poll_sweep(ledger).points
    open_points = {point.record.num for point in points if point.is_open}
    reply = SweepReply(sweep_id=ledger.sweep.sweep_id)
    list_results(ledger.folder, [point.record for point in points], open_points, reply)
    if not reply.attempts:
        raise UserError(f"{ledger.folder}: nothing was submitted from here, so there are no results")
    # Manifests come last, as in every transfer: a run that looks complete is complete.
    paths = sorted((file.path for attempt in reply.attempts for file in attempt.files), key=is_summary)
    files: list[tuple[str, Path | bytes]] = [(HEADER, msgspec.json.encode(reply))]
    files += [(path, ledger.folder / source_path(path)) for path in paths]
    with replacing(out) as archive:
        write_archive(archive, files)
    echo(f"{out}: {pluralize(len(paths), 'file')} of {pluralize(len(reply.attempts), 'attempt')}")
    if open_points:
        echo(f"{pluralize(len(open_points), 'point')} not ended: export again later for the rest.")
    return _print_left_out({}, reply.skipped)


def _print_left_out(attempts: Mapping[AttemptKey, str], files: Iterable[str]) -> bool:
    lines = [f"point {point}, attempt {attempt}: {reason}" for (point, attempt), reason in sorted(attempts.items())]
    lines += files
    for line in lines:
        echo(f"  left out: {line}")
    return bool(lines)
