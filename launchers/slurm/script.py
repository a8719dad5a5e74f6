"""Render sbatch scripts: Jinja2 templates filled for a group of points. Needs no Slurm."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, TemplateError

from inpaint_bench.core.errors import UserError
from inpaint_bench.core.paths import templates_dir
from launchers.points.point import Group

from .environment import python_path

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

    `command` runs one task, `folder` takes the logs, `code` is the snapshot to run from. Raises UserError for an
    unknown template, an invalid variable name, and values with control characters.
    """
    site = group.site
    # Ours come after those of the site and replace them: another PYTHONPATH would hide the snapshot.
    variables = {
        **site.environment.variables,
        "PYTHONPATH": python_path(code),
        "PYTHONSAFEPATH": "1",  # else the directory that the job starts in comes before the snapshot
        "PYTHONUNBUFFERED": "1",
        "SUBMITIT_EXECUTOR": "slurm",
    }
    for name in variables:
        if not name.isidentifier():
            raise UserError(f"sites.{site.name}.environment.variables.{name}: not a variable name")
    directives = list(_directives(group, folder, job_name))
    _refuse_control_characters(
        site.name,
        [
            *((f"--{option}", value) for option, value in directives),
            ("the job's command", command),
            *(("a module", module) for module in site.environment.modules),
            *((f"the variable {name}", value) for name, value in variables.items()),
        ],
    )
    try:
        text = (
            _environment()
            .get_template(site.template)
            .render(
                site=site,
                request=group.request,
                modules=[shlex.quote(module) for module in site.environment.modules],
                directives=[(option, _quoted(value)) for option, value in directives],
                variables=[(name, shlex.quote(str(value))) for name, value in sorted(variables.items())],
                command=command,
                end_wait_s=END_WAIT_S,
            )
        )
    except TemplateError as error:
        known = ", ".join(sorted(_environment().list_templates()))
        raise UserError(f"site {site.name}: template {site.template}: {error} (have: {known})") from None
    return text.rstrip() + "\n"


def _quoted(value: str | int | None) -> str | None:
    return None if value is None else shlex.quote(str(value))


def _directives(group: Group, folder: Path, job_name: str) -> Iterator[tuple[str, str | int | None]]:
    site, request = group.site, group.request
    environment = site.environment
    yield "job-name", job_name
    if site.account.value:
        yield "account", site.account.value
    if request.partition:
        yield "partition", request.partition
    if site.qos:
        yield "qos", site.qos
    if constraint := [*site.constraint, *request.features]:
        # "&": a constraint that the user adds narrows the site's own
        yield "constraint", "&".join(constraint)
    if site.exclude_nodes:
        yield "exclude", ",".join(site.exclude_nodes)
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
    yield "array", f"0-{len(group.points) - 1}"
    # Written in both cases, because the default differs between clusters (JobRequeue).
    yield ("requeue" if site.requeue.request else "no-requeue"), None
    # Otherwise a requeued job may overwrite the log of its first start.
    yield "open-mode", "append"
    # submitit's own names of logs; the 0 is the rank of the task.
    yield "output", str(folder / "%A_%a_0_log.out")
    yield "error", str(folder / "%A_%a_0_log.err")
    if environment.export:
        yield "export", environment.export
    if environment.get_user_env:
        yield "get-user-env", environment.get_user_env


def _refuse_control_characters(site: str, values: Iterable[tuple[str, str | int | None]]) -> None:
    """Raise UserError for a control character: a line break starts a new line of the script inside any quotes."""
    for name, value in values:
        if any(ord(char) < 32 or ord(char) == 127 for char in str(value)):
            raise UserError(f"site {site}: {name} has a control character: {value!r}")
