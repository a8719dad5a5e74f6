"""Before anything is submitted: checks of points (folder, limits, connections, scripts, accounts), and the dry run."""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from inpaint_bench.core.config import recipe
from inpaint_bench.core.config.conflicts import lever_problem
from inpaint_bench.core.config.parse import missing_train
from inpaint_bench.core.config.unread import refuse_unread
from inpaint_bench.core.console import console, echo_json, output, sanitize
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.files import expand_path
from inpaint_bench.core.schema import CODE, SCHEMA_VERSION, SWEEP
from launchers.points.blocks import advice
from launchers.points.input_paths import given_paths, is_visible, runs_this_python
from launchers.points.point import Group, Point, by_site, group_points
from launchers.points.site_catalog import reachability
from launchers.remote import client
from launchers.slurm import starts as slurm_starts
from launchers.slurm.environment import unused_settings
from launchers.slurm.query import UNKNOWN, array_id, jobs_named
from launchers.slurm.sbatch import render, requested_cluster
from launchers.status import tables
from launchers.status.cost import cost_lines
from launchers.status.survey import by_queue, sites_of
from launchers.sweep import snapshot
from launchers.sweep.attempt import Attempt, queue_name
from launchers.sweep.ledger import Ledger, job_name
from launchers.sweep.sweep_record import MAX_NAME_BYTES, LaunchContext

from .estimates import Estimate, lines

log = logging.getLogger(__name__)

LONGEST_SWEEP_ID = "s" * 13  # as new_sweep_id makes them
MAX_ESTIMATES = 20  # per site and dry run: its controller computes every estimate
SCRIPTS = "sbatch"  # folder of a dry run's scripts
REQUESTED = ("point", "overrides", "gpu", "batch", "site", "total_time_min", "service_units")


def check_points(points: Sequence[Point], folder: Path, launch_context: LaunchContext, *, is_new: bool = True) -> None:
    """Raise UserError for mistakes that sbatch would report later, or that nothing would report.

    A lever that is refused today may be in a sweep that an earlier version launched: no obstacle to its other points.
    """
    for point in points:
        recipe.check_device(point.bench)
        recipe.check_telemetry(point.bench)
        recipe.check_data(point.bench)
        if is_new:
            recipe.check_study(point.bench)
            refuse_unread(point.bench, point.overrides)
        if (problem := lever_problem(point.bench)) and point.bench.study.name not in recipe.STUDIES:
            if is_new:
                raise UserError(problem)
            log.warning(f"point {point.num} will be unavailable: {problem}")
    for name, members in by_site(points).items():
        site = members[0].site
        most = site.limits.max_submit_jobs
        jobs = len({point.num if point.block is None else point.block for point in members})
        if most is not None and jobs > most and site.connection.has_slurm:
            raise UserError(
                f"{jobs} jobs for {name}, which takes {most} jobs of one user at a time "
                "(limits.max_submit_jobs of its site file): launch fewer at once"
            )
        if any(point.site.connect != site.connect for point in members):
            raise UserError(f"sites.{name}.connect differs between points, and a sweep reaches a site one way")
        if launch_context.extra_config_dirs and members[0].reachable and site.connection.over_ssh:
            raise UserError(
                f"{', '.join(launch_context.extra_config_dirs)}: the points for {name} are composed there, from a copy "
                "of the code without these files; move them into conf/"
            )
    mail = points[0].bench.notify.mail
    if mail and (names := [point.site.name for point in points if not point.site.connection.has_slurm]):
        log.warning(f"notify.mail={mail}: no mail about the points at site={names[0]}, since Slurm sends it")
    if mail and "@" not in mail:  # sbatch takes any word
        log.warning(f"notify.mail={mail}: is no address; the site's mail system must have a user {mail}")
    for gpu in {point.bench.gpu.name: point.bench.gpu for point in points if not point.bench.gpu.verified}.values():
        log.warning(f"gpu={gpu.name}: its figures are those of documents; no run on such a card is known here")
    for point in {(point.site.name, point.bench.track.name): point for point in points}.values():
        track, site = point.bench.track, point.site
        if track.package and not runs_this_python(site, point.reachability):
            log.warning(f"track={track.name}: was not checked whether {site.name} has the package {track.package}")
    # Every script is rendered once and dropped: a mistake in a template or value must not stop a half-done submission.
    unused: dict[str, str] = {}
    for group in group_points(points):
        length = len(job_name(group.name, LONGEST_SWEEP_ID))
        if length > MAX_NAME_BYTES:
            raise UserError(
                f"{group.site.name}: the name of the array would have {length} characters, and folders and jobs take "
                f"{MAX_NAME_BYTES}; shorten the names of partition and GPU, of which it is made"
            )
        _check_container(group)
        kernels = group.site.storage.kernels
        if kernels and is_visible(group.site, group.points[0].reachability) and expand_path(kernels).is_file():
            raise UserError(f"sites.{group.site.name}.storage.kernels={kernels}: is a file, and needs to be a folder")
        if group.site.connection.has_slurm:
            script = script_of(group, folder, folder, "check")
            for point in group.points:
                point.cluster = requested_cluster(group.site, script)
            unused |= unused_settings(group.site, group.points[0].bench.gpu.name, script)
    if unused:
        settings, keys = ", ".join(unused), ", ".join(dict.fromkeys(unused.values()))
        log.warning(sanitize(f"{settings}: a launch does not read this from the shell; use {keys}"))


