"""One HTTP GET of an exporter's page: bounded in time and size, from that address and no other.

Proxies of the environment are not asked: the exporter is on the node or beside it. Redirects are not followed.
"""

from __future__ import annotations

import http.client
import time
from typing import Final

from inpaint_bench.core.schema import PRODUCER
from inpaint_bench.core.validation import Endpoint

TIMEOUT_S: Final = 2.0  # of the connection and of each wait
WHOLE_S: Final = 5.0  # of the answer's body
MAX_BYTES: Final = 4 * 2**20  # eight GPUs with every field are well below one


class ScrapeError(Exception):
    """There is no answer to use; one phrase."""


def scrape(endpoint: Endpoint) -> str:
    """The page's text. Raises ScrapeError."""
    kind = http.client.HTTPSConnection if endpoint.scheme == "https" else http.client.HTTPConnection
    connection = kind(endpoint.host, endpoint.port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", endpoint.path, headers={"Accept": "text/plain", "User-Agent": PRODUCER})
        answer = connection.getresponse()
        if 300 <= answer.status < 400:
            raise ScrapeError(f"it redirects to {answer.getheader('Location', 'nowhere')[:200]}, which is not followed")
        if answer.status != 200:
            raise ScrapeError(f"it answered with HTTP status {answer.status}")
        return _body(answer).decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        raise ScrapeError(str(error) or type(error).__name__) from None
    finally:
        connection.close()


def _body(answer: http.client.HTTPResponse) -> bytes:
    body = bytearray()
    give_up_s = time.monotonic() + WHOLE_S
    while chunk := answer.read1(2**16):
        body += chunk
        if len(body) > MAX_BYTES:
            raise ScrapeError(f"its answer is longer than {MAX_BYTES / 2**20:g} MiB")
        if time.monotonic() > give_up_s:
            raise ScrapeError(f"its answer took longer than {WHOLE_S:g} s")
    if answer.length or not body.endswith(b"\n"):  # the text format ends every line
        raise ScrapeError("its answer was cut off" if body else "its answer was empty")
    return bytes(body)
