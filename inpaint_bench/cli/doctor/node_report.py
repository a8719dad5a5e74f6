"""The findings of a probe job on a compute node, as a table."""

from __future__ import annotations

from rich.console import Console

from inpaint_bench.core.console import echo, table
from inpaint_bench.run.node_probe import Check, NodeFindings


def show(out: Console, site: str, findings: NodeFindings) -> None:
    """Print the findings."""
    rows = list(findings.facts.items())
    rows += [(name, _text(check)) for name, check in {**findings.required, "NVML": findings.nvml}.items()]
    rows += [(f"{key} {check.path or ''}".strip(), _text(check)) for key, check in findings.folders.items()]
    if not findings.quotas:
        rows.append(("quota", "unknown: the node has no showquota, quota or lfs"))
    title = f"{site}: node {findings.node}, partition {findings.partition}, {findings.seconds:g} s"
    out.print(table(("compute node", "found"), rows, title=title))
    for command, output in findings.quotas.items():
        echo(f"$ {command}\n{output}")


def lacks_essentials(findings: NodeFindings) -> bool:
    """Return whether something is missing that every job needs. Folders belong to the site file and count there."""
    return any(check.error for check in findings.required.values())


def _text(check: Check) -> str:
    return f"FAILS: {check.error}" if check.error else str(check.result)
