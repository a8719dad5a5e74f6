"""Render sbatch scripts: Jinja2 templates filled for a group of points. Needs no Slurm."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from functools import cache
from itertools import takewhile
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, TemplateError

from inpaint_bench.core.config.site import CLUSTER, SiteConfig
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.paths import templates_dir
from inpaint_bench.core.schema import JOBS
from launchers import entry
from launchers.points import point_file
from launchers.points.point import Group
from launchers.sweep.ledger import job_name

from .environment import python_path

_LINE = r"^#SBATCH\s(?:[^#\n]*\s)?(?:%s)\s*[\"']?([^\s\"'#]+)"
_CLUSTERS = _LINE % r"--clusters?[=\s]|-M"
# Jobs are found by these, which sbatch takes shortened too.
_OURS = {"job-name": _LINE % r"--j[a-z-]*[=\s]|-J", "array": _LINE % r"--ar[a-z]*[=\s]|-a"}
END_WAIT_S = 120  # after the first task of a job has ended, until srun kills the others


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
    command = entry.command(python, [point_file.path(point, sweep) for point in group.points])
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
        text = (
            _environment()
            .get_template(site.template)
            .render(
                site=site,
                request=request,
                modules=[shlex.quote(module) for module in site.environment.modules],
                directives=[
                    (name, None if value is True else shlex.quote(str(value))) for name, value in options.items()
                ],
                cpus_per_task=options.get("cpus-per-task"),
                variables=[(name, shlex.quote(str(value))) for name, value in sorted(variables.items())],
                command=command,
                use_srun=site.use_srun,
                end_wait_s=END_WAIT_S,
            )
        )
    except TemplateError as error:
        known = ", ".join(sorted(_environment().list_templates()))
        raise UserError(f"site {site.name}: template {site.template}: {error} (have: {known})") from None
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
        "array": f"0-{len(group.points) - 1}",
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