def check_packages(points: Sequence[Point]) -> None:
    """Raise UserError for points that would run here, without the extra `train`; warn of jobs with this Python."""
    missing = missing_train()
    for name, members in by_site(points).items() if missing else ():
        site = members[0].site
        if not site.connection.has_slurm:
            raise UserError(f"site={name} runs points on this machine, and {missing}")
        if runs_this_python(site, members[0].reachability):
            log.warning(f"{name}: jobs run this Python ({name} has no other in sites.{name}.python), and {missing}")


def _check_container(group: Group) -> None:
    """Raise UserError for a container that the jobs of a group could not run in."""
    site, image = group.site, group.site.environment.container.image
    key = f"sites.{site.name}.environment.container.image={image}"
    if image and not site.connection.has_slurm:
        raise UserError(f"{key}: jobs on this machine run without a container; leave it out")
    if image and is_visible(site, group.points[0].reachability) and not Path(image).exists():
        raise UserError(f"{key}: no such file; docs/installation.md says how to build it")


def check_queue(points: Sequence[Point], ledger: Ledger, sweep_id: str) -> None:
    """Raise UserError if a Slurm has a job of this sweep that the ledger does not record, or one of these points.

    So a record that was lost, cut off, edited or copied is found out before a point is submitted twice.
    """
    is_recorded = (ledger.folder / SWEEP).exists()  # not yet, for the first launch of a plan file
    attempts = [attempt for record in (ledger.points() if is_recorded else {}).values() for attempt in record.attempts]
    # Arrays whose submission was not confirmed have no id here: they are found by their name.
    arrays = {attempt.job_name: ("", attempt.cluster) for attempt in attempts}
    arrays |= {a.job_name: (array_id(a.job_id), a.cluster) for a in attempts if a.job_id}
    nums = {point.num for point in points}
    # A job of several points may go on when one of them has ended: its record says so, squeue does not.
    single = (attempt for attempt in attempts if attempt.block is None)
    chosen = {(attempt.job_name, str(attempt.task)) for attempt in single if attempt.point in nums}
    # Also the sites where the record says that attempts went: points may be placed elsewhere now.
    sites = (sites_of(ledger) if is_recorded else {}) | {point.site.name: point.site for point in points}
    # Also those clusters of a site to which a template sends its jobs, or sent them.
    known = [*attempts, *(ledger.sweep.points if is_recorded else []), *(point.requested() for point in points)]
    known += [Attempt(point=0, site=name, cluster=site.cluster) for name, site in sites.items()]
    for name, (site, _) in by_queue(sites, [attempt for attempt in known if attempt.site in sites]).items():
        if not site.connection.submits_here or not reachability(site).ok:
            continue
        jobs, result = jobs_named(site, job_name("", sweep_id))
        if jobs is None and any(point.site.name == site.name for point in points):
            raise UserError(f"{name}: squeue {result}, so it is not known what was submitted there; try again later")
        for job_id, listed_name, active in jobs or ():
            recorded, cluster = arrays.get(listed_name, (None, None))
            if recorded is None:
                raise ledger.refusal(f"does not record job {job_id} ({listed_name}), which {name} has")
            # The local cluster may be recorded by its name, or without one.
            elsewhere = recorded and cluster and site.cluster and cluster != site.cluster
            if elsewhere or recorded not in ("", array_id(job_id)):
                array = queue_name(recorded, cluster)
                raise ledger.refusal(f"records array {array} as {listed_name}, and {name} has {job_id} of that name")
            arrays[listed_name] = (array_id(job_id), site.cluster or cluster)  # a second one is one too many
            if active and (listed_name, job_id.partition("_")[2]) in chosen:
                raise ledger.refusal(f"does not show that {name} still has job {job_id} ({listed_name})")


