"""`collect`: copy results of other sites into a sweep, over ssh."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from inpaint_bench.core.console import echo, pluralize
from inpaint_bench.core.errors import PointsFailedError, UserError
from launchers.remote.client import RemoteError, RemoteSweep, SweepReply
from launchers.remote.ssh import UnreachableError
from launchers.remote.sync import copy_results, fetch_over_ssh, list_files
from launchers.status.survey import sites_of
from launchers.sweep import private_dirs
from launchers.sweep.ledger import Ledger


def run_collect(sweep: Path) -> None:
    """Copy results from every site that is reached over ssh.

    Raises UserError if a site fails, PointsFailedError if something was left out.
    """
    ledger = Ledger.open(sweep)
    private_dirs.check_own(sweep, "only that user can collect its results; `merge` reads those that are there")
    sites = sorted(sites_of(ledger).items())
    remotes = [remote for _, site in sites if (remote := RemoteSweep.of(site, ledger))]
    plans = sorted({str(record.plan) for record in ledger.points().values() if record.plan})
    if plans:
        echo(f"{', '.join(plans)}: rsync the sweep directory from where it was submitted, and merge both.")
    elif not remotes:
        echo("Nothing to collect: no point of this sweep was submitted over ssh, and none waits in a plan.")
    errors, left_out = [], False
    for remote in remotes:
        name = remote.site.name
        try:
            reply = remote.call("status", remote.root, reply=SweepReply)
            echo(f"{name}: {pluralize(len(reply.records), 'run')} listed")
            fetch = partial(fetch_over_ssh, remote, folder=ledger.folder)
            report = copy_results(ledger, reply, list_files(remote), fetch, site=name)
            echo(f"{name}: {report}")
            for reason in report.left_out:
                echo(f"  left out: {reason}")
            left_out |= bool(report.left_out)
        # The other sites are still asked, and all errors are reported together.
        except (UnreachableError, RemoteError) as error:
            errors.append(f"{error}; what has arrived is kept, and `collect` continues from there")
        except UserError as error:
            errors.append(f"{name}: {error}")
    if errors:
        raise UserError("; ".join(errors))
    if left_out:
        raise PointsFailedError("not everything was copied; the reasons are listed above")
