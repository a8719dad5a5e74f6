"""Slurm arrays of points: render a script for each from its Jinja2 template, and submit it by one sbatch call.

Only `submit_groups` needs Slurm.
"""

import logging
import re
import shlex
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from itertools import takewhile
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, TemplateError

from inpaint_bench.core.config.site import CLUSTER, SiteConfig
from inpaint_bench.core.console import pluralize
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.paths import templates_dir
from inpaint_bench.core.schema import JOBS
from launchers import entry
from launchers.points import point_file
from launchers.points.point import Group, SubmitOutcome
from launchers.sweep import private_dirs
from launchers.sweep.attempt import queue_name
from launchers.sweep.events import Refused, Submitted
from launchers.sweep.ledger import Ledger, job_name

from . import blocks
from .environment import python_path, slurm_environment

log = logging.getLogger(__name__)

_LINE = r"^#SBATCH\s(?:[^#\n]*\s)?(?:%s)\s*[\"']?([^\s\"'#]+)"
_CLUSTERS = _LINE % r"--clusters?[=\s]|-M"
# Jobs are found by these, which sbatch takes shortened too.
_OURS = {"job-name": _LINE % r"--j[a-z-]*[=\s]|-J", "array": _LINE % r"--ar[a-z]*[=\s]|-a"}
END_WAIT_S = 120  # after the first task of a job has ended, until srun kills the others

SCRIPT = "sbatch.sh"  # in the folder of the array

# Slurm's manual asks programs not to call sbatch in a tight loop. Most sweeps have at most ten arrays and are not
# delayed; if every point has another time limit, there are as many arrays as points.
STALLED_S = 10.0  # an sbatch call that takes longer is named
UNPACED_CALLS = 10  # per site; each later call follows a pause of limits.submit_pause_s

# slurm_strerror's wording, and EAGAIN, after which sbatch itself has retried for minutes
EAGAIN = "Resource temporarily unavailable"
NO_ANSWER = re.compile(
    "Unable to contact slurm controller|Socket timed out|Zero Bytes were transmitted|in standby mode|"
    f"{EAGAIN}|Message (send|receive) failure|Communication (connection|shutdown) failure|"
    "Unexpected message received|Insane message length|Header lengths are longer|Connection (refused|reset|timed out)|"
    "Broken pipe|Transport endpoint|sbatch printed no job id|No route to host|Network is |Host is down|"
    "connection abort|Interrupted system call|Input/output error|shutting down|"
    # Slurm may have refused the request, or the client the reply to a request that Slurm accepted.
    "authentication error"
)
# At the beginning of a line, perhaps after the name of a program or in colour, since a site's text may quote it
_ACCEPTED = re.compile(
    r"(?am)^(?:\s|\x1b\[[\d;]*m|[\w-]+: )*Submitted batch job ([1-9]\d{0,17})(?!\d)(?: on cluster (\w(?:[\w.-]*\w)?))?"
)
_PARSABLE = re.compile(r"([1-9]\d{0,17})(?:;(\w[\w.-]*))?", re.ASCII)  # all of the output, by a template's --parsable
# A smaller array may be accepted. After EAGAIN sbatch has called again itself, for minutes, so nothing was accepted.
# The text "(job submit limit, user's size and/or time limits)" counts if no limit of another name stands before it.
_TOO_MANY = re.compile(
    r"SubmitJob|temporarily unable to accept job|job queue full|MaxJobCount|Invalid job array specification|"
    r"\A(?!.*\b(QOS|Assoc|Max|Grp)[A-Z]).*job submit limit"
)
# sbatch may print more before it, also a site's own text. Some errors of Slurm do not say what has failed.
_REFUSED = re.compile("[Bb]atch job submission failed: (?!Unspecified error|No error|Success)")


