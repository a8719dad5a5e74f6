"""The findings of a probe job on a compute node, as tables."""

from __future__ import annotations

import msgspec
from rich.console import Console

from inpaint_bench.core.console import table
from inpaint_bench.run.node_probe import FolderCheck, ImportCheck, NodeFindings

from . import gpu_report


def show(out: Console, site: str, findings: NodeFindings) -> None:
    """Print the findings."""
    title = f"{site}: node {findings.node}, partition {findings.partition}, {findings.seconds:g} s"
    out.print(table(("compute node", "found"), _rows(findings), title=title))
    for quota in findings.quotas:
        print(f"$ {quota.command}\n{quota.text}")
    if findings.gpu is not None:
        gpu_report.show(out, msgspec.convert(findings.gpu, gpu_report.GpuFindings))


def lacks_essentials(findings: NodeFindings) -> bool:
    """Return whether something is missing that every job needs. Folders belong to the site file and count there."""
    return findings.cuda.error is not None or any(check.error for check in findings.imports.values())


def _rows(findings: NodeFindings) -> list[tuple[str, str]]:
    cuda, software = findings.cuda, findings.software
    rows = [
        ("Python", f"{findings.python}, {findings.executable}"),
        ("code", findings.code),
        *((f"import {name}", _import(check)) for name, check in findings.imports.items()),
        (
            "CUDA",
            f"FAILS: {cuda.error} (CUDA_VISIBLE_DEVICES={cuda.visible or 'not set'})"
            if cuda.error
            else f"{cuda.name}, {cuda.memory_gib:g} GiB, {cuda.count} visible, CUDA {cuda.version}, {cuda.uuid}",
        ),
        ("driver", software.get("driver") or "not found"),
        ("NVML", findings.gpu_error or "works; the findings about the GPU are below"),
        ("processor", f"{software.get('cpu')}, {software.get('cores')} cores for the job"),
        *((f"{key} {check.path or ''}".strip(), _folder(check)) for key, check in findings.folders.items()),
    ]
    if not findings.quotas:
        rows.append(("quota", "unknown: the node has no showquota, quota or lfs"))
    return rows


def _import(check: ImportCheck) -> str:
    return f"FAILS: {check.error}" if check.error else f"{check.version or 'works'}, {check.seconds:g} s"


def _folder(check: FolderCheck) -> str:
    if check.error:
        return f"FAILS: {check.error}"
    files = "" if check.free_files is None else f", {check.free_files:,} files"
    return f"writable; free: {check.free_gib:g} GiB{files}"
