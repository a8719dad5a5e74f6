"""Bundles made by hand, and a sweep that they are brought into."""

from __future__ import annotations

import io

from launchers.remote import bundle
from launchers.remote.bundle import Source
from launchers.remote.import_results import Arrivals, Received
from launchers.sweep.ledger import Ledger

ATTEMPT = {
    "point": 6,
    "attempt": 1,
    "run_id": "r-6",
    "site": "delta",
    "group": "00-delta",
    "job_name": "inpaint-s1-00-delta",
    "job_id": "77_0",
    "refused": None,
    "cancelled": False,
}
RUN = {
    "6/attempt-1/steps/part-000000.parquet": b"rows",
    "logs/00-delta/77_0_0_log.out": b"said\n",
    "6/attempt-1/manifest.json": b'{"status": "completed"}',
}


def packed(files: dict[str, bytes], head: dict | None = None) -> bytes:
    out = io.BytesIO()
    sources = [Source(path=path, content=content) for path, content in files.items()]
    bundle.write(out, head or {"kind": "test"}, bundle.listed(sources))
    return out.getvalue()


def results(files: dict[str, bytes] = RUN, made_unix: float = 100.0, **changes: object) -> bytes:
    attempts = changes.pop("attempts", [ATTEMPT])
    head = {"kind": "results", "sweep_id": "s1", "made_unix": made_unix, "attempts": attempts}
    head["journals"] = [path for path in files if path.endswith(".journal.arrows")]
    return packed(files, head | changes)


def bring(content: bytes, ledger: Ledger, site: str | None = None) -> Received:
    stream = io.BytesIO(content)
    with Arrivals(ledger, site=site) as arrivals:
        arrivals.take(stream, bundle.read_index(stream))
    return arrivals.received


def everything(ledger: Ledger) -> dict[str, bytes]:
    ours = ("ledger.jsonl", ".lock", ".collect.lock", ".digests.json")
    files = (file for file in ledger.folder.rglob("*") if file.is_file() and file.name not in ours)
    return {str(file.relative_to(ledger.folder)): file.read_bytes() for file in files}