@cache
def _environment() -> Environment:
    return Environment(
        loader=FileSystemLoader(templates_dir()),
        # A misspelt name in a template is an error, and not an empty option.
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def render(group: Group, sweep: Path, code: Path, sweep_id: str) -> str:
    """Return the script of an array in a sweep directory; `code` is the snapshot to run from.

    Raises UserError for an unknown template, an invalid variable name, and values with control characters.
    """
    site, request, folder = group.site, group.request, sweep / JOBS / group.name
    container = site.environment.container
    python = container.python if container.image else site.python or sys.executable
    files = [[point_file.path(point, sweep) for point in task] for task in group.tasks]
    runner, command = "", entry.command(python, files[0][0].parent, [file for task in files for file in task])
    if group.in_blocks:
        runner, command = blocks.command(python, folder, files), entry.command(python, files[0][0].parent, [])
    options = _options(group, job_name(group.name, sweep_id), folder)
    variables = dict(site.environment.variables)
    if container.image:
        variables["PYTHONNOUSERSITE"] = "1"  # HOME is visible in a container, with packages for another Python
        needed = [sweep, *([] if code.is_relative_to(sweep) else [code])]
        command = f"{_container(site, needed)} {command}"
    # Ours replace those of the site: another PYTHONPATH would hide the snapshot.
    variables |= {
        "PYTHONPATH": python_path(code),
        "PYTHONSAFEPATH": "1",  # else the directory that the job starts in comes before the snapshot
        "PYTHONUNBUFFERED": "1",
    }
    for name in variables:
        if not name.isidentifier():
            raise UserError(f"sites.{site.name}.environment.variables.{name}: not a variable name")
    values = [
        *((f"--{option}", value) for option, value in options.items()),
        ("the job's command", command),
        *(("a module", module) for module in site.environment.modules),
        *((f"the variable {name}", value) for name, value in variables.items()),
    ]
    for name, value in values:
        # A line break would start a new line of the script inside any quotes.
        if not str(value).isprintable():
            raise UserError(f"site {site.name}: {name} has a control character: {value!r}")
    try:
        template = _environment().get_template(site.template)
        text = template.render(
            site=site,
            request=request,
            modules=[shlex.quote(module) for module in site.environment.modules],
            directives=[(name, None if value is True else shlex.quote(str(value))) for name, value in options.items()],
            cpus_per_task=options.get("cpus-per-task"),
            variables=[(name, shlex.quote(str(value))) for name, value in sorted(variables.items())],
            command=command,
            runner=runner,
            use_srun=site.use_srun,
            end_wait_s=END_WAIT_S,
        )
    except TemplateError as error:
        known = ", ".join(sorted(_environment().list_templates()))
        raise UserError(f"site {site.name}: template {site.template}: {error} (have: {known})") from None
    if runner not in text:
        raise UserError(
            f"site {site.name}: its script ({site.template}) leaves `runner` out: it needs points_per_job=1"
        )
    for name, pattern in _OURS.items():
        value = _requested(text, pattern)
        if not value or value.partition("%")[0] != options[name]:  # %: how many tasks run at a time
            stays = f"--{name}={options[name]}, by which its jobs are found, must stay"
            raise UserError(f"site {site.name}: its script ({site.template}) has --{name}={value or ''}, and {stays}")
    return text.rstrip() + "\n"


def _requested(script: str, pattern: str) -> str | None:
    """Return what the lines before the first command ask sbatch for; of two, sbatch takes the last."""
    head = takewhile(lambda line: not line.strip() or line.lstrip().startswith("#"), script.splitlines())
    return [None, *re.findall(pattern, "\n".join(head), re.MULTILINE)][-1]


def requested_cluster(site: SiteConfig, script: str) -> str | None:
    """Return the cluster that a script asks sbatch for; None: the local one. Raises UserError for several."""
    name = _requested(script, _CLUSTERS)
    if name and not CLUSTER["pattern"][0].fullmatch(name):
        raise UserError(
            f"site {site.name}: its script ({site.template}) has --clusters={name}; the jobs of a site go to one "
            "cluster: name it, and write a site file for each of the others"
        )
    return name and name.lower()  # as Slurm stores it


def _container(site: SiteConfig, needed: Sequence[Path]) -> str:
    """Return the command line that runs another one in the site's container, with the folders that it needs."""
    container = site.environment.container
    for path in needed:
        if "," in str(path):
            raise UserError(f"{path}: a folder with a comma in its name cannot be bound into a container")
    binds = dict.fromkeys([*map(str, needed), *container.binds])
    command = [container.command, "exec", *(["--nv"] if container.nv else [])]
    return shlex.join([*command, *(f"--bind={bind}" for bind in binds), str(container.image)])


def _options(group: Group, name: str, folder: Path) -> dict[str, str | int | None]:
    """Return sbatch's options by name; True for one without a value. Raises UserError without one that ranks need."""
    site, request, mail = group.site, group.request, group.points[0].bench.notify.mail
    options: dict[str, str | int | None] = {
        "job-name": name,
        "account": site.account.value,
        "partition": request.partition,
        "qos": site.qos,
        "reservation": site.reservation,
        "clusters": site.cluster,
        # "&": a constraint that the user adds narrows the site's own
        "constraint": "&".join([*site.constraint, *request.features]),
        "exclude": ",".join(site.exclude_nodes),
        "nodes": request.nodes,
        "ntasks-per-node": request.tasks_per_node,
        "cpus-per-task": request.cpus_per_task,
        "mem": f"{request.mem_gb}G" if request.mem_gb else None,
        **dict([request.gpu_option] if request.gpu_option else []),
        "time": request.time_min,
        # Without a leading "B:", Slurm signals the steps that srun started and not the batch shell.
        "signal": f"USR2@{request.warning_s}" if request.warning_s else None,
        "array": f"0-{len(group.tasks) - 1}",
        # Without ARRAY_TASKS in it, Slurm writes once about an array and not about each task.
        "mail-type": "END,FAIL" if mail else None,
        "mail-user": mail,
        # Written in both cases, because the default differs between clusters (JobRequeue).
        "requeue" if site.requeue.request else "no-requeue": True,
        # Otherwise a requeued job may overwrite the log of its first start.
        "open-mode": "append",
        # As submitit names the logs of local jobs; the 0 is the rank of the task.
        "output": str(folder / "%A_%a_0_log.out"),
        "error": str(folder / "%A_%a_0_log.err"),
        "export": site.environment.export,
        "get-user-env": site.environment.get_user_env,
    }
    options |= {name: True if value == "" else value for name, value in site.directives.items()}
    options = {name: value for name, value in options.items() if value}
    for count, option in ((request.nodes, "nodes"), (request.tasks_per_node, "ntasks-per-node")):
        if count > 1 and not {option, "ntasks"} & options.keys():
            raise UserError(
                f"sites.{site.name}.directives.{option}: is left out, and a job of {count} needs it or ntasks"
            )
    return options


class UnansweredError(UserError):
    """Slurm gave sbatch no answer: it may have accepted the array, and the next call would fare no better."""


class RefusedError(UserError):
    """The array does not exist: slurmctld refused it, or sbatch was not called."""


class TooManyError(RefusedError):
    """The array was refused, and a smaller one may be accepted."""


def submit_groups(groups: Sequence[Group], ledger: Ledger, code: Path) -> SubmitOutcome:
    """Submit each group as an array, and record what became of it.

    A refused array does not stop the others. One that is too large is halved until it fits: its other points are
    recorded as refused before the next call, and are left to `rerun`. If not even one job fits, the other arrays of
    that site and partition are not tried. After one that Slurm did not answer for, which it may have accepted, the
    other arrays of that site are not tried.
    """
    calls: Counter[str] = Counter()
    closed: dict[tuple[str, str | None], str] = {}  # by site, and by partition if it is full: why no more is tried
    outcome = SubmitOutcome()
    sweep_id = ledger.sweep.sweep_id
    waiting = list(reversed(groups))
    while waiting:
        group = waiting.pop()
        site, count = group.site, pluralize(len(group.points), "point")
        partition = (site.name, group.request.partition)
        tasks = [[(point.num, point.attempt) for point in task] for task in group.tasks]
        attempts = [key for task in tasks for key in task]
        try:
            if reason := closed.get((site.name, None)) or closed.get(partition):
                # Refused for certain, since sbatch is not even called: `rerun` may submit its points.
                raise RefusedError(f"{site.name}: {group.name} was not submitted, as {reason}")
            if calls[site.name] >= UNPACED_CALLS:
                time.sleep(site.limits.submit_pause_s)
            calls[site.name] += 1
            array, cluster = _submit_array(group, ledger.folder, code, sweep_id)
        except UserError as error:
            certain = isinstance(error, RefusedError)
            kept = sum(map(len, tasks[: len(tasks) // 2])) if isinstance(error, TooManyError) else 0
            refused = attempts[kept:]
            ledger.append(Refused(group=group.name, attempts=refused, message=str(error), certain=certain))
            outcome.not_accepted += len(refused)
            advice = f"`rerun` with corrected overrides submits its {count}."
            if not certain:
                advice = f"Once squeue and sacct list no such job, {advice}"
            if isinstance(error, TooManyError):
                rest = pluralize(len(refused), "point")
                advice = f"`rerun` then submits {rest} of it."
                if kept:
                    advice = f"It is tried again with {pluralize(kept, 'point')}; {advice}"
                    waiting.append(replace(group, points=group.points[:kept]))
                else:
                    closed[partition] = "Slurm took no more jobs before"
            elif isinstance(error, UnansweredError):
                closed[site.name, None] = "Slurm did not answer before"
                outcome.unanswered = True
                advice = "Slurm may have accepted it nevertheless: `status` and `rerun` search for it by name."
            log.error(f"{error}. {advice}")
            continue
        # Before the next call: so at most one array is ever in Slurm without its id in the ledger.
        try:
            ledger.append(Submitted(group=group.name, job_id=f"{array}_%a", cluster=cluster, attempts=attempts))
        except OSError as error:
            raise UserError(
                f"{site.name}: array {array} was submitted, and that could not be recorded ({error.filename}: "
                f"{error.strerror}). `status` and `rerun` find it by its name; later arrays were not submitted"
            ) from None
        log.info(f"{queue_name(site.name, cluster)}: array {array} with {count} in {group.request.partition}")
    return outcome


def _submit_array(group: Group, sweep: Path, code: Path, sweep_id: str) -> tuple[str, str | None]:
    """Submit a group as an array with a job per point; return its id, and the cluster if sbatch names one.

    Raises UnansweredError, RefusedError with sbatch's own message, and UserError if it is not certain whether Slurm
    accepted the array, for a message that says neither.
    """
    site, folder = group.site, private_dirs.make(sweep / JOBS / group.name)
    file, script = folder / SCRIPT, render(group, sweep, code, sweep_id)
    try:
        # Before sbatch is called: the jobs of a launcher that dies in that moment find their points.
        for number, task in enumerate(group.tasks):
            for point in task:
                point_file.write(point, sweep, f"{group.name}_{number}")
        file.write_text(script, encoding="utf-8")
        # With the descriptor of the sweep's lock: sbatch keeps the lock if this process is killed before it returns.
        command, environment = ["sbatch", str(file)], slurm_environment(site)
        with _named_if_stalled(f"{site.name}: sbatch of {group.name}"):
            # Text that a site adds to sbatch's lines may be in any encoding.
            sbatch = subprocess.run(command, capture_output=True, errors="replace", close_fds=False, env=environment)
    except OSError as error:  # a full disk, or there is no sbatch: nothing is written after the call
        raise RefusedError(f"{site.name}: {group.name} could not be submitted: {error}") from None
    parsable = _PARSABLE.fullmatch(sbatch.stdout.strip())
    accepted = {parsable.groups()} if parsable else set(_ACCEPTED.findall(sbatch.stdout))
    # Whatever the exit code: with --wait in a template it is that of the jobs.
    for job_id, cluster in accepted if len(accepted) == 1 else ():
        return job_id, cluster or None
    id_missing = f"sbatch printed no job id ({sbatch.stdout.strip()[:200]})"
    printed = (sbatch.stderr or f"exit code {sbatch.returncode}") if sbatch.returncode else id_missing
    lines = [line.removeprefix("sbatch: error: ").strip() for line in printed.splitlines()]
    message = "; ".join(filter(None, lines)).replace("\ufffd", "?")
    too_many, lost = _TOO_MANY.search(message), NO_ANSWER.search(message)
    # Tested first: sbatch reports a lost connection as "Batch job submission failed: ..." too.
    if lost and not (too_many and lost[0] == EAGAIN):
        raise UnansweredError(f"{site.name}: Slurm did not answer sbatch of {group.name}: {message}")
    text = f"{site.name}: sbatch refused {group.name}: {message}"
    if "Invalid node name" in message and site.exclude_nodes:
        text += f" (sites.{site.name}.exclude_nodes=[] excludes none)"
    if sbatch.returncode > 0 and too_many:  # not killed while it called again
        raise TooManyError(f"{text}; more fit once jobs of yours have left the queue")
    raise RefusedError(text) if _REFUSED.search(message) else UserError(text)


@contextmanager
def _named_if_stalled(call: str) -> Iterator[None]:
    """Log once that a call takes long."""
    text = f"{call} has not answered for {STALLED_S:g} s; it keeps the sweep's lock until it does"
    timer = threading.Timer(STALLED_S, log.warning, [text])
    with suppress(RuntimeError):  # no more threads for this user
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