def missing_accounts(points: Sequence[Point]) -> list[str]:
    """Return a sentence for each site that requires an account and has none set."""
    sentences = []
    for site in (point.site for point in points):
        account, key = site.account, f"sites.{site.name}.account.value"
        if account.required and not account.value and site.connection.has_slurm:
            pattern = f" (pattern {account.pattern})" if account.pattern else ""
            how = account.how_to_list or "sacctmgr show associations user=$USER format=account"
            sentences.append(f"{site.name} needs an account: {key}=...{pattern}; `{how}` at {site.name} lists yours")
    return list(dict.fromkeys(sentences))


def script_of(group: Group, folder: Path, code: Path, sweep_id: str) -> str:
    """Return the group's sbatch script; for a site over ssh, as it will be rendered there."""
    if group.site.connection.over_ssh:
        folder = Path(client.root_of(group.site, sweep_id))
        code = folder / CODE / code.name
    return render(group, folder, code, sweep_id)


# --- dry run -------------------------------------------------------------------------------------


def preview(
    points: Sequence[Point],
    folder: Path,
    sweep_id: str,
    first_group_number: int,
    estimates: Mapping[int, Estimate],
    left_out: Sequence[str],
) -> None:
    """Write the scripts, and print what a launch would submit; `left_out` are sentences on points that do not fit."""
    groups = group_points(points, first_number=first_group_number)
    scripts = _write_scripts(groups, folder, sweep_id)
    starts = _estimated_starts(groups, scripts)
    if output.as_json:
        echo_json(_as_json(groups, starts, folder, estimates) | {"left_out": left_out})
    else:
        console().print(*tables.plan_tables(points, starts, {num: each.shown for num, each in estimates.items()}))
    if scripts:
        log.info(f"scripts: {folder / SCRIPTS}")
    for line in filter(None, (*cost_lines(points), *lines(points, estimates), advice(points))):
        log.info(line)
    for site, members in by_site(points).items():
        if not members[0].reachable:
            reason = members[0].reachability.reason
            log.info(f"{site} cannot be reached from here ({reason}): a launch would write a plan file for it")
    for site, members in by_site(points).items():
        paths = dict.fromkeys(path for point in members for path in given_paths(point.bench))
        if paths and not is_visible(members[0].site, members[0].reachability):
            log.info(f"{', '.join(paths)}: at {site}, which this machine does not see, so this was not looked at")
    for line in missing_accounts(points):
        log.info(line)
    log.info("Dry run: nothing was submitted.")


def _as_json(
    groups: Sequence[Group], starts: Mapping[str, str], folder: Path, estimates: Mapping[int, Estimate]
) -> dict[str, Any]:
    """Return the arrays with their points, as `--json` prints them: fields may be added, none is removed."""
    arrays = []
    for group in groups:
        requested = [point.requested() for point in group.points]
        points = [
            {name: getattr(attempt, name) for name in REQUESTED} | {"likely": asdict(estimates[attempt.point])}
            for attempt in requested
        ]
        arrays.append(
            {
                "array": group.name,
                "site": group.site.name,
                "reachable": group.points[0].reachable,
                "partition": group.request.partition,
                "request": str(group.request),
                "time_min": group.request.time_min,
                "expected_start": starts.get(group.name),
                "soonest": group.points[0].site_basis or None,
                "unit": group.site.charging.unit,
                "points": points,
            }
        )
    return {"schema_version": SCHEMA_VERSION, "sweep": str(folder), "arrays": arrays}


def _write_scripts(groups: Sequence[Group], folder: Path, sweep_id: str) -> dict[str, Path]:
    """Return the files by group; incomplete if the disk takes no more."""
    code = snapshot.planned_path(folder / CODE)
    files: dict[str, Path] = {}
    for group in groups:
        if not group.site.connection.has_slurm:
            continue
        file = folder / SCRIPTS / f"{group.name}.sh"
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(script_of(group, folder, code, sweep_id), encoding="utf-8")
        except OSError as error:
            # A preview without scripts is still of use.
            log.info(f"{error.filename or file}: {error.strerror}, so the scripts were not written")
            break
        files[group.name] = file
    return files


def _estimated_starts(groups: Sequence[Group], scripts: Mapping[str, Path]) -> dict[str, str]:
    """Return by group when Slurm expects to start it, in words. Queries only sites whose commands work here."""
    starts = dict.fromkeys(scripts, UNKNOWN)
    written = [group for group in groups if group.name in scripts and group.points[0].reachable]
    for members in by_site(group for group in written if group.site.connection.submits_here).values():
        for group in members[:MAX_ESTIMATES]:
            start = slurm_starts.ask(group.site, scripts[group.name].read_text(encoding="utf-8"))
            starts[group.name] = str(start) if start.wait_s is None else tables.clock(time.time() + start.wait_s)
            if start.wait_s is None and not start.refused:
                break  # a controller that is down or busy is not queried again
    return starts
