"""Queued jobs run the code as it was when they were submitted, whatever is edited meanwhile."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

from inpaint_bench.environment import git_state
from inpaint_bench.files import replace_json
from inpaint_bench.paths import ROOT, conf_dir, templates_dir

PACKAGES = ("inpaint_bench", "launchers", "hydra_plugins")  # what a job may import
RECORD = "snapshot.json"


def take(folder: Path) -> str:
    """Copy the running packages, conf/ and slurm_templates/ into a new folder below `folder`.

    Named after its content, so equal code is stored once however often a sweep is rerun. Returns that name.
    """
    sources = [ROOT / name for name in PACKAGES] + [conf_dir(), templates_dir()]
    files = [
        (Path(source.name) / path.relative_to(source), path)
        for source in sources
        for path in sorted(source.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc"
    ]
    digest = hashlib.sha256()
    for relative, path in files:
        digest.update(f"{relative}\0".encode() + path.read_bytes() + b"\0")
    name = digest.hexdigest()[:12]
    target = folder / name
    if (target / RECORD).is_file():
        return name
    for relative, path in files:
        (target / relative).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target / relative)
    replace_json(target / RECORD, {"content_sha256": digest.hexdigest(), "git": git_state(ROOT)})
    return name
