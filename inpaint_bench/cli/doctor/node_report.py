"""What a probe job found on a compute node, as tables."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from inpaint_bench.core.console import table

from . import gpu_report


def show(out: Console, site: str, found: dict[str, Any]) -> None:
    slurm = found["slurm"] or {}
    title = f"{site}: node {found['node']}, partition {slurm.get('partition')}, {found['seconds']:g} s"
    out.print(table(("on the compute node", "found"), _rows(found), title=title))
    for quota in found["quotas"]:
        print(f"$ {quota['command']}\n{quota['text']}")
    if "why" not in found["gpu"]:
        gpu_report.show(out, found["gpu"])


def fails(found: dict[str, Any]) -> bool:
    """Something that every job needs is not there. Folders are facts of the site file and judged with it."""
    return "why" in found["cuda"] or not all(one["ok"] for one in found["imports"].values())


def _rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    python, software = found["python"], found["software"]
    rows = [
        ("Python", f"{python['version']}, {python['executable']}"),
        ("code", found["code"]),
        *((f"import {name}", _import(one)) for name, one in found["imports"].items()),
        ("CUDA", _cuda(found["cuda"])),
        ("driver", software.get("driver") or "not found"),
        ("NVML", found["gpu"].get("why") or "answers; the card's findings are below"),
        ("processor", f"{software.get('cpu')}, {software.get('cores')} cores for the job"),
    ]
    rows += [(f"{key} {one['path'] or ''}".strip(), _folder(one)) for key, one in found["folders"].items()]
    if not found["quotas"]:
        rows.append(("quota", "no showquota, quota or lfs on the node: what is left is not known"))
    return rows


def _import(one: dict[str, Any]) -> str:
    if not one["ok"]:
        return f"FAILS: {one['why']}"
    return f"{one['version'] or 'works'}, {one['seconds']:g} s"


def _cuda(cuda: dict[str, Any]) -> str:
    if "why" in cuda:
        return f"FAILS: {cuda['why']} (CUDA_VISIBLE_DEVICES={cuda.get('visible') or 'not set'})"
    return (
        f"{cuda['name']}, {cuda['memory_gib']:g} GiB, {cuda['count']} visible, CUDA {cuda['version']}, {cuda['uuid']}"
    )


def _folder(one: dict[str, Any]) -> str:
    if not one["ok"]:
        return f"FAILS: {one['why']}"
    files = "" if one["free_files"] is None else f", {one['free_files']:,} files"
    return f"may be written; free: {one['free_gib']:g} GiB{files}"
