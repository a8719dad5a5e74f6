"""Send the webhook of a sweep: `python -m launchers.submit.webhook SWEEP SITE NUMBER FILE`, in a job of its own.

The URL is a secret: it is read from its file when it is used, and written nowhere.
"""

from __future__ import annotations

import logging
import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import msgspec

from inpaint_bench.core.console import shell_command
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.files import expand_path, read_plain
from inpaint_bench.core.records import read_record
from inpaint_bench.core.schema import PRODUCER
from launchers.status.survey import PointStatus, poll_sweep
from launchers.sweep.ledger import Ledger

log = logging.getLogger(__name__)

MODULE = "launchers.submit.webhook"
FOLDER = "notify"  # in the sweep directory
TIMEOUT_S = 20.0  # of a try
TRIES = 3
PAUSE_S = 10.0
SETTLE_S = 60.0  # sacct, and a shared file system, may show the end of the last job this late
POLL_S = 5.0


class LastJob(msgspec.Struct, frozen=True, kw_only=True):
    """The newest job at a site that waits for the end of a sweep. Only it sends: others know of fewer arrays."""

    number: int
    job_id: str


def record_of(sweep: Path, site: str) -> Path:
    """Return the path of a site's `LastJob`."""
    return sweep / FOLDER / f"{site}.json"


def refuse_url(text: str) -> None:
    """Raise UserError where `notify.webhook_file` is the URL itself, which is not in the message."""
    if "://" in text:
        raise UserError(
            "notify.webhook_file: is a URL, which every run would record; write it into a file that only you can read "
            "and name that"
        )


def read_url(text: str) -> str:
    """Return the URL in the file that `notify.webhook_file` names. Raises UserError, never with the URL in it."""
    refuse_url(text)
    key, file = f"notify.webhook_file={text}", expand_path(text)
    try:
        mode = file.stat().st_mode
        url = read_plain(file, follow_links=True).decode().strip()
    except OSError as error:
        raise UserError(f"{key}: {error.strerror}") from None
    except UnicodeDecodeError:
        url = ""
    if mode & 0o077:
        raise UserError(f"{key}: others can read it, and the URL in it is a secret; `chmod 600` it")
    if not re.fullmatch(r"https?://[!-~]+", url):
        raise UserError(f"{key}: must hold one line, a URL that begins with https://")
    return url


def message(folder: Path, site: str) -> dict[str, Any]:
    """Return what is sent about the points of a site: JSON, with the `text` that Slack and Mattermost show."""
    ledger, deadline = Ledger.open(folder), time.monotonic() + SETTLE_S
    while True:
        points = [point for point in poll_sweep(ledger, only_site=site).points if point.record.site == site]
        if not any(point.is_open for point in points) or time.monotonic() > deadline:
            return _message(folder, ledger.sweep.sweep_id, site, points)
        time.sleep(POLL_S)


def _message(folder: Path, sweep_id: str, site: str, points: Sequence[PointStatus]) -> dict[str, Any]:
    states = Counter(str(point.state) for point in points)
    reasons = Counter(str(point.reason) for point in points if point.reason)
    commands = {"status": shell_command("status", folder)}
    if reasons:
        commands["rerun"] = shell_command("rerun", folder, "--dry-run")
    report = shell_command("report", "dataset", "-o", "report")
    commands["report"] = f"{shell_command('merge', folder, '-o', 'dataset')} && {report}"
    listed = ", ".join(f"{number} {state}" for state, number in sorted(states.items()))
    failed = ", ".join(f"{number} {reason}" for reason, number in sorted(reasons.items()))
    ended = "has not ended" if any(point.is_open for point in points) else "has ended"
    text = f"Sweep {sweep_id} {ended} at {site}: {listed}{f' ({failed})' if failed else ''}."
    return {
        "text": "\n".join([text, *(f"`{command}`" for command in commands.values())]),
        "sweep_id": sweep_id,
        "site": site,
        "folder": str(folder),
        "states": dict(states),
        "reasons": dict(reasons),
        "commands": commands,
    }


def send(url: str, content: dict[str, Any]) -> str | None:
    """Post the message as JSON. Returns why it did not arrive, or None."""
    headers = {"Content-Type": "application/json", "User-Agent": PRODUCER}
    error = ""
    for number in range(TRIES):
        time.sleep(PAUSE_S if number else 0)
        try:
            with urlopen(Request(url, msgspec.json.encode(content), headers), timeout=TIMEOUT_S):
                return None
        except HTTPError as refusal:
            # Not its reason, which the server writes.
            error = f"the server answered with code {refusal.code}"
            if refusal.code < 500 and refusal.code != 429:
                break
        except TimeoutError:
            # The message may have arrived: a second one would be one too many.
            return f"no answer within {TIMEOUT_S:.0f} s"
        except (OSError, HTTPException, ValueError) as failure:  # no connection; or not a URL after all
            error = f"no connection ({type(failure).__name__})"
    return error


def report(folder: Path, site: str, webhook_file: str, *, once: Path | None = None) -> bool:
    """Send the webhook about the points of a site, unless the file `once` exists. Logs the outcome; False: failed."""
    try:
        url, content = read_url(webhook_file), message(folder, site)
        if once:
            # Before it is sent: a job that is preempted or loses its node afterwards starts again.
            once.touch(exist_ok=False)
        error = send(url, content)
    except FileExistsError:
        log.info(f"{site}: nothing was sent: an earlier start of this job did that")
        return True
    except (OSError, UserError) as failure:
        error = str(failure)
    if error:
        log.warning(f"{site}: the webhook was not sent: {error}")
    else:
        log.info(f"{site}: the webhook was sent")
    return error is None


def main(argv: Sequence[str]) -> int:
    """Send the webhook, unless a newer job will."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    folder, site, number, webhook_file = Path(argv[0]), argv[1], int(argv[2]), argv[3]
    newest = read_record(record_of(folder, site), LastJob)
    if newest and newest.number > number:
        log.info(f"{site}: nothing was sent: more was submitted since, and job {newest.job_id} waits for all of it")
        return 0
    return 0 if report(folder, site, webhook_file, once=folder / FOLDER / f"{site}-{number}.sent") else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
