"""Render sbatch scripts: Jinja2 templates filled for a group of points. Needs no Slurm."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, TemplateError

from inpaint_bench.core.config.site import SiteConfig
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.paths import templates_dir
from launchers.points.point import Group, SlurmRequest

from .environment import python_path

Directive = tuple[str, str | int | None]  # an option of sbatch and its value

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


def render(group: Group, *, command: str, folder: Path, code: Path, job_name: str) -> str:
    """Return the script of an array.

    `command` runs one task, `folder` in the sweep directory takes the logs, `code` is the snapshot to run from. Raises
    UserError for an unknown template, an invalid variable name, and values with control characters.
    """
    site, request = group.site, group.request
    notify = group.points[0].bench.notify
    directives = [
        *_head(group, job_name),
        *_resources(request),
        ("array", f"0-{len(group.points) - 1}"),
        # Without ARRAY_TASKS in it, Slurm writes once about an array and not about each task.
        *([("mail-type", "END,FAIL"), ("mail-user", notify.mail)] if notify.mail else []),
        # submitit's own names of logs; the 0 is the rank of the task.
        *_tail(site, str(folder / "%A_%a_0_log.out"), str(folder / "%A_%a_0_log.err")),
    ]
    variables = {}
    if site.environment.container.image:
        variables["PYTHONNOUSERSITE"] = "1"  # HOME is visible in a container, with packages for another Python
        sweep = folder.parents[1]
        needed = [sweep, *([] if code.is_relative_to(sweep) else [code])]
        command = f"{_container(site, needed)} {command}"
    # Ours come after those of the site and replace them: another PYTHONPATH would hide the snapshot.
    variables = {
        **site.environment.variables,
        **variables,
        "PYTHONPATH": python_path(code),
        "PYTHONSAFEPATH": "1",  # else the directory that the job starts in comes before the snapshot
        "PYTHONUNBUFFERED": "1",
        "SUBMITIT_EXECUTOR": "slurm",
    }
    for name in variables:
        if not name.isidentifier():
            raise UserError(f"sites.{site.name}.environment.variables.{name}: not a variable name")
    values = [
        *((f"--{option}", value) for option, value in directives),
        ("the job's command", command),
        *(("a module", module) for module in site.environment.modules),
        *((f"the variable {name}", value) for name, value in variables.items()),
    ]
    for name, value in values:
        # A line break would start a new line of the script inside any quotes.
        if any(ord(char) < 32 or ord(char) == 127 for char in str(value)):
            raise UserError(f"site {site.name}: {name} has a control character: {value!r}")
    try:
        text = (
            _environment()
            .get_template(site.template)
            .render(
                site=site,
                request=request,
                modules=[shlex.quote(module) for module in site.environment.modules],
                directives=[(name, None if value is None else shlex.quote(str(value))) for name, value in directives],
                variables=[(name, shlex.quote(str(value))) for name, value in sorted(variables.items())],
                command=command,
                use_srun=site.use_srun,
                end_wait_s=END_WAIT_S,
            )
        )
    except TemplateError as error:
        known = ", ".join(sorted(_environment().list_templates()))
        raise UserError(f"site {site.name}: template {site.template}: {error} (have: {known})") from None
    return text.rstrip() + "\n"


def _container(site: SiteConfig, needed: Sequence[Path]) -> str:
    """Return the command line that runs another one in the site's container, with the folders that it needs."""
    container = site.environment.container
    for path in needed:
        if "," in str(path):
            raise UserError(f"{path}: a folder with a comma in its name cannot be bound into a container")
    binds = dict.fromkeys([*map(str, needed), *container.binds])
    command = [container.command, "exec", *(["--nv"] if container.nv else [])]
    return shlex.join([*command, *(f"--bind={bind}" for bind in binds), str(container.image)])


def _head(group: Group, job_name: str) -> Iterator[Directive]:
    site = group.site
    yield "job-name", job_name
    if site.account.value:
        yield "account", site.account.value
    if group.request.partition:
        yield "partition", group.request.partition
    if site.qos:
        yield "qos", site.qos
    if constraint := [*site.constraint, *group.request.features]:
        # "&": a constraint that the user adds narrows the site's own
        yield "constraint", "&".join(constraint)
    if site.exclude_nodes:
        yield "exclude", ",".join(site.exclude_nodes)


def _resources(request: SlurmRequest) -> Iterator[Directive]:
    yield "nodes", request.nodes
    yield "ntasks-per-node", request.tasks_per_node
    yield "cpus-per-task", request.cpus_per_task
    yield "mem", f"{request.mem_gb}G"
    if request.gpu_option:
        yield request.gpu_option
    yield "time", request.time_min
    # Without a leading "B:", Slurm signals the steps that srun started and not the batch shell.
    if request.warning_s:
        yield "signal", f"USR2@{request.warning_s}"


def _tail(site: SiteConfig, output: str, error: str) -> Iterator[Directive]:
    # Written in both cases, because the default differs between clusters (JobRequeue).
    yield ("requeue" if site.requeue.request else "no-requeue"), None
    # Otherwise a requeued job may overwrite the log of its first start.
    yield "open-mode", "append"
    yield "output", output
    yield "error", error
    if site.environment.export:
        yield "export", site.environment.export
    if site.environment.get_user_env:
        yield "get-user-env", site.environment.get_user_env
