"""`rerun`, `cancel`, `collect`: submit again what a sweep lacks or add repetitions, stop its jobs, copy its results.

`cancel` stops no command that is still submitting from the sweep: its jobs are cancelled when it has ended.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path

from inpaint_bench.commands.repetitions import add_repetitions
from inpaint_bench.core.config.site import SiteConfig
from inpaint_bench.core.console import echo, echo_json, output, pluralize
from inpaint_bench.core.errors import PointsFailedError, UserError
from inpaint_bench.core.recipe_names import split_choices
from inpaint_bench.core.schema import Reason
from launchers.remote import client
from launchers.remote.client import RemoteError, RemoteSweep, SweepReply
from launchers.remote.ssh import UnreachableError
from launchers.remote.sync import copy_results, fetch_over_ssh, list_files
from launchers.slurm import local_executor
from launchers.status.survey import by_queue, cancel_in_slurm, poll_sweep, sites_of
from launchers.submit.rerun import rerun
from launchers.sweep.attempt import Attempt
from launchers.sweep.events import Cancelled
from launchers.sweep.ledger import BUSY, RERUN_REFUSES, BusyError, Ledger
from launchers.sweep.private_dirs import check_own

BUSY_TIMEOUT_S = 60.0  # for a command that is still submitting


def run_rerun(
    sweep: Path,
    changes: Sequence[str] | None,
    *,
    only: str | None,
    repeats: str | None,
    dry_run: bool,
    wait: bool,
    as_json: bool,
) -> None:
    """Submit again what the sweep lacks. Raises UserError, and PointsFailedError for points of unknown state."""
    changes = split_choices(changes or [])
    if as_json:
        if not dry_run:
            raise UserError("--json: only together with --dry-run; `status --json` tells what was submitted")
        output.as_json = True
        output.adjust_log()
    if repeats is not None:
        if only is not None:
            raise UserError("--only selects points to submit again, and --repeats submits none again: use one of them")
        target = _repetitions(repeats)
        add_repetitions(sweep, target=target, changes=changes, dry_run=dry_run, wait=wait)
        return
    rerun(sweep, only=_reasons(only), changes=changes, dry_run=dry_run, wait=wait)


def _repetitions(text: str) -> int | None:
    """Parse --repeats; None for auto."""
    if text == "auto":
        return None
    if not (text.isdecimal() and int(text) > 0):
        raise UserError(f"--repeats {text}: must be a whole number above 0, or auto")
    return int(text)


def _reasons(text: str | None) -> frozenset[Reason] | None:
    """Parse --only; None for no selection."""
    if text is None:
        return None
    names = {name.strip() for name in text.split(",")}
    if "oom" in names:
        names = names - {"oom"} | {Reason.OOM_GPU, Reason.OOM_HOST}
    try:
        return frozenset(Reason(name) for name in names)
    except ValueError:
        raise UserError(f"--only {text}: no such reason; have: {', '.join(Reason)}, oom") from None


def run_cancel(sweep: Path, *, point: list[int] | None, as_json: bool) -> None:
    """Cancel what is queued or running, of these points or of all.

    Raises UserError with the reasons if something could not be cancelled.
    """
    output.as_json = as_json
    ledger = Ledger.open(sweep)
    check_own(sweep, "only that user can cancel its jobs")
    if unknown := set(point or ()) - ledger.points().keys():
        raise UserError(f"--point {min(unknown)}: the sweep has no such point; `status` lists them")
    locked = ledger.is_locked()  # before Slurm is queried, which then knows what was submitted in the meantime
    number, problems = _cancel_open_points(ledger, point)
    if locked and not (point and _are_of_this_machine(ledger, point)):
        echo(f"Another command {BUSY}; waiting for it, {BUSY_TIMEOUT_S:g} s at most.", error=as_json)
        try:
            with ledger.lock(timeout_s=BUSY_TIMEOUT_S):
                # The other command has ended: what it submitted in the meantime is cancelled too.
                more, problems = _cancel_open_points(ledger, point)
                number += more
        except BusyError:
            problems.append(f"another command {BUSY}, and has not ended: cancel again when it has")
    notes: list[str] = []
    records = ledger.points(notes).values()
    if any(RERUN_REFUSES in note for note in notes):
        problems.append(
            f"{sweep}: its ledger lacks attempts, whose jobs were not looked for; `squeue --me -a` lists yours"
        )
    for plan, waiting in sorted(Counter(record.plan for record in records if record.plan).items()):
        # The plan may have been carried away and submitted there, which nothing here can know.
        echo(
            f"{sweep / plan}: nothing of it ({pluralize(waiting, 'point')}) was submitted from here, so nothing is to "
            "be cancelled here; delete the file to keep them from being submitted, and cancel where a copy of it was.",
            error=as_json,
        )
    if as_json:
        echo_json({"problems": problems})
    if problems:
        raise UserError("; ".join(problems))
    if not number:
        echo("Nothing is queued or running.", error=as_json)


def _are_of_this_machine(ledger: Ledger, chosen: Collection[int]) -> bool:
    """Return whether no Slurm runs these points: once they are recorded as cancelled, no other command starts them."""
    sites, points = sites_of(ledger), ledger.points()
    return not any(sites[points[num].site].connection.has_slurm for num in chosen)


def _cancel_open_points(ledger: Ledger, chosen: Collection[int] | None) -> tuple[int, list[str]]:
    """Cancel the points that are known to be open. Returns how many, and why others were not cancelled."""
    open_ = [point.record.last for point in poll_sweep(ledger).points if point.is_open and point.record.last]
    attempts = [attempt for attempt in open_ if not chosen or attempt.point in chosen]
    kept = {attempt.job_id for attempt in open_ if attempt not in attempts}
    total, problems = 0, []
    for name, (site, members) in by_queue(sites_of(ledger), attempts).items():
        number, messages = _cancel_at(site, ledger, members, kept)
        problems += [f"{name}: {message.removeprefix(f'{site.name}: ')}" for message in messages]
        total += number
        if number:
            echo(f"{name}: {pluralize(number, 'point')} cancelled", error=output.as_json)
    return total, problems


def _cancel_at(
    site: SiteConfig, ledger: Ledger, attempts: Sequence[Attempt], kept: Collection[str | None]
) -> tuple[int, list[str]]:
    if site.connection.submits_here:
        return cancel_in_slurm(site, ledger, attempts, kept)
    points = [attempt.point for attempt in attempts]
    if site.connection.over_ssh and (problem := client.cancel(site, ledger, points, timeout_s=BUSY_TIMEOUT_S)):
        return 0, [problem]
    if not site.connection.is_polled and site.connection.has_slurm:
        return 0, ["its points were submitted there from a plan file; cancel them there"]
    # Recorded before processes are stopped: a point that waits for its turn on this machine then never starts.
    ledger.append(Cancelled(attempts=[attempt.key for attempt in attempts]))
    problems = []
    for job_id in (attempt.job_id for attempt in attempts if attempt.job_id and attempt.job_id.startswith("pid:")):
        if (pid := local_executor.process_id(job_id)) is not None:
            local_executor.stop(pid)
        else:
            problems.append(f"{job_id} runs on another machine: cancel it there")
    return len(attempts) - len(problems), problems


def run_collect(sweep: Path) -> None:
    """Copy results from every site that is reached over ssh.

    Raises UserError if a site fails, PointsFailedError if something was left out.
    """
    ledger = Ledger.open(sweep)
    check_own(sweep, "only that user can collect its results; `merge` reads those that are there")
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
